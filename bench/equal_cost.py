"""Choices of formats that take equal time, out of one program: what they cost, and the least drift within a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsmp.errors import BudgetError
from dsmp.hardware_db.formats import get_format
from dsmp.passes.assignment import AssignmentProblem, totals_of
from dsmp.passes.labels import split_label
from dsmp.passes.plan_fields import Reason
from dsmp.passes.program import Candidate, Program
from dsmp.passes.select_optimal import select_optimal

Labels = Mapping[str, str]
"""A choice: one label per node key."""

GAP = 1e-5
"""The solver's gap; cells compare choices whose times differ by a few per cent."""
RESOLUTION = 1.002
"""Error budgets are bisected until they lie within this factor."""
_SLACK = 1 + 1e-9


def is_low(candidate: Candidate) -> bool:
    """Whether a node multiplies in 8 bits or fewer."""
    return _bits(candidate) <= 8


def with_candidates(program: Program, candidates: Mapping[str, list[Candidate]]) -> Program:
    """A program with other candidates for its nodes."""
    return _changed(program, candidates=dict(candidates))


def _only(program: Program, key: str, allowed: Callable[[Candidate], bool], why: Reason) -> list[Candidate]:
    """A node's candidates with those that are not `allowed` blocked."""
    return [c if allowed(c) else c.model_copy(update={"blocked": why}) for c in program.candidates[key]]


def between(program: Program, gemms: Collection[str], *, narrowest: int = 0, widest: int = 64) -> Program:
    """A program in which GEMMs multiply in formats of `narrowest` to `widest` bits, as traced where they may not."""
    why = Reason(code="bench", text=f"formats of {narrowest} to {widest} bits are compared")
    candidates = dict(program.candidates)
    for key in gemms:
        if any(narrowest <= _bits(c) <= widest for c in program.allowed[key]):
            candidates[key] = _only(program, key, lambda c: narrowest <= _bits(c) <= widest, why)
    return with_candidates(program, candidates)


def _bits(candidate: Candidate) -> int:
    return get_format(candidate.compute).storage_bits


def with_low_format(program: Program, gemms: Collection[str], arithmetic: str) -> Program:
    """A program whose only format of 8 bits or fewer is the one with that label."""
    why = Reason(code="bench", text=f"of the narrow formats only {arithmetic} is compared")
    candidates = dict(program.candidates)
    for key in gemms:
        candidates[key] = _only(program, key, lambda c: not is_low(c) or split_label(c.label)[0] == arithmetic, why)
    return with_candidates(program, candidates)


def low_arithmetics(program: Program, gemms: Collection[str]) -> list[str]:
    """Labels of the arithmetics of 8 bits or fewer that some GEMM may take."""
    found = {split_label(c.label)[0]: None for key in gemms for c in program.allowed[key] if is_low(c)}
    return list(found)


def starting_labels(program: Program, gemms: Collection[str]) -> dict[str, str]:
    """The choice that everything is compared with: each GEMM in the wide or 16-bit format of least drift that it may
    take, all other nodes as traced."""
    labels = {}
    for key, candidates in program.allowed.items():
        wide = [c for c in candidates if not is_low(c)]
        best = min(wide or candidates, key=lambda c: c.drift or 0.0) if key in gemms else candidates[0]
        labels[key] = best.label
    return labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Labels by key, their time with shared casts in microseconds, and their predicted drift."""

    labels: Labels
    time_us: float
    drift: float

    def low(self, program: Program) -> dict[str, Candidate]:
        """The candidates of the nodes that are not as traced, as a trial takes them."""
        found = {}
        for key, label in self.labels.items():
            candidates = program.candidates[key]
            if label != candidates[0].label:
                found[key] = next(c for c in candidates if c.label == label)
        return found

    def formats(self, program: Program, gemms: Collection[str]) -> str:
        """How many GEMMs multiply in what, the most frequent first."""
        counted = Counter(split_label(self.labels[key])[0] or program.candidates[key][0].compute for key in gemms)
        return ", ".join(f"{count} {name}" for name, count in counted.most_common())


class Costs:
    """True times of choices.

    A program also charges for reading a value wider than it is stored where its drift would else be understated. Those
    charges are no time: choices that are judged by their measured drift do not pay them.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        problem = program.problem()
        copies = [c for c in program.copies if get_format(c.format).storage_bits <= 8]
        self._problem = replace(problem, casts=_changed(program, copies=copies).problem().casts)
        self._index = [{label: i for i, label in enumerate(row)} for row in problem.labels]

    def choice(self, labels: Labels) -> Choice:
        """A choice with its true time. Raises KeyError for a label that is not allowed."""
        indices = [known[labels[key]] for known, key in zip(self._index, self.program.keys, strict=True)]
        totals = totals_of(self._problem, indices)
        return Choice(labels=dict(labels), time_us=totals.time, drift=totals.error)


def _changed(program: Program, **fields: Any) -> Program:
    """A program made anew: a copy would keep what the old one has derived from its fields."""
    return Program(**{**{name: getattr(program, name) for name in Program.model_fields}, **fields})


def least_time(program: Program) -> float:
    """The least time that any choice takes."""
    return select_optimal(program.problem(), gap=GAP).totals.time


def least_drift(program: Program, time_us: float) -> Choice | None:
    """The choice of least predicted drift that takes at most `time_us`, None if none is that fast.

    The solver minimises time within an error budget: the smallest budget that reaches the time is bisected.
    """
    problem = program.problem()
    limit = time_us * _SLACK
    low = math.fsum(float(np.min(row)) for row in problem.error)
    high = math.fsum(float(np.max(row)) for row in problem.error)
    best = _within(problem, high, limit)
    if best is None:
        return None
    at_once = _within(problem, low, limit)
    if at_once is not None:
        return _named(program, at_once)
    smallest = min((float(e) for row in problem.error for e in row if e > 0), default=0.0)
    low, high = max(low, smallest, best[2] * 1e-12), best[2]
    while high > low * RESOLUTION:
        middle = math.sqrt(low * high)
        found = _within(problem, middle, limit)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, found[2])
    return _named(program, best)


_Found = tuple[tuple[int, ...], float, float]


def _within(problem: AssignmentProblem, budget: float, limit: float) -> _Found | None:
    """The fastest choice within an error budget, its time and error, if it takes at most `limit`."""
    try:
        found = select_optimal(replace(problem, error_budget=budget), gap=GAP)
    except BudgetError:
        return None
    if found.totals.time > limit:
        return None
    return found.choice, found.totals.time, found.totals.error


def _named(program: Program, found: _Found) -> Choice:
    choice, time, error = found
    labels = {key: program.allowed[key][i].label for key, i in zip(program.keys, choice, strict=True)}
    return Choice(labels=labels, time_us=time, drift=error)
