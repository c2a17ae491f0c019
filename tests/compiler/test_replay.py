"""A plan made offline replays: nothing missing, nothing decided otherwise, and every departure from it is said."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from compiling import GEMMS, Replay, Seen, compiled, gemms_of, relative
from torch import nn

import dsmp
from dsmp.codegen.audit import Ran
from dsmp.errors import PlanMismatchError, RuleError
from dsmp.passes.plan import PrecisionPlan, load_plan

every_model = pytest.mark.parametrize("name", zoo.EVERY_MODEL)


@every_model
def test_keys_offline_are_the_keys_at_run_time(name: str, replayed: Callable[[str], Replay]) -> None:
    found = replayed(name)
    assert found.keys == found.offline
    assert all(len(set(g)) == len(g) for g in found.keys), "a key stands twice"


@every_model
def test_every_backward_product_knows_its_forward(name: str, replayed: Callable[[str], Replay]) -> None:
    found = replayed(name)
    assert found.unmatched == []
    for graph in found.keys:
        phases = Counter(k.split("|")[1] for k in gemms_of(graph))
        # A model's first layers read inputs without gradients; attention is one backward node.
        assert phases["fprop"] - 3 <= phases["dgrad"] + phases["bwd"] <= phases["fprop"]
        assert phases["wgrad"] + phases["bwd"] >= phases["fprop"] - 3


@every_model
def test_a_strict_replay_finds_every_node_in_the_plan(name: str, replayed: Callable[[str], Replay]) -> None:
    found = replayed(name)
    assert found.warnings == []
    assert {k for g in found.keys for k in g} == set(found.plan.by_key)
    assert any(d.compute == "bf16" for d in found.plan)


@every_model
def test_a_replay_decides_what_a_run_without_plan_decides(name: str, replayed: Callable[[str], Replay]) -> None:
    assert replayed(name).other == []


@every_model
def test_the_audit_lists_every_planned_node(name: str, replayed: Callable[[str], Replay]) -> None:
    found = replayed(name)
    assert set(found.audit.by_key) == set(found.plan.by_key)
    assert found.audit.fallbacks == []
    for decision in found.plan:
        entry = found.audit.by_key[decision.key]
        assert (entry.compute, entry.recipe, entry.output) == (decision.compute, decision.recipe, decision.output)
        # this machine's CPU is no H800: what is planned narrow is simulated, the rest runs as traced
        narrow = decision.op in GEMMS and decision.compute != decision.traced
        assert (entry.ran is Ran.SIMULATED) == narrow
        assert not narrow or "h800" in entry.reason


# on a small model


@pytest.fixture
def model() -> nn.Module:
    return zoo.build("normed").model


X = torch.linspace(-1, 1, 6 * 32).reshape(6, 32)


def save(plan: PrecisionPlan, path: Path, **changes: dict[str, Any]) -> str:
    """The plan as a file, some of its nodes edited: key -> fields."""
    data = json.loads(plan.to_json())
    for key, fields in changes.items():
        next(n for n in data["nodes"] if n["key"] == key).update(fields)
    path.write_text(json.dumps(data))
    return str(path)


def test_a_plan_object_and_its_file_give_the_same_numbers(model: nn.Module, tmp_path: Path) -> None:
    plan = dsmp.plan(model, X, hardware="h800")
    direct = compiled(model, hardware="h800")(X)
    assert torch.equal(compiled(model, plan=plan, strict=True)(X), direct)
    assert torch.equal(compiled(model, plan=plan.save(tmp_path / "p.json"), strict=True)(X), direct)
    assert load_plan(tmp_path / "p.json") == plan


def test_an_edited_node_is_obeyed(model: nn.Module, tmp_path: Path) -> None:
    plan = dsmp.plan(model, X, hardware="cpu-avx2")
    exact = model(X)
    assert relative([compiled(model, plan=plan)(X)], [exact]) < 1e-6
    edited = save(plan, tmp_path / "p.json", **{"up|fprop|linear|0": {"compute": "bf16", "output": "bf16"}})
    torch._dynamo.reset()
    found = compiled(model, plan=edited, hardware="h800", strict=True)(X)
    assert 1e-5 < relative([found], [exact]) < 2e-2


def test_an_inference_plan_serves_inference(model: nn.Module) -> None:
    plan = dsmp.plan(model, X, hardware="h800", training=False)
    with torch.no_grad():
        assert relative([compiled(model, plan=plan, strict=True)(X)], [model(X)]) < 2e-2


def test_a_training_plan_serves_inference_too(model: nn.Module) -> None:
    """The forward keys of a joint graph and of an inference graph are the same for products."""
    plan = dsmp.plan(model, X, hardware="h800")
    with torch.no_grad():
        found = compiled(model, plan=plan)(X)
    assert torch.equal(found, compiled(model, plan=plan)(X).detach())


def test_another_batch_size_replays(model: nn.Module) -> None:
    plan = dsmp.plan(model, X, hardware="h800")
    f = compiled(model, plan=plan, strict=True)
    for size in (6, 3, 17):
        value = torch.randn(size, 32)
        out = f(value)
        out.sum().backward()
        assert relative([out], [model(value)]) < 2e-2


def test_strict_refuses_the_plan_of_another_model(model: nn.Module) -> None:
    plan = dsmp.plan(model, X, hardware="h800")
    other = nn.Linear(32, 4)
    with pytest.raises(Exception, match="not in the plan for Normed") as caught:
        compiled(other, plan=plan, strict=True)(X)
    assert isinstance(caught.value.inner_exception, PlanMismatchError)
    assert "|fprop|linear|0" in str(caught.value)


def test_without_strict_another_model_runs_as_traced_and_is_told(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    plan = dsmp.plan(model, X, hardware="h800")
    other = nn.Linear(32, 4)
    with caplog.at_level(logging.WARNING, logger="dsmp"):
        found = compiled(other, plan=plan)(X)
    assert relative([found], [other(X)]) < 1e-6
    told = [r.getMessage() for r in caplog.records if r.name == "dsmp"]
    assert len(told) == 1 and "not in the plan for Normed" in told[0] and "|fprop|linear|0" in told[0]


def test_a_plan_that_lacks_one_node_names_it(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    plan = dsmp.plan(model, X, hardware="h800")
    missing = "down|dgrad|linear|0"
    holed = plan.model_copy(update={"nodes": [d for d in plan if d.key != missing]})
    with pytest.raises(Exception, match=r"1 GEMMs? .*down\|dgrad\|linear\|0"):
        compiled(model, plan=holed, strict=True)(X)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, logger="dsmp"):
        compiled(model, plan=holed)(X).sum().backward()
    assert [missing in r.getMessage() for r in caplog.records if r.name == "dsmp"] == [True]


# rules


def formats(seen_plan: PrecisionPlan, op: str = "linear") -> dict[str, str]:
    return {d.key: d.compute for d in seen_plan if d.op == op}


def test_the_last_rule_that_matches_wins(model: nn.Module) -> None:
    plan = dsmp.plan(model, X, hardware="h800", rules={"*|linear|*": "fp8_e4m3", "up|*": "fp32", "up|wgrad|*": "bf16"})
    found = formats(plan)
    assert found["up|fprop|linear|0"] == "fp32" and found["up|wgrad|linear|0"] == "bf16"
    assert found["down|fprop|linear|0"] == found["head|dgrad|linear|0"] == "fp8_e4m3", "rules beat vetoes"
    assert plan.by_key["up|fprop|linear|0"].reason.code == "rule"
    assert "up|*" in plan.by_key["up|fprop|linear|0"].reason.text


def test_rules_in_the_options_act_as_rules_in_the_plan(model: nn.Module) -> None:
    rules = {"*|linear|*": "fp8_e4m3", "up|*": "fp32"}
    planned = compiled(model, plan=dsmp.plan(model, X, hardware="h800", rules=rules), strict=True)(X)
    torch._dynamo.reset()
    assert torch.equal(compiled(model, hardware="h800", rules=rules)(X), planned)
    torch._dynamo.reset()
    as_list = [{"match": m, "format": f} for m, f in rules.items()]
    assert torch.equal(compiled(model, hardware="h800", rules=as_list)(X), planned)


def test_rules_change_a_replayed_plan_only_where_they_match(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dsmp.plan(model, X, hardware="h800", rules={"up|fprop|*": "fp8_e4m3"})
    used: list[dict[str, str]] = []
    original = dsmp.compiler.backend.apply_decisions

    def look(gm: torch.fx.GraphModule, decisions: Any, **kwargs: Any) -> Any:
        used.append({k: d.compute for k, d in decisions.items() if d.op == "linear"})
        return original(gm, decisions, **kwargs)

    monkeypatch.setattr(dsmp.compiler.backend, "apply_decisions", look)
    compiled(model, plan=plan, rules={"down|*|linear|*": "fp32"}, strict=True)(X).sum().backward()
    (found,) = used
    assert found == {**formats(plan), **{k: "fp32" for k in formats(plan) if k.startswith("down|")}}
    assert found["up|fprop|linear|0"] == "fp8_e4m3"


def test_a_rule_that_matches_nothing_is_an_error(model: nn.Module) -> None:
    with pytest.raises(RuleError, match=r"upp\|\*.* matches no node.*\|fprop\|"):
        dsmp.plan(model, X, hardware="h800", rules={"upp|*": "fp32"})


def test_rules_meet_both_sides_of_a_graph_break(seen: Seen) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    model = Broken()
    exact, value = [], torch.randn(6, 32)
    with torch.no_grad():
        middle = model.a(value)
        exact = model.b(middle)
        plan = dsmp.plan(model, value, hardware="h800", training=False, rules={"*": "fp32", "b|*linear*": "bf16"})
        assert formats(plan) == {"a|fprop|linear|0": "fp32", "b|fprop|linear|0": "bf16"}
        found = compiled(model, plan=plan, strict=True)(value)
    assert len(seen.graphs) == 2
    wanted = (middle.bfloat16().float() @ model.b.weight.bfloat16().float().t() + model.b.bias).bfloat16().float()
    assert relative([found], [wanted]) < 1e-3 < relative([found], [exact])


@pytest.mark.parametrize("how", ["autocast", "converted"])
def test_a_plan_of_another_dtype_is_not_followed_in_silence(how: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 32)),
        torch.randn(2, 3, 8, 8),
    )
    plan = dsmp.plan(model, (x,), hardware="h800", training=False)
    if how == "converted":
        model, x = model.bfloat16(), x.bfloat16()

    def run(strict: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.reset()
        options = {"plan": plan, "executor": "eager", "strict": strict}
        compiled = torch.compile(model, backend="dsmp", options=options)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return compiled(x), model(x)

    found, wanted = run(strict=False)
    assert found.dtype == wanted.dtype and (found - wanted).norm() <= 0.02 * wanted.norm()
    (told,) = [r.message for r in caplog.records if "another dtype" in r.message]
    assert "0|fprop|conv|0, in bf16 and not in fp32" in told and "autocast" in told
    with pytest.raises(Exception, match="another dtype than in the plan"):
        run(strict=True)
