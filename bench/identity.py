"""Does dsmp with everything in fp32 change anything? Outputs and gradients against plain torch.compile, both with
Inductor.

    python -m bench.identity [--json FILE]

The figures are relative L2 distances over all outputs and over all parameter gradients; `plain vs eager` shows how
far plain torch.compile itself is from eager, which is what fp32 rounding amounts to on that model.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.table import Row, show


def models() -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """ResNet-18, BERT and Llama, small, without dropout."""
    vision = importlib.import_module("torchvision")
    generator = torch.Generator().manual_seed(0)
    yield "ResNet-18", vision.models.resnet18(), {"x": torch.randn(4, 3, 64, 64, generator=generator)}
    hub = importlib.import_module("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    tokens = torch.randint(0, 512, (2, 64), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens}
    bert = hub.BertConfig(**sizes, intermediate_size=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    yield "BERT", hub.BertForMaskedLM(bert), batch
    llama = hub.LlamaConfig(**sizes, intermediate_size=256, use_cache=False)
    yield "Llama", hub.LlamaForCausalLM(llama), batch


def step(model: nn.Module, call: Callable[..., Any], batch: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """(all outputs, all parameter gradients, seconds) of one training step, flattened, in fp64."""
    started = time.perf_counter()
    result = call(**batch)
    outputs = [t for t in tree_leaves(dict(result) if hasattr(result, "loss") else result) if isinstance(t, Tensor)]
    loss = result.loss if hasattr(result, "loss") else outputs[0].square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = [torch.cat([t.detach().double().flatten() for t in group]) for group in (outputs, gradients)]
    return flat[0], flat[1], time.perf_counter() - started


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of a from b."""
    return float((a - b).norm() / b.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, model, batch in models():
        results = []
        for wrap in (
            lambda m: m,
            torch.compile,
            lambda m: torch.compile(m, backend="dsmp", options={"hardware": "cpu-avx2"}),
        ):
            torch._dynamo.reset()
            twin = copy.deepcopy(model)
            results.append(step(twin, wrap(twin), batch))
        eager, plain, ours = results
        rows.append(
            {
                "model": name,
                "outputs, dsmp vs plain": distance(ours[0], plain[0]),
                "gradients, dsmp vs plain": distance(ours[1], plain[1]),
                "outputs, plain vs eager": distance(plain[0], eager[0]),
                "gradients, plain vs eager": distance(plain[1], eager[1]),
                "plain, first step s": plain[2],
                "dsmp, first step s": ours[2],
            }
        )
    show("all-fp32 plan against plain torch.compile (Inductor)", rows, arguments.json_file)


if __name__ == "__main__":
    main()
