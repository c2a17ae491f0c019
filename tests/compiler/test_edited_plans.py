"""A plan edited by hand either does what it says or is refused: nothing in it is silently ignored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsmp
from dsmp.compiler.pipeline import check_plan_hardware
from dsmp.errors import PlanFileError, PlanHardwareError, RuleError
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.passes.plan import parse_plan


@pytest.fixture(scope="module")
def plan() -> dsmp.PrecisionPlan:
    return dsmp.plan(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(4, 16), hardware="h800")


GEMM, KEPT = "0|fprop|linear|0", "1|fprop|erf|0"


@pytest.mark.parametrize(
    ("key", "change", "told"),
    [
        (KEPT, {"compute": "fp8_e4m3"}, "only GEMMs"),
        (KEPT, {"compute": "bf16"}, "set output"),
        (GEMM, {"compute": "fp16", "accumulate": "fp16", "recipe": "tensor"}, "accumulated in fp32"),
        (GEMM, {"compute": "fp32", "accumulate": "bf16"}, "accumulated in fp32"),
        (GEMM, {"compute": "tf32", "recipe": "1x128/128x128"}, "needs no scales"),
        (GEMM, {"compute": "int8", "accumulate": "int32", "recipe": "none"}, "row/row"),
        (GEMM, {"traced": "bf16", "compute": "int8", "accumulate": "int32", "recipe": "static/row"}, "written in bf16"),
        (GEMM, {"compute": "int8", "accumulate": "int32", "recipe": "dynamic/dynamic"}, "by dynamic/row"),
        (GEMM, {"compute": "fp8_e4m3fnuz", "recipe": "1x128/128x128"}, "flavour"),
    ],
)
def test_what_no_executor_would_do_is_refused(
    plan: dsmp.PrecisionPlan, key: str, change: dict[str, Any], told: str
) -> None:
    data = json.loads(plan.to_json())
    next(n for n in data["nodes"] if n["key"] == key).update(change)
    with pytest.raises(PlanHardwareError, match=told):
        check_plan_hardware(parse_plan(json.dumps(data)), resolve_hardware("h800"))


def test_an_untouched_plan_passes(plan: dsmp.PrecisionPlan) -> None:
    check_plan_hardware(plan, resolve_hardware("h800"))


def test_a_rule_that_only_meets_nodes_that_cannot_follow_it() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU()), torch.randn(4, 16)
    with pytest.raises(RuleError, match="can follow"):
        dsmp.plan(model, x, hardware="h800", rules={"*erf*": "fp8_e4m3"})


def test_compiling_warns_of_a_rule_without_a_node(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    options = {"hardware": "h800", "executor": "eager", "rules": {"*|nope|*": "fp8_e4m3"}}
    compiled = torch.compile(nn.Linear(4, 4), backend="dsmp", options=options)
    with caplog.at_level(logging.WARNING, logger="dsmp"), torch.no_grad():
        compiled(torch.randn(2, 4))
    assert "*|nope|*" in caplog.text


def test_a_link_stays_a_link(plan: dsmp.PrecisionPlan, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    plan.save(link)
    assert link.is_symlink()
    assert dsmp.load_plan(real).digest == plan.digest


@pytest.mark.parametrize("place", ["", "missing/plan.json"])
def test_a_place_that_holds_no_file(plan: dsmp.PrecisionPlan, tmp_path: Path, place: str) -> None:
    with pytest.raises(PlanFileError, match="existing folder"):
        plan.save(tmp_path / place)
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_rnn_is_named_when_there_is_no_graph() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.lstm(x)[0]
            return out

    with pytest.raises(dsmp.DsmpError, match=r"lstm is an RNN.*allow_rnn"):
        dsmp.plan(Tagger(), torch.randn(2, 3, 4), hardware="h800")


def test_rules_edited_into_the_file_take_effect_on_replay(plan: dsmp.PrecisionPlan, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(4, 16)
    data = json.loads(plan.to_json())
    data["rules"] = [{"match": "0|fprop|linear|*", "format": "fp8_e4m3"}]
    results = {}
    for name, text in (("plain", plan.to_json()), ("ruled", json.dumps(data))):
        torch._dynamo.reset()
        (tmp_path / f"{name}.json").write_text(text)
        options = {"plan": str(tmp_path / f"{name}.json"), "executor": "eager", "strict": True}
        results[name] = torch.compile(model, backend="dsmp", options=options)(x).detach()
    wanted = model(x).detach()
    errors = {name: float((r - wanted).norm() / wanted.norm()) for name, r in results.items()}
    assert 3 * errors["plain"] < errors["ruled"] < 0.1


def test_replaying_a_plan_for_another_device_is_said(
    plan: dsmp.PrecisionPlan, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    options = {"plan": plan, "hardware": "a100", "executor": "eager"}
    with caplog.at_level(logging.WARNING, logger="dsmp"):
        torch.compile(model, backend="dsmp", options=options)(torch.randn(4, 16))
    assert "made for h800" in caplog.text and "for a100" in caplog.text
