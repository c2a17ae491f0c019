"""FLOPs against numbers worked out by hand, and the roofline's behaviour."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from graph_helpers import aten_graph, by_key, keyed_graph, nodes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from dsmp.compiler.capture import capture
from dsmp.hardware_db import resolve
from dsmp.hardware_db.formats import split_recipe
from dsmp.hardware_db.work import GemmShape
from dsmp.passes.cost import CostModel, format_of, storage_bytes
from dsmp.passes.gemm import gemm_op
from dsmp.passes.graph import calls, placeholders
from dsmp.passes.workload import flops_of

NONE = split_recipe("none")
FP8 = split_recipe("1x128/128x128")


def flops_in(function, *args):
    """FLOPs of each product of a function's graph."""
    return [flops_of(n) for n in calls(aten_graph(function, *args)) if gemm_op(n)]


def test_flops_of_matrix_products():
    x, w, b = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    assert flops_in(torch.mm, x, w) == [2 * 3 * 4 * 5]
    assert flops_in(torch.addmm, b, x, w) == [2 * 3 * 4 * 5]
    assert flops_in(torch.bmm, torch.randn(7, 3, 4), torch.randn(7, 4, 5)) == [7 * 2 * 3 * 4 * 5]
    assert flops_in(torch.baddbmm, torch.randn(7, 3, 5), torch.randn(7, 3, 4), torch.randn(7, 4, 5)) == [7 * 120]


@pytest.mark.parametrize(
    ("groups", "kernel", "stride", "padding", "transposed"),
    [(1, 3, 1, 1, False), (1, 3, 2, 0, False), (6, 3, 1, 1, False), (2, 1, 1, 0, False), (1, 3, 2, 1, True)],
    ids=["plain", "strided", "depthwise", "grouped", "transposed"],
)
def test_flops_of_a_convolutions_three_passes(groups, kernel, stride, padding, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    first = nn.Conv2d(6, 6, 1)
    conv = kind(6, 12, kernel, stride=stride, padding=padding, groups=groups)
    (graph,) = capture(nn.Sequential(first, conv), (torch.randn(2, 6, 9, 9),))
    y = conv(torch.randn(2, 6, 9, 9))
    positions = 81 if transposed else y.shape[2] * y.shape[3]
    # every weight is multiplied once per image and position, in each pass
    expected = 2 * 2 * positions * conv.weight.numel()
    nodes = by_key(graph.gm)
    assert {p: flops_of(nodes[f"1|{p}|conv|0"]) for p in ("fprop", "dgrad", "wgrad")} == dict.fromkeys(
        ("fprop", "dgrad", "wgrad"), expected
    )


def test_flops_of_an_unsplit_convolution_backward():
    def function(g, x, w):
        return torch.ops.aten.convolution_backward(
            g, x, w, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
        )

    both = flops_in(function, torch.randn(2, 4, 6, 6), torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    assert both == [2 * (2 * 2 * 36 * 4 * 27)]


@pytest.mark.parametrize(("key_heads", "causal"), [(6, False), (6, True), (2, False)], ids=["mha", "causal", "gqa"])
def test_flops_of_attention(key_heads, causal):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q, k, v):
            gqa = key_heads != 6
            return F.scaled_dot_product_attention(
                self.scale * q, self.scale * k, v * self.scale, is_causal=causal, enable_gqa=gqa
            )

    q, k, v = torch.randn(2, 6, 10, 16), torch.randn(2, key_heads, 12, 16), torch.randn(2, key_heads, 12, 16)
    (graph,) = capture(Attention(), (q, k, v))
    nodes = by_key(graph.gm)
    product = 2 * 2 * 6 * 10 * 12 * 16
    forward = [flops_of(n) for key, n in nodes.items() if "|fprop|" in key and gemm_op(n)]
    backward = [flops_of(n) for key, n in nodes.items() if "|fprop|" not in key and gemm_op(n)]
    assert sum(forward) == 2 * product
    # fused: the scores again and four gradients; explicit products: four gradients
    fused = "|fprop|sdpa|0" in nodes
    assert sum(backward) == (5 if fused else 4) * product


def test_flops_of_grouped_products(captured):
    nodes = by_key(captured("mixtral").graphs[0].gm)
    grouped = {k: flops_of(n) for k, n in nodes.items() if "|grouped_mm|" in k}
    # 2 sequences of 16 tokens, 2 experts each; gate and up in one product of 2 * 256 columns, down back to 128
    up, down = 2 * 64 * 128 * 512, 2 * 64 * 256 * 128
    experts = "model.layers.0.mlp.experts"
    assert grouped == {
        f"{experts}|{phase}|grouped_mm|{i}": flops
        for i, flops in enumerate((up, down))
        for phase in ("fprop", "dgrad", "wgrad")
    }


def test_flops_of_everything_else():
    gm = aten_graph(lambda x: (x.exp().sum(0), x.t(), torch.zeros(9)), torch.randn(3, 4))
    assert [flops_of(nodes_of(gm, f"aten.{n}")[0]) for n in ("exp", "sum", "t", "zeros")] == [12, 12, 0, 0]


def test_counting_adds_no_guard_to_a_dynamic_graph():
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    (graph,) = capture(nn.Linear(8, 4), (x,))
    inputs = [n.meta["val"] for n in placeholders(graph.gm)]
    symbols = [v for v in inputs if isinstance(v, torch.SymInt)]
    assert symbols, "the batch is symbolic"
    guards = len(symbols[0].node.shape_env.guards)
    assert flops_of(by_key(graph.gm)["|fprop|linear|0"]) == 2 * 6 * 8 * 4
    assert len(symbols[0].node.shape_env.guards) == guards


# the roofline


def gemm(m, k, n, dtype=torch.float32):
    """x[m, k] @ w[k, n] without memory; w is a parameter."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = (torch.empty(s, dtype=dtype, device="meta") for s in ((m, k), (k, n)))
    node = graph.call_function(torch.ops.aten.mm.default, (x, w))
    node.meta["val"] = torch.empty(m, n, dtype=dtype, device="meta")
    return node, frozenset([w])


def seconds(name, size, compute, recipes=NONE, *, output="fp32", storage="fp32", dtype=torch.float32):
    node, weights = gemm(*size, dtype)
    model = CostModel(resolve(name), weights)
    return model.gemm_time(node, flops_of(node), compute, recipes, "fp32", output, storage)


SIZE = st.sampled_from([1, 16, 100, 128, 512, 1000, 4096, 16384])


@settings(deadline=None)
@given(
    st.tuples(SIZE, SIZE, SIZE),
    st.integers(0, 2),
    st.sampled_from(
        [
            ("h800", "fp8_e4m3", FP8, "bf16"),
            ("h800", "bf16", NONE, "bf16"),
            ("a100", "tf32", NONE, "fp32"),
            ("v100", "fp16", NONE, "fp32"),
            ("cpu-avx2", "fp32", NONE, "fp32"),
        ]
    ),
)
def test_larger_products_take_no_less_time(size, axis, what):
    name, compute, recipes, storage = what
    larger = tuple(2 * s if i == axis else s for i, s in enumerate(size))
    small, large = (seconds(name, s, compute, recipes, storage=storage, output=storage) for s in (size, larger))
    assert 0 < small <= large
    assert small >= resolve(name).launch_overhead_s


def test_a_large_product_takes_its_flops_over_the_rate():
    h800 = resolve("h800")
    size = (16384, 16384, 16384)
    occupied = GemmShape(m=16384, n=16384, k=16384).occupancy(132)
    assert occupied > 0.99
    busy = 2 * math.prod(size) / (h800.peak("bf16") * h800.efficiency.compute_for("bf16") * occupied)
    cast = 16384**2 * (4 + 2) / (h800.memory_bandwidth * h800.efficiency.memory)
    expected = busy + cast + 2 * h800.launch_overhead_s
    assert seconds("h800", size, "bf16", storage="bf16", output="bf16") == pytest.approx(expected, rel=1e-9)


def test_a_thin_product_takes_its_bytes_over_the_bandwidth():
    a100 = resolve("a100")
    moved = 4 * (1 * 8192 + 8192 * 8192 + 8192)
    expected = moved / (a100.memory_bandwidth * a100.efficiency.memory) + a100.launch_overhead_s
    assert seconds("a100", (1, 8192, 8192), "tf32") == pytest.approx(expected, rel=1e-9)


def test_quantisation_pays_for_large_products_only():
    small, large = (256, 256, 256), (8192, 8192, 8192)

    def both(size):
        return [
            seconds("h800", size, f, r, storage="bf16", output="bf16") for f, r in (("fp8_e4m3", FP8), ("bf16", NONE))
        ]

    fp8, bf16 = both(small)
    assert fp8 > bf16
    fp8, bf16 = both(large)
    assert fp8 < bf16


def test_what_preparing_operands_costs():
    h800 = resolve("h800")
    bandwidth = h800.memory_bandwidth * h800.efficiency.memory
    m, k, n = 512, 1024, 2048
    node, weights = gemm(m, k, n)

    def preparation(parameters, compute, recipes, storage):
        model = CostModel(h800, parameters)
        return model.gemm_time(node, 0, compute, recipes, "fp32", "fp32", storage) - (
            model.gemm_bytes(node, compute, "fp32") / bandwidth + h800.launch_overhead_s
        )

    launch = h800.launch_overhead_s
    weight, activation = k * n, m * k
    assert preparation(weights, "fp32", NONE, "fp32") == pytest.approx(0, abs=1e-12)
    assert preparation(weights, "tf32", NONE, "fp32") == pytest.approx(0, abs=1e-12)
    assert preparation(weights, "bf16", NONE, "bf16") == pytest.approx(6 * weight / bandwidth + launch, rel=1e-6)
    assert preparation(frozenset(), "bf16", NONE, "bf16") == pytest.approx(0, abs=1e-12)
    fp8 = preparation(weights, "fp8_e4m3", FP8, "bf16")
    assert fp8 == pytest.approx((5 * weight + 3 * activation) / bandwidth + 2 * launch, rel=1e-6)


def test_bytes_of_a_product():
    node, weights = gemm(3, 4, 5)
    model = CostModel(resolve("h800"), weights)
    assert model.gemm_bytes(node, "fp32", "fp32") == 4 * (12 + 20 + 15)
    assert model.gemm_bytes(node, "fp8_e4m3", "bf16") == (12 + 20) + 2 * 15
    assert model.gemm_bytes(node, "tf32", "fp32") == 4 * (12 + 20 + 15)


def test_storage():
    assert [storage_bytes(f, 10) for f in ("fp64", "fp32", "tf32", "bf16", "fp8_e4m3", "fp4_e2m1")] == [
        80,
        40,
        40,
        20,
        10,
        5,
    ]
    assert format_of(torch.bfloat16) == "bf16" and format_of(torch.int32) is None
    assert format_of(torch.float8_e4m3fn) is None


# borders of fused regions


def borders(function, *args, stored=None):
    """Bytes that each call moves over its region's border, in graph order."""
    gm = keyed_graph(function, *args).gm
    model, seen = CostModel(resolve("a100")), set()
    return [model.border_bytes(n, stored or {}, seen) for n in calls(gm) if not gemm_op(n)]


def test_a_fused_chain_reads_once_and_writes_once():
    assert borders(lambda x: x.exp().sin().cos(), torch.randn(10)) == [40, 0, 40]


def test_an_outside_value_is_read_once():
    assert borders(lambda x: x.exp() + x.sin() * x, torch.randn(10)) == [40, 0, 0, 40]
    assert borders(lambda x: x.exp() + x.t().sin().t(), torch.randn(2, 5)) == [40, 0, 0, 0, 40]


def test_a_value_is_read_again_in_the_backward_pass():
    gm = keyed_graph(lambda x: (x.exp(), x.sin()), torch.randn(10)).gm
    exp, sin = calls(gm)
    sin.meta["partitioner_tag"] = "is_backward"
    model, seen = CostModel(resolve("a100")), set()
    assert [model.border_bytes(n, {}, seen) for n in (exp, sin)] == [80, 80]


def test_only_what_is_read_of_an_outside_value_counts():
    assert borders(lambda x: x[:2].exp(), torch.randn(10)) == [0, 8 + 8]
    assert borders(lambda x, y: x.expand(100, 10) * y, torch.randn(10), torch.randn(100, 10)) == [0, 40 + 4000 + 4000]


def test_rows_of_a_table_count_not_the_table():
    table, ids = torch.randn(1000, 8), torch.tensor([3, 5, 3])
    assert borders(lambda t, i: t[i].exp(), table, ids) == [3 * 32 + 3 * 8, 3 * 32]
    assert borders(lambda t, i: F.embedding(i, t), table, ids) == [3 * 32 + 3 * 8 + 3 * 32]
    assert borders(lambda t: t.exp(), table) == [2 * 32000]


def test_products_are_outside():
    moved = borders(lambda x, w: (x.exp() @ w).sin(), torch.randn(3, 4), torch.randn(4, 5))
    assert moved == [48 + 48, 60 + 60]
    assert borders(lambda x, w: x.exp().t() @ w, torch.randn(4, 3), torch.randn(4, 5)) == [48 + 48, 0]


def test_narrow_storage_halves_what_is_moved():
    gm = keyed_graph(lambda x, w: (x.exp() @ w).sin(), torch.randn(3, 4), torch.randn(4, 5)).gm
    exp, mm, sin = calls(gm)
    model = CostModel(resolve("h800"))
    assert model.border_bytes(exp, {exp: "bf16", mm: "bf16"}, set()) == 48 + 24
    assert model.border_bytes(sin, {exp: "bf16", mm: "bf16"}, set()) == 30 + 60


def test_items_of_a_tuple_are_read_from_the_node_that_made_it():
    def function(x, w):
        variance, mean = torch.var_mean(x @ w, dim=0)
        return variance * mean

    assert borders(function, torch.randn(3, 4), torch.randn(4, 5)) == [60, 20]


def test_memory_time_is_bytes_over_achieved_bandwidth():
    a100 = resolve("a100")
    assert CostModel(a100).memory_time(10**9) == pytest.approx(1e9 / (a100.memory_bandwidth * a100.efficiency.memory))
