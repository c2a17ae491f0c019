"""Calibrated int8 models: compiled with the int8 pass alone, ranges taken from the batch that is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx
from torch.utils._python_dispatch import _disable_current_modes

from bench.cpu_convolutions import Ranges
from dsmp.codegen.cpu.extension import cpu_operators
from dsmp.codegen.cpu.int8_graph import Lowered, lower_int8
from dsmp.compiler.tracing import compile_eagerly
from dsmp.passes.graph import calls, concrete
from dsmp.passes.static_steps import Steps

needs_operators = pytest.mark.skipif(not cpu_operators().ok, reason=cpu_operators().reason)


def steps_for(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Steps]:
    """The steps of all convolutions and linears on one batch."""
    with torch.no_grad(), _disable_current_modes():
        ranges = Ranges(gm)
        ranges.run(*(concrete(x) if isinstance(x, torch.SymInt) else x for x in inputs))
    return ranges.steps


class Int8:
    """A model compiled in int8. `report` and `graph` are there after its first call."""

    def __init__(self, model: nn.Module, *, executor: str = "eager", keep: Callable[[fx.Node], bool] = lambda _: True,
                 narrow_residuals: bool = True) -> None:  # fmt: skip
        self.report: list[Lowered] = []
        self.graph: fx.GraphModule | None = None

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            def change(graph: fx.GraphModule) -> None:
                steps = {n: s for n, s in steps_for(graph, inputs).items() if keep(n)}
                self.report = lower_int8(graph, steps, narrow_residuals=narrow_residuals)
                self.graph = graph

            if executor == "eager":
                return compile_eagerly(gm, inputs, change)
            patches = {"joint_custom_pre_pass": lambda graph: change(graph.owning_module)}
            return compile_fx(gm, list(inputs), config_patches=patches)

        torch._dynamo.reset()  # variants of one class are no recompilations
        self.compiled = torch.compile(model, backend=backend)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.compiled(x)

    def targets(self) -> list[str]:
        """The calls of the graph, in order, without tuple accesses and the copies that restore an order in memory."""
        assert self.graph is not None
        found = [str(n.target).removesuffix(".default") for n in calls(self.graph)]
        return [name for name in found if name not in ("<built-in function getitem>", "aten.clone")]
