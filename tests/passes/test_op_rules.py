"""The op-rule table: complete for real models, made of operators that exist, and classes of decomposed operators."""

from __future__ import annotations

import pytest
import torch
import zoo
from graph_helpers import aten_graph, nodes_of

from dsmp.hardware_db import OP_CLASSES
from dsmp.passes.gemm import GEMM_OPS, gemm_op, operand_slots
from dsmp.passes.graph import calls, is_backward, node_op, op_name
from dsmp.passes.op_rules import OP_RULES, Policy, class_of, is_known, rule_of


@pytest.mark.parametrize("name", [*zoo.EVERY_MODEL, *zoo.TINY])
def test_every_operator_of_the_zoo_has_a_row(name, captured):
    missing = {node_op(n) or str(n.target) for g in captured(name) for n in calls(g.gm) if not is_known(n)}
    assert not missing, f"passes/op_rules.py has no row for {sorted(missing)}"


def test_every_row_names_an_operator_that_exists():
    names = [n.split(".") for n in OP_RULES if n.split(".")[0] in ("aten", "prims")]
    wrong = [f"{namespace}.{op}" for namespace, op in names if not hasattr(getattr(torch.ops, namespace), op)]
    assert len(names) > 400 and not wrong


def test_rows_use_the_words_of_the_hardware_database():
    assert {r.op_class for r in OP_RULES.values()} <= set(OP_CLASSES)
    for name, rule in OP_RULES.items():
        assert rule.why, name
        assert (rule.policy is Policy.LADDER) == (name in GEMM_OPS), name


@pytest.mark.parametrize("name", sorted(n for n in GEMM_OPS if n.startswith("aten.")))
def test_positions_of_operands_masks_and_biases_are_those_of_the_schema(name):
    op = GEMM_OPS[name]
    schema = getattr(torch.ops.aten, name.split(".")[1]).default._schema
    arguments = [a.name for a in schema.arguments]
    expected = {
        "matmul": {"self", "mat1", "mat2", "batch1", "batch2"},
        "conv": {"input", "weight", "grad_output"},
        "grouped_mm": {"self", "mat2"},
        "sdpa": {"query", "key", "value", "grad_out", "grad_out_", "out"},
    }[op.kind]
    assert {arguments[i] for i in op.operands} <= expected
    assert len(op.axes) == len(op.operands)
    if op.bias is not None:
        assert arguments[op.bias] in ("self", "bias")
    masks = [a for a in arguments if a in ("attn_bias", "attn_mask")]
    mask = arguments[op.mask] if isinstance(op.mask, int) else op.mask
    assert masks == ([mask] if mask is not None else [])


def test_contracted_axes_have_one_size():
    def function(x, w, b, image, kernel):
        torch.mm(x, w), torch.addmm(b, x, w), torch.bmm(x[None], w[None])
        return torch.nn.functional.conv2d(image, kernel)

    gm = aten_graph(
        function, torch.randn(3, 4), torch.randn(4, 5), torch.randn(5), torch.randn(1, 6, 9, 9), torch.randn(2, 6, 3, 3)
    )
    found = [n for n in calls(gm) if gemm_op(n)]
    assert [node_op(n).split(".")[1] for n in found] == ["mm", "addmm", "bmm", "convolution"]
    for node in found:
        sizes = {node.args[i].meta["val"].shape[axis] for i, axis in operand_slots(node)}
        assert sizes == ({6} if node_op(node) == "aten.convolution" else {4})


def _classes(graph, origin):
    """Classes of all primitives that a decomposed operator became."""
    return {
        class_of(n)
        for n in calls(graph.gm)
        if op_name(n.meta.get("original_aten")) == f"aten.{origin}" and gemm_op(n) is None
    }


@pytest.mark.parametrize(
    ("name", "origin", "op_class"),
    [
        ("normed", "native_layer_norm", "norm"),
        ("normed", "native_layer_norm_backward", "norm"),
        ("convnet", "_native_batch_norm_legit_functional", "norm"),
        ("fused_qkv", "_softmax", "softmax"),
        ("fused_qkv", "_softmax_backward_data", "softmax"),
        ("llama", "_log_softmax", "softmax"),
        ("llama", "nll_loss_forward", "loss"),
        ("llama", "nll_loss_backward", "loss"),
        ("tied", "embedding_dense_backward", "embedding"),
    ],
)
def test_primitives_have_the_class_of_the_operator_they_came_from(name, origin, op_class, captured):
    assert _classes(captured(name).graphs[0], origin) == {op_class}


def test_classes_of_what_was_not_decomposed(captured):
    graph = captured("llama").graphs[0].gm
    assert {class_of(n) for n in nodes_of(graph, "aten.embedding")} == {"embedding"}
    assert {class_of(n) for n in nodes_of(graph, "aten.rsqrt")} <= {"pointwise", "norm"}
    assert {class_of(n) for n in nodes_of(graph, "aten.cos")} == {"pointwise"}
    assert {rule_of(n).policy for n in nodes_of(graph, "aten.mm")} == {Policy.LADDER}


def test_products_keep_their_class_whatever_they_came_from():
    gm = aten_graph(torch.mm, torch.randn(2, 3), torch.randn(3, 4))
    (mm,) = nodes_of(gm, "aten.mm")
    mm.meta["original_aten"] = torch.ops.aten._softmax.default
    assert class_of(mm) == "matmul"


def test_unknown_operators_are_kept_and_say_so():
    gm = aten_graph(lambda x: torch.special.airy_ai(x), torch.randn(3))
    (node,) = calls(gm)
    assert not is_known(node) and not is_backward(node)
    assert rule_of(node).policy is Policy.KEEP and "no row" in rule_of(node).why
    assert class_of(node) == "other"
