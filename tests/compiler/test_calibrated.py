from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch import Tensor, nn

import dsmp
from dsmp.errors import (
    BudgetError,
    CalibrationError,
    InvalidOptionError,
    LossError,
    NotCalibratedError,
    PlanHardwareError,
    PlanSchemaError,
    ScoresError,
    TieError,
)
from dsmp.passes.plan import parse_plan


class Mlp(nn.Module):
    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(32, width)
        self.mid = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for layer in self.mid:
            y = y + torch.nn.functional.gelu(layer(self.norm(y)))
        return self.head(self.norm(y))


def model() -> Mlp:
    torch.manual_seed(0)
    made = Mlp().eval()
    nn.init.normal_(made.head.weight, std=0.4)
    return made


def batches(count: int = 4, size: int = 16) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 32, generator=generator),) for _ in range(count)]


OPTIONS = {"hardware": "h800", "cost": "bits", "calibration": batches()}


@pytest.fixture(scope="module")
def calibrated():
    return dsmp.plan(model(), **OPTIONS, training=False, budget="1%")


def test_the_plan_honours_the_budget_and_its_prediction_is_true(calibrated):
    s = calibrated.solution
    assert s.drift <= s.limit and s.measured <= s.limit * 1.05
    assert 0.8 <= s.ratio <= 1.25
    assert s.gap <= 1e-3 and s.bound_us <= s.time_us
    assert s.samples == 64 and 1 <= s.runs <= 25 and s.p95 >= s.measured
    assert {d.compute for d in calibrated if d.op == "linear"} - {"fp32"}
    assert calibrated.budget.amount == 0.01


def test_a_larger_budget_is_never_slower(calibrated):
    times = [calibrated.solve(budget=b).solution.time_us for b in (0.0, 1e-4, 1e-3, 0.01, 0.1, 1.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    nothing = calibrated.solve(budget=0.0)
    assert all(d.compute == d.traced == d.output for d in nothing if d.op != "view")


def test_solving_again_for_the_same_budget_gives_the_same_plan(calibrated):
    again = calibrated.solve(budget=calibrated.budget.amount)
    if calibrated.solution.runs == 1:
        assert again.diff(calibrated) == []
    assert again.solution.measured is None and again.solution.time_us <= calibrated.solution.time_us * 1.001


def test_a_calibrated_plan_survives_a_file(calibrated, tmp_path):
    loaded = dsmp.load_plan(calibrated.save(tmp_path / "plan.json"))
    assert loaded == calibrated
    assert loaded.solve(budget=0.02).digest == calibrated.solve(budget=0.02).digest
    assert parse_plan(json.dumps(json.loads(calibrated.to_json()))) == calibrated


def test_the_plan_runs(calibrated):
    m = model()
    compiled = torch.compile(m, backend="dsmp", options={"plan": calibrated, "executor": "eager", "strict": True})
    x = batches()[0][0]
    with torch.no_grad():
        got, want = compiled(x), m(x)
    assert not torch.equal(got, want)
    kl = nn.functional.kl_div(got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="batchmean")
    assert float(kl) < 4 * calibrated.solution.limit
    assert dsmp.plan_of(compiled) is calibrated


def test_calibrating_leaves_the_model_as_it_was():
    m = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)).train()
    m[0].weight.grad = torch.ones_like(m[0].weight)
    before = {k: v.clone() for k, v in m.state_dict().items()}
    state = torch.get_rng_state()
    plan = dsmp.plan(m, **OPTIONS, budget=0.05)
    assert plan.program.drift == "gradients"
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())
    assert torch.equal(m[0].weight.grad, torch.ones_like(m[0].weight)) and m[3].weight.grad is None
    assert torch.equal(state, torch.get_rng_state())
    assert m.training


def test_training_is_measured_on_the_users_loss():
    pairs = [(b[0], torch.arange(16) % 10) for b in batches(2)]
    with_loss = dsmp.plan(
        model(), hardware="h800", cost="bits", calibration=pairs, loss=nn.CrossEntropyLoss(), budget=0.01
    )
    assert with_loss.program.drift == "gradients"
    phases = {d.phase for d in with_loss if d.op == "linear" and d.compute != "fp32"}
    assert phases == {"fprop", "dgrad", "wgrad"}
    assert with_loss.solution.measured <= 0.0105


def test_the_users_loss_is_the_base_of_the_budget():
    pairs = [(b[0], torch.arange(16) % 10) for b in batches(2)]
    loss = nn.CrossEntropyLoss()
    plan = dsmp.plan(model(), hardware="h800", training=False, cost="bits", calibration=pairs, loss=loss, budget=0.01)
    m = model()
    with torch.no_grad():
        mean = sum(float(loss(m(x), y)) for x, y in pairs) / 2
    assert plan.program.loss == pytest.approx(mean, rel=1e-5)
    assert plan.solution.limit == pytest.approx(0.01 * mean, rel=1e-5)


def test_scores_serve_other_devices_and_budgets(tmp_path):
    m = model()
    scores = dsmp.measure_scores(m, batches(), hardware="h800", training=False)
    path = scores.save(tmp_path / "scores.json")
    assert dsmp.load_scores(path) == scores
    for hardware in ("h800", "a100"):
        plan = dsmp.plan(m, batches()[0], hardware=hardware, training=False, cost="bits", scores=path, budget=0.02)
        assert plan.solution.measured is None and plan.solution.drift <= plan.solution.limit
        assert plan.hardware.startswith(hardware)
    with pytest.raises(ScoresError, match="fingerprint"):
        dsmp.plan(nn.Linear(32, 3), batches()[0], hardware="h800", training=False, scores=path)
    path.write_text(path.read_text().replace('"drift": "kl"', '"drift": "best"'))
    with pytest.raises(ScoresError, match="drift"):
        dsmp.plan(m, batches()[0], hardware="h800", training=False, scores=path)


def test_scores_without_what_a_budget_is_a_share_of_are_named():
    m = model()
    scores = dsmp.measure_scores(m, batches(1), hardware="h800", training=False)
    for update, message in (({"nodes": {}}, "no node"), ({"loss": None}, "no loss")):
        with pytest.raises(ScoresError, match=message):
            dsmp.plan(m, batches()[0], hardware="h800", training=False, scores=scores.model_copy(update=update))
    with pytest.raises(InvalidOptionError, match="scores"):
        dsmp.plan(m, batches()[0], hardware="h800", training=False, scores=3)


def test_edited_candidates_are_checked(calibrated):
    key = next(k for k in calibrated.program.keys if "linear" in k)

    def edited(change) -> str:
        data = json.loads(calibrated.to_json())
        change(data["program"])
        return json.dumps(data)

    def block(program):
        for c in program["candidates"][key]:
            c["blocked"] = {"code": "mine", "text": "not this"}

    def forget(program):
        for c in program["candidates"][key]:
            c["drift"], c["blocked"] = None, None

    def pay(program):
        program["copies"][0]["time_us"] = {"fp32": -1.0}

    with pytest.raises(PlanSchemaError, match="not blocked"):
        parse_plan(edited(block))
    with pytest.raises(PlanSchemaError, match="greater than or equal to 0"):
        parse_plan(edited(pay))
    with pytest.raises(PlanSchemaError, match="has no drift"):
        parse_plan(edited(forget)).solve(budget=0.01)


def test_rules_are_applied_last():
    plan = dsmp.plan(model(), **OPTIONS, training=False, budget=1.0, rules={"mid.1|*": "fp32", "up|*": "bf16"})
    assert plan.by_key["mid.1|fprop|linear|0"].compute == "fp32"
    assert plan.by_key["up|fprop|linear|0"].compute == "bf16"
    assert plan.by_key["up|fprop|linear|0"].reason.code == "rule"
    with pytest.raises(PlanHardwareError, match="A100"):
        dsmp.plan(
            model(), hardware="a100", training=False, calibration=batches(), budget=1.0, rules={"mid*": "fp8_e4m3"}
        )


def test_rules_that_tear_tied_nodes_apart_are_named():
    rules = {"mid.0|fprop|linear|0": "bf16", "mid.1|fprop|linear|0": "fp32"}
    with pytest.raises(TieError, match=r"3 tied nodes \(mid.0\|fprop\|linear\|0, mid.1\|fprop.*tied=False"):
        dsmp.plan(model(), **OPTIONS, training=False, budget="1%", rules=rules)
    apart = dsmp.plan(model(), **OPTIONS, training=False, budget="1%", rules=rules, tied=False)
    assert [apart.by_key[f"mid.{i}|fprop|linear|0"].compute for i in (0, 1)] == ["bf16", "fp32"]


def test_scores_are_printed_in_one_line():
    scores = dsmp.measure_scores(model(), batches(), hardware="h800", training=False)
    assert re.fullmatch(r"Scores\(Mlp: \d+ nodes; drift kl, loss \S+; 64 samples, 2 draws each\)", repr(scores))
    node = next(iter(scores.nodes.values()))
    assert str(node) == repr(node) and len(repr(node)) < 100 and f"{len(node.labels)} drifts" in repr(node)


def test_ties_hold_repeated_blocks_together():
    tied = dsmp.plan(model(), **OPTIONS, training=False, budget=0.002)
    formats = {(d.compute, d.recipe, d.output) for d in tied if d.key.startswith("mid.") and d.op == "linear"}
    assert len(formats) == 1
    untied = tied.solve(budget=0.002)
    free = dsmp.plan(model(), **OPTIONS, training=False, budget=0.002, tied=False)
    assert not free.program.ties and free.solution.time_us <= untied.solution.time_us * 1.001


def test_memory_is_a_budget():
    free = dsmp.plan(model(), **OPTIONS, budget=0.5)
    assert free.solution.saved_bytes > 0
    least = min(free.solution.saved_bytes, dsmp.plan(model(), batches()[0], hardware="h800").prediction.saved_bytes)
    tight = free.solve(budget=0.5, memory=int(least))
    assert tight.solution.saved_bytes <= least
    with pytest.raises(BudgetError, match="memory"):
        free.solve(budget=0.5, memory=10)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "no batch"),
        (iter(()), "no batch"),
        (torch.randn(16, 32), "is a Tensor"),
        ("batches", "is a str"),
        ([(torch.full((16, 32), math.nan),)], "batch 1: 512 of 512 values are NaN"),
        ([*batches(1), (torch.randn(16, 31),)], "batch 2 does not fit the model"),
        ([(torch.randn(16, 32), torch.randn(3))], "does not fit the model"),
    ],
)
def test_bad_batches_are_named(calibration, message):
    with pytest.raises(CalibrationError, match=message):
        dsmp.plan(model(), batches()[0], hardware="h800", training=False, calibration=calibration)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, t: y, "a tensor of shape"),
        (lambda y, t: 3.0, "a float"),
        (lambda y, t: y.sum() * math.nan, "is nan"),
        (lambda y, t: y[99], "failed: IndexError"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_bad_losses_are_named(loss, message, training):
    pairs = [(batches()[0][0], None)]
    with pytest.raises(LossError, match=message):
        dsmp.plan(model(), batches()[0], hardware="h800", training=training, calibration=pairs, loss=loss)


def test_a_batch_without_its_target_is_named():
    with pytest.raises(CalibrationError, match="pair"):
        dsmp.plan(model(), batches()[0], calibration=batches(), loss=nn.CrossEntropyLoss(), hardware="h800")


def test_a_model_that_is_not_finite_is_named():
    m = model()
    m.head.weight.data[0, 0] = math.inf
    with pytest.raises(CalibrationError, match="not finite"):
        dsmp.plan(m, hardware="h800", training=False, calibration=batches())


def test_a_model_without_parameters_or_on_meta_is_named():
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort().indices

    with pytest.raises(CalibrationError):
        dsmp.plan(Nothing(), hardware="h800", training=False, calibration=[(torch.randn(3, 4),)])
    frozen = model().requires_grad_(False)
    with pytest.raises(CalibrationError, match="infer"):
        dsmp.plan(frozen, hardware="h800", calibration=batches())
    with pytest.raises(CalibrationError, match="meta"):
        dsmp.plan(model().to("meta"), (torch.empty(16, 32, device="meta"),), hardware="h800", calibration=batches())


def test_graph_breaks_are_named():
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            torch._dynamo.graph_break()
            return self.b(y)

    for training in (True, False):
        with pytest.raises(CalibrationError, match="2 graphs"):
            dsmp.plan(Breaks(), hardware="h800", training=training, calibration=batches())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": -1}, BudgetError, "cannot be read"),
        ({"budget": "half"}, BudgetError, "cannot be read"),
        ({"budget": 5}, BudgetError, "more than everything"),
        ({"budget": 1}, BudgetError, "'1%' for a hundredth"),
        ({"budget": 10**400}, BudgetError, "cannot be read"),
        ({"memory": 10**400}, BudgetError, "cannot be read"),
        ({"memory": "a lot"}, BudgetError, "cannot be read"),
        ({"memory": "60%"}, BudgetError, "there are none"),
        ({"drift": "mse"}, InvalidOptionError, "kl"),
        ({"cost": "fast"}, InvalidOptionError, "roofline"),
        ({"draws": 0}, InvalidOptionError, "1 or more"),
        ({"loss": 3}, InvalidOptionError, "function"),
    ],
)
def test_bad_settings_are_named(options, error, message):
    with pytest.raises(error, match=message):
        dsmp.plan(model(), hardware="h800", training=False, calibration=batches(), **options)


def test_settings_without_calibration_are_refused():
    for options in ({"budget": 0.01}, {"memory": "1GB"}, {"loss": print}, {"drift": "kl"}):
        with pytest.raises(InvalidOptionError, match="calibration"):
            dsmp.plan(model(), batches()[0], hardware="h800", **options)
    plain = dsmp.plan(model(), batches()[0], hardware="h800")
    with pytest.raises(NotCalibratedError):
        plain.solve(budget=0.1)


def test_an_interrupted_calibration_writes_nothing(tmp_path, monkeypatch):
    def stop():
        yield batches()[0]
        raise KeyboardInterrupt

    target = tmp_path / "scores.json"
    with pytest.raises(KeyboardInterrupt):
        dsmp.measure_scores(model(), stop(), hardware="h800", training=False).save(target)
    assert list(tmp_path.iterdir()) == []
