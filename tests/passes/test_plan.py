"""The plan file: round trip, stable text, comparison, atomic writing, and clear errors for every malformed file."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsmp.errors import PlanFileError, PlanSchemaError, RuleError
from dsmp.hardware_db import FORMATS, RECIPES
from dsmp.passes.keys import PHASES, NodeKey
from dsmp.passes.plan import (
    Budget,
    Decision,
    ModelInfo,
    PrecisionPlan,
    Prediction,
    Rule,
    fingerprint,
    load_plan,
    parse_plan,
    parse_rules,
)
from dsmp.passes.plan_fields import STORED_FORMATS, Reason
from dsmp.passes.program import Candidate, Copy, Program, Solution

FORMAT = st.sampled_from(sorted(FORMATS))
RECIPE = st.sampled_from(sorted(RECIPES)).flatmap(
    lambda a: st.sampled_from([a, *(f"{a}/{b}" for b in sorted(RECIPES))])
)
COUNT = st.integers(0, 2**60)
TIMES = st.dictionaries(FORMAT, st.floats(0, 1e12, allow_nan=False), max_size=3)
TEXT = st.text(max_size=20)


@st.composite
def decisions(draw, key=None):
    key = key or draw(
        st.builds(NodeKey, TEXT, st.sampled_from(PHASES), st.sampled_from(["linear", "add"]), st.integers(0, 99))
    )
    return Decision(
        key=str(key),
        op=key.op,
        aten=draw(TEXT),
        phase=key.phase,
        module=key.fqn,
        shapes=draw(st.lists(st.lists(COUNT, max_size=3), max_size=3)),
        flops=draw(COUNT),
        bytes=draw(COUNT),
        compute=draw(FORMAT),
        recipe=draw(RECIPE),
        accumulate=draw(FORMAT),
        output=draw(st.sampled_from(STORED_FORMATS)),
        reason=Reason(code=draw(TEXT), text=draw(TEXT)),
        time_us=draw(TIMES),
        sensitivity=draw(st.none() | TIMES),
    )


PREDICTIONS = st.builds(
    Prediction,
    time_us=st.floats(0, 1e9),
    time_us_fp32=st.floats(0, 1e9),
    saved_bytes=st.none() | COUNT,
    saved_bytes_fp32=st.none() | COUNT,
)
FINITE = st.floats(0, 1e9)
SOLUTIONS = st.builds(
    Solution, limit=st.none() | FINITE, memory_limit=st.none() | COUNT, time_us=FINITE, cast_us=FINITE, drift=FINITE,
    saved_bytes=COUNT, bound_us=FINITE, gap=FINITE, price_us_per_drift=FINITE, price_us_per_byte=FINITE,
    binding=st.lists(st.sampled_from(["error", "memory"]), unique=True), measured=st.none() | FINITE,
    ratio=st.none() | FINITE, p95=st.none() | FINITE, samples=COUNT, runs=COUNT,
)  # fmt: skip
CANDIDATES = st.builds(
    Candidate, label=TEXT, compute=FORMAT, recipe=RECIPE, accumulate=FORMAT, output=st.sampled_from(STORED_FORMATS),
    bytes=COUNT, time_us=FINITE, drift=st.none() | FINITE, measured=st.booleans(), saved_bytes=COUNT,
    blocked=st.none() | st.builds(Reason, code=TEXT, text=TEXT),
)  # fmt: skip


@st.composite
def programs(draw):
    keys = [f"layers.{i}|fprop|linear|0" for i in range(draw(st.integers(1, 3)))]
    ways = st.lists(CANDIDATES, min_size=1, max_size=3, unique_by=lambda c: c.label)
    candidates = {key: draw(ways) for key in keys}
    for found in candidates.values():  # one of them may be taken
        found[0] = found[0].model_copy(update={"blocked": None})
    some = st.lists(st.sampled_from(keys), max_size=3, unique=True)
    copies = st.builds(
        Copy, value=st.sampled_from([*keys, "x"]), format=FORMAT, recipe=RECIPE,
        time_us=st.dictionaries(TEXT, FINITE, max_size=2),
        readers=st.dictionaries(st.sampled_from(keys), st.lists(TEXT, max_size=2), max_size=2),
    )  # fmt: skip
    return Program(
        cost=draw(st.sampled_from(["roofline", "bits"])), loss=draw(st.none() | FINITE),
        drift=draw(st.sampled_from(["kl", "bernoulli", "l2", "gradients"])), candidates=candidates,
        copies=draw(st.lists(copies, max_size=2)), ties=draw(st.lists(some, max_size=2)),
        reads=draw(st.dictionaries(st.sampled_from(keys), some, max_size=2)),
    )  # fmt: skip


PLANS = st.builds(
    PrecisionPlan,
    dsmp=TEXT,
    torch=TEXT,
    hardware=TEXT,
    model=st.builds(ModelInfo, source=TEXT, fingerprint=TEXT, nodes=COUNT),
    budget=st.none() | st.builds(Budget, amount=st.none() | st.floats(0, 1), saved_bytes=st.none() | COUNT),
    solution=st.none() | SOLUTIONS,
    program=st.none() | programs(),
    prediction=PREDICTIONS,
    rules=st.lists(st.builds(Rule, match=TEXT, format=FORMAT), max_size=3),
    nodes=st.lists(decisions(), max_size=4, unique_by=lambda d: d.key),
)


def make(key="a.b|fprop|linear|0", compute="bf16", **changes):
    parsed = NodeKey.parse(key)
    values = {
        "key": key,
        "op": parsed.op,
        "aten": "aten.mm.default",
        "phase": parsed.phase,
        "module": parsed.fqn,
        "shapes": [[2, 3], [3, 4], [2, 4]],
        "flops": 48,
        "bytes": 100,
        "compute": compute,
        "accumulate": "fp32",
        "output": "bf16",
        "reason": Reason(code="tier", text="a reason"),
        "time_us": {"bf16": 1.5, "fp32": 2.5},
    }
    return Decision(**{**values, **changes})


def plan_of(*nodes, **changes):
    values = {
        "dsmp": "0.1",
        "torch": "2.14",
        "hardware": "h800",
        "model": ModelInfo(source="Net", fingerprint="f00", nodes=len(nodes)),
        "prediction": Prediction(time_us=10, time_us_fp32=25),
        "nodes": list(nodes),
    }
    return PrecisionPlan(**{**values, **changes})


# round trip


@settings(deadline=None)
@given(PLANS)
def test_plans_survive_their_text(plan):
    text = plan.to_json()
    again = parse_plan(text)
    assert again == plan
    assert again.to_json() == text
    assert again.digest == plan.digest


def test_the_file_holds_one_node_a_line_in_order():
    keys = ["b|fprop|linear|0", "a|wgrad|linear|0", "c|bwd|add|3"]
    text = plan_of(*(make(k) for k in keys)).to_json()
    lines = [line for line in text.splitlines() if '"key"' in line]
    assert [json.loads(line.rstrip(","))["key"] for line in lines] == keys
    head = json.loads(text)
    assert next(iter(head)) == "schema" and head["schema"] == 2 and list(head)[-1] == "nodes"
    assert text.endswith("}\n")


def test_an_empty_plan_is_json():
    assert json.loads(plan_of().to_json())["nodes"] == []


def test_text_outside_of_ascii_stays_readable():
    assert "größe 日本" in plan_of(make(reason=Reason(code="c", text="größe 日本"))).to_json()


def test_the_digest_is_that_of_the_decisions():
    plan = plan_of(make(), make("c|fprop|linear|0"))
    assert plan.digest == plan_of(*plan.nodes, torch="9.9", prediction=Prediction(time_us=1, time_us_fp32=1)).digest
    assert plan.digest == plan_of(make(reason=Reason(code="x", text="y")), make("c|fprop|linear|0")).digest
    others = [
        plan_of(make(compute="fp16"), plan.nodes[1]),
        plan_of(make(output="fp32"), plan.nodes[1]),
        plan_of(make(recipe="tensor"), plan.nodes[1]),
        plan_of(make(accumulate="fp64"), plan.nodes[1]),
        plan_of(make("d|fprop|linear|0"), plan.nodes[1]),
        plan_of(plan.nodes[0]),
        plan_of(*plan.nodes, hardware="a100"),
    ]
    assert len({plan.digest, *(p.digest for p in others)}) == 1 + len(others)


def test_reading_a_plan():
    plan = plan_of(
        make(flops=300),
        make("c|fprop|linear|0", compute="fp8_e4m3", flops=100),
        make("d|fprop|add|0", compute="fp32", op="pointwise"),
    )
    assert len(plan) == 3 and [d.key for d in plan] == list(plan.by_key)
    assert plan.by_key["c|fprop|linear|0"].compute == "fp8_e4m3"
    for text in ("Net on h800", "3 nodes", "bf16 75.0%", "fp8_e4m3 25.0%", "2.50x as fast as fp32"):
        assert text in repr(plan), repr(plan)
    assert "GEMM FLOPs none" in repr(plan_of())


def test_decisions_are_values():
    with pytest.raises(ValueError, match="frozen"):
        make().compute = "fp32"


# comparison


def test_differences():
    a = plan_of(make("x|fprop|linear|0"), make("y|fprop|linear|0"), make("z|fprop|linear|0"))
    b = plan_of(
        make("w|fprop|linear|0"),
        make("y|fprop|linear|0", compute="fp8_e4m3", recipe="1x128/128x128"),
        make("x|fprop|linear|0", reason=Reason(code="other", text="other"), time_us={}),
    )
    found = a.diff(b)
    assert [f.key for f in found] == ["y|fprop|linear|0", "z|fprop|linear|0", "w|fprop|linear|0"]
    assert found[1].after is None and found[2].before is None
    assert str(found[0]) == "y|fprop|linear|0: bf16 -> bf16  =>  fp8_e4m3 1x128/128x128 -> bf16"
    assert str(found[1]).endswith("=>  absent") and "absent  =>" in str(found[2])
    assert a.diff(a) == []
    for change in ({"output": "fp32"}, {"accumulate": "fp64"}, {"recipe": "tensor"}):
        assert len(plan_of(make()).diff(plan_of(make(**change)))) == 1


# files


def test_save_and_load(tmp_path):
    plan = plan_of(make(), rules=[Rule(match="*", format="bf16")])
    path = plan.save(tmp_path / "plan.json")
    assert path == tmp_path / "plan.json" and load_plan(path) == plan == load_plan(str(path))
    assert os.listdir(tmp_path) == ["plan.json"], "no temporary file is left"


def test_saving_keeps_the_files_permissions(tmp_path):
    path = tmp_path / "plan.json"
    plan_of().save(path)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    plan_of(make()).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_failing_write_leaves_the_old_file(step, tmp_path, monkeypatch):
    path = plan_of(make()).save(tmp_path / "plan.json")
    before = path.read_bytes()

    def fail(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(PlanFileError, match="no space left"):
        plan_of().save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_plan_that_has_no_json_form_leaves_the_old_file(tmp_path, monkeypatch):
    path = plan_of(make()).save(tmp_path / "plan.json")

    def interrupted(_self):
        raise KeyboardInterrupt

    monkeypatch.setattr(PrecisionPlan, "to_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_of().save(path)
    monkeypatch.undo()
    assert load_plan(path) == plan_of(make()) and os.listdir(tmp_path) == ["plan.json"]


# errors


def document(**changes):
    data = json.loads(plan_of(make()).to_json())
    return {**data, **changes}


def node(**changes):
    data = json.loads(plan_of(make()).to_json())["nodes"][0]
    return {k: v for k, v in {**data, **changes}.items() if v != "absent"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no JSON", "dsmp plan -o"]),
        ("{", ["no JSON"]),
        ("not json", ["no JSON"]),
        ("[" * 100_000, ["no JSON"]),
        ('{"schema": ' + "1" * 5000 + "}", ["no JSON"]),
        ("[]", ["a list where an object with a 'nodes' list belongs"]),
        ("3", ["a int where an object"]),
        ("null", ["a NoneType where an object"]),
        ("{}", ["field schema is None; this version reads 2"]),
        (json.dumps(document(schema=1)), ["field schema is 1; this version reads 2"]),
        (json.dumps(document(schema="2")), ["field schema is '2'"]),
        (json.dumps(document(schema=[2])), ["field schema is [2]"]),
        (json.dumps(document(colour="red")), ["field colour: Extra inputs are not permitted"]),
        (json.dumps({k: v for k, v in document().items() if k != "hardware"}), ["field hardware: Field required"]),
        (json.dumps(document(nodes={})), ["field nodes: Input should be a valid list"]),
        (json.dumps(document(nodes=[3])), ["field nodes.0"]),
        (json.dumps(document(nodes=[node(colour="red")])), ["field nodes.0.colour: Extra inputs"]),
        (
            json.dumps(document(nodes=[node(compute="fp7")])),
            ["field nodes.0.compute", "'fp7'", "Known: bf16", "fp8_e4m3"],
        ),
        (json.dumps(document(nodes=[node(compute="fp8e4m3")])), ["Did you mean 'fp8_e4m3'"]),
        (json.dumps(document(nodes=[node(output="fp8_e4m3")])), ["field nodes.0.output", "fp64, fp32, bf16, fp16"]),
        (
            json.dumps(document(nodes=[node(recipe="1x64")])),
            ["field nodes.0.recipe", "'1x64'", "Known: 128x128, 1x128"],
        ),
        (json.dumps(document(nodes=[node(recipe="a/b/c")])), ["field nodes.0.recipe"]),
        (
            json.dumps(document(nodes=[node(phase="forward")])),
            ["field nodes.0.phase", "'fprop', 'dgrad', 'wgrad' or 'bwd'"],
        ),
        (json.dumps(document(nodes=[node(key="a.b|linear")])), ["field nodes.0.key", "fqn|phase|op|ordinal"]),
        (json.dumps(document(nodes=[node(flops=-1)])), ["field nodes.0.flops"]),
        (json.dumps(document(nodes=[node(flops="many")])), ["field nodes.0.flops"]),
        (json.dumps(document(nodes=[node(time_us={"fp7": 1.0})])), ["field nodes.0.time_us.fp7"]),
        (json.dumps(document(nodes=[node(time_us={"bf16": float("nan")})])), ["field nodes.0.time_us.bf16", "finite"]),
        (json.dumps(document(nodes=[node(reason="because")])), ["field nodes.0.reason"]),
        (json.dumps(document(nodes=[node(output="absent")])), ["field nodes.0.output: Field required"]),
        (json.dumps(document(rules=[{"match": "*", "format": "half"}])), ["field rules.0.format", "'half'"]),
        (json.dumps(document(nodes=[node(), node(compute="fp32")])), ["key 'a.b|fprop|linear|0' stands twice"]),
        (json.dumps(document(nodes=[node(flops=-1), node(compute="fp7")])), ["; 1 more"]),
    ],
)
def test_malformed_plans(text, words, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanSchemaError) as error:
        load_plan(path)
    message = str(error.value)
    assert str(path) in message and all(w in message for w in words), message
    assert "\n" not in message and "pydantic" not in message


def test_what_is_no_file(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path, "bad\0name.json"):
        with pytest.raises(PlanSchemaError, match="cannot be read"):
            load_plan(path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanSchemaError, match="cannot be read"):
        load_plan(binary)


# rules


def test_rules_from_what_people_write():
    expected = [Rule(match="a|*", format="bf16"), Rule(match="*", format="fp32")]
    assert parse_rules({"a|*": "bf16", "*": "fp32"}) == expected
    assert parse_rules([{"match": "a|*", "format": "bf16"}, {"match": "*", "format": "fp32"}]) == expected
    assert parse_rules(expected) == parse_rules(iter(expected)) == expected
    assert parse_rules(None) == parse_rules({}) == parse_rules([]) == []


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("*|linear|*", ["are text", "{glob: format}"]),
        ({"*": "half"}, ["field format", "'half'", "Known: bf16"]),
        ({"*": None}, ["field format"]),
        ({3: "bf16"}, ["field match"]),
        ([{"match": "*"}], ["field format: Field required"]),
        ([{"match": "*", "format": "bf16", "phase": "fprop"}], ["field phase: Extra inputs"]),
        ([("*", "bf16")], ["{glob: format}"]),
        (["*"], ["{glob: format}"]),
        (7, ["{glob: format}"]),
    ],
)
def test_malformed_rules(rules, words):
    with pytest.raises(RuleError) as error:
        parse_rules(rules)
    assert all(w in str(error.value) for w in words), str(error.value)


def test_rules_are_globs_over_whole_keys_with_case():
    key = "model.layers.10.mlp.up_proj|fprop|linear|0"
    for match in (
        "*",
        "*|linear|*",
        "model.layers.*.mlp.*",
        "model.layers.1?.mlp.up_proj|fprop|linear|0",
        "*up_proj|[fd]*",
    ):
        assert Rule(match=match, format="bf16").applies(key), match
    for match in ("model.layers.10.mlp.up_proj", "*|Linear|*", "*|dgrad|*", "layers.*"):
        assert not Rule(match=match, format="bf16").applies(key), match


def test_fingerprints():
    entries = [("a|fprop|linear|0", "aten.mm.default", [[2, 3]]), ("b|fprop|add|0", "aten.add.Tensor", [[4]])]
    assert fingerprint(entries) == fingerprint(reversed(entries))
    changed = [
        [("a|fprop|linear|1", *entries[0][1:]), entries[1]],
        [("a|fprop|linear|0", "aten.bmm.default", [[2, 3]]), entries[1]],
        [("a|fprop|linear|0", "aten.mm.default", [[2, 4]]), entries[1]],
        entries[:1],
    ]
    assert len({fingerprint(e) for e in (entries, *changed)}) == 5
