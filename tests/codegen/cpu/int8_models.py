"""Calibrated int8 models: compiled with the int8 pass alone, ranges taken from the batch that is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx
from torch.utils._python_dispatch import _disable_current_modes

from dsmp.codegen.cpu.int8_graph import Lowered, lower_int8, why_not
from dsmp.codegen.cpu.int8_ops import int8_operators
from dsmp.compiler.tracing import compile_eagerly
from dsmp.passes.graph import calls, concrete
from dsmp.passes.static_steps import Steps, steps_of

needs_operators = pytest.mark.skipif(not int8_operators().ok, reason=int8_operators().reason)


class Ranges(fx.Interpreter):
    """Runs a graph and notes how what convolutions and linears read is quantised."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.steps: dict[fx.Node, Steps] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and not why_not(n):
            x = self.env[next(a for a in n.args if isinstance(a, fx.Node) and a.meta["val"].dim() > 1)]
            self.steps[n] = steps_of(x.min().item(), x.max().item())
        return super().run_node(n)


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
