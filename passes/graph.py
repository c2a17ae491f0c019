"""Questions about an FX graph of ATen operators that several passes ask.

A *value* is what a node produces. Views, copies and tuple accesses do not make a new number, so most questions are
put to the *root* of a value: the node that last computed it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
prims = torch.ops.prims

FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

# Same numbers, same order of magnitude of elements: a cast may move across these.
VIEW_OPS = frozenset(
    {
        "aten.view", "aten._unsafe_view", "aten.reshape", "aten.permute", "aten.transpose", "aten.t", "aten.expand",
        "aten.squeeze", "aten.unsqueeze", "aten.alias", "aten.detach", "aten.clone", "aten.flatten", "aten.unflatten",
        "aten.lift_fresh_copy", "aten.lift_fresh", "aten.contiguous",
        "aten._reshape_alias", "aten.movedim", "aten.numpy_T", "aten.view_copy",
    }
)  # fmt: skip
# A part of a value: the numbers are the same, but a cast must not be moved above it (it would touch more elements).
SLICE_OPS = frozenset(
    {
        "aten.slice", "aten.select", "aten.split", "aten.split_with_sizes", "aten.narrow", "aten.chunk",
        "aten.diagonal", "aten.unbind", "aten.as_strided",
    }
)  # fmt: skip
CAST_OPS = frozenset({"prims.convert_element_type", "aten._to_copy", "aten.to"})


_EXPECTED: MutableMapping[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # numbers of symbols, by shape environment


@functools.cache
def op_name(target: object) -> str:
    """`aten.mm` for `aten.mm.default`: namespace and packet, without the overload; `''` for what is no operator."""
    if target is aten.view.dtype:
        return "reinterpreted.view"  # the same bits read as other numbers: no view in the sense of this module
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[-1]}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.__name__}"
    return ""


def node_op(node: fx.Node) -> str:
    """The operator's name of a call, `''` for placeholders, outputs, tuple accesses and attributes."""
    return op_name(node.target) if node.op == "call_function" else ""


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The (fake) tensor that a node produces, None if it produces no single tensor."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """All (fake) tensors of a node's result, also those inside a tuple."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]


def is_float(node: fx.Node) -> bool:
    """Whether a node produces at least one floating-point tensor that a numeric format can be planned for."""
    return any(t.dtype in FLOAT_DTYPES for t in tensors_of(node))


def float_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of the node's first floating-point tensor, None if there is none."""
    return next((t.dtype for t in tensors_of(node) if t.dtype in FLOAT_DTYPES), None)


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to the backward part of a joint graph (tangents included)."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_joint(gm: fx.GraphModule) -> bool:
    """Whether the graph holds a backward part."""
    return any(is_backward(n) for n in gm.graph.nodes)


def complete_halves(gm: fx.GraphModule) -> None:
    """Put every call of a joint graph into the forward or the backward pass, in place.

    AOTAutograd leaves out what a custom `autograd.Function` computes in its backward method: there a call is backward
    when it reads a backward value or when only backward calls read it.
    """
    if not is_joint(gm):
        return
    open_calls = [n for n in gm.graph.nodes if n.op == "call_function" and "partitioner_tag" not in n.meta]
    for node in open_calls:
        if any(is_backward(n) for n in node.all_input_nodes):
            node.meta["partitioner_tag"] = "is_backward"
    for node in reversed(open_calls):
        if "partitioner_tag" not in node.meta:
            only_backward = bool(node.users) and all(is_backward(user) for user in node.users)
            node.meta["partitioner_tag"] = "is_backward" if only_backward else "is_forward"


def root(node: fx.Node, *, through_casts: bool = False, through_slices: bool = True) -> fx.Node:
    """The node that computed the numbers of `node`: views, copies and (if asked) slices and dtype casts are skipped."""
    while node.op == "call_function":
        name = op_name(node.target)
        transparent = (
            name in VIEW_OPS
            or (through_slices and (name in SLICE_OPS or _is_split_item(node)))
            or (through_casts and name in CAST_OPS)
        )
        if not transparent or not node.args or not isinstance(node.args[0], fx.Node):
            return node
        node = node.args[0]
    return node


def _is_split_item(node: fx.Node) -> bool:
    source = node.args[0] if is_getitem(node) else None
    return isinstance(source, fx.Node) and node_op(source) in SLICE_OPS


def concrete(size: int | torch.SymInt) -> int:
    """A size as a number: the hint of a symbolic one (the size seen while tracing), what `expect_size` noted for one
    that only running tells, else 1."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is not None:
        return int(hint)
    known = _EXPECTED.get(size.node.shape_env, {})
    expected = size.node.expr.xreplace(known)
    return int(expected) if expected.is_number else 1


def expect_size(size: int | torch.SymInt, expected: int) -> None:
    """Note a number for the symbols of a size that only running tells, for estimates; a number noted earlier stays."""
    if isinstance(size, torch.SymInt) and size.node.hint is None:
        known = _EXPECTED.setdefault(size.node.shape_env, {})
        for symbol in size.node.expr.free_symbols:
            known.setdefault(symbol, symbol - symbol + expected)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape as plain numbers, hints in place of symbols."""
    return tuple(concrete(s) for s in tensor.shape)


def numel_of(tensor: torch.Tensor) -> int:
    """Number of elements, hints in place of symbols."""
    total = 1
    for s in tensor.shape:
        total *= concrete(s)
    return total


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes a call reads, in argument order, repeated ones repeated."""
    found: list[fx.Node] = []

    def take(operand: fx.Node) -> fx.Node:
        found.append(operand)
        return operand

    fx.node.map_arg((node.args, node.kwargs), take)
    return found


def calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """All operator calls of the graph, tuple accesses left out."""
    return (n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)


def real_users(node: fx.Node) -> Iterator[fx.Node]:
    """Users of a value, looking through tuple accesses."""
    for user in node.users:
        if is_getitem(user):
            yield from user.users
        else:
            yield user


def output_node(gm: fx.GraphModule) -> fx.Node:
    last: fx.Node = next(iter(reversed(gm.graph.nodes)))
    return last


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def fake_mode_of(values: Iterable[object]) -> FakeTensorMode:
    """The mode of the fake tensors among values, a new one if there are none."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None) or FakeTensorMode()
