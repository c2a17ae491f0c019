"""The program of a captured model: times that agree with the plan made without calibration, shared copies, memory."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import zoo
from graph_helpers import by_key
from torch import nn

from dsmp.compiler.capture import capture
from dsmp.hardware_db import resolve
from dsmp.hardware_db.formats import get_format
from dsmp.passes.formulate import formulate
from dsmp.passes.gemm import gemm_op
from dsmp.passes.graph import calls, is_backward, numel_of, value_of
from dsmp.passes.keys import key_of
from dsmp.passes.labels import split_label
from dsmp.passes.op_rules import Policy, rule_of
from dsmp.passes.scores import Scores
from dsmp.passes.select_default import select_default

DEVICES = ("h800", "a100", "v100", "mi250x", "cpu-avx2", "cpu-amx")
# Drift of a format in a synthetic model: the square of its unit roundoff.
DRIFTS = {f: get_format(f).unit_roundoff ** 2 for f in ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")}


def drift_of(key, label, node):
    arithmetic, stored = split_label(label)
    return DRIFTS.get((arithmetic or stored.removeprefix("->")).partition(":")[0], 1e-3)


def graphs_of(captured):
    return [(g.gm, g.parameters) for g in captured]


@pytest.fixture(scope="session")
def formulated(captured):
    """`formulated(model, device, training=True, **options)`: the program of a zoo model."""

    @functools.cache
    def of(name, device, training=True, **options):
        return formulate(graphs_of(captured(name, training)), resolve(device), drift_of, **options)

    return of


def traced(program):
    return {key: found[0].label for key, found in program.candidates.items()}


def as_decided(program, decisions):
    """The labels of a plan's decisions; of the nearest candidate where the program offers less (results that leave the
    model are not rounded, attention is not scaled)."""
    labels = {}
    for d in decisions:
        if d.key in program.candidates:
            free = program.allowed[d.key]
            near = [c for c in free if c.compute == d.compute]
            ranked = sorted(near or free[:1], key=lambda c: (c.recipe != d.recipe, c.output != d.output))
            labels[d.key] = ranked[0].label
    return labels


MODELS = [("llama", True), ("llama", False), ("resnet18", True), ("resnet18", False), ("wide", True), ("sdpa", True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "training"), MODELS)
def test_it_costs_what_the_plan_without_calibration_costs(name, training, device, captured, formulated):
    program = formulated(name, device, training)
    (graph,) = captured(name, training)
    made = select_default(graph.gm, resolve(device), parameters=graph.parameters)
    assert program.totals(traced(program)).time == pytest.approx(made.time_us_traced, rel=1e-6)
    assert program.totals(traced(program)).error == 0.0
    planned = program.totals(as_decided(program, made.decisions)).time
    assert planned == pytest.approx(made.time_us, rel=0.1)


@pytest.mark.parametrize("device", ["h800", "v100"])
def test_it_holds_every_node_in_the_order_of_the_graph(device, captured, formulated):
    (graph,) = captured("llama")
    program = formulated("llama", device)
    nodes = by_key(graph.gm)
    assert program.keys == tuple(k for k, n in nodes.items() if rule_of(n).policy is not Policy.VIEW)
    assert list(program.reads) == list(nodes)
    assert (program.cost, program.drift, program.loss) == ("roofline", "l2", None)
    assert all(c.time_us >= 0 and c.bytes >= 0 for found in program.candidates.values() for c in found)
    again = formulate(graphs_of(captured("llama")), resolve(device), drift_of)
    assert again == program
    assert type(program).model_validate_json(program.model_dump_json()) == program


def test_what_nodes_read(captured, formulated):
    (graph,) = captured("mlp")
    reads = formulated("mlp", "h800").reads
    nodes = by_key(graph.gm)
    for key, sources in reads.items():
        operands = [n for n in nodes[key].all_input_nodes if key_of(n) is not None]
        assert set(sources) >= {str(key_of(n)) for n in operands}
        if rule_of(nodes[key]).policy is Policy.VIEW and key_of(nodes[key].args[0]) is not None:
            assert sources[0] == str(key_of(nodes[key].args[0]))
    order = {key: i for i, key in enumerate(reads)}
    assert all(order[source] < order[key] for key, sources in reads.items() for source in sources)


def test_reading_goes_through_tuples_and_integers():
    def function(x, y):
        values, indices = torch.topk(x.sin(), 2)
        return y.cos()[indices + 1] * values.exp()

    (graph,) = capture(function, (torch.randn(6), torch.randn(6)), training=False)
    reads = formulate([(graph.gm, graph.parameters)], resolve("h800"), None).reads
    (index,) = [key for key in reads if key.split("|")[2] == "index"]
    assert sorted(k.split("|")[2] for k in reads[index]) == ["cos", "topk"]
    (exp,) = [key for key in reads if key.split("|")[2] == "exp"]
    assert [k.split("|")[2] for k in reads[exp]] == ["topk"]


# copies


def copies_of(program, value, **wanted):
    return [c for c in program.copies if c.value == value and all(getattr(c, k) == v for k, v in wanted.items())]


def test_readers_of_one_activation_share_its_copies(captured, formulated):
    (graph,) = captured("llama")
    program = formulated("llama", "h800")
    attention = "model.layers.1.self_attn"
    three = {f"{attention}.{p}_proj|fprop|linear|0" for p in "qkv"}
    gradients = {f"{attention}.{p}_proj|wgrad|linear|0" for p in "qkv"}
    (plain,) = [c for c in program.copies if three <= set(c.readers) and c.format == "bf16"]
    assert set(plain.readers) == three | gradients
    assert plain.readers[f"{attention}.q_proj|fprop|linear|0"] == ["bf16", "bf16->bf16"]
    (whole,) = copies_of(program, plain.value, format="fp8_e4m3", recipe="tensor")
    assert set(whole.readers) == three | gradients
    # rows of one product are columns of the other
    rows = copies_of(program, plain.value, format="fp8_e4m3", recipe="row")
    assert [set(c.readers) for c in rows] == [three, gradients]
    weights = {n.name for n in graph.parameters}
    assert not weights & {c.value for c in program.copies}


def test_what_copies_cost(captured, formulated):
    (graph,) = captured("llama")
    device, program = resolve("h800"), formulated("llama", "h800")
    bandwidth = device.achieved_bandwidth / 1e6  # bytes per microsecond
    nodes = by_key(graph.gm)
    gate = "model.layers.0.mlp.gate_proj|fprop|linear|0"
    (plain,) = [c for c in program.copies if gate in c.readers and c.format == "bf16"]
    numel = numel_of(value_of(nodes[plain.value]))
    # one more write of a value that is stored as traced, nothing where it is stored in bf16
    assert plain.time_us == {"fp32": pytest.approx(2 * numel / bandwidth)}
    (quantised,) = copies_of(program, plain.value, format="fp8_e4m3", recipe="1x128")[:1]
    assert quantised.time_us == {
        label: pytest.approx(1e6 * device.conversion_time(stored, "fp8_e4m3", "1x128", numel))
        for label, stored in (("fp32", "fp32"), ("->bf16", "bf16"))
    }
    assert program.candidates[plain.value][1].label == "->bf16"


def test_inputs_are_read_converted_and_written(captured, formulated):
    device, program = resolve("h800"), formulated("mlp", "h800")
    (graph,) = captured("mlp")
    (cast,) = [c for c in program.copies if c.format == "bf16" and "up|fprop|linear|0" in c.readers]
    (node,) = [n for n in graph.gm.graph.nodes if n.name == cast.value]
    assert node.op == "placeholder" and node not in graph.parameters
    expected = 1e6 * device.conversion_time("fp32", "bf16", "none", numel_of(value_of(node)))
    assert cast.time_us == {"": pytest.approx(expected)}
    assert not [c for c in program.copies if c.value == cast.value and c.format == "fp32"]


def best_label(program, key, **wanted):
    return next(
        c.label for c in program.allowed[key] if all(getattr(c, name) == value for name, value in wanted.items())
    )


def test_storage_that_readers_pay_for_does_not_go_with_readers_that_do_not(formulated):
    program = formulated("normed", "h800", False)
    (norm,) = [k for k, found in program.candidates.items() if found[-1].drift == 0.0 and len(found) == 2
               and found[-1].blocked is None and "norm" in k]  # fmt: skip
    head = "head|fprop|linear|0"
    labels = traced(program)
    wide = program.totals(labels).time
    narrow = program.totals(labels | {norm: "->bf16", head: "bf16"}).time
    mixed = program.totals(labels | {norm: "->bf16"}).time
    other = program.totals(labels | {norm: "->bf16", head: "fp16"}).time
    assert min(mixed, other) > wide + 5 * program.candidates[head][0].time_us
    assert narrow < program.totals(labels | {head: "bf16"}).time
    quantised = program.totals(labels | {norm: "->bf16", "up|fprop|linear|0": best_label(program, "up|fprop|linear|0")})
    assert quantised.time == pytest.approx(mixed)


@pytest.mark.parametrize("device", ["h800", "v100", "cpu-amx"])
@pytest.mark.parametrize("cost", ["roofline", "bits"])
def test_the_fastest_choice_of_a_small_model_is_consistent(device, cost):
    """By trying all choices: the fastest never pays for a forbidden combination and beats every uniform one."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    (graph,) = capture(model, (torch.randn(1024, 512),), training=False)
    few = {
        "fp32", "bf16", "->bf16", "bf16->bf16", "fp16:tensor/tensor", "->fp16", "fp16:tensor/tensor->fp16",
        "int8:row/row->bf16",
    }  # fmt: skip
    program = formulate([(graph.gm, graph.parameters)], resolve(device), lambda k, label, n: 1e-6, cost=cost)
    choices = [[c.label for c in found if c.label in few] for found in program.allowed.values()]
    stored = 0 if device == "cpu-amx" else 2  # CPUs store nothing narrower between the nodes of inference
    assert all(choices) and sum(len(c) > 1 for c in choices) >= 2 + stored
    times = {c: program.totals(dict(zip(program.keys, c, strict=True))).time for c in itertools.product(*choices)}
    fastest = min(times, key=times.__getitem__)
    best = program.totals(dict(zip(program.keys, fastest, strict=True)))
    assert best.time < 0.75 * program.totals(traced(program)).time
    assert best.cast_time < 0.5 * best.time
    by_key_ = dict(zip(program.keys, fastest, strict=True))
    gemms = {n: str(key_of(n)) for n in calls(graph.gm) if gemm_op(n)}
    assert all(by_key_[key] != "fp32" for key in gemms.values())


# bits


def test_bits_count_flops_times_bits(captured, formulated):
    (graph,) = captured("wide")
    program = formulated("wide", "h800", cost="bits")
    decisions = select_default(graph.gm, resolve("h800"), parameters=graph.parameters).decisions
    flops = {d.key: d.flops for d in decisions}
    nodes = by_key(graph.gm)
    for key, found in program.candidates.items():
        for c in found:
            bits = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16}.get(c.compute, get_format(c.compute).storage_bits)
            expected = flops[key] * bits / 16 / 1e9 if gemm_op(nodes[key]) else 0.0
            assert c.time_us == pytest.approx(expected)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.0])
@pytest.mark.parametrize("name", ["wide", "llama", "fused_qkv"])
def test_casts_eat_their_share_of_what_uniform_8_bits_save(name, share, captured):
    program = formulate(graphs_of(captured(name)), resolve("h800"), drift_of, cost="bits", cast_share=share)

    def uniform(arithmetic):
        labels = traced(program)
        for key, found in program.allowed.items():
            labels[key] = next((c.label for c in found if c.label.partition("->")[0] == arithmetic), labels[key])
        return program.totals(labels)

    eight = {c.label.partition("->")[0] for found in program.allowed.values() for c in found
             if get_format(c.compute).storage_bits == 8}  # fmt: skip
    assert eight
    times = {a: uniform(a) for a in eight}
    nodes = [f for f in program.allowed.values() if any(c.label.partition("->")[0] in eight for c in f)]
    gross = sum(found[0].time_us / 4 for found in nodes)  # 32 bits; 8 bits save 8 of them over 16
    casts = {a: t.cast_time for a, t in times.items()}
    assert any(cast == pytest.approx(share * gross, rel=1e-6, abs=1e-9) for cast in casts.values())
    assert {get_format(c.format).storage_bits for c in program.copies if set(c.time_us) != {"->bf16"}} <= {8}
    if not share:
        assert not any(casts.values())


# memory, scores, several graphs


def test_saved_bytes_are_those_of_forward_values_that_the_backward_pass_reads(captured, formulated):
    inference, training = formulated("llama", "h800", False), formulated("llama", "h800")
    assert not any(c.saved_bytes for found in inference.candidates.values() for c in found)
    (graph,) = captured("llama")
    nodes = by_key(graph.gm)
    saved = {key: {c.output: c.saved_bytes for c in found} for key, found in training.candidates.items()}
    assert not any(v for key, found in saved.items() if is_backward(nodes[key]) for v in found.values())
    gate = "model.layers.0.mlp.gate_proj|fprop|linear|0"
    numel = numel_of(value_of(nodes[gate]))
    assert saved[gate] == {"fp32": 4 * numel, "bf16": 2 * numel}
    assert saved["model.layers.0.self_attn.v_proj|fprop|linear|0"]["fp32"] > 0


def test_scores_give_drift_loss_and_kind(captured):
    graphs = graphs_of(captured("normed"))
    empty = Scores(dsmp="0", torch="0", source="x", fingerprint="0", drift="kl", loss=1.5, samples=1, draws=1, nodes={})
    program = formulate(graphs, resolve("h800"), empty)
    assert (program.drift, program.loss) == ("kl", 1.5)
    barred = [c for found in program.candidates.values() for c in found if c.blocked and c.blocked.code == "unscored"]
    assert barred and all(c.drift is None for c in barred)
    free = formulate(graphs, resolve("h800"), None)
    assert {c.drift for found in free.candidates.values() for c in found} == {None, 0.0}


def test_the_first_of_several_graphs_decides_a_key(captured):
    graphs = graphs_of(captured("mlp"))
    once, twice = (formulate(graphs * n, resolve("h800"), drift_of) for n in (1, 2))
    assert once == twice
    other = formulate(graphs + graphs_of(captured("normed")), resolve("h800"), drift_of)
    shared = set(once.keys)
    assert {k: other.candidates[k] for k in once.keys} == once.candidates
    assert set(other.keys) > shared


def test_a_symbolic_batch_is_priced_by_its_hint():
    x = torch.randn(6, 64)
    torch._dynamo.mark_dynamic(x, 0)
    model = zoo.build("mlp").model
    dynamic, static = (
        formulate(graphs_of(capture(model, (value,))), resolve("h800"), drift_of) for value in (x, torch.randn(6, 64))
    )
    gemms = [k for k in static.keys if "|linear|" in k]
    assert gemms and {k: dynamic.candidates[k] for k in gemms} == {k: static.candidates[k] for k in gemms}


def test_each_call_of_torchs_depthwise_convolution_costs_on_cpus():
    def times(groups, device, training=False):
        conv = nn.Conv2d(32, 32, 3, padding=1, groups=groups)
        program = formulate(
            graphs_of(capture(conv, (torch.randn(1, 32, 14, 14),), training=training)), resolve(device), drift_of
        )
        return {c.label: c.time_us for c in program.candidates["|fprop|conv|0"]}

    assert times(32, "cpu-avx2")["fp32"] > 50 > times(32, "cpu-avx2", training=True)["fp32"]
    assert times(8, "cpu-avx2")["fp32"] < 50
