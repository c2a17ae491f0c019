"""A budget on the running CPU chooses no format that is only simulated there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsmp
import dsmp.compiler.simulated
from dsmp.compiler.simulated import is_running_cpu
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.passes.explain import explain
from dsmp.passes.plan import PrecisionPlan

AMX = "cpu-amx"  # has bf16 and int8 units


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 256, generator=generator) for _ in range(2)]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of the CPU that this process is taken to run on."""
    original = resolve_hardware

    def resolve(name: str | None = None, *files: Any) -> Any:
        return original(AMX if name == "cpu" else name, *files)

    monkeypatch.setattr(dsmp.compiler.simulated, "resolve_hardware", resolve)
    return AMX


def plan(hardware: str, **options: Any) -> PrecisionPlan:
    return dsmp.plan(
        model(), hardware=hardware, training=False, cost="bits", calibration=batches(), budget="20%", **options
    )


def computed(made: PrecisionPlan) -> set[str]:
    return {d.compute for d in made if d.op == "linear"}


def native(made: PrecisionPlan) -> bool:
    """Whether every linear is one that a CPU multiplies: int8 in static or dynamic steps."""
    linears = [d for d in made if d.op == "linear"]
    return all(d.compute in ("fp32", "bf16", "fp16") or d.recipe in ("static/row", "dynamic/row") for d in linears)


def test_the_running_cpu_takes_only_what_it_multiplies_natively(running: str) -> None:
    made = plan(running)
    assert native(made)
    assert made.program is not None
    codes = {c.blocked.code for found in made.program.candidates.values() for c in found if c.blocked}
    assert "simulated" in codes
    linear = next(d for d in made if d.op == "linear")
    constraint = explain(made, linear, want="int8:row/row").constraint
    assert constraint is not None and constraint.code == "simulated"
    assert f"on {running} dsmp only simulates it" in constraint.text
    assert native(made.solve(budget=0.9))


def test_other_devices_are_studied_in_full(running: str) -> None:
    assert computed(plan("h800")) & {"int8", "fp8_e4m3"}
    assert not is_running_cpu(resolve_hardware("cpu-avx2")) and not is_running_cpu(resolve_hardware("h800"))
    assert is_running_cpu(resolve_hardware(running))


def test_a_rule_may_ask_for_it(running: str) -> None:
    made = plan(running, rules={"2|fprop|linear|0": "int8"})
    assert made.by_key["2|fprop|linear|0"].compute == "int8"
    assert made.by_key["0|fprop|linear|0"].compute == "int8"  # of the same shape: tied
    assert made.by_key["4|fprop|linear|0"].compute != "int8"


def test_without_the_device_at_hand_all_of_int8_may_be_chosen() -> None:
    if is_running_cpu(resolve_hardware(AMX)):
        pytest.skip("this is the device")
    made = plan(AMX)
    assert "int8" in computed(made) and made.program is not None
    rows = [c for found in made.program.candidates.values() for c in found if c.label == "int8:row/row"]
    assert {c.blocked.code for c in rows if c.blocked} <= {"veto-head", "veto-ends", "recipe"}


def test_plans_from_scores_keep_to_it(running: str) -> None:
    scores = dsmp.measure_scores(model(), batches(), hardware=running, training=False)
    made = dsmp.plan(model(), batches()[0], hardware=running, training=False, cost="bits", scores=scores, budget="20%")
    assert native(made)


def test_compiling_with_a_budget_simulates_nothing() -> None:
    compiled = torch.compile(model(), backend="dsmp", options={"budget": 0.2, "executor": "eager"})
    with torch.no_grad():
        compiled(batches()[0])
    (made,) = [dsmp.plan_of(compiled)]
    assert made is not None
    assert native(made)
