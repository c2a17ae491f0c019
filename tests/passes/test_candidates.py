"""Which ways to compute and store a node there are, and why some are barred."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import zoo
from graph_helpers import ONE_PER_TIER
from torch import nn

from dsmp.compiler.capture import capture
from dsmp.hardware_db import resolve
from dsmp.hardware_db.formats import get_format
from dsmp.hardware_db.measurement import GemmPoint, Measurement
from dsmp.passes.candidates import narrow_storage, ways_of
from dsmp.passes.gemm import gemm_op, takes_recipe
from dsmp.passes.labels import SCORED_ARITHMETIC
from dsmp.passes.operand_copies import operand_copies
from dsmp.passes.ranges import Range
from dsmp.passes.scores import NodeScores, Score, Scores

LABELS = [f if r == "none" else f"{f}:{r}" for f, r in SCORED_ARITHMETIC]


def ways(graph, device="h800", scores=None):
    """{key: the node's ways}."""
    device = resolve(device) if isinstance(device, str) else device
    return {str(n.key): n for n in ways_of(graph.gm, device, graph.parameters, scores)}


def of(module, *args, device="h800", scores=None, training=True):
    (graph,) = capture(module, args, training=training)
    return ways(graph, device, scores)


def labels(node):
    return [w.label for w in node.allowed]


def reason(node, label):
    """Why a way is barred."""
    (way,) = [w for w in node.ways if w.label == label]
    assert way.blocked is not None, f"{label} is allowed"
    return way.blocked


def scores(found, *, drift=1.0, measured=True, ranges=None, without=()):
    """Scores for every label at every node of a model."""
    names = [n for n in (*LABELS, "->bf16", "->fp16") if n not in without]
    node = NodeScores(labels={n: Score(drift=drift, measured=measured) for n in names}, ranges=ranges or {})
    return Scores(
        dsmp="0", torch="0", source="test", fingerprint="0", drift="kl", samples=1, draws=1,
        nodes=dict.fromkeys(found, node),
    )  # fmt: skip


def reaching(**absmax):
    return {name: Range(absmax=value, exponents={}) for name, value in absmax.items()}


@pytest.mark.parametrize("device", ONE_PER_TIER)
@pytest.mark.parametrize("name", ["wide", "convnet", "router", "fused_qkv", "sdpa"])
def test_every_node_has_its_traced_way_first_and_only_what_the_device_can_do(name, device, captured):
    (graph,) = captured(name).graphs
    hardware = resolve(device)
    for node in ways(graph, hardware).values():
        first, *others = node.ways
        assert (first.label, first.compute, first.output) == (node.traced,) * 3
        assert first.blocked is None and first.drift == 0.0
        bits = [get_format(w.compute).storage_bits for w in node.ways]
        assert bits == sorted(bits, reverse=True)
        assert len({w.label for w in node.ways}) == len(node.ways)
        for way in others:
            if gemm_op(node.node) is None:
                assert (way.compute, way.recipe) == (node.traced, "none")
                assert way.output == narrow_storage(hardware)
            if way.blocked is None:
                assert hardware.supports(first_class(node), None, way.compute, way.accumulate), way
                assert way.output in (node.traced, narrow_storage(hardware))
                assert gemm_op(node.node) is None or takes_recipe(node.node, way.recipe), way
            else:
                assert way.blocked.code and way.blocked.text


def first_class(node):
    return node.key.op if gemm_op(node.node) is not None else "pointwise"


def test_the_formats_of_a_linear_layer(captured):
    qkv = ways(captured("wide").graphs[0])["qkv|fprop|linear|0"]
    eight = [f"{f}:{r}->bf16" for f in ("fp8_e4m3", "fp8_e5m2") for r in ("tensor/tensor", "row/row", "1x128/128x128")]
    assert labels(qkv) == [
        "fp32", "tf32", "tf32->bf16", "bf16", "bf16->bf16", "fp16", "fp16->bf16", "fp16:tensor/tensor",
        "fp16:tensor/tensor->bf16", *eight, "int8:row/row->bf16", "int8:tensor/tensor->bf16",
    ]  # fmt: skip
    missing = [w for w in qkv.ways if w.blocked]
    assert [w.compute for w in missing] == ["fp8_e4m3fnuz", "fp8_e5m2fnuz", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "int4"]
    assert {w.blocked.code for w in missing} == {"verdict"}
    assert "fnuz" in reason(qkv, "fp8_e4m3fnuz:tensor/tensor->bf16").text


AVX2 = "epyc-7763"
STEPS = reaching(lhs=4.0)["lhs"].model_copy(update={"low": -1.0, "high": 4.0})


def test_weights_alone_are_narrow_on_cpus_where_nobody_trains():
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.randn(64, 256)
    (graph,) = capture(model, (x,), training=False)
    known = scores(["0|fprop|linear|0", "1|fprop|linear|0"], ranges={"lhs": STEPS})
    found = ways(graph, AVX2, known)["0|fprop|linear|0"]
    assert labels(found) == [
        "fp32", "fp16:wide/none", "int8:row/row", "int8:tensor/tensor", "int8:dynamic/row", "int8:static/row",
        "int8:wide/row", "int4:wide/1x128",
    ]  # fmt: skip
    by_label = {w.label: w for w in found.ways}
    assert by_label["int8:wide/row"].accumulate == "fp32" and by_label["int8:row/row"].accumulate == "int32"
    assert by_label["int8:static/row"].static_range == (-1.0, 4.0) and by_label["int8:row/row"].static_range is None
    (trained,) = capture(model, (x,), training=True)
    narrow = [w.label for n in ways(trained, AVX2, known).values() for w in n.ways]
    assert not any(name in label for name in ("wide", "static", "dynamic") for label in narrow)
    assert not any("wide" in w.label for w in ways(graph, "h800", known)["0|fprop|linear|0"].ways)


def test_weights_beyond_fp16_and_activations_of_unknown_range_are_barred():
    (graph,) = capture(nn.Sequential(*map(nn.Linear, (256, 256), (256, 9))), (torch.randn(64, 256),), training=False)
    key = "0|fprop|linear|0"
    found = ways(graph, AVX2, scores([key], ranges=reaching(rhs=40000.0, lhs=4.0)))[key]
    assert reason(found, "fp16:wide/none").code == "overflow"
    assert "range" in reason(found, "int8:static/row").text
    assert "int8:wide/row" in labels(found)


def test_the_weights_of_an_output_head_may_be_narrow_its_products_not():
    (graph,) = capture(nn.Sequential(*map(nn.Linear, (256, 256), (256, 9))), (torch.randn(64, 256),), training=False)
    key = "1|fprop|linear|0"
    head = ways(graph, AVX2, scores([key], ranges={"lhs": STEPS}))[key]
    assert labels(head) == ["fp32", "fp16:wide/none", "int8:wide/row", "int4:wide/1x128"]
    assert reason(head, "int8:row/row").code == "veto-head"


def test_few_rows_gain_nothing_from_static_steps():
    (graph,) = capture(nn.Sequential(*map(nn.Linear, (256, 256), (256, 9))), (torch.randn(4, 256),), training=False)
    key = "0|fprop|linear|0"
    found = ways(graph, AVX2, scores([key], ranges={"lhs": STEPS}))[key]
    assert "int8:wide/row" in labels(found) and not any("static" in w.label or "dynamic" in w.label for w in found.ways)


def _convolutions():
    return nn.Sequential(nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 3))


def test_convolutions_keep_no_activations_wide():
    (graph,) = capture(_convolutions(), (torch.randn(1, 32, 8, 8),), training=False)
    key = "0|fprop|conv|0"
    found = ways(graph, AVX2, scores([key], ranges={"lhs": STEPS}))[key]
    assert "int8:static/row" in labels(found) and not any("wide" in w.label for w in found.ways)


def test_hardware_that_scales_blocks_of_32_is_offered_them(captured):
    (graph,) = captured("wide").graphs
    blackwell = labels(ways(graph, "b200")["qkv|fprop|linear|0"])
    assert {"fp8_e4m3:mx32/mx32->bf16", "fp8_e4m3:row/row->bf16", "fp4_e2m1:mx32/mx32->bf16"} <= set(blackwell)
    assert not any("mx32" in text for text in labels(ways(graph, "h800")["qkv|fprop|linear|0"]))


def test_recipes_are_in_the_order_of_the_operands_and_labels_are_not(captured):
    found = ways(captured("wide").graphs[0])
    label = "fp8_e4m3:1x128/128x128"
    recipes = {}
    for phase in ("fprop", "dgrad", "wgrad"):
        (way,) = [w for w in found[f"qkv|{phase}|linear|0"].ways if w.arithmetic == label]
        recipes[phase] = (way.recipe, way.activation)
    assert recipes == {
        "fprop": ("1x128/128x128", "1x128"),
        "dgrad": ("1x128/128x128", "1x128"),
        "wgrad": ("1x128/1x128", "1x128"),
    }


def test_how_results_are_stored(captured):
    (graph,) = captured("wide").graphs
    found = ways(graph)
    # a parameter's gradient, which a library GEMM of narrow operands writes in fp32 on a GPU
    assert not any("->" in text for text in labels(found["qkv|wgrad|linear|0"]))
    assert "fp8_e4m3:row/row" in labels(found["qkv|wgrad|linear|0"])
    assert ways(graph, "v100")["qkv|fprop|linear|0"].ways[-1].output == "fp16"
    assert [narrow_storage(resolve(d)) for d in ("h800", "a100", "v100", "mi250x")] == ["bf16", "bf16", "fp16", "bf16"]
    # what the model returns keeps its dtype
    answer = of(zoo.build("mlp").model, torch.randn(4, 64), training=False)["down|fprop|linear|0"]
    assert {w.output for w in answer.ways} == {"fp32"}


def test_models_of_other_dtypes():
    half = of(zoo.build("mlp").model.bfloat16(), torch.randn(4, 64).bfloat16())
    up = half["up|fprop|linear|0"]
    assert up.traced == "bf16" and {w.output for w in up.ways} == {"bf16"}
    assert all(get_format(w.compute).storage_bits <= 8 for w in up.ways[1:]) and len(up.allowed) > 1
    double = of(zoo.build("mlp").model.double(), torch.randn(4, 64).double())
    assert {tuple(w.label for w in n.ways) for n in double.values()} == {("fp64",)}


def test_vetoes_bar_what_they_bar(captured):
    head = ways(captured("wide").graphs[0])["head|fprop|linear|0"]
    assert {get_format(w.compute).storage_bits for w in head.allowed} == {32, 16}
    assert reason(head, "int8:row/row->bf16").code == "veto-head"
    gate = ways(captured("router").graphs[0])["gate|fprop|linear|0"]
    assert labels(gate) == ["fp32"]
    assert {w.blocked.code for w in gate.ways[1:]} == {"veto-router", "verdict"}


def test_recipes_that_do_not_fit_are_barred(captured):
    attention = ways(captured("sdpa").graphs[0], "v100")["|fprop|sdpa|0"]
    assert "fp16" in labels(attention) and reason(attention, "fp16:tensor/tensor").code == "recipe"
    convolution = ways(captured("convnet").graphs[0], "cpu-amx")["depthwise|fprop|conv|0"]
    assert "int8:row/row->bf16" in labels(convolution)


def test_a_short_sum_over_the_input_stays_as_traced_unless_measured():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.second(torch.relu(self.first(x))).relu()

    (graph,) = capture(Model(), (torch.randn(4, 8),))
    found = ways(graph)
    first, second = "first|fprop|linear|0", "second|fprop|linear|0"
    estimated, measured = (ways(graph, scores=scores(found, measured=m)) for m in (False, True))
    assert labels(estimated[first]) == ["fp32"] and reason(estimated[first], "bf16").code == "veto-first-layer"
    assert "8 values" in reason(estimated[first], "bf16").text
    assert {"bf16", "fp8_e4m3:row/row->bf16"} <= set(labels(measured[first]))
    assert {"bf16", "fp8_e4m3:row/row"} & set(labels(estimated[second])) == {"bf16"}  # the head of this model


def test_ranges_bar_fp16():
    (graph,) = capture(zoo.build("normed").model, (torch.randn(6, 32),))
    found = ways(graph, "v100")
    down = "down|fprop|linear|0"
    fits = ways(graph, "v100", scores(found, ranges=reaching(lhs=32000.0, rhs=1.0, out=32000.0)))[down]
    assert "fp16" in labels(fits)
    operand = ways(graph, "v100", scores(found, ranges=reaching(lhs=33000.0, out=1.0)))[down]
    assert reason(operand, "fp16").code == "overflow" and "3.3e+04" in reason(operand, "fp16").text
    assert "fp16:tensor/tensor" in labels(operand) and "fp16:tensor/tensor->fp16" in labels(operand)
    result = ways(graph, "v100", scores(found, ranges=reaching(lhs=1.0, out=1e6)))[down]
    assert labels(result) == ["fp32", "fp16:tensor/tensor"]
    assert reason(result, "fp16:tensor/tensor->fp16").code == "overflow"
    # bf16 reaches as far as fp32
    assert "bf16" in labels(ways(graph, "h800", scores(found, ranges=reaching(lhs=1e9, out=1e9)))[down])
    stored = [n for n in ways(graph, "v100", scores(found, ranges=reaching(out=1e6))).values() if not gemm_op(n.node)]
    assert stored and all(len(n.allowed) == 1 for n in stored)


def test_what_has_no_score_is_barred(captured):
    (graph,) = captured("normed").graphs
    found = ways(graph)
    some = ways(graph, scores=scores(found, without=["bf16", "->bf16"]))
    up = some["up|fprop|linear|0"]
    assert reason(up, "bf16").code == "unscored"
    assert "tf32" in labels(up)
    assert reason(up, "tf32->bf16").code == "unscored"  # a bias and an activation read the stored result
    none = ways(graph, scores=scores({}))
    assert all([w.label for w in n.allowed] in ([n.traced], [n.traced, "->bf16"]) for n in none.values())


def test_drifts_add_up_and_are_not_charged_twice(captured):
    (graph,) = captured("normed").graphs
    found = ways(graph, scores=scores(ways(graph), drift=3.0))
    up = {w.label: w for w in found["up|fprop|linear|0"].ways}
    assert (up["fp32"].drift, up["bf16"].drift, up["bf16->bf16"].drift) == (0.0, 3.0, 6.0)
    assert up["bf16->bf16"].measured and not found["up|fprop|linear|0"].rounded_by_readers
    # the normed value goes into the head alone, which rounds it
    alone = [n for n in found.values() if n.rounded_by_readers and gemm_op(n.node) is None]
    assert alone and {w.drift for n in alone for w in n.ways if w.label == "->bf16"} == {0.0}


def test_a_value_is_not_free_to_be_narrow_when_a_reader_stays_wide(captured):
    (graph,) = captured("router").graphs
    found = ways(graph, scores=scores(ways(graph), drift=3.0, without=[n for n in LABELS if n != "tf32"]))
    assert not any(n.rounded_by_readers for n in found.values())


def test_drift_from_a_function(captured):
    (graph,) = captured("normed").graphs
    seen = []

    def drift_of(key, label, node):
        seen.append((key, label, node.name))
        return 5.0

    found = ways(graph, scores=drift_of)
    up = {w.label: w for w in found["up|fprop|linear|0"].ways}
    assert up["tf32->bf16"].drift == 10.0 and not up["tf32->bf16"].measured
    assert {label for _, label, _ in seen} <= {*LABELS, "->bf16"}
    unknown = ways(graph)["up|fprop|linear|0"]
    assert {w.drift for w in unknown.ways[1:]} == {None} and len(unknown.allowed) > 10


def test_formats_measured_to_be_slow_are_barred(captured):
    (graph,) = captured("wide").graphs
    device = resolve("a100")
    points = tuple(
        GemmPoint(format=f, accumulate="fp32", m=8192, n=4096, k=4096, flop_per_s=rate, operator="aten.mm")
        for f, rate in (("fp32", 2e13), ("bf16", 1e13), ("tf32", 1e14))
    )
    measured = Measurement(
        device="a100", name="mine", units=device.units, date="2026-01-01", torch="2.14",
        memory_bandwidth_bytes_per_s=1e12,
        launch_overhead_s=1e-6, gemm=points,
    )  # fmt: skip
    qkv = ways(graph, replace(device, measured=measured, overlays=("mine.toml",)))["qkv|fprop|linear|0"]
    assert reason(qkv, "bf16").code == "measured" and "0.5 times" in reason(qkv, "bf16").text
    assert "tf32" in labels(qkv) and "bf16->bf16" not in [w.label for w in qkv.ways]


class Stores(nn.Module):
    """One value of each kind that may or may not be stored narrow."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 32)
        self.up, self.down, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, ids):
        hidden = self.up(x).exp()  # read by a GEMM and by another operator
        shared = self.down(hidden) * hidden
        summed = self.out(shared.relu()).cumsum(1)  # a reduction that only GEMMs read
        ranked = torch.topk(shared.sigmoid(), 3)[0]
        return self.table(ids) @ summed.sin().t(), ranked, x.tanh()


def test_what_may_be_stored_narrow():
    (graph,) = capture(Stores(), (torch.randn(6, 32), torch.arange(6)), training=False)
    found = {n.node.name: n for n in ways(graph).values() if gemm_op(n.node) is None}
    assert labels(found["exp"]) == labels(found["relu"]) == labels(found["embedding"]) == ["fp32", "->bf16"]
    assert {name: n.rounded_by_readers for name, n in found.items()} == {
        "exp": False, "mul": False, "relu": True, "cumsum": False, "sigmoid": False, "embedding": True, "sin": True,
        "tanh": False,
    } | {name: False for name in found if name.startswith("topk")}  # fmt: skip
    barred = {name: n.ways[1].blocked.code for name, n in found.items() if len(n.ways) > 1 and n.ways[1].blocked}
    assert barred["mul"] == barred["cumsum"] == barred["sigmoid"] == "fused"
    assert barred["tanh"] == "output"
    assert barred["topk"] == "policy"


def test_values_that_are_ranked_or_summed_are_stored_as_traced():
    class Ranked(nn.Module):
        def forward(self, x, w, v):
            scores = (x @ w).sigmoid()
            total = (x @ w).cumsum(0)
            user = (x @ w).to(torch.bfloat16).to(torch.float32)
            return torch.topk(scores @ v, 2)[0] + torch.topk(scores, 2)[0], total @ v + total.exp(), user @ v + user

    inputs = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)
    (graph,) = capture(Ranked(), inputs, training=False)
    found = {n.node.name: n for n in ways(graph).values()}
    assert reason(found["sigmoid"], "->bf16").code == "veto-ranking"
    assert reason(found["cumsum"], "->bf16").code == "policy"
    casts = [n for name, n in found.items() if name.startswith("convert") and n.traced == "fp32"]
    assert casts and {reason(n, "->bf16").code for n in casts} == {"policy"}


def test_devices_without_16_bit_storage_store_as_traced(captured):
    (graph,) = captured("fused_qkv").graphs
    device = resolve("cpu-avx2")
    profile = device.profile.model_copy(update={"io_formats": ("fp32",)})
    plain = replace(device, profile=profile)
    assert narrow_storage(plain) is None
    assert {w.output for n in ways(graph, plain).values() for w in n.ways} == {"fp32"}


def test_attention_statistics_do_not_keep_the_result_wide(captured):
    attention = ways(captured("sdpa").graphs[0])["|fprop|sdpa|0"]
    assert "bf16->bf16" in labels(attention) and not attention.rounded_by_readers


def test_a_bias_keeps_a_value_from_being_free():
    class Shared(nn.Module):
        def forward(self, x, w):
            x = x.exp()
            return torch.addmm(x, x, w).sin() + F.linear(x, w)

    (graph,) = capture(Shared(), (torch.randn(8, 8), torch.randn(8, 8)), training=False)
    exp = next(n for n in ways(graph).values() if n.node.name == "exp")
    assert not exp.rounded_by_readers


def test_narrow_weights_alone_do_not_round_what_they_read():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x):
            return self.up(x.exp())

    (graph,) = capture(Reads(), (torch.randn(64, 32),), training=False)
    known = scores(ways(graph, "epyc-9654"))
    nodes = [n for n in ways(graph, "epyc-9654", known).values() if gemm_op(n.node) or n.node.name == "exp"]
    (form,) = [c for c in operand_copies(nodes, graph.parameters) if c.format == "fp32"]
    assert form.source.name == "exp"
    assert form.readers["up|fprop|linear|0"] == ["fp32", "fp16:wide/none", "int8:wide/row", "int4:wide/1x128"]
    assert not any(n.rounded_by_readers for n in nodes)


def test_cpus_store_nothing_narrower_between_the_nodes_of_inference():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    for training in (False, True):
        (graph,) = capture(model, (torch.randn(64, 256),), training=training)
        outputs = {w.output for n in ways(graph, "epyc-9654").values() for w in n.ways}
        assert outputs == ({"fp32", "bf16"} if training else {"fp32"})


def test_a_range_of_zeros_alone_has_no_static_steps():
    (graph,) = capture(_convolutions(), (torch.randn(1, 32, 8, 8),), training=False)
    key = "0|fprop|conv|0"
    for low, high, allowed in ((0.0, 0.0, False), (1e-45, 1e-45, False), (0.0, 1e-3, True)):
        reach = reaching(lhs=high)["lhs"].model_copy(update={"low": low, "high": high})
        found = ways(graph, AVX2, scores([key], ranges={"lhs": reach}))[key]
        assert ("int8:static/row" in labels(found)) == allowed
    assert "no range" in reason(ways(graph, AVX2, scores([key], ranges={}))[key], "int8:static/row").text
