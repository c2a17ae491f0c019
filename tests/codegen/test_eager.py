"""Lowering for op-by-op execution changes no bit."""

from __future__ import annotations

import math

import pytest
import torch
from graph_helpers import aten_graph, copied, nodes_of, random_inputs, run
from hypothesis import given, settings
from hypothesis import strategies as st

from dsmp.codegen.eager import lower_for_eager
from dsmp.passes.graph import node_op

VALUES = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, 1e-40, -1e-40, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 0.1, 1 / 3, 16777217.0]
)
OPERATORS = {
    "add": torch.ops.aten.add.Tensor,
    "sub": torch.ops.aten.sub.Tensor,
    "mul": torch.ops.aten.mul.Tensor,
    "div": torch.ops.aten.div.Tensor,
}
SCALARS = st.floats(width=64) | st.integers(-(2**40), 2**40) | st.sampled_from([0.0, -0.0, 1e-45, 1e300, 1e-320, 0.1])


def bits(x):
    """Bit patterns, all NaNs made one."""
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(
        {4: torch.int32, 8: torch.int64, 2: torch.int16}[x.element_size()]
    )


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def lowered(function, *args):
    """(the outputs before, the outputs after, the lowered graph)."""
    gm = aten_graph(function, *args)
    before = run(gm, args)
    lower_for_eager(gm)
    gm.graph.lint()
    gm.recompile()
    return before, run(gm, args), gm


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(OPERATORS)), SCALARS, st.sampled_from([torch.float32, torch.float64]))
def test_scalars_keep_their_bits(name, scalar, dtype):
    operator = OPERATORS[name]
    before, after, gm = lowered(lambda x: operator(x, scalar), VALUES.to(dtype))
    assert same_bits(before[0], after[0])
    (node,) = nodes_of(gm, f"aten.{name}")
    assert not isinstance(node.args[1], (int, float)), "the scalar has become a constant"


def test_zeros_of_both_signs_are_two_constants():
    def function(x):
        return [torch.ops.aten.mul.Tensor(x, s) for s in (0.0, -0.0, 0, 2.0, 2)]

    before, after, gm = lowered(function, torch.tensor([1.0, -1.0]))
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))
    assert torch.signbit(after[1]).tolist() == [True, False]
    constants = [n for n in gm.graph.nodes if n.op == "get_attr"]
    assert len(constants) == 3, "0.0 and 0 are one constant, -0.0 another, 2.0 and 2 a third"


def test_adding_zero_keeps_the_sign_rules():
    _, after, _ = lowered(lambda x: [x + 0.0, x - 0.0, x + -0.0, x / -0.0], torch.tensor([0.0, -0.0]))
    expected = [
        torch.tensor([0.0, 0.0]),
        torch.tensor([0.0, -0.0]),
        torch.tensor([0.0, -0.0]),
        torch.tensor([math.nan] * 2),
    ]
    assert all(same_bits(a, e) for a, e in zip(after, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_left_alone(dtype):
    x = torch.tensor([0, 1, 3]).to(dtype)
    before, after, gm = lowered(lambda x: [x * 0.1, x + 2], x)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, after, strict=True))
    assert not [n for n in gm.graph.nodes if n.op == "get_attr"]


def test_dtypes_do_not_change_with_the_rank():
    for x in (torch.tensor(1.5), torch.tensor([1.5]), torch.randn(0), torch.tensor(1.5, dtype=torch.float64)):
        before, after, _ = lowered(lambda x: [x * 3, x / 7.0, 2 - x], x)
        assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


def test_alpha_and_rounding_modes_are_left_alone():
    def function(x):
        return [
            torch.ops.aten.add.Tensor(x, 3.0, alpha=2),
            torch.ops.aten.sub.Tensor(x, 3.0, alpha=2),
            torch.div(x, 0.3, rounding_mode="floor"),
        ]

    before, after, _ = lowered(function, VALUES[:6])
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


LAYOUTS = {
    "contiguous": torch.randn(3, 4),
    "transposed": torch.randn(4, 3).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 4).expand(3, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_casts_become_copies_with_the_same_numbers_and_strides(layout):
    def function(x):
        return [torch.ops.prims.convert_element_type(x, d) for d in (torch.bfloat16, torch.float32, torch.float64)]

    x = LAYOUTS[layout]
    before, after, gm = lowered(function, x)
    assert all(same_bits(a, b) and a.stride() == b.stride() for a, b in zip(before, after, strict=True))
    assert {node_op(n) for n in gm.graph.nodes if n.op == "call_function"} <= {"aten._to_copy"}


@pytest.mark.parametrize("name", ["llama", "convnet", "sdpa", "normed", "mixtral"])
def test_whole_models_keep_their_bits(name, captured):
    (graph,) = captured(name).graphs
    inputs = random_inputs(graph.gm, graph.parameters)
    expected = run(graph.gm, inputs)
    copy = copied(graph)
    lower_for_eager(copy.gm)
    copy.gm.graph.lint()
    assert [n for n in copy.gm.graph.nodes if n.op == "get_attr"]
    actual = run(copy.gm, inputs)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a is e is None or torch.equal(a, e)
    lower_for_eager(copy.gm)
    for a, e in zip(run(copy.gm, inputs), expected, strict=True):
        assert a is e is None or torch.equal(a, e), "lowering twice"
