"""Fused backward nodes are split into one node per gradient, with the same numbers."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe
from graph_helpers import aten_graph, keyed_graph, nodes_of, run
from torch import nn

from dsmp.passes.gemm import gemm_op, operand_nodes, operand_slots, written_gradients
from dsmp.passes.graph import aten, calls, node_op, placeholders
from dsmp.passes.keys import ModuleNames, assign_keys, key_of
from dsmp.passes.split_backward import split_backward
from dsmp.passes.workload import flops_of

assert transformers.integrations.moe  # registers the grouped product
ARGS = torch.randn(2, 4, 6, 6), torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)


def backward_graph(mask, used=(0, 1, 2)):
    """grad_output, input, weight -> the used gradients of a convolution, the backward node as one call."""

    def function(g, x, w):
        found = aten.convolution_backward(g, x, w, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, list(mask))
        return [found[i] for i in used]

    gm = aten_graph(function, *ARGS)
    for node in calls(gm):
        node.meta["partitioner_tag"] = "is_backward"
    return gm


def halves(gm):
    return [list(n.args[-1]) for n in nodes_of(gm, "aten.convolution_backward")]


def test_two_nodes_give_what_one_gave():
    gm = backward_graph([True, True, True])
    expected = run(gm, ARGS)
    assert split_backward(gm) == 1
    gm.graph.lint()
    assert halves(gm) == [[True, False, False], [False, True, True]]
    for actual, wanted in zip(run(gm, ARGS), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_each_half_says_what_it_writes_and_reads():
    gm = backward_graph([True, True, True])
    (original,) = nodes_of(gm, "aten.convolution_backward")
    name = original.name
    split_backward(gm)
    dgrad, wgrad = nodes_of(gm, "aten.convolution_backward")
    assert written_gradients(dgrad) == (True, False) and written_gradients(wgrad) == (False, True)
    assert dgrad.meta["dsmp_split_of"] == wgrad.meta["dsmp_split_of"] == name
    assert [v is not None for v in dgrad.meta["val"]] == [True, False, False]
    assert [v is not None for v in wgrad.meta["val"]] == [False, True, True]
    assert dgrad.meta["partitioner_tag"] == "is_backward"
    grad, x, w = placeholders(gm)
    # the gradient of the input sums over output channels: axis 1 of the gradient, axis 0 of the weight
    assert operand_nodes(dgrad) == (grad, w) and operand_slots(dgrad) == ((0, 1), (2, 0))
    assert operand_nodes(wgrad) == (grad, x) and operand_slots(wgrad) == ((0, None), (1, None))


@pytest.mark.parametrize(
    ("mask", "used", "expected"),
    [
        ([True, True, False], (0, 1), [[True, False, False], [False, True, False]]),
        ([True, True, True], (0, 2), [[True, False, False], [False, False, True]]),
        ([False, True, True], (1, 2), None),
        ([True, False, False], (0,), None),
        ([True, True, True], (0,), None),
        ([True, True, True], (1, 2), None),
    ],
    ids=["no bias", "bias only", "no input", "input only", "weight unused", "input unused"],
)
def test_only_what_is_asked_for_and_used_is_split(mask, used, expected):
    gm = backward_graph(mask, used)
    wanted = run(gm, ARGS)
    gm.graph.eliminate_dead_code()
    assert split_backward(gm) == (expected is not None)
    assert halves(gm) == (expected or [mask])
    for actual, before in zip(run(gm, ARGS), wanted, strict=True):
        assert torch.equal(actual, before)


def test_splitting_twice_changes_nothing():
    gm = backward_graph([True, True, True])
    split_backward(gm)
    before = [n.format_node() for n in gm.graph.nodes]
    assert split_backward(gm) == 0
    assert [n.format_node() for n in gm.graph.nodes] == before


def test_the_split_is_that_of_a_captured_network(captured):
    (graph,) = captured("convnet").graphs
    parts = [n for n in nodes_of(graph.gm, "aten.convolution_backward") if "dsmp_split_of" in n.meta]
    assert len(parts) == 4
    whole = [n for n in nodes_of(graph.gm, "aten.convolution_backward") if "dsmp_split_of" not in n.meta]
    assert [written_gradients(n) for n in whole] == [(False, True)], "the images need no gradient"


def test_grouped_products_are_split(captured):
    (graph,) = captured("mixtral").graphs
    parts = nodes_of(graph.gm, "transformers.grouped_mm_fallback_backward")
    assert [written_gradients(n) for n in parts] == [(True, False), (False, True)] * 2
    for node in parts:
        gradient, value, weight = node.args[3], node.args[0], node.args[1]
        assert operand_nodes(node) == ((gradient, weight) if written_gradients(node)[0] else (value, gradient))
        sizes = {
            n.meta["val"].shape[axis] for n, (_, axis) in zip(operand_nodes(node), operand_slots(node), strict=True)
        }
        assert len(sizes) == 1, "both operands are summed over one axis"


def test_attention_and_forward_nodes_are_left_alone(captured):
    (graph,) = captured("sdpa").graphs
    before = [n.format_node() for n in graph.gm.graph.nodes]
    assert split_backward(graph.gm) == 0
    assert [n.format_node() for n in graph.gm.graph.nodes] == before
    conv = keyed_graph(nn.functional.conv2d, ARGS[1], ARGS[2])
    assert split_backward(conv.gm) == 0 and [node_op(n) for n in calls(conv.gm)] == ["aten.convolution"]


@pytest.mark.parametrize(("used", "phase"), [(0, "dgrad"), (1, "wgrad")])
def test_a_grouped_product_of_which_one_gradient_is_used(used, phase):
    def function(x, w, offsets, g):
        y = torch.ops.transformers.grouped_mm_fallback(x, w, offsets)
        return y, torch.ops.transformers.grouped_mm_fallback_backward(x, w, offsets, g)[used]

    offsets = torch.tensor([3, 8], dtype=torch.int32)
    gm = aten_graph(function, torch.randn(8, 16), torch.randn(2, 16, 12), offsets, torch.randn(8, 12))
    gm.graph.eliminate_dead_code()
    forward, backward = (n for n in calls(gm) if gemm_op(n))
    for node, tag in ((forward, "is_forward"), (backward, "is_backward")):
        node.meta.update(partitioner_tag=tag, seq_nr=7)
    assert split_backward(gm) == 0
    assert assign_keys(gm, ModuleNames(), lambda _: False).unmatched == ()
    assert str(key_of(backward)) == f"|{phase}|grouped_mm|0"
    x, w, _, g = placeholders(gm)
    assert operand_nodes(backward) == ((g, w) if phase == "dgrad" else (x, g))
    assert flops_of(backward) == flops_of(forward) == 2 * 8 * 16 * 12
