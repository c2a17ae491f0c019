"""The halves of a fused backward node come together again where both read the same."""

from __future__ import annotations

import operator

import pytest
import torch
from graph_helpers import aten_graph, by_key, copied, decide_gemms, decision, nodes_of, random_inputs, run
from torch import nn

from dsmp.codegen.lower import merge_backward
from dsmp.passes.graph import aten, calls
from dsmp.passes.keys import NodeKey
from dsmp.passes.legalize import legalize
from dsmp.passes.split_backward import split_backward


def backward_graph(mask=(True, True, True), groups=1, transposed=False, stride=1):
    def function(g, x, w):
        bias = [w.shape[1] * groups if transposed else w.shape[0]] if mask[2] else None
        return list(
            aten.convolution_backward(
                g, x, w, bias, [stride] * 2, [1, 1], [1, 1], transposed, [0, 0], groups, list(mask)
            )
        )

    conv = (nn.ConvTranspose2d if transposed else nn.Conv2d)(6, 4, 3, stride=stride, padding=1, groups=groups)
    x = torch.randn(2, 6, 9, 9)
    args = torch.randn_like(conv(x)), x, conv.weight.detach()
    gm = aten_graph(function, *args)
    for node in calls(gm):
        node.meta["partitioner_tag"] = "is_backward"
    return gm, args, conv


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": (True, True, False)}, {"groups": 2}, {"stride": 2}, {"transposed": True, "stride": 2}],
    ids=["bias", "no bias", "groups", "stride", "transposed"],
)
def test_merging_undoes_splitting(options):
    gm, args, conv = backward_graph(**options)
    expected = run(gm, args)
    assert split_backward(gm) == 1
    assert len(nodes_of(gm, "aten.convolution_backward")) == 2
    assert merge_backward(gm) == 1
    gm.graph.lint()
    (node,) = nodes_of(gm, "aten.convolution_backward")
    assert list(node.args[-1]) == list(options.get("mask", (True, True, True)))
    actual = run(gm, args)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None and e is None) or torch.equal(a, e)
    g, x, _ = args
    x = x.clone().requires_grad_()
    conv(x).backward(g)
    torch.testing.assert_close(actual[0], x.grad)
    torch.testing.assert_close(actual[1], conv.weight.grad)
    if actual[2] is not None:
        torch.testing.assert_close(actual[2], conv.bias.grad)


def test_the_merged_node_says_where_it_comes_from(captured):
    (graph,) = captured("convnet").graphs
    copy = copied(graph)
    assert merge_backward(copy.gm) == 2
    merged = [n for n in nodes_of(copy.gm, "aten.convolution_backward") if "dsmp_merged" in n.meta]
    pairs = {n.meta["dsmp_merged"] for n in merged}
    assert pairs == {tuple(NodeKey(m, p, "conv", 0) for p in ("dgrad", "wgrad")) for m in ("depthwise", "down")}
    for node in merged:
        shapes = [None if v is None else tuple(v.shape) for v in node.meta["val"]]
        _, x, w = (a.meta["val"] for a in node.args[:3])
        assert shapes[0] == tuple(x.shape) and shapes[1] == tuple(w.shape)
        assert node.meta["partitioner_tag"] == "is_backward"
    assert merge_backward(copy.gm) == 0, "nothing is left to merge"


@pytest.mark.parametrize("name", ["convnet", "mixtral"])
def test_merging_changes_no_number(name, captured):
    (graph,) = captured(name).graphs
    inputs = random_inputs(graph.gm, graph.parameters)
    expected = run(graph.gm, inputs)
    copy = copied(graph)
    assert merge_backward(copy.gm) == 2
    copy.gm.graph.lint()
    for actual, wanted in zip(run(copy.gm, inputs), expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)


def test_tuple_accesses_stand_behind_the_merged_node(captured):
    (graph,) = captured("resnet18").graphs
    copy = copied(graph)
    assert merge_backward(copy.gm) == 19, "of 20 convolutions the first needs no gradient of its input"
    copy.gm.graph.lint()
    order = {n: i for i, n in enumerate(copy.gm.graph.nodes)}
    for node in nodes_of(copy.gm, "aten.convolution_backward"):
        assert all(u.target is operator.getitem and order[u] > order[node] for u in node.users)


@pytest.mark.parametrize("same_device", [True, False])
def test_halves_of_one_precision_are_merged_after_legalisation(same_device, captured):
    (graph,) = captured("convnet").graphs
    copy = copied(graph)
    plan = decide_gemms(copy.gm, "bf16", output="bf16")
    legalize(copy.gm, plan, same_device=same_device, storage="bf16", parameters=copy.parameters)
    inputs = random_inputs(graph.gm, graph.parameters)
    before = run(copy.gm, inputs)
    merged = merge_backward(copy.gm)
    assert merged == 2 or not same_device
    for a, b in zip(run(copy.gm, inputs), before, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)


def test_halves_of_different_precision_stay_apart(captured):
    (graph,) = captured("convnet").graphs
    nodes = by_key(graph.gm)
    for formats in (("bf16", "fp32"), ("fp32", "bf16")):
        copy = copied(graph)
        plan = {
            k: decision(nodes[k], f) for k, f in zip(("down|dgrad|conv|0", "down|wgrad|conv|0"), formats, strict=True)
        }
        legalize(copy.gm, plan, same_device=True, storage="bf16", parameters=copy.parameters)
        assert merge_backward(copy.gm) == 1, "only the other convolution's"
        assert {"down|dgrad|conv|0", "down|wgrad|conv|0"} <= set(by_key(copy.gm))
