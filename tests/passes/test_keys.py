"""Node keys: text form, uniqueness, phases from dataflow, module paths."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import zoo
from graph_helpers import Recorder, by_key, gemm_keys, keyed_graph, random_inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dsmp.compiler.capture import capture
from dsmp.passes.gemm import gemm_op, operand_nodes
from dsmp.passes.graph import calls, is_backward, is_float, node_op, numel_of, root, tensors_of, value_of
from dsmp.passes.keys import BWD, DGRAD, FPROP, PHASES, WGRAD, ModuleNames, NodeKey, assign_keys, key_of, plain_path

OPERATORS = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)
KEYS = st.builds(NodeKey, st.text(), st.sampled_from(PHASES), OPERATORS, st.integers(0, 10**8))


@given(KEYS)
def test_keys_survive_their_text(key):
    assert NodeKey.parse(str(key)) == key


@given(KEYS, KEYS)
def test_different_keys_have_different_texts(a, b):
    assert (str(a) == str(b)) == (a == b)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model.q_proj",
        "a|fprop|linear",
        "a|forward|linear|0",
        "a|FPROP|linear|0",
        "a|fprop|linear|x",
        "a|fprop|linear|-1",
        "a|fprop|linear|01",
        "a|fprop|linear|²",
        "a|fprop|linear|٣",
        "a|fprop|linear|",
        "a|fprop||0",
        "a|fprop|linear|0 ",
        "a|fprop|linear|0\n",
    ],
)
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match=r"no node key; the form is fqn\|phase\|op\|ordinal"):
        NodeKey.parse(text)


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("L['self'].layers.0.q", "layers.0.q"),
        ("L['self']", ""),
        ("L['s'].model", "model"),
        ("L['args'][0].model.norm", "model.norm"),
        ("L__self__.a.b", "a.b"),
        ("L['self'].a@1.b@2", "a.b"),
        ("L['model'].a", "a"),
        ("G['net']", "net"),
        ("L['fn'].__closure__[0].cell_contents", "__closure__[0].cell_contents"),
        ("model.self.a", "model.self.a"),
    ],
)
def test_the_name_of_the_traced_root_is_cut_off(path, plain):
    assert plain_path(path) == plain


def test_module_identity_beats_the_written_path():
    gm = keyed_graph(lambda x, w: torch.relu(x @ w), torch.randn(2, 3), torch.randn(3, 4)).gm
    mm, relu = calls(gm)
    mm.meta["nn_module_stack"] = {"17": ("L['self'].wrong", nn.Linear), "4711@3": ("L['self'].also_wrong", nn.Linear)}
    relu.meta["nn_module_stack"] = {"99": ("L['self'].written", nn.ReLU)}
    names = ModuleNames(by_id={"17": "outer", "4711": "outer.inner"}, frame="frame")
    assert names.of(mm) == "outer.inner"
    assert names.of(relu) == "written"
    relu.meta.pop("nn_module_stack")
    assert names.of(relu) == "frame"


# the zoo


@pytest.mark.parametrize("name", zoo.EVERY_MODEL)
def test_every_float_node_has_one_key_and_every_gradient_its_forward_node(name, captured):
    for graph in captured(name):
        assert graph.keys.unmatched == ()
        keyed = [n for n in calls(graph.gm) if key_of(n) is not None]
        assert keyed == [n for n in calls(graph.gm) if is_float(n)]
        texts = graph.key_texts()
        assert len(texts) == len(set(texts)) == len(keyed)
        assert all(str(NodeKey.parse(t)) == t for t in texts)


@pytest.mark.parametrize("name", zoo.EVERY_MODEL)
def test_keys_stand_at_the_modules_that_eager_calls(name, captured):
    case = zoo.build(name)
    called: Counter[tuple[str, str]] = Counter()
    for fqn, module in case.model.named_modules():
        kind = {nn.Linear: "linear", nn.Conv2d: "conv"}.get(type(module))
        if kind:
            module.register_forward_hook(lambda *_, key=(fqn, kind): called.update([key]))
    case.loss()
    planned = Counter(
        (k.fqn, k.op)
        for graph in captured(name)
        for n in calls(graph.gm)
        if gemm_op(n) and (k := key_of(n)).phase == FPROP and k.op in ("linear", "conv")
    )
    assert {k: planned[k] for k in called} == dict(called)
    extra = set(planned) - set(called)
    # a router calls F.linear on a parameter of its own
    assert {fqn.rsplit(".", 1)[-1] for fqn, _ in extra} <= {"gate"}, extra


def _depends_on_a_parameter(graph, node):
    """Whether gradients flow back through a value: there is a way of float values from a parameter to it."""
    seen, pending = set(), [node]
    while pending:
        n = pending.pop()
        if n in seen:
            continue
        seen.add(n)
        if n in graph.parameters:
            return True
        if n.op == "call_function" and (is_float(n) or node_op(n) == ""):
            pending.extend(n.all_input_nodes)
    return False


@pytest.mark.parametrize("name", zoo.EVERY_MODEL)
def test_each_product_has_the_gradients_it_needs(name, captured):
    for graph in captured(name):
        keys = set(graph.key_texts())
        for node in calls(graph.gm):
            key = key_of(node)
            if gemm_op(node) is None or key.phase != FPROP:
                continue
            gradients = {p: str(NodeKey(key.fqn, p, key.op, key.ordinal)) in keys for p in (DGRAD, WGRAD, BWD)}
            if key.op == "sdpa":
                assert gradients == {DGRAD: False, WGRAD: False, BWD: True}, key
                continue
            lhs, rhs = operand_nodes(node)
            assert gradients[DGRAD] == _depends_on_a_parameter(graph, lhs), key
            assert gradients[WGRAD] == _depends_on_a_parameter(graph, rhs), key
            assert not gradients[BWD]


@pytest.mark.parametrize("name", zoo.EVERY_MODEL)
def test_gradients_have_the_size_of_what_they_belong_to(name, captured):
    for graph in captured(name):
        nodes = by_key(graph.gm)
        checked = 0
        for node in nodes.values():
            key = key_of(node)
            if gemm_op(node) is None or key.phase not in (DGRAD, WGRAD):
                continue
            forward = nodes[str(NodeKey(key.fqn, FPROP, key.op, key.ordinal))]
            owner = operand_nodes(forward)[0 if key.phase == DGRAD else 1]
            written = tensors_of(node)
            # a grouped product's backward node has no mask: both of its halves give both gradients
            own = written[1] if key.op == "grouped_mm" and key.phase == WGRAD else written[0]
            assert numel_of(own) == numel_of(value_of(owner)), key
            assert is_backward(node) and not is_backward(forward)
            checked += 1
        assert checked


# phases, by value


def _recorded(graph):
    inputs = random_inputs(graph.gm)
    return inputs, Recorder(graph.gm).values(inputs)


def _same_up_to_transposition(actual, expected):
    return any(
        a.shape == expected.shape and torch.allclose(a, expected, rtol=1e-4, atol=1e-4)
        for a in (actual, actual.transpose(-1, -2))
    )


@pytest.mark.parametrize("name", ["mlp", "normed", "twice", "shared_weight", "tied"])
def test_linear_gradients_by_value(name, captured):
    (graph,) = captured(name)
    _, values = _recorded(graph)
    nodes = by_key(graph.gm)
    for node in nodes.values():
        key = key_of(node)
        if gemm_op(node) is None or key.phase == FPROP:
            continue
        lhs, rhs = (values[n] for n in operand_nodes(nodes[str(NodeKey(key.fqn, FPROP, key.op, key.ordinal))]))
        gradients = [values[n] for n in operand_nodes(node) if is_backward(root(n))]
        assert len(gradients) == 1
        gradient = gradients[0]
        length = lhs.shape[0]
        gradient = gradient if gradient.shape[0] == length else gradient.T
        expected = gradient @ rhs.T if key.phase == DGRAD else lhs.T @ gradient
        assert _same_up_to_transposition(values[node], expected), key


class Scores(nn.Module):
    """query @ key^T from two halves of one projection: both operands have one root."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(16, 2 * 12)

    def forward(self, x):
        query, key = self.both(x).chunk(2, dim=-1)
        return query @ key.transpose(-1, -2)


class Square(nn.Module):
    """y @ y: both operands are the very same node."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        y = self.proj(x)
        return y @ y


@pytest.mark.parametrize("shape", [(9, 16), (2, 9, 16)], ids=["mm", "bmm"])
def test_two_slices_of_one_projection_keep_their_own_gradients(shape):
    (graph,) = capture(Scores(), (torch.randn(shape),))
    inputs, values = _recorded(graph)
    nodes = by_key(graph.gm)
    query, transposed = (values[n] for n in operand_nodes(nodes["|fprop|matmul|0"]))
    tangent = inputs[-1]
    assert tangent.shape == values[nodes["|fprop|matmul|0"]].shape
    assert _same_up_to_transposition(values[nodes["|dgrad|matmul|0"]], tangent @ transposed.transpose(-1, -2))
    assert _same_up_to_transposition(values[nodes["|wgrad|matmul|0"]], query.transpose(-1, -2) @ tangent)


def test_a_product_of_a_value_with_its_own_transpose_has_both_gradients(captured):
    (graph,) = captured("gram")
    inputs, values = _recorded(graph)
    nodes = by_key(graph.gm)
    y = values[operand_nodes(nodes["|fprop|matmul|0"])[0]]
    tangent = inputs[-1]
    assert not torch.allclose(tangent, tangent.T)
    assert _same_up_to_transposition(values[nodes["|dgrad|matmul|0"]], tangent @ y)
    assert _same_up_to_transposition(values[nodes["|wgrad|matmul|0"]], y.T @ tangent)


def test_a_product_of_a_value_with_itself_has_both_gradients():
    (graph,) = capture(Square(), (torch.randn(8, 8),))
    inputs, values = _recorded(graph)
    nodes = by_key(graph.gm)
    y, tangent = values[operand_nodes(nodes["|fprop|matmul|0"])[0]], inputs[-1]
    assert _same_up_to_transposition(values[nodes["|dgrad|matmul|0"]], tangent @ y.T)
    assert _same_up_to_transposition(values[nodes["|wgrad|matmul|0"]], y.T @ tangent)


def test_convolution_gradients_by_value(captured):
    (graph,) = captured("convnet")
    _, values = _recorded(graph)
    nodes = by_key(graph.gm)
    fprop = nodes["down|fprop|conv|0"]
    x, w = (values[n].clone().requires_grad_() for n in operand_nodes(fprop))
    dgrad, wgrad = nodes["down|dgrad|conv|0"], nodes["down|wgrad|conv|0"]
    gradient = values[dgrad.args[0]]
    torch.nn.functional.conv2d(x, w, stride=2).backward(gradient)
    torch.testing.assert_close(values[dgrad][0], x.grad)
    torch.testing.assert_close(values[wgrad][1], w.grad)
    assert values[dgrad][1] is None and values[wgrad][0] is None


# module paths and ordinals


def test_convolution_backward_is_two_nodes_where_both_gradients_are_needed(captured):
    (graph,) = captured("convnet")
    conv = [k for k in gemm_keys(graph.gm) if "|conv|" in k]
    assert sorted(conv) == sorted(
        [f"{m}|{p}|conv|0" for m in ("depthwise", "down") for p in ("fprop", "dgrad", "wgrad")]
        + ["stem|fprop|conv|0", "stem|wgrad|conv|0"]
    )


def test_a_module_called_twice_counts_its_calls(captured):
    (graph,) = captured("twice")
    assert sorted(gemm_keys(graph.gm)) == [
        "inner|dgrad|linear|1",
        "inner|fprop|linear|0",
        "inner|fprop|linear|1",
        "inner|wgrad|linear|0",
        "inner|wgrad|linear|1",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shared_weight", {"first|fprop", "second|fprop", "second|dgrad", "first|wgrad", "second|wgrad"}),
        ("tied", {"body|fprop", "body|dgrad", "body|wgrad", "head|fprop", "head|dgrad", "head|wgrad"}),
    ],
)
def test_tied_weights_keep_their_modules_keys(name, expected, captured):
    (graph,) = captured(name)
    assert set(gemm_keys(graph.gm)) == {f"{e}|linear|0" for e in expected}


def test_products_outside_of_any_module_belong_to_the_root(captured):
    (graph,) = captured("fused_qkv")
    matmuls = [k for k in gemm_keys(graph.gm) if "|matmul|" in k]
    assert sorted(matmuls) == sorted(f"|{p}|matmul|{i}" for p in ("fprop", "dgrad", "wgrad") for i in (0, 1))


def test_an_inference_graph_has_forward_keys_only(captured):
    (graph,) = captured("mlp", training=False)
    assert not graph.joint
    assert {key_of(n).phase for n in calls(graph.gm) if key_of(n)} == {FPROP}
    assert gemm_keys(graph.gm) == ["up|fprop|linear|0", "down|fprop|linear|0"]


def test_a_bar_in_a_modules_name_is_no_separator():
    model = nn.ModuleDict({"a|b": nn.Linear(4, 3)})
    model.forward = lambda x: model["a|b"](x)
    (graph,) = capture(model, (torch.randn(2, 4),))
    (key,) = [k for k in gemm_keys(graph.gm) if "fprop" in k]
    assert NodeKey.parse(key) == NodeKey("a|b", FPROP, "linear", 0)


def test_only_parameters_make_a_linear():
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    assert gemm_keys(keyed_graph(torch.mm, x, w, parameters=[1]).gm) == ["|fprop|linear|0"]
    assert gemm_keys(keyed_graph(torch.mm, x, w).gm) == ["|fprop|matmul|0"]
    cast = keyed_graph(lambda x, w: x @ w.t().to(torch.float32), x, torch.randn(4, 3).double(), parameters=[1])
    assert gemm_keys(cast.gm) == ["|fprop|linear|0"], "a cast, transposed parameter is a parameter"


def test_backward_products_without_a_forward_node_are_reported():
    gm = keyed_graph(lambda x, w, v: (x @ w) @ v, torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 3)).gm
    first, second = (n for n in calls(gm) if gemm_op(n))
    first.meta["seq_nr"], second.meta["seq_nr"] = 1, 2
    second.meta["partitioner_tag"] = "is_backward"
    report = assign_keys(gm, ModuleNames(), lambda _: False)
    assert report.unmatched == (second.name,)
    assert key_of(second) == NodeKey("", BWD, "matmul", 0)


def test_keys_do_not_depend_on_the_capture(captured):
    case = zoo.build("normed")
    (again,) = capture(case.model, case.args, case.kwargs)
    (graph,) = captured("normed")
    assert again.key_texts() == graph.key_texts()
