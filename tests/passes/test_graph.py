"""Roots, operands and sizes of values in ATen graphs."""

from __future__ import annotations

import pytest
import torch
from graph_helpers import aten_graph, nodes_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dsmp.passes import graph as g


def test_operator_names():
    assert g.op_name(torch.ops.aten.mm.default) == "aten.mm"
    assert g.op_name(torch.ops.aten.add.Tensor) == "aten.add"
    assert g.op_name(torch.ops.prims.convert_element_type.default) == "prims.convert_element_type"
    assert g.op_name(torch.ops.higher_order.cond).startswith("higher_order.")
    assert g.op_name(torch.add) == g.op_name("mm") == ""


def test_the_root_is_what_computed_the_numbers():
    gm = aten_graph(lambda x: torch.relu(x).t().unsqueeze(0).expand(3, 5, 4).clone() + 1, torch.randn(4, 5))
    (relu,), (add,) = nodes_of(gm, "aten.relu"), nodes_of(gm, "aten.add")
    assert g.root(add.args[0]) is relu
    assert g.root(add) is add
    assert g.root(relu.args[0]) is relu.args[0], "a placeholder is its own root"


def test_slices_and_split_items_are_looked_through_when_asked():
    def function(x):
        y = torch.exp(x)
        first, second = y.split([1, 3], dim=0)
        return first.t() + 1, second[1:2].view(5, 1) + 2

    gm = aten_graph(function, torch.randn(4, 5))
    (exp,) = nodes_of(gm, "aten.exp")
    for add in nodes_of(gm, "aten.add"):
        assert g.root(add.args[0]) is exp
        partial = g.root(add.args[0], through_slices=False)
        assert partial is not exp and (g.is_getitem(partial) or g.node_op(partial) in g.SLICE_OPS)


def test_casts_are_looked_through_only_when_asked():
    gm = aten_graph(lambda x: torch.exp(x).to(torch.bfloat16).t() * 2, torch.randn(4, 5))
    (exp,), (mul,) = nodes_of(gm, "aten.exp"), nodes_of(gm, "aten.mul")
    assert g.node_op(g.root(mul.args[0])) in g.CAST_OPS
    assert g.root(mul.args[0], through_casts=True) is exp


def test_items_of_a_computed_tuple_are_their_own_root():
    gm = aten_graph(lambda x: torch.var_mean(x, dim=0)[1].view(5, 1) * 2, torch.randn(4, 5))
    (mul,) = nodes_of(gm, "aten.mul")
    found = g.root(mul.args[0])
    assert g.is_getitem(found) and g.node_op(found.args[0]) == "aten.var_mean"


def test_values_of_nodes():
    gm = aten_graph(lambda x, i: (torch.var_mean(x), torch.topk(x, 2), i + 1), torch.randn(4, 5), torch.arange(3))
    (var_mean,), (topk,), (add,) = (nodes_of(gm, f"aten.{n}") for n in ("var_mean", "topk", "add"))
    assert g.value_of(var_mean) is None and len(g.tensors_of(var_mean)) == 2
    assert g.is_float(var_mean) and g.is_float(topk) and not g.is_float(add)
    assert g.float_dtype(topk) is torch.float32 and g.float_dtype(add) is None
    assert set(g.calls(gm)) == {var_mean, topk, add}, "tuple accesses are no calls"


def test_operands_keep_repetitions_and_lists_and_keywords():
    gm = aten_graph(lambda x, y: torch.cat([x * x, y]), torch.randn(2), torch.randn(2))
    (mul,), (cat,) = nodes_of(gm, "aten.mul"), nodes_of(gm, "aten.cat")
    x, y = g.placeholders(gm)
    assert g.operands(mul) == [x, x]
    assert g.operands(cat) == [mul, y]


def test_readers_are_found_behind_tuple_accesses():
    gm = aten_graph(lambda x: (lambda v, m: v + m)(*torch.var_mean(x, dim=0)), torch.randn(4, 5))
    (var_mean,), (add,) = nodes_of(gm, "aten.var_mean"), nodes_of(gm, "aten.add")
    assert set(g.real_users(var_mean)) == {add}


def test_the_two_halves_of_a_joint_graph():
    gm = aten_graph(lambda x: torch.exp(x).sum(), torch.randn(3))
    assert not g.is_joint(gm)
    (total,) = nodes_of(gm, "aten.sum")
    total.meta["partitioner_tag"] = "is_backward"
    assert g.is_joint(gm) and g.is_backward(total) and not g.is_backward(nodes_of(gm, "aten.exp")[0])
    assert g.output_node(gm).op == "output"


def test_symbolic_sizes_become_their_hints():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(6, 4), symbolic_context=context)
    assert isinstance(x.shape[0], torch.SymInt)
    assert g.shape_of(x) == (6, 4) and all(type(s) is int for s in g.shape_of(x))
    assert g.numel_of(x) == 24 and type(g.numel_of(x)) is int
    assert g.concrete(x.shape[0] * 2 + 1) == 13
    assert g.concrete(mode.shape_env.create_unbacked_symint()) == 1


@pytest.mark.parametrize("name", sorted(g.VIEW_OPS | g.SLICE_OPS | g.CAST_OPS))
def test_listed_operators_exist(name):
    namespace, op = name.split(".")
    assert hasattr(getattr(torch.ops, namespace), op)
