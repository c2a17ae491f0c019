"""A training step of a stack of Llama blocks on the running GPU: eager, Inductor, autocast, torchao's fp8, and dsmp.

    python -m bench.models_gpu [--layers 4] [--hidden 4096] [--batch 4] [--length 2048] [--steps 20] [-o FILE]

The model is transformers' LlamaForCausalLM with random weights, as wide as Llama-8B by default. A step is forward,
backward and AdamW on random tokens. Every way trains a fresh model from the same weights on the same few batches, over
and over: `loss` is that of the last step, and comes down as the batches are learned by heart. The first step, which
compiles, and two more are not timed; `ms` is the median of the others. `x autocast+Inductor` is how many times as fast
as that. `MB` is torch's peak memory of one way: weights, gradients, the optimizer's state and activations.

Weights are fp32 but for `eager bf16` and `torchao fp8`. Ways that fail (memory, a missing package) are said and left
out. Without a GPU: one line, exit code 2.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsmp
from bench.gpu import gpu_or_exit, say_and_exit
from bench.table import Row, show
from dsmp.errors import MissingPackageError

BASELINE = "autocast+Inductor"
TORCHAO = "torchao fp8"
WARMUP = 3
_BATCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sizes of the model and of a step. `kv_heads` share keys and values; a head has 128 dimensions, or fewer in a
    narrow model."""

    layers: int = 4
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    batch: int = 4
    length: int = 2048
    steps: int = 20
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One way of training: milliseconds of every timed step, peak bytes (0 on a CPU), the last loss, and what ran."""

    way: str
    step_ms: Sequence[float]
    peak_bytes: int
    loss: float
    note: str = ""

    @property
    def ms(self) -> float:
        return statistics.median(self.step_ms)


Step = Callable[[Tensor], Tensor]
"""From token ids [batch, length] to the loss."""


def llama(settings: Settings) -> nn.Module:
    """The same random weights every time."""
    hub = importlib.import_module("transformers")
    config = hub.LlamaConfig(
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        vocab_size=settings.vocabulary,
        max_position_embeddings=settings.length,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = hub.LlamaForCausalLM(config).to(settings.device)
    return model


def loss_of(call: Callable[..., Any]) -> Step:
    """The loss of a causal language model on its own input."""
    return lambda ids: call(input_ids=ids, labels=ids).loss


def under_autocast(step: Step, device: str) -> Step:
    """A step with bf16 autocast around its forward."""

    def run(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return step(ids)

    return run


def torchao_fp8(model: nn.Module) -> Step:
    """torchao's fp8 training with scales per tensor, under Inductor; the head stays in bf16."""
    float8 = importlib.import_module("torchao.float8")
    narrow = float8.convert_to_float8_training(
        model.to(torch.bfloat16), module_filter_fn=lambda module, name: not name.endswith("lm_head")
    )
    return loss_of(torch.compile(narrow))


def ways(device: str) -> dict[str, Callable[[nn.Module], Step]]:
    """How a model is trained, by name."""
    options: Mapping[str, dict[str, Any]] = {"dsmp": {}, "dsmp, kernels off": {"kernels": "off"}}
    return {
        "eager fp32": loss_of,
        "eager bf16": lambda model: loss_of(model.to(torch.bfloat16)),
        "Inductor fp32": lambda model: loss_of(torch.compile(model)),
        BASELINE: lambda model: under_autocast(loss_of(torch.compile(model)), device),
        TORCHAO: torchao_fp8,
        **{name: _by_dsmp(chosen) for name, chosen in options.items()},
    }


def _by_dsmp(options: dict[str, Any]) -> Callable[[nn.Module], Step]:
    return lambda model: loss_of(torch.compile(model, backend="dsmp", options=options))


def token_batches(settings: Settings) -> list[Tensor]:
    """The few batches that every way learns."""
    generator = torch.Generator().manual_seed(1)
    shape = (settings.batch, settings.length)
    return [torch.randint(settings.vocabulary, shape, generator=generator).to(settings.device) for _ in range(_BATCHES)]


def train(name: str, make: Callable[[nn.Module], Step], settings: Settings) -> Measured:
    """Train a fresh model one way."""
    torch._dynamo.reset()
    gpu = settings.device == "cuda"
    if gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = llama(settings)
    step = make(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=gpu)
    batches = token_batches(settings)
    times: list[float] = []
    loss = float("nan")
    for index in range(WARMUP + settings.steps):
        _wait(gpu)
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        result = step(batches[index % len(batches)])
        result.backward()
        optimizer.step()
        _wait(gpu)
        if index >= WARMUP:
            times.append(1e3 * (time.perf_counter() - started))
        loss = float(result.detach())
    return Measured(
        way=name,
        step_ms=times,
        peak_bytes=torch.cuda.max_memory_allocated() if gpu else 0,
        loss=loss,
        note=what_ran(model) if name.startswith("dsmp") else "",
    )


def what_ran(model: nn.Module) -> str:
    """Shares of GEMM FLOPs by what computes them, of a model that dsmp has compiled."""
    return str(dsmp.audit(model)).partition("GEMM FLOPs: ")[2]


def _wait(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()


def measured(settings: Settings, chosen: Sequence[str]) -> Iterator[Measured]:
    """Every chosen way that runs; one that does not is said."""
    for name, make in ways(settings.device).items():
        if name not in chosen:
            continue
        if name == TORCHAO and importlib.util.find_spec("torchao") is None:
            print(f"{name}: torchao is not installed", flush=True)
            continue
        try:
            result = train(name, make, settings)
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory", flush=True)
            continue
        print(f"{name}: {result.ms:.4g} ms a step, loss {result.loss:.4f}", flush=True)
        yield result


def rows_of(results: Sequence[Measured], settings: Settings) -> list[Row]:
    """A row of each way; the speed-up is nan where the baseline did not run."""
    base = next((r.ms for r in results if r.way == BASELINE), float("nan"))
    return [
        {
            "way": r.way,
            "ms": r.ms,
            "tokens/s": settings.tokens / (1e-3 * r.ms),
            "MB": r.peak_bytes / 1e6,
            f"loss, step {settings.steps + WARMUP}": r.loss,
            f"x {BASELINE}": base / r.ms,
            "GEMM FLOPs": r.note,
        }
        for r in results
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = tuple(ways("cuda"))
    defaults = Settings()
    for name in ("layers", "hidden", "inner", "heads", "kv_heads", "vocabulary", "batch", "length", "steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--way", action="append", choices=names, help="only these, once for each")
    parser.add_argument("-o", "--json", type=Path, dest="json_file")
    arguments = parser.parse_args(argv)
    gpu_or_exit(parser, "bench.models_gpu")
    if importlib.util.find_spec("transformers") is None:
        say_and_exit(parser, MissingPackageError("transformers", "bench.models_gpu", "models"))
    torch.set_float32_matmul_precision("high")  # what users of fp32 on a GPU set: its products run in tf32
    sizes = {k: v for k, v in vars(arguments).items() if k not in ("way", "json_file")}
    settings = Settings(**sizes)
    results = list(measured(settings, arguments.way or names))
    if not results:
        parser.exit(1, "nothing was measured\n")
    title = f"Llama, {settings.layers} layers of {settings.hidden}, {settings.batch} x {settings.length} tokens"
    show(title, rows_of(results, settings), arguments.json_file)


if __name__ == "__main__":
    main()
