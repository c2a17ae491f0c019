"""ResNet-18 and MobileNetV3-large in calibrated int8 on a CPU, against fp32 in the same run.

    python -m bench.cpu_convolutions [--models resnet18,mobilenet_v3_large] [--batches 1,8] [--inductor] [-o FILE]

Weights are random; batch norms have seen random images. Ranges are taken from the batch that is timed. Every variant is
called in turn, in an order that rotates; what counts is the CPU time of one thread, which leaves out the work of other
processes, but not their use of caches and memory. `ms` is the median, `x best fp32` the median over rounds of the ratio
to the fp32 variant with the least median. `drift` is the relative L2 distance of outputs to fp32 eager. Linears and
convolutions are int8, but for convolutions of single pixels (squeeze and excitation) where `int8 all` is not said. With
--inductor, fp32 and int8 are compiled by Inductor as well, which takes minutes. `packed MB` is what all int8 variants
hold together, for a model each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torchvision
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx
from torch.utils._python_dispatch import _disable_current_modes

from bench.table import Row, show
from bench.timing import in_turns
from dsmp.codegen.cpu.extension import cpu_operators
from dsmp.codegen.cpu.int8_graph import lower_int8, why_not
from dsmp.codegen.cpu.packs import clear, packed_bytes
from dsmp.compiler.tracing import compile_eagerly
from dsmp.passes.static_steps import Steps, steps_of

Call = Callable[[], Tensor]


class Ranges(fx.Interpreter):
    """Runs a graph on one batch and notes how what convolutions and linears read is quantised."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.steps: dict[fx.Node, Steps] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and not why_not(n):
            x = self.env[next(a for a in n.args if isinstance(a, fx.Node) and a.meta["val"].dim() > 1)]
            self.steps[n] = steps_of(x.min().item(), x.max().item())
        return super().run_node(n)


def in_int8(model: nn.Module, executor: str, *, single_pixels: bool) -> Callable[[Tensor], Tensor]:
    """A model that is compiled in int8 at its first call, on that call's ranges."""

    def chosen(node: fx.Node) -> bool:
        return single_pixels or node.meta["val"].dim() == 2 or node.meta["val"].shape[2:].numel() > 1

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def change(graph: fx.GraphModule) -> None:
            with torch.no_grad(), _disable_current_modes():
                ranges = Ranges(graph)
                ranges.run(*inputs)
            lower_int8(graph, {n: s for n, s in ranges.steps.items() if chosen(n)})

        if executor == "eager":
            return compile_eagerly(gm, inputs, change)
        return compile_fx(gm, list(inputs), config_patches={"joint_custom_pre_pass": lambda g: change(g.owning_module)})

    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=backend)
    return compiled


def random_model(name: str) -> nn.Module:
    """A torchvision model of random weights whose batch norms have seen something."""
    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, name)()
    model.train()
    for _ in range(3):
        model(torch.randn(4, 3, 128, 128))
    return model.eval()


def variants(name: str, batch: int, *, inductor: bool) -> dict[str, Call]:
    """Every way to run one model on one batch, compiled and warm."""
    model, other = random_model(name), random_model(name).to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224)
    y = x.contiguous(memory_format=torch.channels_last)
    found: dict[str, Call] = {"fp32 eager": lambda: model(x), "fp32 eager channels_last": lambda: other(y)}
    ways = {"int8 eager": ("eager", False), "int8 all eager": ("eager", True)}
    if inductor:
        first, second = torch.compile(random_model(name)), torch.compile(other)
        found |= {"fp32 inductor": lambda: first(x), "fp32 inductor channels_last": lambda: second(y)}
        ways |= {"int8 inductor": ("inductor", False), "int8 all inductor": ("inductor", True)}
    for title, (executor, single_pixels) in ways.items():
        compiled = in_int8(random_model(name), executor, single_pixels=single_pixels)
        found[title] = lambda compiled=compiled: compiled(y)  # type: ignore[misc]
    for call in found.values():
        call()
        call()
    return found


def rows_of(name: str, batch: int, *, inductor: bool, rounds: int) -> list[Row]:
    torch._dynamo.reset()
    clear()
    calls = variants(name, batch, inductor=inductor)
    packed = packed_bytes() / 1e6
    wanted, outputs = calls["fp32 eager"](), {title: call() for title, call in calls.items()}
    taken = {title: [1e3 * t for t in found] for title, found in in_turns(calls, rounds).items()}
    best = min((t for t in taken if t.startswith("fp32")), key=lambda t: median(taken[t]))
    return [
        {
            "model": name,
            "batch": batch,
            "variant": title,
            "ms": median(times),
            "x fp32 eager": median(a / b for a, b in zip(taken["fp32 eager"], times, strict=True)),
            "x best fp32": median(a / b for a, b in zip(taken[best], times, strict=True)),
            "drift": float((outputs[title] - wanted).norm() / wanted.norm()),
            "packed MB": packed,
        }
        for title, times in taken.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,mobilenet_v3_large")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("-o", "--json", type=Path)
    options = parser.parse_args()
    verdict = cpu_operators()
    if not verdict.ok:
        print(verdict.reason)
        return 2
    torch.set_num_threads(1)
    rows: list[Row] = []
    with torch.no_grad():
        for name in options.models.split(","):
            for batch in map(int, options.batches.split(",")):
                rows += rows_of(name, batch, inductor=options.inductor, rounds=options.rounds)
    show("int8 convolutions, CPU time of one thread", rows, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
