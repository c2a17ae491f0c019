"""Rules that store the weights of linears narrow, without any calibration."""

from __future__ import annotations

import pytest
import torch
from narrow_plans import Mlp, needs_operators

import dsmp
from dsmp.errors import PlanHardwareError, RuleError

RULES = {"*|linear|*": "int8 wide/row", "down|*": "int4 wide/1x128"}
ERRORS = {
    "fp16 wide/none": 1e-3, "int8 wide/row": 1e-2, "int4 wide/1x128": 0.15, "int8 dynamic/row": 3e-2, "int8": 3e-2,
}  # fmt: skip


def _example() -> tuple[Mlp, torch.Tensor]:
    torch.manual_seed(0)
    return Mlp(128).eval(), torch.randn(4, 128)


@needs_operators
@pytest.mark.parametrize("text", list(ERRORS))
def test_weights_are_stored_as_a_rule_asks(text):
    model, x = _example()
    compiled = torch.compile(
        model, backend="dsmp", options={"rules": {"*|linear|*": text}, "executor": "eager", "strict": True}
    )
    with torch.no_grad():
        got, exact = compiled(x), model(x)
    error = float((got - exact).norm() / exact.norm())
    assert ERRORS[text] / 100 < error < ERRORS[text]
    entries = [e for e in dsmp.audit(compiled) if e.op == "linear"]
    assert [e.implementation for e in entries] == ["cpu_narrow_linear" if "wide" in text else "cpu_int8_dynamic"] * 2


def test_int8_alone_is_what_the_device_has_kernels_for():
    model, x = _example()
    for hardware, training, recipe in (
        ("cpu", False, "dynamic/row"),
        ("cpu", True, "row/row"),
        ("a100", False, "row/row"),
    ):
        plan = dsmp.plan(model, (x,), training=training, hardware=hardware, rules={"*|fprop|linear|*": "int8"})
        found = {d.recipe.replace("row/row", "row") for d in plan if d.op == "linear" and d.phase == "fprop"}
        assert found == {recipe.replace("row/row", "row")}


@needs_operators
def test_a_plan_with_rules_replays_and_releases(tmp_path):
    model, x = _example()
    plan = dsmp.plan(model, (x,), training=False, hardware="cpu", rules=RULES)
    formats = {d.key: (d.compute, d.recipe, d.output) for d in plan if d.op == "linear"}
    assert formats == {
        "up|fprop|linear|0": ("int8", "wide/row", "fp32"), "down|fprop|linear|0": ("int4", "wide/1x128", "fp32"),
    }  # fmt: skip
    plan.save(tmp_path / "plan.json")
    compiled = torch.compile(model, backend="dsmp", options={"plan": tmp_path / "plan.json", "executor": "eager"})
    with torch.no_grad():
        before = compiled(x)
        torch._dynamo.reset()
        assert dsmp.release_weights(model, plan).released == {"up": "int8 wide/row", "down": "int4 wide/1x128"}
        compiled = torch.compile(model, backend="dsmp", options={"plan": plan, "executor": "eager"})
        assert torch.equal(compiled(x), before)


def test_rules_choose_among_what_was_measured():
    model, x = _example()
    plan = dsmp.plan(
        model, (x,), training=False, hardware="cpu", calibration=[(x,)], budget="1e-9", rules={"up|*": "fp16 wide/none"}
    )
    assert [(d.compute, d.recipe) for d in plan if d.op == "linear"] == [("fp16", "wide/none"), ("fp32", "none")]
    with pytest.raises(RuleError, match="recipes with wide or dynamic for linears"):
        plan.solve(budget=0.5, rules={"norm|*": "int8 wide/row"})
    again = plan.solve(budget=0.5, rules={"*|linear|*": "int8 wide/row"})
    assert [(d.compute, d.recipe) for d in again if d.op == "linear"] == [("int8", "wide/row")] * 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"training": True}, r"up\|fprop\|linear\|0: int8 wide/row stores weights for inference"),
        ({"hardware": "h800"}, "has no linears with int8 weights alone"),
        ({"hardware": "h800", "rule": "int8 dynamic/row"}, "int8 dynamic/row is for CPUs, which h800 is not"),
        ({"training": True, "rule": "int8 dynamic/row"}, "stores weights for inference"),
        ({"dtype": torch.bfloat16}, "written in bf16"),
    ],
)
def test_narrow_weights_where_they_cannot_be(settings, why):
    model, x = _example()
    dtype = settings.get("dtype", torch.float32)
    with pytest.raises(PlanHardwareError, match=why):
        dsmp.plan(
            model.to(dtype), (x.to(dtype),), training=settings.get("training", False),
            hardware=settings.get("hardware", "cpu"), rules={"*": settings.get("rule", "int8 wide/row")},
        )  # fmt: skip


class Scaled(torch.nn.Module):
    """A product by a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x, factor):
        return torch.nn.functional.linear(x, self.weight * factor)


def test_a_weight_that_is_computed_is_not_stored_narrow():
    with pytest.raises((RuleError, PlanHardwareError), match="wide"):
        dsmp.plan(
            Scaled(), (torch.randn(4, 8), torch.randn(())), training=False, hardware="cpu",
            rules={"*": "int8 wide/row"},
        )  # fmt: skip
