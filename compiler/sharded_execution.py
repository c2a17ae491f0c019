"""Run one rank's graph: partition it into forward and backward, run these op by op or through Inductor, differentiate.

Gathered values (parameters that are stored in shards, sequences that are stored in parts) are gathered again in the
backward pass instead of being saved whole: saving them would undo what storing shards saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    InputMutationAOTOutput,
    ParamAOTInput,
    TangentAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import InvalidOptionError
from ..passes.graph import (
    SLICE_OPS,
    VIEW_OPS,
    complete_halves,
    fake_mode_of,
    is_getitem,
    node_op,
    output_node,
    placeholders,
)
from ..passes.graph_identity import take_over
from ..passes.sharding import Placements
from .tracing import boxed

Executor = Literal["eager", "inductor"]
Compiled = Callable[[list[Any]], Sequence[Any]]

_GATHERS = frozenset({"_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_gather_into_tensor_coalesced"})
_AFTER_GATHER = VIEW_OPS | SLICE_OPS | {"_c10d_functional.wait_tensor", "aten.cat"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """The callables of one rank: `forward` gives `results` results, then what `backward` reads before its tangents.

    `tangents` lists the position among the results that each tangent belongs to; `backward` gives one gradient (or
    None) per input, and is None where nothing needs a gradient.
    """

    forward: Compiled
    backward: Compiled | None
    results: int
    tangents: tuple[int, ...] = ()


def build_halves(gm: fx.GraphModule, executor: Executor) -> Halves:
    """Make a sharded joint or inference graph runnable. Raises InvalidOptionError for an unknown executor."""
    if executor not in get_args(Executor):
        raise InvalidOptionError("executor", executor, " or ".join(repr(e) for e in get_args(Executor)))
    if executor == "inductor":
        gm = _for_inductor(gm)
    compile_half = _inductor if executor == "inductor" else _eager
    descriptors = output_node(gm).meta["desc"]
    tangents = [n.meta["desc"].output for n in placeholders(gm) if isinstance(n.meta.get("desc"), TangentAOTInput)]
    if not tangents:
        return Halves(forward=compile_half(gm, False), backward=None, results=len(descriptors))
    forward, backward, results = partition(gm)
    return Halves(
        forward=compile_half(forward, False),
        backward=compile_half(backward, True),
        results=results,
        tangents=tuple(list(descriptors[:results]).index(t) for t in tangents),
    )


def partition(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """A sharded joint graph as forward and backward graph, and how many results the forward graph gives."""
    inputs = placeholders(gm)
    tangents = [n for n in inputs if isinstance(n.meta.get("desc"), TangentAOTInput)]
    results = len(output_node(gm).meta["desc"]) - (len(inputs) - len(tangents))
    _regather(gm)
    static = [i for i, n in enumerate(inputs) if isinstance(n.meta.get("desc"), ParamAOTInput)]
    forward, backward = min_cut_rematerialization_partition(
        gm, (), num_fwd_outputs=results, static_lifetime_input_indices=static
    )
    return forward, backward, results


def _regather(gm: fx.GraphModule) -> None:
    """Mark gathers of the forward pass, and the views that put their parts together, to be done again."""
    after: set[fx.Node] = set()
    for node in gm.graph.nodes:
        name = node_op(node)
        follows = (name in _AFTER_GATHER or is_getitem(node)) and any(n in after for n in node.all_input_nodes)
        if name in _GATHERS or follows:
            after.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def _for_inductor(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph in Inductor's own operators: it has no lowering for what its decompositions replace."""
    values = [n.meta["val"] for n in placeholders(gm)]
    mode = fake_mode_of(values)
    with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
        interpreter = fx.Interpreter(gm)
        new = make_fx(lambda *args: interpreter.run(*args), decomposition_table=select_decomp_table())(*values)
    take_over(gm, new)
    complete_halves(new)
    return new


def _eager(gm: fx.GraphModule, backward: bool) -> Compiled:
    return boxed(gm)


def _inductor(gm: fx.GraphModule, backward: bool) -> Compiled:
    values = [n.meta["val"] for n in placeholders(gm)]
    mode = fake_mode_of(values)
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        compiled: Any = compile_fx_inner(gm, values, is_backward=backward)
    return compiled  # type: ignore[no-any-return]


class Sharded(torch.autograd.Function):
    """One call of a rank's graph. Parameters come in as DTensors and their gradients leave as DTensors, since a
    gradient may be divided where its parameter is not; the graph itself sees local tensors only."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, gradients: Mapping[int, Placements], *inputs: Any) -> tuple[Any, ...]:
        values = list(halves.forward([x.to_local() if isinstance(x, DTensor) else x for x in inputs]))
        results, saved = values[: halves.results], values[halves.results :]
        ctx.halves, ctx.gradients = halves, gradients
        ctx.wholes = {i: (inputs[i].device_mesh, inputs[i].shape, inputs[i].stride()) for i in gradients}
        ctx.others = [None if isinstance(v, Tensor) else v for v in saved]
        ctx.save_for_backward(*(v if isinstance(v, Tensor) else None for v in saved))
        ctx.results = [(r.shape, r.dtype, r.device) if isinstance(r, Tensor) else None for r in results]
        exact = [r for i, r in enumerate(results) if isinstance(r, Tensor) and i not in halves.tangents]
        ctx.mark_non_differentiable(*exact)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        inputs = [other if t is None else t for t, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        for position in ctx.halves.tangents:
            given = gradients[position]
            if given is None:
                shape, dtype, device = ctx.results[position]
                given = torch.zeros(shape, dtype=dtype, device=device)
            inputs.append(given.contiguous())
        found = list(ctx.halves.backward(inputs))
        for i, placements in ctx.gradients.items():
            if found[i] is not None:
                mesh, shape, stride = ctx.wholes[i]
                found[i] = DTensor.from_local(found[i], mesh, placements, run_check=False, shape=shape, stride=stride)
        return (None, None, *found)


def mutated(descriptors: Sequence[Any]) -> dict[int, str]:
    """Positions of results that are new values of a buffer, with the buffer's name."""
    found = [(i, d.mutated_input) for i, d in enumerate(descriptors) if isinstance(d, InputMutationAOTOutput)]
    return {i: d.target for i, d in found if isinstance(d, BufferAOTInput)}
