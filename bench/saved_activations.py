"""How many bytes does a training step keep for its backward pass, measured, under a bf16 plan and in fp32?

    python -m bench.saved_activations [--json FILE]

The bytes are those of the tensors that autograd really holds between forward and backward, each storage counted once,
parameters, buffers and inputs left out. `predicted` is what the plan said beforehand, from the partitioner.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import dsmp
from bench.table import Row, show
from dsmp.compiler.small_gpt import SmallGpt, small_gpt_batch

FP32, BF16 = "cpu-avx2", "h800"


def models() -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Transformers of a few million parameters, in training mode without dropout."""
    ids, targets = small_gpt_batch(batch=8, context=128)
    yield "small GPT, 4 layers", SmallGpt(), {"ids": ids, "targets": targets}
    hub = importlib.import_module("transformers")
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1024}
    tokens = torch.randint(0, 1024, (8, 128), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    llama = hub.LlamaConfig(**sizes, intermediate_size=768, use_cache=False)
    yield "Llama, 4 layers", hub.LlamaForCausalLM(llama), batch
    bert = hub.BertConfig(**sizes, intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    yield "BERT, 4 layers", hub.BertForMaskedLM(bert), batch


def measured_bytes(model: nn.Module, step: Callable[..., Any], batch: dict[str, Any]) -> int:
    """Bytes of the storages that one forward pass saves for the backward pass."""
    alive = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *batch.values()]}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in alive:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = step(**batch)
        loss = getattr(result, "loss", result)
    total = sum(held.values())
    loss.backward()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, dest="json_file")
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, model, batch in models():
        sizes = {}
        for hardware in (FP32, BF16):
            torch._dynamo.reset()
            options = {"hardware": hardware, "executor": arguments.executor}
            step = torch.compile(model, backend="dsmp", options=options)
            sizes[hardware] = measured_bytes(model, step, batch)
        eager = measured_bytes(model, model, batch)
        predicted = dsmp.plan(model, batch, hardware=BF16).prediction
        assert predicted.saved_bytes is not None and predicted.saved_bytes_fp32 is not None
        rows.append(
            {
                "model": name,
                "eager fp32 MB": eager / 1e6,
                "dsmp fp32 MB": sizes[FP32] / 1e6,
                "dsmp bf16 MB": sizes[BF16] / 1e6,
                "bf16 vs fp32 %": 100 * (sizes[BF16] / sizes[FP32] - 1),
                "bf16 vs eager %": 100 * (sizes[BF16] / eager - 1),
                "predicted %": 100 * (predicted.saved_bytes / predicted.saved_bytes_fp32 - 1),
            }
        )
    show("activations saved for the backward pass", rows, arguments.json_file)


if __name__ == "__main__":
    main()
