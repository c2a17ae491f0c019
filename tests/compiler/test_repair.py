"""The repair loop on programs whose runs are made up: what was predicted is not what a run shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from dsmp.compiler.repair import MAX_RUNS, low_candidates, measured_solution, repair
from dsmp.compiler.trial import TrialResult
from dsmp.errors import BudgetError
from dsmp.passes.plan_fields import Reason
from dsmp.passes.program import Candidate, Program

KEYS = [f"layers.{i}|fprop|linear|0" for i in range(8)]


def candidate(label: str, time: float, drift: float, blocked: Reason | None = None) -> Candidate:
    return Candidate(
        label=label, compute=label, accumulate="fp32", output="fp32", time_us=time, drift=drift, blocked=blocked
    )


def program(blocked: Reason | None = None) -> Program:
    """Nodes that become faster and worse: fp32, bf16, fp8; without fp32 where it is `blocked`."""
    candidates = {
        key: [
            candidate("fp32", 4.0, 0.0, blocked),
            candidate("bf16", 2.0, 1e-4 * (i + 1)),
            candidate("fp8_e4m3", 1.0, 1e-2 * (i + 1)),
        ]
        for i, key in enumerate(KEYS)
    }
    return Program(cost="bits", drift="l2", candidates=candidates)


class Runs:
    """Stands in for a trial: the drift of a run is a function of what was chosen."""

    def __init__(self, drift: Callable[[Mapping[str, Candidate]], float]) -> None:
        self.drift, self.runs = drift, 0

    def run(self, chosen: Mapping[str, Candidate]) -> TrialResult:
        self.runs += 1
        drift = self.drift(chosen)
        return TrialResult(drift=drift, p95=2 * drift, samples=10)


def predicted(chosen: Mapping[str, Candidate], factors: Mapping[str, float] | float = 1.0) -> float:
    return sum(c.drift * (factors if isinstance(factors, float) else factors.get(k, 1.0)) for k, c in chosen.items())


def test_a_true_prediction_takes_one_run():
    trial = Runs(predicted)
    found = repair(program(), trial, drift=0.02)
    # one for the plan, one for fp8 alone, which is faster and predicted to be 18 times as bad as is allowed
    assert trial.runs == 2 and found.first_ratio == pytest.approx(1.0)
    assert 0 < found.result.drift <= 0.02
    assert len({c.compute for c in found.solved.chosen.values()}) > 1


def cancelling(chosen: Mapping[str, Candidate]) -> float:
    """Errors of fp8 cancel where all nodes have it."""
    alone = {c.compute for c in chosen.values()} == {"fp8_e4m3"} and len(chosen) == len(KEYS)
    return 1e-5 if alone else predicted(chosen)


def test_one_format_is_taken_where_its_errors_cancel():
    trial = Runs(cancelling)
    found = repair(program(), trial, drift=0.02)
    solution = found.solved.solution
    assert trial.runs <= MAX_RUNS and found.result.drift == 1e-5
    assert {c.compute for c in found.solved.chosen.values()} == {"fp8_e4m3"}
    assert (solution.time_us, solution.drift) == (8.0, pytest.approx(0.36))
    assert solution.bound_us <= solution.time_us and solution.gap == pytest.approx(0.0)
    changed = {r.text for r in found.solved.reasons.values() if r.code == "single-format"}
    assert len(changed) == 1 and "a run drifts by 1e-05" in changed.pop()


def test_one_format_is_not_taken_where_it_is_slower_ruled_out_or_hopeless():
    def fp8(**changes: object) -> dict[str, list[Candidate]]:
        return {key: [*found[:2], found[2].model_copy(update=changes)] for key, found in program().candidates.items()}

    rule = Reason(code="rule", text="the rule")
    for candidates in (fp8(time_us=50.0), fp8(blocked=rule), fp8(drift=10.0)):
        trial = Runs(cancelling)
        found = repair(Program(cost="bits", drift="l2", candidates=candidates), trial, drift=0.02)
        assert trial.runs == 1
        assert {c.compute for c in found.solved.chosen.values()} <= {"fp32", "bf16"}


def test_single_formats_keep_to_the_runs_and_the_memory_that_are_allowed():
    heavy = {
        key: [c.model_copy(update={"saved_bytes": 10 if c.compute == "fp8_e4m3" else 1}) for c in found]
        for key, found in program().candidates.items()
    }
    heavy_program = Program(cost="bits", drift="l2", candidates=heavy)
    found = repair(heavy_program, Runs(cancelling), drift=0.02, saved_bytes=20.0)
    assert sum(c.saved_bytes for c in found.solved.chosen.values()) <= 20
    trial = Runs(cancelling)
    repair(program(), trial, drift=0.02, max_runs=1)
    assert trial.runs == 1


@pytest.mark.parametrize(
    "shown",
    [
        lambda chosen: predicted(chosen, 40.0),
        lambda chosen: predicted(chosen, {KEYS[3]: 300.0}),
        lambda chosen: predicted(chosen) + (0.3 if len(chosen) > 3 else 0.0),  # not additive
        lambda chosen: predicted(chosen) + 0.05 * len(chosen) ** 2,
        lambda chosen: math.inf if any(c.compute == "fp8_e4m3" for c in chosen.values()) else predicted(chosen),
        lambda chosen: 1.0 if chosen else 0.0,  # whatever is lowered is ruinous
        lambda chosen: math.inf if chosen else 0.0,
    ],
    ids=["a factor", "one node", "many nodes", "quadratic", "one format", "anything", "infinite"],
)
def test_no_plan_exceeds_its_budget_when_it_is_run(shown):
    trial = Runs(shown)
    found = repair(program(), trial, drift=0.02)
    assert trial.runs <= MAX_RUNS
    assert found.result.drift == shown(low_candidates(found.program, found.solved.chosen)) <= 0.02


def test_where_nothing_meets_the_budget_it_says_what_binds():
    trial = Runs(lambda chosen: 1.0)
    with pytest.raises(BudgetError, match=r"cannot be met: .* What binds: layers.\d\|fprop"):
        repair(program(Reason(code="rule", text="the rule 'layers*' asks for less")), trial, drift=0.02)


def test_an_infinite_ratio_is_not_told():
    trial = Runs(lambda chosen: 1e-9 * len(chosen))
    free = {k: [c.model_copy(update={"drift": 0.0}) for c in found] for k, found in program().candidates.items()}
    found = repair(Program(cost="bits", drift="l2", candidates=free), trial, drift=0.02)
    solution = measured_solution(found.solved.solution, 0.02, found.result, trial.runs)
    assert solution.measured == pytest.approx(8e-9) and solution.ratio is None
