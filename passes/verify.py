"""Invariants of the graph, checked between passes: a breach is a defect of dsmp and raises VerificationError.

1  what the model returns, and every gradient, keeps its dtype and shape
2  every traced operator still reads its inputs in the traced dtypes, unless it is a GEMM that was planned
3  the operands of a GEMM agree in dtype
4  every decision has its node in the graph, or stands in the list of missing keys
5  every call has a (fake) value and, in a joint graph, a place in the forward or backward pass
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..errors import VerificationError
from .gemm import gemm_op, operand_nodes
from .graph import FLOAT_DTYPES, calls, is_joint, operands, output_node, shape_of, tensors_of, value_of
from .keys import key_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What must survive the passes: dtypes and shapes of the outputs, and input dtypes of every traced operator."""

    outputs: tuple[tuple[torch.dtype | None, tuple[int, ...]], ...]
    inputs: Mapping[fx.Node, tuple[torch.dtype, ...]]


def snapshot(gm: fx.GraphModule) -> Snapshot:
    """Take the snapshot of a traced graph, before any pass changes it."""
    return Snapshot(outputs=_outputs(gm), inputs={n: _input_dtypes(n) for n in calls(gm) if gemm_op(n) is None})


def verify(gm: fx.GraphModule, before: Snapshot, decided: Iterable[str], missing: Iterable[str] = ()) -> None:
    """Check the invariants on a graph after a pass.

    `decided` are the keys of all decisions for this graph, `missing` those that are known to have no node.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"the graph is malformed: {error}") from error
    after = _outputs(gm)
    if after != before.outputs:
        changed = [i for i, (a, b) in enumerate(zip(before.outputs, after, strict=False)) if a != b]
        raise VerificationError(f"outputs {changed} changed their dtype or shape: {before.outputs} became {after}")
    joint = is_joint(gm)
    for node in calls(gm):
        traced = before.inputs.get(node)
        if traced is not None and _input_dtypes(node) != traced:
            raise VerificationError(f"{node.format_node()} reads {_input_dtypes(node)}, it was traced with {traced}")
        if gemm_op(node) is not None:
            dtypes = {v.dtype for n in operand_nodes(node) if (v := value_of(n)) is not None}
            if len(dtypes) > 1:
                raise VerificationError(f"{node.format_node()} mixes operands of {sorted(map(str, dtypes))}")
        if "val" not in node.meta and _returns_something(node):
            raise VerificationError(f"{node.format_node()} has no value in its meta data")
        if joint and "partitioner_tag" not in node.meta:
            raise VerificationError(f"{node.format_node()} belongs neither to the forward nor to the backward pass")
    present = {str(k) for n in calls(gm) if (k := key_of(n)) is not None}
    lost = set(decided) - present - set(missing)
    if lost:
        raise VerificationError(f"planned nodes left the graph: {sorted(lost)[:5]} ({len(lost)} in all)")


def _outputs(gm: fx.GraphModule) -> tuple[tuple[torch.dtype | None, tuple[int, ...]], ...]:
    values = fx.node.map_arg(output_node(gm).args[0], value_of)
    flat = values if isinstance(values, (list, tuple)) else [values]
    return tuple((v.dtype, shape_of(v)) if isinstance(v, torch.Tensor) else (None, ()) for v in flat)


def _input_dtypes(node: fx.Node) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for n in operands(node) for t in tensors_of(n) if t.dtype in FLOAT_DTYPES)


def _returns_something(node: fx.Node) -> bool:
    """False for calls that are made for their effect only, such as an assertion."""
    return not isinstance(node.target, torch._ops.OpOverload) or bool(node.target._schema.returns)
