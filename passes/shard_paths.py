"""How far a shard of a linear's outputs gets through the forward graph before ranks have to talk.

A linear whose output features are divided over ranks (by column) gives values that are divided in one dimension. They
may pass whatever works on each part alone: elementwise operators, views that keep the dimension, attention by batch or
head. They end well in a linear that sums over the divided dimension (by row) and in sums and maxima over it, as a loss
has them; anything else that would need the other parts ends them badly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import ParamAOTInput

from .gemm import gemm_op, operand_nodes
from .graph import is_backward, is_getitem, node_op, root, shape_of, value_of
from .op_rules import rule_of

_REDUCTIONS = frozenset({"aten.sum", "aten.amax", "aten.amin"})
_LAYOUT = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten.expand", "aten.squeeze", "aten.unsqueeze"})
_CUTS = frozenset({"aten.slice", "aten.select", "aten.split", "aten.split_with_sizes", "aten.cat", "aten._softmax"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A forward product with a parameter: x [tokens, in] times weight; `outputs` is the weight's dimension of outputs
    (0 for nn.Linear). `bias` names the parameter that addmm adds, if any."""

    node: fx.Node
    weight: str
    outputs: int
    bias: str | None = None

    @property
    def features(self) -> int:
        return int(self.node.meta["val"].shape[-1])


@dataclass(kw_only=True, slots=True)
class Path:
    """Where the divided outputs of a linear get: `ends` are the linears by row, `blocked` says why they may not be
    divided, `units` what cannot be cut (heads): (what, how many), `vectors` parameters that are added or multiplied
    along the way and are divided with them, `reduced` whether sums or maxima over the divided dimension are taken."""

    ends: list[fx.Node] = field(default_factory=list)
    units: list[tuple[str, int]] = field(default_factory=list)
    vectors: list[str] = field(default_factory=list)
    seen: set[fx.Node] = field(default_factory=set)
    beside: set[fx.Node] = field(default_factory=set)
    blocked: str = ""
    reduced: bool = False


def parameter_of(node: fx.Node) -> str | None:
    """The name of the parameter that a node is, None where it is none."""
    desc = node.meta.get("desc")
    return desc.target if isinstance(desc, ParamAOTInput) else None


def linears(gm: fx.GraphModule) -> dict[fx.Node, Linear]:
    """All forward products of a two-dimensional value with a parameter, by node."""
    found = {}
    for node in gm.graph.nodes:
        op = gemm_op(node)
        if is_backward(node) or op is None or node_op(node) not in ("aten.mm", "aten.addmm"):
            continue
        right = operand_nodes(node)[1]
        weight = parameter_of(root(right, through_casts=True))
        if weight is None:
            continue
        bias = None if op.bias is None else parameter_of(root(node.args[op.bias], through_casts=True))
        outputs = 0 if _transposed(right) else 1
        found[node] = Linear(node=node, weight=weight, outputs=outputs, bias=bias)
    return found


def _transposed(node: fx.Node) -> bool:
    turned = False
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        turned ^= node_op(node) in ("aten.t", "aten.transpose", "aten.permute", "aten.numpy_T")
        node = node.args[0]
    return turned


def path_of(linear: Linear, known: Mapping[fx.Node, Linear]) -> Path:
    """Follow the divided outputs of a linear through the forward graph."""
    path = Path()
    pending = [(linear.node, 1)]
    while pending and not path.blocked:
        node, dim = pending.pop()
        if node in path.seen:
            continue
        path.seen.add(node)
        for user in node.users:
            if is_backward(user):
                continue
            if user.op == "output":
                continue  # gathered for whoever reads it
            after = _through(user, node, dim, known, path)
            if after is not None:
                pending.append((user, after))
    return path


def _through(user: fx.Node, node: fx.Node, dim: int, known: Mapping[fx.Node, Linear], path: Path) -> int | None:
    """The divided dimension of a user's result; None where the way ends, well or (path.blocked) badly."""
    name = node_op(user)
    shape = shape_of(node.meta["val"]) if value_of(node) is not None else ()
    if is_getitem(user):
        return dim
    if user in known and operand_nodes(user)[0] is node and dim == 1:
        path.ends.append(user)
        return None
    if name in _REDUCTIONS:
        return _through_reduction(user, dim, len(shape), path)
    if name in _LAYOUT:
        return _through_view(user, shape, dim, path)
    if name in ("aten.transpose", "aten.permute", "aten.t"):
        return _turned(user, dim, len(shape))
    if name in _CUTS:
        cut = _argument(user, 2 if name.startswith("aten.split") else 1, 0) % len(shape)
        if cut == dim:
            path.blocked = f"{user.name} ({name}) works along the divided dimension"
            return None
        return dim - (name == "aten.select" and cut < dim)
    op = gemm_op(user)
    if op is not None and op.kind == "sdpa":
        if dim > 1:
            path.blocked = f"{user.name} ({name}) needs the whole of its dimension {dim}"
            return None
        return dim
    if rule_of(user).op_class == "pointwise" or name in ("aten.clone", "aten.detach", "aten.alias", "aten.contiguous"):
        return _through_pointwise(user, node, dim, path)
    path.blocked = f"{user.name} ({name}) may need the whole value"
    return None


def _argument(node: fx.Node, position: int, default: int) -> int:
    value = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    return int(value)  # type: ignore[arg-type]


def _through_reduction(user: fx.Node, dim: int, rank: int, path: Path) -> int | None:
    dims = user.args[1] if len(user.args) > 1 else list(range(rank))
    over = {int(d) % rank for d in dims} or set(range(rank))  # type: ignore[union-attr, arg-type]
    if dim in over:
        path.reduced = True
        return None
    kept = len(user.args) > 2 and bool(user.args[2])
    return dim if kept else dim - sum(d < dim for d in over)


def _through_view(user: fx.Node, before: Sequence[int], dim: int, path: Path) -> int | None:
    after = shape_of(user.meta["val"])
    if node_op(user) == "aten.expand":
        return dim + len(after) - len(before)
    start, at = math.prod(before[:dim]), 1
    for i, size in enumerate(after):
        if at == start and size != 1:
            if size != before[dim]:
                path.units.append((f"{user.name} of {_owner(user)} views {before[dim]} as {size} parts", size))
            return i
        at *= size
    path.blocked = f"{user.name} views {tuple(before)} as {after}, which breaks up the divided dimension {dim}"
    return None


def _turned(user: fx.Node, dim: int, rank: int) -> int:
    name = node_op(user)
    if name == "aten.permute":
        return [int(d) % rank for d in user.args[1]].index(dim)  # type: ignore[union-attr, arg-type]
    a, b = (0, 1) if name == "aten.t" else (int(user.args[1]) % rank, int(user.args[2]) % rank)  # type: ignore[arg-type]
    return {a: b, b: a}.get(dim, dim)


def _through_pointwise(user: fx.Node, node: fx.Node, dim: int, path: Path) -> int | None:
    result = shape_of(user.meta["val"])
    dim += len(result) - node.meta["val"].dim()
    for other in user.all_input_nodes:
        value = value_of(other)
        at = -1 if value is None else dim - (len(result) - value.dim())
        if other is node or value is None or at < 0 or value.shape[at] == 1:
            continue
        name = parameter_of(root(other))
        if name is not None and value.dim() == 1:
            path.vectors.append(name)
        elif value.dtype is not torch.bool and root(other).op != "placeholder":
            path.beside.add(other)  # must be divided likewise, which only the other linears' paths can tell
    return dim


def _owner(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return repr(list(stack.values())[-1][0]) if stack else "the model"
