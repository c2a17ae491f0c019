"""Time against drift over all budgets, and what simpler choices make of the same program. Pure numbers.

The front is the solver's answer at budgets from the least drift that can be reached to that of the fastest choice.
Beside it stand choices that look at no drift at all: every node in one format where it may, the operator lists of
torch.autocast, the first choices of the device's ladder ("tier"), and what is decided without calibration ("default":
of the ladder, what pays). They follow no ties and keep no memory budget: they are what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..errors import BudgetError, NotCalibratedError
from ..hardware_db.capability import Device
from ..hardware_db.formats import split_recipe
from ..hardware_db.schema import OP_CLASSES
from .assignment import Assignment, AssignmentProblem, Totals, totals_of
from .exchange import chosen_candidate
from .labels import split_label
from .plan import Decision, PrecisionPlan
from .plan_fields import GEMM_CLASSES
from .program import Candidate, Program
from .select_optimal import front, select_optimal

Kind = Literal["front", "plan", "format", "autocast", "tier", "default"]

# torch.autocast runs these in the low format (AT_FORALL_LOWER_PRECISION_FP of ATen/autocast_mode.h)
AUTOCAST_LOW = frozenset({"linear", "matmul", "conv", "sdpa"})
AUTOCAST_FORMATS = ("bf16", "fp16")

_DECADES = 9  # of drift below the fastest choice's that a front looks at


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A choice: predicted microseconds (casts included), drift, the drift as a budget in the user's unit (a share of 1;
    None where the loss is 0), saved bytes. `bound_us` and `gap` certify points of the front; `optimum_us` is the time
    of the front's choice within this point's drift, for the points beside it."""

    kind: Kind
    name: str
    time_us: float
    cast_us: float
    drift: float
    amount: float | None
    saved_bytes: int
    bound_us: float | None = None
    gap: float | None = None
    optimum_us: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoFront:
    """Points of the front by rising drift, the plan's own point, the points of simpler choices, and the plan's budget.

    `limit` is the budget as a drift, `limit_amount` in the user's unit, both None for a plan without one. `notes` says
    what was left out.
    """

    source: str
    hardware: str
    front: tuple[Point, ...]
    plan: Point
    others: tuple[Point, ...]
    limit: float | None
    limit_amount: float | None
    notes: tuple[str, ...] = ()


def pareto_front(plan: PrecisionPlan, *, points: int = 24, device: Device | None = None) -> ParetoFront:
    """Solve a plan's program at `points` budgets (at least 2), with the plan's memory budget.

    `device` is the planned hardware, for its tier. Raises NotCalibratedError for a plan without a program.
    """
    program, solution = plan.program, plan.solution
    if program is None or solution is None:
        raise NotCalibratedError(plan.model.source)
    memory = math.inf if solution.memory_limit is None else float(solution.memory_limit)
    problem = program.problem(saved_bytes=memory)
    chooser = _Chooser(plan, program)
    mine = chooser.plan_point(problem)
    others = chooser.others(problem, device)
    fastest = select_optimal(problem)
    grid = _budgets(problem, fastest.totals.error, points)
    solved = _solved(problem, sorted({*grid, *(p.drift for p in others), mine.drift}))
    found = [_front_point(program, a) for a in (*solved.values(), fastest)]
    return ParetoFront(
        source=plan.model.source, hardware=plan.hardware, front=tuple(_undominated(found)),
        plan=_with_optimum(mine, solved, fastest),
        others=tuple(_with_optimum(p, solved, fastest) for p in others),
        limit=solution.limit, limit_amount=_amount(program, solution.limit) if solution.limit is not None else None,
        notes=() if device is not None else (f"no tier: {plan.hardware} is no device that is known here",),
    )  # fmt: skip


def _budgets(problem: AssignmentProblem, fastest: float, points: int) -> list[float]:
    """Budgets from the least drift of any choice to the fastest one's, evenly in the logarithm."""
    least = float(sum(error.min() for error in problem.error))
    steps = [float(e) for error in problem.error for e in error if e > least]
    floor = max(least, min(steps, default=fastest), fastest * 10.0**-_DECADES)
    if fastest <= floor or not fastest:
        return [least]
    return sorted({least, *np.geomspace(floor, fastest, max(points - 1, 1)).tolist()[:-1]})


def _solved(problem: AssignmentProblem, budgets: Sequence[float]) -> Mapping[float, Assignment]:
    """The best choice for each budget that one can meet at all."""
    try:
        return dict(zip(budgets, front(problem, budgets), strict=True))
    except BudgetError:
        found = {}
        for budget in budgets:
            try:
                found[budget] = select_optimal(replace(problem, error_budget=budget))
            except BudgetError:
                continue
        return found


def _undominated(points: Sequence[Point]) -> list[Point]:
    """Points by rising drift, each faster than all before it."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.drift, p.time_us)):
        if not kept or point.time_us < kept[-1].time_us:
            kept.append(point)
    return kept


def _front_point(program: Program, a: Assignment) -> Point:
    point = _point(program, "front", "optimum", a.totals)
    return replace(point, bound_us=max(0.0, a.bound), gap=a.gap)


def _with_optimum(point: Point, solved: Mapping[float, Assignment], fastest: Assignment) -> Point:
    if point.drift >= fastest.totals.error:
        return replace(point, optimum_us=fastest.totals.time)
    found = solved.get(point.drift)
    return replace(point, optimum_us=found.totals.time if found is not None else None)


def _point(program: Program, kind: Kind, name: str, totals: Totals) -> Point:
    return Point(
        kind=kind, name=name, time_us=totals.time, cast_us=totals.cast_time, drift=totals.error,
        amount=_amount(program, totals.error), saved_bytes=int(totals.memory),
    )  # fmt: skip


def _amount(program: Program, drift: float) -> float | None:
    amount = program.amount(drift)
    return amount if math.isfinite(amount) else None


# ---- choices that look at no drift -------------------------------------------------------------------------

Pick = Callable[[Decision, Sequence[Candidate]], Candidate | None]


class _Chooser:
    """Simple choices of candidates, node by node."""

    def __init__(self, plan: PrecisionPlan, program: Program) -> None:
        self.plan = plan
        self.program = program

    def plan_point(self, problem: AssignmentProblem) -> Point:
        """What the decisions of the plan cost; where one was edited into no candidate, the one as traced stands."""
        return self._of(problem, "plan", "plan", chosen_candidate)

    def others(self, problem: AssignmentProblem, device: Device | None) -> list[Point]:
        """Every single format, autocast's lists, the tier where the device is given, the default where it is known."""
        found = [self._of(problem, "format", name, _uniform(name)) for name in self._arithmetics()]
        for name in AUTOCAST_FORMATS:
            if any(c.compute == name for key in self.program.keys for c in self.program.allowed[key]):
                found.append(self._of(problem, "autocast", f"autocast {name}", _autocast(name)))
        if device is not None:
            found.append(self._of(problem, "tier", f"{device.id} tier", _tier(device)))
        if self.program.default is not None:
            found.append(self._of(problem, "default", "uncalibrated plan", _labelled(self.program.default)))
        return found

    def _arithmetics(self) -> list[str]:
        """Labels of the arithmetic of GEMMs, in the order in which they occur."""
        decisions = self.plan.by_key
        names: dict[str, None] = {}
        for key in self.program.keys:
            if key in decisions and decisions[key].op in GEMM_CLASSES:
                names.update(dict.fromkeys(split_label(c.label)[0] for c in self.program.allowed[key]))
        return list(names)

    def _of(self, problem: AssignmentProblem, kind: Kind, name: str, pick: Pick) -> Point:
        choice = []
        for key in self.program.keys:
            allowed = self.program.allowed[key]
            decision = self.plan.by_key[key]
            taken = pick(decision, allowed) or _traced(decision, allowed)
            choice.append(next(i for i, c in enumerate(allowed) if c is taken))
        return _point(self.program, kind, name, totals_of(problem, choice))


def _traced(d: Decision, allowed: Sequence[Candidate]) -> Candidate:
    """The candidate as the model was written; the most accurate one where a rule forbids it."""
    same = [c for c in allowed if c.compute == c.output == d.traced]
    return same[0] if same else min(allowed, key=lambda c: (c.drift or 0.0, c.time_us))


def _fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    return min(candidates, key=lambda c: (c.time_us, c.label), default=None)


def _uniform(name: str) -> Pick:
    """GEMMs in one arithmetic, everything else stored in its format, where they may."""

    def pick(d: Decision, allowed: Sequence[Candidate]) -> Candidate | None:
        if d.op in GEMM_CLASSES:
            return _fastest([c for c in allowed if split_label(c.label)[0] == name])
        return _fastest([c for c in allowed if c.output == name])

    return pick


def _autocast(name: str) -> Pick:
    def pick(d: Decision, allowed: Sequence[Candidate]) -> Candidate | None:
        if d.op not in AUTOCAST_LOW:
            return None
        low = [c for c in allowed if c.compute == name]
        return _fastest([c for c in low if c.output == name] or low)

    return pick


def _labelled(labels: Mapping[str, str]) -> Pick:
    def pick(d: Decision, allowed: Sequence[Candidate]) -> Candidate | None:
        return next((c for c in allowed if c.label == labels.get(d.key)), None)

    return pick


def _tier(device: Device) -> Pick:
    """The first choice of the device's ladder that is allowed; its recipe and the tier's storage where there is one."""

    def pick(d: Decision, allowed: Sequence[Candidate]) -> Candidate | None:
        if d.op not in OP_CLASSES:
            return None
        for choice in device.ladder(d.op):
            parts = {r.name for r in split_recipe(choice.recipe)}
            same = [c for c in allowed if c.compute == choice.format]
            same = [c for c in same if {r.name for r in split_recipe(c.recipe)} <= parts] or same
            if d.op not in GEMM_CLASSES:
                same = [c for c in same if c.output == d.traced] or same
            else:
                same = [c for c in same if c.output == device.storage] or same
            if same:
                return _fastest(same)
        return None

    return pick
