"""Each 8-bit format alone on all GEMMs that may take it, run beside a plan that mixes formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..hardware_db.formats import get_format
from ..passes.keys import NodeKey
from ..passes.labels import split_label
from ..passes.plan_fields import GEMM_CLASSES, Reason
from ..passes.program import Candidate, Program
from ..passes.solve import Solved
from .trial import Trial, TrialResult

HOPELESS = 100.0
"""A format whose predicted drift exceeds budget and measured drift this many times is not run."""
_EQUAL = 1 + 1e-9  # times that differ by less differ in the order of a sum only


def low_candidates(program: Program, chosen: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """The nodes that are not left as traced: the first candidate of a node is its traced format."""
    return {k: c for k, c in chosen.items() if c.label != program.candidates[k][0].label}


def best_single_format(
    program: Program,
    solved: Solved,
    result: TrialResult,
    trial: Trial,
    *,
    drift: float,
    saved_bytes: float,
    max_runs: int,
) -> tuple[Solved, TrialResult]:
    """The plan or, where a run of it shows less drift and it is predicted to be at least as fast, the one that has all
    GEMMs in one 8-bit format; `result` is the run of the plan. Of each format the recipe of the least predicted drift
    is run, while runs last.
    """
    best, shown = solved, result
    within = HOPELESS * max(drift, result.drift)
    for chosen in _single_formats(program, solved.chosen):
        if trial.runs >= max_runs:
            break
        totals = program.totals({key: c.label for key, c in chosen.items()})
        if totals.time > _EQUAL * solved.solution.time_us or totals.memory > saved_bytes or totals.error > within:
            continue
        run = trial.run(low_candidates(program, chosen))
        if not run.drift < shown.drift or run.drift > drift:
            continue
        bound = min(solved.solution.bound_us, totals.time)
        solution = solved.solution.model_copy(
            update={
                "time_us": totals.time, "cast_us": totals.cast_time, "drift": totals.error,
                "saved_bytes": int(totals.memory), "bound_us": bound,
                "gap": (totals.time - bound) / totals.time if totals.time else 0.0,
            }
        )  # fmt: skip
        why = f"one format for all: a run drifts by {run.drift:.3g}, of the mixture by {result.drift:.3g}"
        reasons = {
            key: Reason(code="single-format", text=why) if c is not solved.chosen[key] else solved.reasons[key]
            for key, c in chosen.items()
        }
        best, shown = replace(solved, chosen=chosen, reasons=reasons, solution=solution), run
    return best, shown


def _single_formats(program: Program, chosen: Mapping[str, Candidate]) -> list[dict[str, Candidate]]:
    """A choice for each 8-bit format: all GEMMs that may take its best recipe take it, all other nodes as chosen."""
    gemms = [key for key in program.keys if NodeKey.parse(key).op in GEMM_CLASSES]
    ways: dict[str, dict[str, dict[str, Candidate]]] = {}
    for key in gemms:
        for c in sorted(program.allowed[key], key=lambda c: (-c.time_us, c.label)):  # the fastest one stays
            if get_format(c.compute).storage_bits <= 8:
                ways.setdefault(c.compute, {}).setdefault(split_label(c.label)[0], {})[key] = c
    found = []
    for recipes in ways.values():
        # the recipe that most GEMMs may take, then that of the least drift
        taken = min(recipes.values(), key=lambda r: (-len(r), sum(c.drift or 0.0 for c in r.values())))
        if any(c is not chosen[key] for key, c in taken.items()):
            found.append({**chosen, **taken})
    return found
