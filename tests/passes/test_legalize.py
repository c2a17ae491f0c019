"""Legalisation: the numbers of every planned format against independent references, and where casts are put."""

from __future__ import annotations

import functools
import itertools
import math
import operator

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from graph_helpers import (
    ONE_PER_TIER,
    by_key,
    copied,
    decide_gemms,
    decision,
    gemm_keys,
    keyed_graph,
    random_inputs,
    relative_error,
    run,
    signature,
)
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from dsmp.compiler.capture import capture
from dsmp.compiler.saved_activations import saved_activation_bytes
from dsmp.compiler.tracing import PARTITION_ARGUMENTS
from dsmp.hardware_db import resolve
from dsmp.passes.cast_motion import operand_storage
from dsmp.passes.gemm import gemm_op, operand_nodes
from dsmp.passes.graph import calls, is_backward, node_op, operands, output_node, placeholders, root, value_of
from dsmp.passes.keys import key_of
from dsmp.passes.legalize import is_native, legalize
from dsmp.passes.select_default import select_default
from dsmp.passes.verify import snapshot, verify

CASTS = ("prims.convert_element_type", "dsmp.cast", "dsmp.fake_quantize")


def applied(graph, decisions, *, same_device=False, storage="fp32"):
    """A legalised and verified copy of a captured graph, and the report."""
    copy = copied(graph)
    before = snapshot(copy.gm)
    report = legalize(copy.gm, decisions, same_device=same_device, storage=storage, parameters=copy.parameters)
    kept = [
        k
        for k in decisions
        if k in by_key(graph.gm) and decisions[k].reason.code == "test" and gemm_op(by_key(graph.gm)[k])
    ]
    verify(copy.gm, before, kept)
    return copy, report


def default_plan(graph, device):
    made = select_default(graph.gm, resolve(device), parameters=graph.parameters)
    return {d.key: d for d in made.decisions}


def flat(outputs):
    return torch.cat([o.double().flatten() for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()])


# one linear layer against numpy

TOKENS, WIDTH, OUT = 48, 256, 160


@pytest.fixture(scope="module")
def linear():
    """The joint graph of y = x @ w.T, and values for x, w and the gradient of y."""
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, OUT, bias=False)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    (graph,) = capture(layer, (x,))
    # a wide range, so that scales differ from block to block
    scale = torch.logspace(-3, 2, WIDTH)
    values = {
        (OUT, WIDTH): torch.randn(OUT, WIDTH) * scale.flip(0),
        (TOKENS, WIDTH): torch.randn(TOKENS, WIDTH) * scale,
        (TOKENS, OUT): torch.randn(TOKENS, OUT) * torch.logspace(-2, 2, TOKENS)[:, None],
    }
    return graph, values


def run_linear(gm, values):
    """(y, gradient of x, gradient of w)."""
    outputs = run(gm, [values[tuple(n.meta["val"].shape)] for n in placeholders(gm)])
    return [
        next(o for o in outputs if o is not None and o.shape == s)
        for s in ((TOKENS, OUT), (TOKENS, WIDTH), (OUT, WIDTH))
    ]


def bf16(a):
    return a.astype(ml_dtypes.bfloat16).astype(np.float32)


def tf32(a):
    bits = a.view(np.uint32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def blocks(a, block, dtype, largest, power_of_two):
    """Every block scaled by its largest magnitude, rounded, scaled back: plain loops over ml_dtypes casts."""
    out = np.empty_like(a)
    for i, j in itertools.product(range(0, a.shape[0], block[0]), range(0, a.shape[1], block[1])):
        part = a[i : i + block[0], j : j + block[1]]
        amax = np.abs(part).max()
        if amax == 0:
            scale = np.float32(1)
        elif power_of_two:
            scale = np.float32(2.0 ** math.ceil(math.log2(float(amax) / largest)))
        else:
            scale = np.float32(amax) / np.float32(largest)
        scaled = part / scale
        rounded = np.rint(scaled) if dtype is np.int8 else scaled.astype(dtype).astype(np.float32)
        out[i : i + block[0], j : j + block[1]] = np.clip(rounded, -largest, largest) * scale
    return out


def along(axis, size):
    """The block of `size` elements along an axis."""
    return (1, size) if axis == 1 else (size, 1)


E4M3, FNUZ = (ml_dtypes.float8_e4m3fn, 448.0, False), (ml_dtypes.float8_e4m3fnuz, 240.0, False)
WHOLE = (10**6, 10**6)

# name: (format, recipes of the three passes, storage, activation(a, contracted axis), weight(w, contracted axis))
SCHEMES = {
    "bf16": ("bf16", ["none"] * 3, "bf16", lambda a, _: bf16(a), lambda w, _: bf16(w)),
    "tf32": ("tf32", ["none"] * 3, "fp32", lambda a, _: tf32(a), lambda w, _: tf32(w)),
    "fp16 tensor": (
        "fp16",
        ["tensor/tensor"] * 3,
        "fp32",
        lambda a, _: blocks(a, WHOLE, np.float16, 65504.0, True),
        lambda w, _: blocks(w, WHOLE, np.float16, 65504.0, True),
    ),
    "fp8 blocks": (
        "fp8_e4m3",
        ["1x128/128x128", "1x128/128x128", "1x128/1x128"],
        "bf16",
        lambda a, axis: blocks(bf16(a), along(axis, 128), *E4M3),
        lambda w, _: blocks(w, (128, 128), *E4M3),
    ),
    "fp8 fnuz blocks": (
        "fp8_e4m3fnuz",
        ["1x128/128x128", "1x128/128x128", "1x128/1x128"],
        "bf16",
        lambda a, axis: blocks(bf16(a), along(axis, 128), *FNUZ),
        lambda w, _: blocks(w, (128, 128), *FNUZ),
    ),
    "mx": (
        "fp8_e4m3",
        ["mx32/mx32"] * 3,
        "bf16",
        lambda a, axis: blocks(bf16(a), along(axis, 32), E4M3[0], 448.0, True),
        lambda w, axis: blocks(w, along(axis, 32), E4M3[0], 448.0, True),
    ),
    "int8 rows": (
        "int8",
        ["row/row"] * 3,
        "fp32",
        lambda a, axis: blocks(a, along(axis, 10**6), np.int8, 127.0, False),
        lambda w, axis: blocks(w, along(axis, 10**6), np.int8, 127.0, False),
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_linear_layer_by_hand(scheme, linear):
    format, recipes, storage, activation, weight = SCHEMES[scheme]
    graph, values = linear
    nodes = by_key(graph.gm)
    outputs = (storage, storage, "fp32")
    plan = {
        f"|{p}|linear|0": decision(nodes[f"|{p}|linear|0"], format, recipe=r, output=o)
        for p, r, o in zip(("fprop", "dgrad", "wgrad"), recipes, outputs, strict=True)
    }
    legal, report = applied(graph, plan, storage=storage)
    assert set(report.simulated) == set(plan) and report.native == ()
    y, dx, dw = run_linear(legal.gm, values)
    x, w, g = (values[s].numpy() for s in ((TOKENS, WIDTH), (OUT, WIDTH), (TOKENS, OUT)))
    store = bf16 if storage == "bf16" else (lambda a: a)
    expected = (
        store(activation(x, 1) @ weight(w, 1).T),
        store(activation(g, 1) @ weight(w, 0)),
        activation(g, 0).T @ activation(x, 0),
    )
    exact = run_linear(graph.gm, values)
    for actual, wanted, plain, name in zip((y, dx, dw), expected, exact, ("y", "dx", "dw"), strict=True):
        assert actual.dtype == torch.float32
        wanted = torch.from_numpy(wanted)
        # the order of the sums may differ, and with it the rounding of the result, but nothing else
        close = (actual - wanted).abs() <= 1e-5 * wanted.abs().amax() + (2**-7 if store is bf16 else 0) * wanted.abs()
        assert close.all(), name
        assert (actual == wanted).float().mean() > 0.9 or store is not bf16, name
        assert relative_error(actual, wanted) < relative_error(plain, wanted) / 20, f"{name} is not that of the format"


def test_the_biased_sum_is_rounded_once(captured):
    (graph,) = captured("normed").graphs
    key = "up|fprop|linear|0"
    legal, _ = applied(graph, {key: decision(by_key(graph.gm)[key], "bf16", output="bf16")}, storage="bf16")
    inputs = random_inputs(graph.gm, graph.parameters)
    by_name = dict(zip([n.name for n in placeholders(graph.gm)], inputs, strict=True))
    node = by_key(graph.gm)[key]
    bias, x, w = (by_name[root(a).name] for a in node.args)
    expected = (x.bfloat16().float() @ w.bfloat16().float().T + bias).bfloat16().float()
    stored = by_key(legal.gm)[key]
    (wide,) = next(iter(stored.users)).users
    assert node_op(wide) == "prims.convert_element_type" and value_of(wide).dtype == torch.float32
    probe = legal.gm.graph
    with probe.inserting_before(output_node(legal.gm)):
        output_node(legal.gm).args = ([wide],)
    legal.gm.graph.eliminate_dead_code()
    legal.gm.recompile()
    (actual,) = run(legal.gm, inputs)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)
    assert (actual == expected).float().mean() > 0.98


def test_alpha_and_beta_of_a_fused_sum():
    x, w, b = torch.randn(6, 8), torch.randn(8, 5), torch.randn(5)
    graph = keyed_graph(lambda b, x, w: torch.addmm(b, x, w, alpha=2.0, beta=0.5), b, x, w)
    for alpha_only in (graph, keyed_graph(lambda b, x, w: torch.addmm(b, x, w, beta=0), b, x, w)):
        (expected,) = run(alpha_only.gm, [b, x, w])
        for same_device in (False, True):
            legal, _ = applied(alpha_only, decide_gemms(alpha_only.gm, "bf16"), same_device=same_device)
            (actual,) = run(legal.gm, [b, x, w])
            assert relative_error(actual, expected) < 0.02


# native and simulated


@pytest.mark.parametrize("name", ["mlp", "normed", "fused_qkv", "sdpa", "convnet"])
def test_native_bf16_equals_simulated_bf16(name, captured):
    (graph,) = captured(name).graphs
    plan = decide_gemms(graph.gm, "bf16", output="bf16")
    inputs = random_inputs(graph.gm, graph.parameters)
    native, report = applied(graph, plan, same_device=True, storage="bf16")
    simulated, other = applied(graph, plan, same_device=False, storage="bf16")
    assert set(report.native) == set(other.simulated) == set(gemm_keys(graph.gm))
    assert report.simulated == other.native == ()
    exact = flat(run(graph.gm, inputs))
    a, b = flat(run(native.gm, inputs)), flat(run(simulated.gm, inputs))
    assert relative_error(a, exact) < 0.02 and relative_error(b, exact) < 0.02
    # both are off by the same roundings; what is left are sums in another order and the bias, added before or after
    assert relative_error(a, b) < 0.012
    assert relative_error(a, exact) > 1e-4


def test_a_single_native_product_equals_the_simulated_one(linear):
    graph, values = linear
    plan = decide_gemms(graph.gm, "bf16", output="bf16")
    native, _ = applied(graph, plan, same_device=True, storage="bf16")
    simulated, _ = applied(graph, plan, same_device=False, storage="bf16")
    for a, b in zip(run_linear(native.gm, values), run_linear(simulated.gm, values), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-5 * float(b.abs().max()))
        assert (a == b).float().mean() > 0.98


def test_native_needs_the_same_device_and_plain_16_bit_operands(linear):
    graph, _ = linear
    node = by_key(graph.gm)["|fprop|linear|0"]
    assert is_native(decision(node, "bf16"), True) and is_native(decision(node, "fp16"), True)
    assert not is_native(decision(node, "bf16"), False)
    assert not is_native(decision(node, "fp16", recipe="tensor/tensor"), True)
    assert not any(is_native(decision(node, f), True) for f in ("tf32", "fp8_e4m3", "fp32"))


@pytest.mark.parametrize(
    ("traced", "compute", "stored"),
    [
        ("fp32", "fp8_e4m3", "bf16"),
        ("fp32", "bf16", "bf16"),
        ("fp32", "tf32", "fp32"),
        ("fp32", "fp32", "fp32"),
        ("bf16", "fp8_e4m3", "bf16"),
        ("fp64", "bf16", "fp64"),
        ("fp16", "fp8_e4m3", "fp16"),
    ],
)
def test_operand_storage(traced, compute, stored):
    assert operand_storage("bf16", traced, compute) == stored
    assert operand_storage("fp32", traced, compute) == traced


def test_a_16_bit_operand_is_not_rounded_to_the_other_16_bit_format_on_the_way():
    assert operand_storage("bf16", "fp32", "fp16") == "fp16"
    assert operand_storage("fp16", "fp32", "bf16") == "bf16"
    # cast before it is scaled it would overflow
    assert operand_storage("bf16", "fp32", "fp16", "tensor") == "fp32"
    assert operand_storage("fp16", "fp32", "fp16", "tensor") == "fp16"
    assert operand_storage("bf16", "bf16", "fp16") == "bf16"


@pytest.mark.parametrize("recipe", ["none", "tensor/tensor"])
def test_simulated_fp16_keeps_its_precision_where_activations_are_stored_in_bf16(recipe, linear):
    graph, values = linear
    plan = {
        key: decision(node, "fp16", recipe=recipe) if gemm_op(node) else decision(node, "fp32")
        for key, node in by_key(graph.gm).items()
    }
    simulated, _ = applied(graph, plan, same_device=False, storage="bf16")
    exact, rounded = flat(run_linear(graph.gm, values)), flat(run_linear(simulated.gm, values))
    assert 0 < relative_error(rounded, exact) < 2**-10  # bf16 alone is off by more


# whole models


@pytest.mark.parametrize("name", zoo.EVERY_MODEL)
def test_an_all_fp32_plan_changes_nothing(name, captured):
    for graph in captured(name):
        copy, report = applied(graph, default_plan(graph, "cpu-avx2"), same_device=True)
        assert signature(copy.gm) == signature(graph.gm)
        assert (report.casts, report.native, report.simulated, report.undecided) == (0, (), (), ())


DEVICES = ("a100", "mi250x", "h800", "mi300x", "b200", "cpu-amx")
PLANNED = [
    *itertools.product(("convnet", "router"), DEVICES),
    *itertools.product(("llama",), ("a100", "h800", "cpu-amx")),
    ("bert", "cpu-amx"),
    ("bert", "mi250x"),
    ("vit", "b200"),
    ("mixtral", "mi300x"),
    ("mixtral", "cpu-amx"),
]


@pytest.mark.parametrize(("name", "device"), PLANNED)
def test_planned_models_stay_close_to_what_was_traced(name, device, captured):
    (graph,) = captured(name).graphs
    inputs = random_inputs(graph.gm, graph.parameters)
    exact = flat(run(graph.gm, inputs))
    plan = default_plan(graph, device)
    for same_device in (False, True) if device == "cpu-amx" else (False,):
        copy = copied(graph)
        before = snapshot(copy.gm)
        report = legalize(
            copy.gm, plan, same_device=same_device, storage=resolve(device).storage, parameters=copy.parameters
        )
        verify(copy.gm, before, ())
        planned = {k for k in gemm_keys(graph.gm) if plan[k].compute != "fp32"}
        assert {*report.native, *report.simulated} == planned and report.undecided == ()
        error = relative_error(flat(run(copy.gm, inputs)), exact)
        low, high = (1e-5, 0.015) if resolve(device).storage == "fp32" else (1e-4, 0.06)
        assert low < error < high


def test_fp8_products_in_a_whole_model(captured):
    (graph,) = captured("llama").graphs
    plan = default_plan(graph, "h800")
    forced = {}
    for key, d in plan.items():
        if d.op == "linear" and "layers" in key:
            weights = "1x128" if d.phase == "wgrad" else "128x128"
            d = d.model_copy(update={"compute": "fp8_e4m3", "recipe": f"1x128/{weights}"})
        forced[key] = d
    inputs = random_inputs(graph.gm, graph.parameters)
    exact = flat(run(graph.gm, inputs))
    errors = []
    for decisions in (plan, forced):
        copy, report = applied(graph, decisions, storage="bf16")
        assert len(report.simulated) == len([k for k in gemm_keys(graph.gm) if plan[k].compute != "fp32"])
        errors.append(relative_error(flat(run(copy.gm, inputs)), exact))
    assert errors[0] * 2 < errors[1] < 0.15


# where casts stand


def casts_of(gm):
    return [n for n in calls(gm) if node_op(n) in CASTS]


def new_casts(gm, graph):
    old = {n.name for n in graph.gm.graph.nodes}
    return [n for n in casts_of(gm) if n.name not in old]


def test_one_cast_of_an_activation_serves_fprop_and_wgrad(captured):
    (graph,) = captured("mlp").graphs
    legal, _ = applied(graph, decide_gemms(graph.gm, "bf16", output="bf16"), same_device=True, storage="bf16")
    nodes = by_key(legal.gm)
    # x is [4, 10, 64] and reaches both products through a view to [40, 64]
    (x,) = [p for p in placeholders(legal.gm) if p.meta["val"].shape == (4, 10, 64)]
    (cast,) = [n for n in x.users if node_op(n) == "prims.convert_element_type"]
    assert cast.args == (x, torch.bfloat16), "the cast stands above the view"
    fprop, wgrad = nodes["up|fprop|linear|0"], nodes["up|wgrad|linear|0"]
    assert cast in {root(n) for n in operand_nodes(fprop)} & {root(n) for n in operand_nodes(wgrad)}
    per_value = [(n.args[0], n.args[1]) for n in new_casts(legal.gm, graph)]
    assert len(per_value) == len(set(per_value)), "a value is cast twice to one dtype"


@pytest.mark.parametrize("device", ["h800", "b200", "mi250x", "a100", "cpu-amx"])
@pytest.mark.parametrize("name", ["llama", "convnet", "fused_qkv", "mixtral"])
def test_no_form_of_a_value_is_made_twice(name, device, captured):
    (graph,) = captured(name).graphs
    copy = copied(graph)
    legalize(
        copy.gm,
        default_plan(graph, device),
        same_device=False,
        storage=resolve(device).storage,
        parameters=copy.parameters,
    )
    forms = [(n.target, n.args) for n in new_casts(copy.gm, graph)]
    assert forms and len(forms) == len(set(forms))


def test_casts_stand_above_views_and_expansions_but_below_slices():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x, y):
            return self.a(x[2:4].relu()[:, 1]) + self.b(y.expand(5, 2, 8)).sum(0) + self.a(x[0:2, 0])

    (graph,) = capture(Net(), (torch.randn(100, 3, 8), torch.randn(1, 2, 8)))
    legal, _ = applied(graph, decide_gemms(graph.gm, "bf16"), same_device=True, storage="bf16")
    big, small = (next(p for p in placeholders(legal.gm) if p.meta["val"].shape == s) for s in ((100, 3, 8), (1, 2, 8)))
    casts = new_casts(legal.gm, graph)
    assert not [n for n in casts if n.args[0] is big], "all of x would be cast for a part of it"
    narrowing = [n for n in casts if value_of(n).dtype == torch.bfloat16]
    assert all(value_of(n.args[0]).numel() <= 64 for n in narrowing), "no more than a weight is cast anywhere"
    assert [n for n in casts if n.args[0] is small], "y is cast before it is expanded"


def test_the_cast_of_a_users_bf16_value_is_not_doubled():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.a(x.bfloat16().float())

    (graph,) = capture(Net(), (torch.randn(4, 8),))
    legal, _ = applied(graph, decide_gemms(graph.gm, "bf16", output="fp32"), same_device=True, storage="bf16")
    inputs = random_inputs(graph.gm, graph.parameters)
    assert relative_error(flat(run(legal.gm, inputs)), flat(run(graph.gm, inputs))) < 0.01


def test_narrow_results_are_stored_once_and_widened(captured):
    (graph,) = captured("sdpa").graphs
    legal, _ = applied(graph, default_plan(graph, "cpu-amx"), same_device=True, storage="bf16")
    attention = by_key(legal.gm)["|fprop|sdpa|0"]
    result = next(u for u in attention.users if u.target is operator.getitem and u.args[1] == 0)
    assert value_of(result).dtype == torch.bfloat16
    # the log-sum-exp is no product: it stays as the operator gives it, in fp32
    other = next(u for u in attention.users if u.target is operator.getitem and u.args[1] == 1)
    assert value_of(other).dtype == torch.float32
    assert other.users and not [u for u in other.users if node_op(u) in CASTS]
    out = by_key(legal.gm)["out|fprop|linear|0"]
    assert root(operand_nodes(out)[0], through_casts=False) is result, "the next product reads the stored value"


def test_simulated_casts_are_opaque_and_native_ones_are_not(captured):
    (graph,) = captured("normed").graphs
    plan = decide_gemms(graph.gm, "bf16", output="bf16")
    native, _ = applied(graph, plan, same_device=True, storage="bf16")
    simulated, _ = applied(graph, plan, storage="bf16")
    assert not [n for n in calls(native.gm) if node_op(n).startswith("dsmp.")]
    narrowing = [n for n in new_casts(simulated.gm, graph) if value_of(n).dtype == torch.bfloat16]
    assert narrowing and all(node_op(n) == "dsmp.cast" for n in narrowing)


def test_new_nodes_carry_what_the_partitioner_needs(captured):
    (graph,) = captured("llama").graphs
    legal, _ = applied(graph, default_plan(graph, "h800"), storage="bf16")
    old = {n.name for n in graph.gm.graph.nodes}
    fresh = [n for n in legal.gm.graph.nodes if n.name not in old]
    assert fresh
    for node in fresh:
        assert node.meta["partitioner_tag"] in ("is_forward", "is_backward")
        assert isinstance(value_of(node), torch.Tensor) or isinstance(node.meta["val"], (tuple, list))
        readers_of_backward = [o for o in operands(node) if is_backward(o)]
        assert not readers_of_backward or is_backward(node), "a forward node reads a backward value"


def test_weights_are_cast_again_in_the_backward_pass(captured):
    (graph,) = captured("normed").graphs
    for same_device in (True, False):
        legal, _ = applied(
            graph, decide_gemms(graph.gm, "bf16", output="bf16"), same_device=same_device, storage="bf16"
        )
        weight_casts = [
            n
            for n in new_casts(legal.gm, graph)
            if root(n.args[0], through_casts=True) in legal.parameters and not is_backward(n)
        ]
        assert len(weight_casts) == 3
        assert all(n.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for n in weight_casts)
        assert all(n.meta["ac_graph_id"] == 0 for n in weight_casts)


# what is saved


def saved_tensors(graph, plan, **options):
    """The tensors that the partitioned forward pass hands to the backward pass, inputs left out."""
    legal, _ = applied(graph, plan, **options)
    arguments = graph.gm.meta[PARTITION_ARGUMENTS]
    forward, _ = min_cut_rematerialization_partition(
        legal.gm, [n.meta["val"] for n in placeholders(legal.gm)], **arguments
    )
    saved = output_node(forward).args[0][arguments["num_fwd_outputs"] :]
    return [n for n in saved if root(n).op != "placeholder"]


@pytest.mark.parametrize("same_device", [True, False])
def test_copies_of_weights_are_never_saved(same_device):
    model = nn.Sequential(nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 72), nn.ReLU(), nn.Linear(72, 4))
    (graph,) = capture(model, (torch.randn(3, 96, requires_grad=True),))
    plan = decide_gemms(graph.gm, "bf16", output="bf16")
    saved = saved_tensors(graph, plan, same_device=same_device, storage="bf16")
    assert saved
    rows = {n.meta["val"].shape[0] for n in saved if n.meta["val"].dim() == 2}
    assert rows == {3}, "only activations of three rows are saved"


@pytest.mark.parametrize(("name", "least"), [("llama", 0.35), ("vit", 0.35)])
def test_a_bf16_plan_saves_a_third_less_on_transformers(name, least, captured):
    (graph,) = captured(name).graphs
    plan = default_plan(graph, "cpu-amx")

    def change(gm, parameters):
        legalize(gm, plan, same_device=True, storage="bf16", parameters=parameters)

    traced = saved_activation_bytes(graph.gm, graph.parameters)
    planned = saved_activation_bytes(graph.gm, graph.parameters, change)
    assert 0 < planned < (1 - least) * traced, f"{1 - planned / traced:.1%} less"


# the user's dtypes, masks, dynamic shapes


def test_wider_rules_on_narrow_models():
    case = zoo.build("sdpa")
    mask = torch.zeros(8, 8)
    mask[:, 5:] = -2.0
    for dtype, compute in (
        (torch.bfloat16, "fp32"),
        (torch.float64, "fp32"),
        (torch.float16, "fp32"),
        (torch.float64, "bf16"),
    ):
        model = case.model.to(dtype)
        (graph,) = capture(model, (case.args[0].to(dtype), mask.to(dtype)))
        assert "|fprop|sdpa|0" in gemm_keys(graph.gm)
        legal, report = applied(graph, decide_gemms(graph.gm, compute))
        assert set(report.simulated) == set(gemm_keys(graph.gm))
        inputs = random_inputs(graph.gm, graph.parameters)
        expected, actual = run(graph.gm, inputs), run(legal.gm, inputs)
        assert [o.dtype for o in actual if o is not None] == [o.dtype for o in expected if o is not None]
        assert relative_error(flat(actual), flat(expected)) < 0.03


@pytest.mark.parametrize("same_device", [True, False])
def test_masks_of_attention(same_device):
    case = zoo.build("sdpa")
    mask = torch.zeros(8, 8)
    mask[:, 5:] = torch.finfo(torch.float32).min
    for given in (mask, mask == 0):
        (graph,) = capture(case.model, (case.args[0], given))
        legal, _ = applied(
            graph, decide_gemms(graph.gm, "bf16", output="bf16"), same_device=same_device, storage="bf16"
        )
        inputs = [
            given if tuple(v.shape) == (8, 8) and v.dtype == given.dtype else v
            for v in random_inputs(graph.gm, graph.parameters)
        ]
        expected, actual = flat(run(graph.gm, inputs)), flat(run(legal.gm, inputs))
        assert actual.isfinite().all() and relative_error(actual, expected) < 0.02


@functools.cache
def captured_with_a_dynamic_batch(name):
    case = zoo.build(name)
    torch._dynamo.mark_dynamic(case.args[0], 0)
    (graph,) = capture(case.model, case.args)
    return graph, case.args[0]


@pytest.mark.parametrize("device", ["h800", "mi250x", "cpu-amx"])
@pytest.mark.parametrize("name", ["mlp", "sdpa", "convnet"])
def test_dynamic_shapes(name, device):
    graph, x = captured_with_a_dynamic_batch(name)
    symbols = [str(n.meta["val"]) for n in placeholders(graph.gm) if isinstance(n.meta["val"], torch.SymInt)]
    assert symbols
    legal, report = applied(
        graph, default_plan(graph, device), same_device=device == "cpu-amx", storage=resolve(device).storage
    )
    assert set(report.native) | set(report.simulated) >= {k for k in gemm_keys(graph.gm) if "fprop" in k}
    for batch in (x.shape[0], 7):
        inputs = random_inputs(graph.gm, graph.parameters, sizes=dict.fromkeys(symbols, batch))
        error = relative_error(flat(run(legal.gm, inputs)), flat(run(graph.gm, inputs)))
        assert 1e-6 < error < 0.05


def test_inference_graphs(captured):
    (graph,) = captured("mlp", training=False).graphs
    legal, report = applied(graph, decide_gemms(graph.gm, "bf16", output="bf16"), same_device=True, storage="bf16")
    assert report.native == ("up|fprop|linear|0", "down|fprop|linear|0")
    assert not [n for n in calls(legal.gm) if "recompute" in n.meta or "partitioner_tag" in n.meta]
    inputs = random_inputs(graph.gm)
    assert 1e-5 < relative_error(flat(run(legal.gm, inputs)), flat(run(graph.gm, inputs))) < 0.02


# decisions for other nodes, and missing ones


def test_a_missing_decision_is_reported_and_its_node_left_as_it_was(captured):
    (graph,) = captured("normed").graphs
    plan = decide_gemms(graph.gm, "bf16", output="bf16")
    missing = "down|fprop|linear|0"
    del plan[missing]
    legal, report = applied(graph, plan, storage="bf16")
    assert report.undecided == (missing,)
    node = by_key(legal.gm)[missing]
    assert {value_of(n).dtype for n in operands(node)} == {torch.float32}
    assert missing not in report.simulated
    _, nothing = applied(graph, {})
    gemms = [str(key_of(n)) for n in calls(graph.gm) if gemm_op(n) is not None]
    assert set(nothing.undecided) == set(gemms)


def test_a_stored_format_of_another_node(captured):
    (graph,) = captured("normed").graphs
    nodes = by_key(graph.gm)
    relu = nodes["|fprop|relu|0"]
    inputs = random_inputs(graph.gm, graph.parameters)
    for same_device in (False, True):
        legal, _ = applied(graph, {"|fprop|relu|0": decision(relu, "fp32", output="bf16")}, same_device=same_device)
        (cast,) = [n for n in new_casts(legal.gm, graph) if value_of(n).dtype == torch.bfloat16]
        assert cast.args[0].name == relu.name
        assert set(cast.args[0].users) == {cast}, "every reader sees the stored numbers"
        error = relative_error(flat(run(legal.gm, inputs)), flat(run(graph.gm, inputs)))
        assert 1e-5 < error < 0.01


def test_a_stored_format_of_a_product_that_computes_as_traced(captured):
    (graph,) = captured("normed").graphs
    key = "up|fprop|linear|0"
    legal, _ = applied(graph, {key: decision(by_key(graph.gm)[key], "fp32", output="bf16")})
    narrow = [n for n in new_casts(legal.gm, graph) if value_of(n).dtype == torch.bfloat16]
    assert [key_of(n.args[0]) for n in narrow] == [key_of(by_key(graph.gm)[key])]


def test_outputs_keep_their_dtype_when_they_are_stored_narrow(captured):
    (graph,) = captured("gram").graphs
    legal, _ = applied(graph, decide_gemms(graph.gm, "bf16", output="bf16"), storage="bf16")
    expected = [n.meta["val"].dtype for n in output_node(graph.gm).args[0] if n is not None]
    assert [n.meta["val"].dtype for n in output_node(legal.gm).args[0] if n is not None] == expected


@pytest.mark.parametrize("device", ONE_PER_TIER)
def test_undifferentiated_products_of_every_kind(device):
    def function(x, w, b, image, kernel, q):
        return (
            torch.addmm(b, x, w),
            torch.baddbmm(q, q, q),
            F.conv2d(image, kernel),
            F.conv_transpose2d(image, kernel.transpose(0, 1)),
            F.conv1d(image[:, :, 0], kernel[:, :, 0], groups=1),
        )

    args = [torch.randn(s) for s in ((6, 8), (8, 5), (5,), (2, 4, 9, 9), (6, 4, 3, 3), (3, 7, 7))]
    graph = keyed_graph(function, *args, parameters=[1, 4])
    legal, report = applied(graph, default_plan(graph, device), storage=resolve(device).storage)
    # on CPUs so few numbers do not pay for their casts
    wide = resolve(device).kind == "cpu" or resolve(device).ladder("linear")[0].format == "fp32"
    assert len(report.simulated) == (0 if wide else 5)
    error = relative_error(flat(run(legal.gm, args)), flat(run(graph.gm, args)))
    assert error < (1e-6 if not report.simulated else 0.02)
