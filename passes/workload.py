"""How much work a node is: floating-point operations, and the shape of the matrix product it amounts to."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ..hardware_db.work import GemmShape
from .gemm import gemm_op, operand_nodes, written_gradients
from .graph import concrete, node_op, numel_of, operands, shape_of, tensors_of, value_of
from .op_rules import Policy, class_of, rule_of


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a node (multiply and add counted apart); elements of the result for non-GEMMs."""
    op = gemm_op(node)
    name = node_op(node)
    if op is None:
        if rule_of(node).policy is Policy.VIEW:
            return 0
        read = [numel_of(v) for n in operands(node) if (v := value_of(n)) is not None]
        written = [numel_of(t) for t in tensors_of(node)]
        return max(read + written, default=0) if class_of(node) != "other" else 0
    if op.kind == "sdpa":
        first = 1 if op.backward else 0
        query, key, value = (shape_of(tensor_of(n)) for n in operand_nodes(node)[first : first + 3])
        if op.backward:
            # Five products in place of two: the scores again, and one for each gradient (of value, scores, query, key).
            return _attention_flops(query, key, value) * 5 // 2
        return _attention_flops(query, key, value)
    if op.kind == "grouped_mm":
        tokens, weight = (tensor_of(n) for n in node.args[:2] if isinstance(n, fx.Node))
        count = 2 * numel_of(tokens) * concrete(weight.shape[-1])
        return count * (sum(node.meta.get("dsmp_writes", (True, True))) if op.backward else 1)
    if op.kind == "conv" and op.backward:
        return _convolution_flops(node) * sum(written_gradients(node))
    packet = getattr(node.target, "_overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        raise KeyError(f"no FLOP formula for {name}")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: tree_map(_sized, n.meta.get("val")))
    return int(formula(*args, **kwargs, out_val=tree_map(_sized, node.meta["val"])))


def _convolution_flops(node: fx.Node) -> int:
    """One product of a convolution's backward node: every weight meets every position it is applied at, in each of the
    three passes. (torch's own count of the weight's gradient is too large by the number of groups.)"""
    grad, value, weight, *_ = (tensor_of(n) for n in node.args[:3] if isinstance(n, fx.Node))
    transposed = bool(node.args[7])
    batch, _, *positions = shape_of(value if transposed else grad)
    return 2 * batch * math.prod(positions) * numel_of(weight)


def _attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """query @ key^T and scores @ value of [batch, heads, length, width] tensors."""
    *batch, length, width = query
    return 2 * math.prod(batch) * length * key[-2] * (width + value[-1])


def _sized(value: object) -> object:
    """A value with plain numbers for sizes, so that counting adds no guard to a dynamic graph."""
    if isinstance(value, torch.Tensor):
        return torch.empty(shape_of(value), dtype=value.dtype, device="meta")
    return concrete(value) if isinstance(value, torch.SymInt) else value


def gemm_shape(node: fx.Node) -> GemmShape | None:
    """The matrix product that a GEMM-class node amounts to, None for any other node or an empty operand.

    Convolutions are implicit GEMMs over positions (Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning",
    arXiv:1410.0759), one per group; attention has the shape of its scores; a grouped GEMM has evenly filled groups.
    """
    op = gemm_op(node)
    if op is None:
        return None
    if op.kind == "conv":
        return _convolution_shape(node, backward=op.backward)
    if op.kind == "sdpa":
        first = 1 if op.backward else 0
        query, key, _ = (shape_of(tensor_of(n)) for n in operand_nodes(node)[first : first + 3])
        return _shape(math.prod(query[:-2]), query[-2], key[-2], query[-1])
    if op.kind == "grouped_mm":
        tokens, weight = (shape_of(tensor_of(n)) for n in node.args[:2] if isinstance(n, fx.Node))
        groups = weight[0] if len(weight) == 3 else 1
        return _shape(groups, math.ceil(math.prod(tokens[:-1]) / max(groups, 1)), weight[-1], tokens[-1])
    left, right = (shape_of(tensor_of(n)) for n in operand_nodes(node)[:2])
    return _shape(math.prod(left[:-2]), left[-2], right[-1], left[-1])


def _convolution_shape(node: fx.Node, *, backward: bool) -> GemmShape | None:
    tensors = [shape_of(tensor_of(n)) for n in node.args[:3] if isinstance(n, fx.Node)]
    transposed, groups = bool(node.args[7 if backward else 6]), concrete(cast(int, node.args[9 if backward else 8]))
    if backward:
        grad, value, weight = tensors
        batch, _, *positions = value if transposed else grad
        places, channels, taps = batch * math.prod(positions), weight[0] // groups, math.prod(weight[1:])
        if written_gradients(node)[1]:
            return _shape(groups, channels, taps, places)
        return _shape(groups, places, channels, taps) if transposed else _shape(groups, places, taps, channels)
    value, weight = tensors[:2]
    batch, _, *positions = value if transposed else shape_of(tensors_of(node)[0])
    places, channels, taps = batch * math.prod(positions), weight[0] // groups, math.prod(weight[1:])
    return _shape(groups, places, taps, channels) if transposed else _shape(groups, places, channels, taps)


def _shape(batch: int, m: int, n: int, k: int) -> GemmShape | None:
    return GemmShape(batch=batch, m=m, n=n, k=k) if min(batch, m, n, k) > 0 else None


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node holds; the caller knows that it holds one."""
    value = value_of(node)
    assert value is not None, f"{node} holds no tensor"
    return value
