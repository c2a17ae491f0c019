"""Make a plan's predicted drift true: run it, find the nodes that were predicted wrongly, measure them, solve again.

Predictions are first order in the rounding errors, and a few nodes (a first layer on raw data, say) are not. Those have
small predictions, so looking at the largest finds nothing; halving the set of nodes and running each half does. What
is found is run in each of its formats, since the factor of one does not carry over to another. Where all halves are off
by the same factor, the calibration as a whole is, and all predictions are scaled.

A plan whose run exceeds the budget is never handed out: what predictions do not repair, a smaller limit does, and where
that fails, too, everything stays as traced.

Predictions add errors up as if they were independent. Where those of one format cancel (a filter bank, a sum that is
divided by another of the same rounding), that format everywhere beats the mixture that looks best, so each 8-bit format
alone is run as well (single_formats.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import BudgetError
from ..passes.keys import NodeKey
from ..passes.labels import split_label
from ..passes.plan_fields import GEMM_CLASSES, Reason
from ..passes.program import Candidate, Program, Solution
from ..passes.solve import Solved, solve_program
from .single_formats import best_single_format, low_candidates
from .trial import Trial, TrialResult

LOW, HIGH = 0.8, 1.25
"""A plan is believed when the root of measured over predicted drift lies between these."""
SPLIT = 1.6
"""A group of nodes is looked into when its measured drift and its prediction differ by this factor."""
ROUNDS = 4
MAX_RUNS = 25
RESERVED = 5
"""Runs kept for plans that still exceed the budget once predictions were repaired."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """The plan that was settled on, the program with what was learnt, and the last run."""

    program: Program
    solved: Solved
    result: TrialResult
    first_ratio: float | None


def repair(
    program: Program,
    trial: Trial,
    *,
    drift: float,
    saved_bytes: float = math.inf,
    max_runs: int = MAX_RUNS,
    tell: Callable[[str], None] = lambda text: None,
) -> Repaired:
    """Solve, run, and repair until prediction and run agree and the run meets the budget, in at most `max_runs` runs.

    Raises BudgetError when no choice meets the budgets.
    """
    limit = drift
    solved = solve_program(program, drift=limit, saved_bytes=saved_bytes)
    first_ratio: float | None = None
    learning = max(2, max_runs - RESERVED)
    for round_number in range(ROUNDS):
        result = trial.run(low_candidates(program, solved.chosen))
        ratio = ratio_of(result.drift, solved.solution.drift)
        if round_number == 0:
            first_ratio = ratio
        tell(f"run {trial.runs}: measured/predicted {'none' if ratio is None else f'{ratio:.2f}'}")
        over = result.drift > drift
        # A plan that is the fastest of all whatever the budget gains nothing from better predictions.
        off = ratio is not None and not LOW <= ratio <= HIGH and (over or "error" in solved.solution.binding)
        if not (off or over) or trial.runs >= learning - 1:
            break
        if off:
            program = learn(program, solved.chosen, trial, result.drift, learning)
        elif over:
            limit = 0.95 * limit * drift / result.drift
        solved = solve_program(program, drift=limit, saved_bytes=saved_bytes)
    else:
        result = trial.run(low_candidates(program, solved.chosen))
    if result.drift > drift:
        solved, result = _within(program, solved, result, trial, drift, saved_bytes, max_runs)
    solved, result = best_single_format(
        program, solved, result, trial, drift=drift, saved_bytes=saved_bytes, max_runs=max_runs
    )
    return Repaired(program=program, solved=solved, result=result, first_ratio=first_ratio)


def _within(
    program: Program, solved: Solved, result: TrialResult, trial: Trial, drift: float, saved_bytes: float, max_runs: int
) -> tuple[Solved, TrialResult]:
    """A plan whose run meets the budget, from one whose run does not: solved for ever smaller limits and in the end
    with everything as traced. Raises BudgetError where rules or a budget on memory do not allow for that."""
    limit = min(drift, solved.solution.drift)
    while limit > 0.0 and trial.runs < max_runs - 1:
        limit *= min(0.5, 0.9 * drift / result.drift) if math.isfinite(result.drift) else 0.1
        try:
            solved = solve_program(program, drift=limit, saved_bytes=saved_bytes)
        except BudgetError:
            break
        result = trial.run(low_candidates(program, solved.chosen))
        if result.drift <= drift:
            return solved, result
    solved = solve_program(_held_as_traced(program), saved_bytes=saved_bytes)
    low = low_candidates(program, solved.chosen)
    result = trial.run(low)
    if result.drift > drift:
        names = sorted(low, key=lambda k: -(low[k].drift or 0.0))[:_NAMED]
        raise BudgetError(
            "the error budget cannot be met: a run of the most careful plan that the rules and the memory budget allow "
            f"drifts by {result.drift:.4g}, the budget is {drift:.4g}. What binds: {', '.join(names)}. Raise the "
            "budget, or take back the rules and limits on these nodes."
        )
    return solved, result


def _held_as_traced(program: Program) -> Program:
    """A program in which each node that may stay as traced has to."""
    why = Reason(code="drift", text="stays as traced: every faster plan that was run exceeds the budget")
    candidates = {
        key: found if found[0].blocked else [found[0], *(_blocked(c, why) for c in found[1:])]
        for key, found in program.candidates.items()
    }
    return _with_candidates(program, candidates)


def _blocked(candidate: Candidate, why: Reason) -> Candidate:
    return candidate if candidate.blocked else candidate.model_copy(update={"blocked": why})


def measured_solution(solution: Solution, limit: float, result: TrialResult, runs: int) -> Solution:
    """A solution with what its run showed; `limit` is what the user allowed."""
    ratio = ratio_of(result.drift, solution.drift)
    told = ratio is not None and math.isfinite(ratio)
    return solution.model_copy(
        update={
            "limit": limit if math.isfinite(limit) else None,
            "measured": result.drift, "ratio": ratio if told else None, "p95": result.p95,
            "samples": result.samples, "runs": runs,
        }
    )  # fmt: skip


_NAMED = 8


def ratio_of(measured: float, predicted: float) -> float | None:
    """Root of measured over predicted drift; None where neither says anything."""
    if predicted <= 0.0:
        return None if measured <= 0.0 else math.inf
    return math.sqrt(measured / predicted)


def learn(program: Program, chosen: Mapping[str, Candidate], trial: Trial, measured: float, max_runs: int) -> Program:
    """A program with the drifts of wrongly predicted nodes replaced by measured ones, or all of them scaled."""
    low = low_candidates(program, chosen)
    # A result that is stored narrow at no drift is rounded by its readers anyway: alone it would look guilty.
    keys = [k for k, c in low.items() if c.drift or NodeKey.parse(k).op in GEMM_CLASSES]
    halves = [keys[: len(keys) // 2], keys[len(keys) // 2 :]]
    drifts = [trial.run({k: low[k] for k in half}).drift for half in halves if half]
    predictions = [_predicted(low, half) for half in halves if half]
    factors = [d / p for d, p in zip(drifts, predictions, strict=True) if p > 0]
    common = measured / _predicted(low, keys) if _predicted(low, keys) > 0 else math.inf
    if len(factors) == 2 and math.isfinite(common) and all(1 / SPLIT < f / common < SPLIT for f in factors):
        return _scaled(program, common)
    suspects = [(d, half) for d, half in zip(drifts, (h for h in halves if h), strict=True)]
    found: dict[str, dict[str, float]] = {}
    while suspects and trial.runs < max_runs - 2:
        suspects.sort(key=lambda s: -abs(s[0] - _predicted(low, s[1])))
        group_drift, group = suspects.pop(0)
        predicted = _predicted(low, group)
        if _agree(group_drift, predicted):
            continue
        if len(group) == 1:
            found[group[0]] = _every_format(program, group[0], low[group[0]], trial, max_runs)
            continue
        first, second = group[: len(group) // 2], group[len(group) // 2 :]
        one = trial.run({k: low[k] for k in first}).drift
        # Drifts add up, so the other half need not be run unless it is alone and has to be exact.
        other = max(0.0, group_drift - one)
        suspects += [(one, first), (other, second)]
    return _with_drifts(program, found)


def _agree(measured: float, predicted: float) -> bool:
    return predicted > 0 and 1 / SPLIT <= measured / predicted <= SPLIT


def _predicted(low: Mapping[str, Candidate], keys: Sequence[str]) -> float:
    return sum(low[k].drift or 0.0 for k in keys)


def _every_format(program: Program, key: str, chosen: Candidate, trial: Trial, max_runs: int) -> dict[str, float]:
    """Drift of one node alone in each of its allowed candidates, while runs last: one run for each arithmetic, the
    smallest prediction first. How the result is stored was predicted well enough to be added."""
    traced = program.candidates[key][0]
    ways: dict[str, list[Candidate]] = {}
    for candidate in sorted(program.allowed[key], key=lambda c: (c.drift or 0.0, c.time_us)):
        ways.setdefault(split_label(candidate.label)[0], []).append(candidate)
    first = split_label(chosen.label)[0]
    found: dict[str, float] = {}
    for arithmetic in sorted(ways, key=lambda w: w != first):
        same = ways[arithmetic]
        tried = chosen if arithmetic == first else same[0]
        if arithmetic == traced.label or trial.runs >= max_runs - 2:
            continue
        measured = trial.run({key: tried}).drift
        for candidate in same:
            stored = (candidate.drift or 0.0) - (tried.drift or 0.0)
            found[candidate.label] = max(0.0, measured + stored)
    return found


def _with_drifts(program: Program, found: Mapping[str, Mapping[str, float]]) -> Program:
    candidates = dict(program.candidates)
    for key, drifts in found.items():
        candidates[key] = [
            c.model_copy(update={"drift": drifts[c.label], "measured": True}) if c.label in drifts else c
            for c in candidates[key]
        ]
    return _with_candidates(program, candidates)


def _scaled(program: Program, factor: float) -> Program:
    candidates = {
        key: [c if c.drift is None else c.model_copy(update={"drift": c.drift * factor}) for c in found]
        for key, found in program.candidates.items()
    }
    return _with_candidates(program, candidates)


def _with_candidates(program: Program, candidates: Mapping[str, Sequence[Candidate]]) -> Program:
    """A program made anew: a copy would keep what the old one has derived from its candidates."""
    fields = {name: getattr(program, name) for name in Program.model_fields}
    return Program(**{**fields, "candidates": candidates})
