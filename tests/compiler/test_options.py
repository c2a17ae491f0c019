"""Options of torch.compile: each mistake is one exception that says what was wrong, what is allowed and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from compiling import compiled
from torch import nn

import dsmp
from dsmp.compiler.backend import dsmp as backend
from dsmp.compiler.options import Options, parse_options
from dsmp.errors import (
    DsmpError,
    HardwareDataError,
    InvalidOptionError,
    InvalidWireFormatError,
    PlanHardwareError,
    PlanSchemaError,
    RuleError,
    UnknownHardwareError,
    UnknownOptionError,
    UnknownWireFormatError,
)
from dsmp.passes.wire_formats import WireFormat

X = torch.linspace(-1, 1, 6 * 32).reshape(6, 32)


@pytest.fixture(scope="module")
def plan() -> dsmp.PrecisionPlan:
    return dsmp.plan(zoo.build("normed").model, X, hardware="h800")


def refused(**options: Any) -> DsmpError:
    """The dsmp error of a compilation: Dynamo wraps it once, quoting class and text."""
    with pytest.raises(Exception) as caught:
        compiled(zoo.build("normed").model, **options)(X)
    error = caught.value.inner_exception
    assert isinstance(error, DsmpError)
    assert f"{type(error).__name__}: {error}" in str(caught.value)
    assert "\n" not in str(error) and not re.search(r"(?<!\.)\.\.(?!\.)", str(error))
    return error


def test_defaults() -> None:
    assert parse_options(None) == parse_options({}) == Options()
    assert Options().executor == "inductor" and not Options().strict and Options().plan is None


def test_all_options_together(plan: dsmp.PrecisionPlan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "p.json")
    found = parse_options(
        {"hardware": "h100", "plan": path, "rules": {"*": "bf16"}, "executor": "eager", "strict": True}
    )
    assert found.plan == plan and found.hardware == "h100" and found.strict and found.executor == "eager"
    assert [(r.match, r.format) for r in found.rules] == [("*", "bf16")]


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        (
            {"hardwere": "h800"},
            UnknownOptionError,
            "unknown option 'hardwere'. Did you mean 'hardware'",
        ),
        (
            {"budget_": 1},
            UnknownOptionError,
            "Known: budget, drift, executor, hardware",
        ),
        ({"hardware": "h8000"}, UnknownHardwareError, "Did you mean 'h800'"),
        ({"hardware": "h-8000"}, UnknownHardwareError, "Did you mean 'h800'"),
        ({"hardware": ""}, UnknownHardwareError, "`dsmp hardware list` shows all"),
        ({"hardware": 3}, InvalidOptionError, "option 'hardware' got 3; allowed: a device name"),
        ({"hardware_file": 3}, InvalidOptionError, "option 'hardware_file' got 3; allowed: the path of a TOML file"),
        ({"hardware_file": "absent.toml"}, HardwareDataError, "no such hardware data file"),
        ({"executor": "inductr"}, InvalidOptionError, "allowed: 'inductor' or 'eager'"),
        ({"executor": ["eager"]}, InvalidOptionError, "allowed: 'inductor' or 'eager'"),
        ({"executor": None}, InvalidOptionError, "allowed: 'inductor' or 'eager'"),
        ({"strict": 1}, InvalidOptionError, "allowed: True or False"),
        ({"wire": 8}, InvalidOptionError, "option 'wire' got 8; allowed: a format such as 'int8', or a dict"),
        ({"wire": {"*": 8}}, InvalidOptionError, "a dict such as {'*|all_reduce|*': 'int8'}"),
        ({"wire": "in8"}, UnknownWireFormatError, "unknown wire format 'in8'. Did you mean 'int8'"),
        ({"wire": {"*": "fp8_e4m3"}}, UnknownWireFormatError, "Did you mean 'fp8'"),
        ({"wire": "int8:2"}, InvalidWireFormatError, "blocks of 8 to 65536 values"),
        ({"wire": "topk:5"}, InvalidWireFormatError, "shares above 0 and up to 1"),
        ({"plan": 3}, InvalidOptionError, "a PrecisionPlan or the path"),
        ({"plan": {"nodes": []}}, InvalidOptionError, "a PrecisionPlan or the path"),
        ({"plan": "/nowhere/plan.json"}, PlanSchemaError, "/nowhere/plan.json: cannot be read"),
        ({"plan": "/"}, PlanSchemaError, "cannot be read"),
        ({"rules": "fp8"}, RuleError, "{glob: format}"),
        ({"rules": 3}, RuleError, "{glob: format}"),
        ({"rules": {"*": "fp7"}}, RuleError, "unknown numeric format 'fp7'. Did you mean 'fp"),
        ({"rules": {"*": None}}, RuleError, "field format"),
        ({"rules": {3: "fp32"}}, RuleError, "field match"),
        ({"rules": [{"match": "*", "fmt": "fp32"}]}, RuleError, "field format"),
        ({"rules": ["*"]}, RuleError, "{glob: format}"),
        ({"hardware": "v100", "rules": {"*": "bf16"}}, PlanHardwareError, "v100 cannot compute linear in bf16"),
        ({"hardware": "a100", "rules": {"up|*": "fp8_e4m3"}}, PlanHardwareError, "has no fp8_e4m3 units"),
        ({"hardware": "h800", "rules": {"*": "fp8_e4m3fnuz"}}, PlanHardwareError, "ocp flavour"),
    ],
)
def test_a_wrong_option_is_one_clear_error(options: dict[str, Any], kind: type[DsmpError], told: str) -> None:
    error = refused(**options)
    assert type(error) is kind
    assert told in str(error)


def test_wire_formats_by_glob() -> None:
    assert parse_options({"wire": "int8:64"}).wire == {"*": WireFormat("int8", block=64)}
    globs = {"*": "bf16", "*|all_reduce|*": "topk:0.05"}
    assert list(parse_options({"wire": globs}).wire.values()) == [WireFormat("bf16"), WireFormat("topk", keep=0.05)]


def test_options_that_are_no_dict() -> None:
    with pytest.raises(InvalidOptionError, match="a dict such as"):
        parse_options("hardware=h800")  # type: ignore[arg-type]


def test_the_same_errors_offline() -> None:
    model = zoo.build("normed").model
    with pytest.raises(UnknownHardwareError, match="h800"):
        dsmp.plan(model, X, hardware="h8000")
    with pytest.raises(RuleError, match="fp7"):
        dsmp.plan(model, X, hardware="h800", rules={"*": "fp7"})
    with pytest.raises(PlanHardwareError, match="has no fp8_e4m3 units"):
        dsmp.plan(model, X, hardware="a100", rules={"up|*": "fp8_e4m3"})


@pytest.mark.parametrize("name", ["H800", "h800 ", "H-800", "NVIDIA H800"])
def test_spellings_of_a_device_are_known_or_refused_with_a_hint(name: str) -> None:
    try:
        assert dsmp.resolve_hardware(name).id == "h800"
    except UnknownHardwareError as error:
        assert "h800" in str(error)


UP = "up|fprop|linear|0"
NORM = "norm|fprop|rsqrt|0"


def edited(
    plan: dsmp.PrecisionPlan, path: Path, change: Callable[[dict[str, Any], dict[str, dict[str, Any]]], None]
) -> str:
    """The plan's file after `change(whole, nodes by key)`."""
    data = json.loads(plan.to_json())
    change(data, {n["key"]: n for n in data["nodes"]})
    path.write_text(json.dumps(data))
    return str(path)


def fields(node: str, /, **values: Any) -> Callable[[dict[str, Any], dict[str, dict[str, Any]]], None]:
    return lambda _, nodes: nodes[node].update(values)


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (fields(UP, compute="fp7"), PlanSchemaError, ".compute: unknown numeric format 'fp7'"),
        (fields(UP, output="bf17"), PlanSchemaError, ".output: unknown numeric format 'bf17'. Did you mean 'bf16'"),
        (fields(UP, output="fp8_e4m3"), PlanSchemaError, ".output: results are stored in one of fp64, fp32, bf16"),
        (fields(NORM, output="fp8_e4m3"), PlanSchemaError, ".output: results are stored in one of"),
        (fields(NORM, output="tf32"), PlanSchemaError, ".output: results are stored in one of"),
        (fields(UP, recipe="1x999"), PlanSchemaError, ".recipe: unknown scaling recipe '1x999'"),
        (fields(UP, key="up"), PlanSchemaError, "'up' is no node key; the form is fqn|phase|op|ordinal"),
        (fields(UP, phase="forward"), PlanSchemaError, ".phase: Input should be 'fprop'"),
        (fields(UP, flops=-1), PlanSchemaError, ".flops:"),
        (fields(UP, colour="red"), PlanSchemaError, ".colour: Extra inputs are not permitted"),
        (fields(UP, key=NORM), PlanSchemaError, f"key '{NORM}' stands twice"),
        (lambda data, _: data.update(schema=1), PlanSchemaError, "field schema is 1; this version reads 2"),
        (lambda data, _: data.pop("schema"), PlanSchemaError, "field schema is None"),
        (lambda data, _: data.pop("nodes"), PlanSchemaError, "field nodes: Field required"),
        (lambda data, _: data.update(nodes=3), PlanSchemaError, "field nodes: "),
        (lambda data, _: data.update(rules=[{"match": "*"}]), PlanSchemaError, "field rules.0.format: Field required"),
        (lambda data, _: data.update(hardware="h8000"), UnknownHardwareError, "Did you mean 'h800'"),
        (fields(UP, compute="int4"), PlanHardwareError, f"{UP}: h800 cannot compute linear in int4"),
        (fields(UP, compute="fp8_e4m3fnuz"), PlanHardwareError, "ocp flavour"),
        (fields(UP, compute="fp8_e4m3fnuz", op="pointwise"), PlanHardwareError, "ocp flavour"),
        (fields(UP, accumulate="fp16"), PlanHardwareError, "does not accumulate bf16 in fp16"),
    ],
)
def test_a_malformed_plan_names_the_field(
    plan: dsmp.PrecisionPlan, tmp_path: Path, change: Callable[..., None], kind: type[DsmpError], told: str
) -> None:
    path = edited(plan, tmp_path / "p.json", change)
    error = refused(plan=path)
    assert type(error) is kind
    assert told in str(error)
    if kind is PlanSchemaError:
        assert path in str(error)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"schema": 2}', "\x00\x01", "[" * 100_000])
def test_a_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PlanSchemaError, match=r"p\.json"):
        parse_options({"plan": path})


def test_a_plan_for_a_device_that_cannot_follow_it(plan: dsmp.PrecisionPlan) -> None:
    error = refused(plan=plan, hardware="v100")
    assert type(error) is PlanHardwareError
    assert "v100 cannot compute linear in bf16" in str(error) and "fp16, fp32" in str(error)


def test_a_refusal_never_recommends_what_it_refuses() -> None:
    """A convolution cannot be fp8 although fp8 stands on the device's ladder."""
    case = zoo.build("convnet")
    with pytest.raises(PlanHardwareError, match=r"cannot compute conv in fp8_e4m3.*its ladder \(bf16, fp32\)"):
        dsmp.plan(case.model, case.args, hardware="h800", rules={"*|conv|*": "fp8_e4m3"})


def test_a_plan_for_a_device_that_can(plan: dsmp.PrecisionPlan) -> None:
    model = zoo.build("normed").model
    wanted = compiled(model, plan=plan)(X)
    torch._dynamo.reset()
    assert torch.equal(compiled(model, plan=plan, hardware="h100", strict=True)(X), wanted)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_modes_of_torch_compile_are_known(mode: str) -> None:
    """`mode` belongs to Inductor; the eager executor has no use for it and runs."""

    def eagerly(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return backend(gm, inputs, options={"executor": "eager"}, mode=mode)

    f = torch.compile(nn.Linear(4, 4), backend=eagerly)
    assert f(torch.randn(2, 4)).shape == (2, 4)
