"""Modules whose plans differ in static steps alone run what was compiled for one of them, each with its own steps.

The steps are one more input of the compiled graphs: what calls a module holds them for its thread, and what runs a
graph of it adds them to the graph's inputs. Dynamo sees none of this.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._guards import detect_fake_mode

from ..passes.plan import PrecisionPlan
from ..passes.static_steps import Steps, steps_of, steps_tensor

_running = threading.local()


@dataclass(frozen=True, slots=True)
class WithSteps:
    """Calls what was compiled for all modules that share `plan`, with the steps of one of them: float64 [rows, 2]."""

    compiled: Callable[..., Any]
    plan: PrecisionPlan
    steps: Tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = getattr(_running, "call", None)
        _running.call = self
        try:
            return self.compiled(*args, **kwargs)
        finally:
            _running.call = before


def plan_steps(plan: PrecisionPlan) -> tuple[Steps, ...]:
    """The different static steps of a plan, in the order of its nodes."""
    return tuple(dict.fromkeys(steps_of(*d.static_range) for d in plan if d.static_range is not None))


def alike_but_steps(plan: PrecisionPlan) -> Hashable:
    """Equal for plans whose graphs differ in nothing but what their static steps are: steps are equal, and different,
    in the same places."""
    rows = {steps: row for row, steps in enumerate(plan_steps(plan))}
    places = tuple(None if d.static_range is None else rows[steps_of(*d.static_range)] for d in plan)
    bare = plan.model_copy(update={"nodes": [d.model_copy(update={"static_range": None}) for d in plan]})
    return (bare.digest, plan.model.fingerprint, places)


def with_steps(compiled: Callable[..., Any], plan: PrecisionPlan, own: PrecisionPlan) -> WithSteps:
    """`compiled` for a module whose own plan is alike `plan` but for its steps."""
    return WithSteps(compiled, plan, steps_tensor(plan_steps(own)))


@dataclass(frozen=True, slots=True)
class StepsInput:
    """The input of a Dynamo graph that holds steps: which one it is, and the row of each of the plan's steps."""

    index: int
    rows: Mapping[Steps, int]
    steps: Tensor

    @staticmethod
    def of(plan: PrecisionPlan | None, inputs: Sequence[Any]) -> StepsInput | None:
        """The input after `inputs`, if modules share the plan and one of them is being called; else None."""
        call: WithSteps | None = getattr(_running, "call", None)
        if call is None or call.plan is not plan:
            return None
        return StepsInput(len(inputs), {steps: row for row, steps in enumerate(plan_steps(call.plan))}, call.steps)

    @contextlib.contextmanager
    def added(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[list[Any]]:
        """A Dynamo graph with this input, while it is compiled: Dynamo, which goes on with it, knows nothing of it.
        Gives the graph's example inputs."""
        given = [n for n in gm.graph.nodes if n.op == "placeholder"]
        mode = detect_fake_mode(list(inputs))
        # its sizes are fixed, whatever may vary in others'
        fake = self.steps if mode is None else mode.from_tensor(self.steps, static_shapes=True)
        with gm.graph.inserting_after(given[-1]) if given else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            node = gm.graph.placeholder("dsmp_steps")
        node.meta["example_value"] = fake
        node._dynamo_source = None  # AOTAutograd asks each input where it comes from
        gm.recompile()
        try:
            yield [*inputs, fake]
        finally:
            gm.graph.erase_node(node)
            gm.recompile()


def giving_steps(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph that was compiled with a `StepsInput`, called without it."""

    def run(*args: Any) -> Any:
        return compiled(*args, _running.call.steps)

    return run
