"""Each invariant, broken by hand, is a VerificationError that names the place."""

from __future__ import annotations

import pytest
import torch
from graph_helpers import by_key, copied, decide_gemms, nodes_of
from torch import fx

from dsmp.compiler.capture import capture
from dsmp.errors import DsmpError, VerificationError
from dsmp.passes.graph import aten, output_node, prims, value_of
from dsmp.passes.legalize import legalize
from dsmp.passes.verify import snapshot, verify


@pytest.fixture
def checked(captured):
    """A copy of a captured graph that was legalised in bf16, its snapshot and the keys that were decided."""
    (graph,) = captured("normed").graphs
    copy = copied(graph)
    before = snapshot(copy.gm)
    plan = decide_gemms(copy.gm, "bf16", output="bf16")
    legalize(copy.gm, plan, same_device=True, storage="bf16", parameters=copy.parameters)
    decided = [k for k in plan if k in by_key(copy.gm)]
    verify(copy.gm, before, decided)
    return copy.gm, before, decided


def cast(gm, value, dtype, *, tag="is_forward"):
    """A new cast behind a value, with meta data."""
    with gm.graph.inserting_after(value):
        node = gm.graph.call_function(prims.convert_element_type.default, (value, dtype))
    node.meta["val"] = value_of(value).to(dtype)
    node.meta["partitioner_tag"] = tag
    return node


def breach(gm, before, decided, *words):
    with pytest.raises(VerificationError) as error:
        verify(gm, before, decided)
    assert all(w in str(error.value) for w in words), str(error.value)


def test_an_output_in_another_dtype(checked):
    gm, before, decided = checked
    out = output_node(gm)
    value = out.args[0][0]
    narrow = cast(gm, value, torch.bfloat16)
    out.args = ([narrow, *out.args[0][1:]],)
    breach(gm, before, decided, "outputs [0] changed", "torch.bfloat16")


def test_a_gradient_in_another_dtype(checked):
    gm, before, decided = checked
    out = output_node(gm)
    index = max(i for i, n in enumerate(out.args[0]) if n is not None)
    narrow = cast(gm, out.args[0][index], torch.float64, tag="is_backward")
    out.args = ([narrow if i == index else n for i, n in enumerate(out.args[0])],)
    breach(gm, before, decided, f"outputs [{index}] changed")


def test_an_output_of_another_shape(checked):
    gm, before, decided = checked
    out = output_node(gm)
    value = out.args[0][0]
    with gm.graph.inserting_before(out):
        flipped = gm.graph.call_function(aten.permute.default, (value, [1, 0]))
    flipped.meta.update(val=value_of(value).permute(1, 0), partitioner_tag="is_forward")
    out.args = ([flipped, *out.args[0][1:]],)
    breach(gm, before, decided, "outputs [0] changed")


def test_a_lost_output(checked):
    gm, before, decided = checked
    out = output_node(gm)
    out.args = (out.args[0][:-1],)
    breach(gm, before, decided, "outputs")


def test_a_traced_operator_with_an_input_in_another_dtype(checked):
    gm, before, decided = checked
    relu = nodes_of(gm, "aten.relu")[0]
    narrow = cast(gm, relu.args[0], torch.bfloat16)
    relu.args = (narrow,)
    breach(gm, before, decided, "relu", "it was traced with (torch.float32,)")


def test_a_product_of_mixed_operands(checked):
    gm, before, decided = checked
    product = by_key(gm)["up|wgrad|linear|0"]
    operand = product.args[0]
    product.args = (cast(gm, operand, torch.float32, tag="is_backward"), product.args[1])
    breach(gm, before, decided, product.name, "mixes operands of ['torch.bfloat16', 'torch.float32']")


def test_a_planned_node_that_is_gone(checked):
    gm, before, decided = checked
    product = by_key(gm)["up|fprop|linear|0"]
    del product.meta["dsmp_key"]
    breach(gm, before, decided, "planned nodes left the graph", "up|fprop|linear|0", "(1 in all)")
    verify(gm, before, decided, ["up|fprop|linear|0"])
    with pytest.raises(VerificationError, match="left the graph"):
        verify(gm, before, [*decided, "nowhere|fprop|linear|0"], ["up|fprop|linear|0"])


def test_a_call_without_a_value(checked):
    gm, before, decided = checked
    node = cast(gm, nodes_of(gm, "aten.relu")[0], torch.float64)
    del node.meta["val"]
    breach(gm, before, decided, node.name, "has no value")


def test_a_call_of_neither_pass(checked):
    gm, before, decided = checked
    node = cast(gm, nodes_of(gm, "aten.relu")[0], torch.float64)
    del node.meta["partitioner_tag"]
    breach(gm, before, decided, node.name, "neither to the forward nor to the backward pass")


def test_a_value_that_is_read_before_it_is_made(checked):
    gm, before, decided = checked
    relu = nodes_of(gm, "aten.relu")[0]
    output_node(gm).prepend(relu)
    breach(gm, before, decided, "malformed", "used before")


def test_calls_for_their_effect_need_no_value(captured):
    (graph,) = captured("positions").graphs
    copy = copied(graph)
    before = snapshot(copy.gm)
    assert [n for n in nodes_of(copy.gm, "aten._assert_async") if "val" not in n.meta]
    verify(copy.gm, before, by_key(copy.gm))


def test_inference_graphs_have_one_pass_only(captured):
    (graph,) = captured("mlp", training=False).graphs
    copy = copied(graph)
    assert not [n for n in copy.gm.graph.nodes if "partitioner_tag" in n.meta]
    verify(copy.gm, snapshot(copy.gm), by_key(copy.gm))


def test_integer_inputs_do_not_count():
    (graph,) = capture(torch.nn.Embedding(9, 4), (torch.tensor([1, 2]),))
    before = snapshot(graph.gm)
    (embedding,) = nodes_of(graph.gm, "aten.embedding")
    assert before.inputs[embedding] == (torch.float32,)
    assert len(before.outputs) == len(output_node(graph.gm).args[0])


def test_what_is_raised_is_an_error_of_dsmp():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    gm = fx.GraphModule({}, graph)
    with pytest.raises(DsmpError):
        verify(gm, snapshot(gm), ["a|fprop|linear|0"])
