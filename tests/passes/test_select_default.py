"""Decisions without calibration: the tier of every device, limits, costs, the user's dtypes, the user's rules."""

from __future__ import annotations

import functools

import pytest
import torch
import zoo
from graph_helpers import FORMATS, ONE_PER_TIER
from torch import nn

from dsmp.compiler.capture import capture
from dsmp.errors import PlanHardwareError
from dsmp.hardware_db import resolve
from dsmp.hardware_db.formats import get_format, split_recipe
from dsmp.passes.graph import calls, float_dtype
from dsmp.passes.keys import key_of
from dsmp.passes.op_rules import Policy, rule_of
from dsmp.passes.plan_fields import GEMM_CLASSES, STORED_FORMATS
from dsmp.passes.rules import Rule
from dsmp.passes.select_default import rules_without_a_node, select_default

FP32_CLASSES = {"norm", "softmax", "loss", "embedding", "reduction", "pointwise", "index"}


@pytest.fixture(scope="session")
def decided(captured):
    """`decided(model, device)`: {key: decision} of a zoo model's only graph."""

    @functools.cache
    def of(name, device):
        (graph,) = captured(name).graphs
        made = select_default(graph.gm, resolve(device), parameters=graph.parameters)
        return {d.key: d for d in made.decisions}

    return of


def select(graph, device, **rules):
    made = select_default(
        graph.gm,
        resolve(device),
        parameters=graph.parameters,
        rules=[Rule(match=m, format=f) for m, f in rules.get("rules", ())],
    )
    return {d.key: d for d in made.decisions}


# DESIGN section 6, line by line: format and recipe of linear in fprop, dgrad and wgrad, of attention, storage
BLOCKS = ("1x128/128x128", "1x128/128x128", "1x128/1x128")
MX = ("mx32/mx32",) * 3
TENSOR = ("tensor/tensor",) * 3
PLAIN = ("none",) * 3
TIERS = {
    "a100": ("tf32", PLAIN, "tf32", "fp32"),
    "v100": ("fp16", TENSOR, "fp16", "fp32"),
    "t4": ("fp16", TENSOR, "fp16", "fp32"),
    "mi250x": ("fp16", TENSOR, "fp16", "fp32"),
    "h100": ("fp8_e4m3", BLOCKS, "bf16", "bf16"),
    "h800": ("fp8_e4m3", BLOCKS, "bf16", "bf16"),
    "h200": ("fp8_e4m3", BLOCKS, "bf16", "bf16"),
    "mi300x": ("fp8_e4m3fnuz", BLOCKS, "bf16", "bf16"),
    "b200": ("fp8_e4m3", MX, "bf16", "bf16"),
    "cpu-avx2": ("fp32", PLAIN, "fp32", "fp32"),
    "cpu-avx512": ("fp32", PLAIN, "fp32", "fp32"),
    "cpu-amx": ("bf16", PLAIN, "bf16", "bf16"),
    "cpu-avx512-bf16": ("bf16", PLAIN, "bf16", "bf16"),
}


@pytest.mark.parametrize("device", TIERS)
def test_the_tier_table(device, decided):
    linear, recipes, attention, storage = TIERS[device]
    plan = decided("wide", device)
    for module in ("qkv", "out"):
        found = [plan[f"{module}|{p}|linear|0"] for p in ("fprop", "dgrad", "wgrad")]
        assert [d.compute for d in found] == [linear] * 3
        # of a weight's gradient both operands are activations; of the others the second is the weight
        assert [d.recipe for d in found] == list(recipes)
        assert {d.accumulate for d in found} == {"fp32"}
        assert [d.output for d in found[:2]] == [storage] * 2
        assert {d.reason.code for d in found} == {"tier"}
    sdpa = [plan[f"|{p}|sdpa|0"] for p in ("fprop", "bwd")]
    assert {d.compute for d in sdpa} == {attention} and {d.output for d in sdpa} == {storage}
    assert {d.accumulate for d in sdpa} == {"fp32"}


@pytest.mark.parametrize("device", ONE_PER_TIER)
@pytest.mark.parametrize("model", ["wide", "convnet"])
def test_what_is_no_product_computes_in_fp32(device, model, decided):
    for d in decided(model, device).values():
        if d.op in FP32_CLASSES:
            assert (d.compute, d.accumulate) == ("fp32", "fp32"), d
            assert d.output in ("fp32", resolve(device).storage)
    classes = {d.op for d in decided(model, device).values()}
    assert "norm" in classes and ("loss" in classes) == (model == "wide")


@pytest.mark.parametrize("device", ONE_PER_TIER)
@pytest.mark.parametrize("model", ["wide", "llama", "convnet", "router"])
def test_every_decision_can_be_carried_out(device, model, decided, captured):
    hardware = resolve(device)
    (graph,) = captured(model).graphs
    plan = decided(model, device)
    assert list(plan) == graph.key_texts(), "one decision per keyed node, in graph order"
    for d in plan.values():
        if d.op in GEMM_CLASSES:
            assert hardware.supports(d.op, None, d.compute, d.accumulate), d
            assert d.compute in d.time_us and min(d.time_us.values()) > 0
        assert hardware.supports("view" if d.op == "other" else d.op, None, d.output), d
        assert d.output in STORED_FORMATS
        assert d.reason.text and d.reason.code != "unknown-op"
        assert get_format(d.compute).storage_bits <= 32
        split_recipe(d.recipe)


@pytest.mark.parametrize("device", ONE_PER_TIER)
def test_heads_and_routers_stay_high(device, decided):
    head = [d for d in decided("wide", device).values() if d.module == "head" and d.op == "linear"]
    assert len(head) == 3
    assert all(get_format(d.compute).storage_bits >= 16 for d in head)
    gate = [d for d in decided("router", device).values() if d.module == "gate" and d.op == "linear"]
    assert gate and all(d.compute == "fp32" for d in gate)


def test_a_barred_format_is_named_with_its_reason(decided):
    head = decided("wide", "h800")["head|fprop|linear|0"]
    assert (head.compute, head.reason.code) == ("bf16", "veto-head")
    assert "no fp8_e4m3: output head" in head.reason.text
    gate = decided("router", "h800")["gate|fprop|linear|0"]
    assert gate.reason.code == "veto-router" and "no bf16: router" in gate.reason.text


@pytest.mark.parametrize("model", ["convnet", "resnet18"])
def test_convolutions_on_hopper_are_bf16_and_say_why(model, decided):
    plan = decided(model, "h800")
    convs = [d for d in plan.values() if d.op == "conv"]
    assert convs
    for d in convs:
        assert (d.compute, d.reason.code) == ("bf16", "verdict"), d
        assert "no fp8_e4m3 conv on H800" in d.reason.text and "GEMMs only" in d.reason.text


@pytest.mark.parametrize("device", ["h800", "mi300x", "b200"])
def test_small_products_do_not_pay(device, decided):
    found = [d for d in decided("normed", device).values() if d.op == "linear" and d.module in ("up", "down")]
    assert found
    for d in found:
        assert (d.compute, d.reason.code) == ("bf16", "cost")
        assert "does not pay" in d.reason.text and "us with quantisation" in d.reason.text
        narrow = next(f for f in d.time_us if f.startswith("fp8"))
        assert d.time_us[narrow] >= d.time_us["bf16"]


def test_large_products_pay(decided):
    for key in ("qkv|fprop|linear|0", "out|dgrad|linear|0", "out|wgrad|linear|0"):
        times = decided("wide", "h800")[key].time_us
        assert times["fp8_e4m3"] < times["bf16"] < times["fp32"]


def test_weight_gradients_of_narrow_products_stay_fp32_on_gpus(decided):
    assert decided("wide", "h800")["qkv|wgrad|linear|0"].output == "fp32"
    assert decided("wide", "cpu-amx")["qkv|wgrad|linear|0"].output == "bf16"


def test_what_only_narrow_products_read_is_stored_narrow(decided):
    plan = decided("wide", "h800")
    stored = [d for d in plan.values() if d.reason.code == "storage"]
    assert stored
    # the normed activations feed qkv (and its weight's gradient) only
    assert any(d.module == "norm" for d in stored)
    assert all(d.output == "bf16" and d.compute == "fp32" for d in stored)
    assert not [d for d in decided("wide", "a100").values() if d.output != "fp32"]


def test_views_take_the_format_of_what_they_read(decided):
    plan = decided("wide", "h800")
    assert {d.output for d in plan.values() if d.reason.code == "view"} >= {"bf16", "fp32"}
    assert all(d.compute == d.output for d in plan.values() if d.reason.code == "view")


@pytest.mark.parametrize("device", ONE_PER_TIER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_users_dtypes_are_kept(device, dtype):
    case = zoo.build("normed")
    (graph,) = _captured_in(dtype).graphs
    plan = select(graph, device)
    traced = {str(key_of(n)): FORMATS[float_dtype(n)] for n in calls(graph.gm) if key_of(n)}
    assert case is not None and FORMATS[dtype] in traced.values()
    for key, d in plan.items():
        assert d.output == traced[key], d
        assert get_format(d.compute).storage_bits <= get_format(traced[key]).storage_bits
        if dtype == torch.float64 or d.op not in GEMM_CLASSES:
            assert d.compute == traced[key], d
    assert {d.compute for d in plan.values() if d.op == "linear"} == {FORMATS[dtype]}, "small products"


@functools.cache
def _captured_in(dtype):
    case = zoo.build("normed")
    return capture(case.model.to(dtype), tuple(a.to(dtype) for a in case.args))


def test_identity_on_a_plain_cpu(captured):
    (graph,) = captured("llama").graphs
    made = select_default(graph.gm, resolve("cpu-avx2"), parameters=graph.parameters)
    assert {(d.compute, d.recipe, d.output) for d in made.decisions} == {("fp32", "none", "fp32")}
    assert made.time_us == pytest.approx(made.time_us_traced)


def test_a_plan_for_a_large_model_is_faster_than_what_was_traced(captured):
    (graph,) = captured("wide").graphs
    for device, least in (("h800", 3.0), ("a100", 2.0), ("mi250x", 1.5), ("v100", 2.0)):
        made = select_default(graph.gm, resolve(device), parameters=graph.parameters)
        assert made.time_us * least < made.time_us_traced, device


def test_selection_leaves_the_graph_alone(captured):
    (graph,) = captured("convnet").graphs
    before = [(n.name, n.target, str(n.args), sorted(n.meta)) for n in graph.gm.graph.nodes]
    select(graph, "h800", rules=[("*|conv|*", "bf16")])
    assert [(n.name, n.target, str(n.args), sorted(n.meta)) for n in graph.gm.graph.nodes] == before


# rules


def test_rules_win_over_tier_cost_and_vetoes(captured):
    (graph,) = captured("normed").graphs
    plan = select(graph, "h800", rules=[("up|*|linear|*", "fp8_e4m3"), ("head|fprop|linear|0", "fp8_e4m3")])
    ruled = {k for k, d in plan.items() if d.reason.code == "rule"}
    assert ruled == {"up|fprop|linear|0", "up|wgrad|linear|0", "head|fprop|linear|0"}
    assert {plan[k].compute for k in ruled} == {"fp8_e4m3"}
    assert plan["up|fprop|linear|0"].recipe == "1x128/128x128" and plan["up|wgrad|linear|0"].recipe == "1x128/1x128"
    assert plan["head|dgrad|linear|0"].compute == "bf16", "what no rule matches is as without rules"
    assert "'up|*|linear|*' asks for fp8_e4m3" in plan["up|fprop|linear|0"].reason.text


def test_the_last_matching_rule_wins(captured):
    (graph,) = captured("normed").graphs
    general, special = ("*|linear|*", "fp32"), ("up|*", "bf16")
    plan = select(graph, "h800", rules=[general, special])
    assert plan["up|fprop|linear|0"].compute == "bf16" and plan["down|fprop|linear|0"].compute == "fp32"
    plan = select(graph, "h800", rules=[special, general])
    assert plan["up|fprop|linear|0"].compute == plan["down|fprop|linear|0"].compute == "fp32"
    assert plan["up|fprop|linear|0"].output == "fp32"


def test_a_rule_outside_of_the_ladder_gets_a_recipe(captured):
    (graph,) = captured("normed").graphs
    plan = select(graph, "h800", rules=[("up|fprop|linear|0", "fp16"), ("down|fprop|linear|0", "int8")])
    up, down = plan["up|fprop|linear|0"], plan["down|fprop|linear|0"]
    assert (up.compute, up.recipe) == ("fp16", "tensor/tensor")
    assert (down.compute, down.recipe, down.accumulate) == ("int8", "row/row", "int32")


def test_a_rule_stores_other_results(captured):
    (graph,) = captured("normed").graphs
    plan = select(graph, "h800", rules=[("|fprop|relu|0", "bf16"), ("norm|fprop|mul|*", "fp16")])
    relu = plan["|fprop|relu|0"]
    assert (relu.compute, relu.output, relu.reason.code) == ("fp32", "bf16", "rule")
    assert all(d.output == "fp16" for k, d in plan.items() if k.startswith("norm|fprop|mul|"))


@pytest.mark.parametrize(
    ("device", "glob", "format", "words"),
    [
        ("a100", "up|fprop|linear|0", "fp8_e4m3", "has no fp8_e4m3 units"),
        ("v100", "up|fprop|linear|0", "bf16", "has no bf16 units"),
        ("mi300x", "up|*|linear|*", "fp8_e4m3", "use fp8_e4m3fnuz"),
        ("cpu-avx2", "*|linear|*", "tf32", "has no tf32 units"),
        ("h800", "*|linear|*", "fp4_e2m1", "has no fp4_e2m1 units"),
        ("v100", "|fprop|relu|0", "bf16", "bf16"),
    ],
)
def test_impossible_rules_are_refused_with_the_verdict(device, glob, format, words, captured):
    (graph,) = captured("normed").graphs
    with pytest.raises(PlanHardwareError) as error:
        select(graph, device, rules=[(glob, format)])
    assert words in str(error.value) and "Ask for a format of its ladder (" in str(error.value)
    assert "|fprop|" in str(error.value), "the node is named"


def test_impossible_rules_for_convolutions(captured):
    (graph,) = captured("convnet").graphs
    with pytest.raises(PlanHardwareError, match="no fp8_e4m3 conv on H800"):
        select(graph, "h800", rules=[("*|conv|*", "fp8_e4m3")])


def test_asking_for_the_traced_format_is_always_possible():
    (graph,) = _captured_in(torch.bfloat16).graphs
    plan = select(graph, "v100", rules=[("*|linear|*", "bf16")])
    assert {d.compute for d in plan.values() if d.op == "linear"} == {"bf16"}


def test_rules_without_a_node(captured):
    (graph,) = captured("normed").graphs
    plan = select(graph, "a100")
    rules = [Rule(match=m, format="bf16") for m in ("up|*", "nowhere|*", "UP|*")]
    assert rules_without_a_node(rules, plan) == rules[1:]


def test_policies_and_decisions_agree(captured, decided):
    (graph,) = captured("llama").graphs
    plan = decided("llama", "h800")
    for node in calls(graph.gm):
        if key_of(node) is None:
            continue
        d = plan[str(key_of(node))]
        assert (rule_of(node).policy is Policy.LADDER) == (d.op in GEMM_CLASSES)
        assert (rule_of(node).policy is Policy.VIEW) == (d.reason.code == "view")


def test_user_casts_and_mixed_models_keep_their_own_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(16, 16).bfloat16()
            self.high = nn.Linear(16, 16)

        def forward(self, x):
            return torch.relu(self.high(torch.relu(self.low(x.bfloat16())).float())) @ x.T

    (graph,) = capture(Mixed(), (torch.randn(4, 16),))
    plan = select(graph, "a100")
    assert plan["low|fprop|linear|0"].compute == plan["low|fprop|linear|0"].output == "bf16"
    assert (plan["high|fprop|linear|0"].compute, plan["high|fprop|linear|0"].output) == ("tf32", "fp32")


@pytest.mark.parametrize(("rows", "expected"), [(1, "fp32"), (256, "bf16")])
def test_cpus_convert_weights_at_every_call_only_where_it_pays(rows, expected):
    (graph,) = capture(nn.Linear(1024, 1024), (torch.randn(rows, 1024),), training=False)
    made = select_default(graph.gm, resolve("epyc-9654"), parameters=graph.parameters)
    (linear,) = [d for d in made.decisions if d.op == "linear"]
    assert linear.compute == expected
    assert (linear.reason.code, "bf16 does not pay" in linear.reason.text) == (
        ("cost", True) if expected == "fp32" else ("tier", False)
    )
    assert linear.time_us[expected] == min(linear.time_us.values())


def test_attention_in_bf16_is_slower_on_zen4(captured):
    (graph,) = captured("sdpa", False)
    made = select_default(graph.gm, resolve("epyc-9654"), parameters=graph.parameters)
    assert {d.compute for d in made.decisions if d.op == "sdpa"} == {"fp32"}
    assert "attention" in resolve("epyc-9654").supports("sdpa", None, "bf16").reason
