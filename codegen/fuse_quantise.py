"""Quantisations fused into what computes the tensor: the product of a gated MLP is quantised as it is made.

    gate, up --silu, mul--> product --cast--> bf16 --quantise--> (values, scales)

becomes one operator that reads gate and up and writes values and scales, where nothing else reads the stored product:
it is neither written nor read again. The numbers are those of the separate steps, the rounding to bf16 included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..passes.graph import aten, calls, node_op, shape_of, value_of
from ..passes.workload import tensor_of
from .narrow_operands import CASTS, NarrowOperands

_FUSED = {"dsmp.quantize_both": torch.ops.dsmp.gated_quantize_both, "dsmp.quantize": torch.ops.dsmp.gated_quantize}


def fuse_gates(operands: NarrowOperands) -> int:
    """Fuse quantisations of SiLU-gated products, in place; returns how many."""
    count = 0
    for node in list(calls(operands.gm)):
        if node_op(node) not in _FUSED or (node_op(node) == "dsmp.quantize" and node.args[2:] != ("1x128", -1)):
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        gated = _gated(operands, source)
        if gated is None:
            continue
        gate, up, views = gated
        args = (*(operands.viewed(views, part) for part in (gate, up)), node.args[1])
        fresh = operands.call(_FUSED[node_op(node)].default, args, before=node, like=node)
        node.replace_all_uses_with(fresh)
        operands.graph.erase_node(node)
        operands.erase_unread()
        count += 1
    if count:
        operands.gm.recompile()
    return count


def _gated(operands: NarrowOperands, source: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """(gate, up, views above the source) where the source is silu(gate) * up, stored in bf16 for the one reader that is
    being fused, and gate and up are stored in 16 bits."""
    views, stored = operands.above_views(source)
    if any(len(n.users) != 1 for n in (stored, *views)) or node_op(stored) not in CASTS:
        return None
    held, product = value_of(stored), stored.args[0]
    if held is None or held.dtype != torch.bfloat16 or not isinstance(product, fx.Node):
        return None
    if product.target is not aten.mul.Tensor:
        return None
    left, right = product.args
    for silu, up in ((left, right), (right, left)):
        gate = _silu_of(silu)
        if gate is None or not isinstance(up, fx.Node):
            continue
        parts = [operands.as_stored(part) for part in (gate, up)]
        narrow = all(tensor_of(p).dtype in (torch.bfloat16, torch.float16) for p in parts)
        if narrow and shape_of(tensor_of(parts[0])) == shape_of(tensor_of(parts[1])) == shape_of(held):
            return parts[0], parts[1], views
    return None


def _silu_of(node: Any) -> fx.Node | None:
    """x where the node computes x / (1 + exp(-x)), as decomposed, or x * sigmoid(x); else None."""
    x: Any = None
    match _call(node):
        case (aten.mul.Tensor, (a, b)):
            x = next((v for v, other in ((a, b), (b, a)) if _call(other) == (aten.sigmoid.default, (v,))), None)
        case (aten.div.Tensor, (a, total)):
            power = _argument(total, aten.add.Tensor, 1)
            negative = _argument(power, aten.exp.default)
            x = a if _argument(negative, aten.neg.default) is a else None
    return x if isinstance(x, fx.Node) else None


def _call(node: Any) -> tuple[Any, tuple[Any, ...]]:
    """(operator, arguments) of a call."""
    return (node.target, tuple(node.args)) if isinstance(node, fx.Node) and node.op == "call_function" else (None, ())


def _argument(node: Any, target: Any, *others: Any) -> Any:
    """The first argument of a call of `target` whose other arguments are these; else None."""
    found, arguments = _call(node)
    return arguments[0] if found is target and arguments[1:] == others else None
