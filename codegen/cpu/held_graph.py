"""Take products by held weights apart into torch's own product by a weight that is widened: the form in which a plan
knows them, and from which they are lowered as those of a model that still has its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...passes.graph import aten, node_op, value_of
from ...passes.insertion import insert_call


def take_apart(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """Replace `dsmp::held_linear` and `dsmp::held_convolution` in place; returns the widened weights, which stand for
    parameters.

    What reads a result finds it in the order in memory that it was traced with.
    """
    found = [n for n in gm.graph.nodes if node_op(n) in ("dsmp.held_linear", "dsmp.held_convolution")]
    for node in found:
        product = _linear(gm.graph, node) if node_op(node) == "dsmp.held_linear" else _convolution(gm.graph, node)
        node.replace_all_uses_with(_in_order(gm.graph, product, node))
        gm.graph.erase_node(node)
    if found:
        gm.recompile()
    return frozenset(n for n in gm.graph.nodes if node_op(n) == "dsmp.held_weight")


def _linear(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x, packed, bias, form, size, *_ = node.args
    weight = _call(graph, torch.ops.dsmp.held_weight.default, (packed, form, size, 1), node)
    right = _call(graph, aten.permute.default, (weight, [1, 0]), node)
    if bias is None:
        return _call(graph, aten.mm.default, (x, right), node)
    return _call(graph, aten.addmm.default, (bias, x, right), node)


def _convolution(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x, packed, bias, size, stride, padding, dilation, groups, *_ = node.args
    weight = _call(graph, torch.ops.dsmp.held_weight.default, (packed, "static", size, groups), node)
    args = (x, weight, bias, stride, padding, dilation, False, [0, 0], groups)
    return _call(graph, aten.convolution.default, args, node)


def _in_order(graph: fx.Graph, product: fx.Node, node: fx.Node) -> fx.Node:
    before, now = value_of(node), value_of(product)
    if before is None or now is None or before.stride() == now.stride() or before.dim() != 4:
        return product
    last = before.is_contiguous(memory_format=torch.channels_last) and not before.is_contiguous()
    order = torch.channels_last if last else torch.contiguous_format
    with graph.inserting_before(node):
        copy = graph.call_function(aten.clone.default, (product,), {"memory_format": order})
    copy.meta = {**product.meta, "val": before}
    return copy


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], node: fx.Node) -> fx.Node:
    return insert_call(graph, target, args, {}, like=node, joint="partitioner_tag" in node.meta, before=node)
