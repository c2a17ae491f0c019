"""At which budget the solver would start to take another label for a node.

Prices give an estimate (`price_estimate`). Small programs are then solved again, at budgets around the estimate, until
a budget at which the label is chosen and one at which it is not are within two percent of each other: both were solved.
Large programs, on which that would take longer than a second, get the estimate, which says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import BudgetError
from .assignment import AssignmentProblem, Floats
from .exchange import Exchanges
from .price_estimate import Budgeted, estimate_budget
from .program import Program, Solution
from .select_optimal import Resolver

EXACT_NODES = 150
"""Programs of at most this many nodes are solved again, about a dozen times."""

_STEP = 1.05  # the first step away from the estimate, a factor; each step is the square of the one before
_CLOSE = 1.02  # how far apart, as a factor, the two budgets of an answer may be
_LOWEST = 1e-9  # of the plan's own budget: the least that a search looks at


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """The `budget` ("error": drift, "memory": saved bytes) at which a label would be chosen.

    `value` is the budget at which it is chosen, `before` the one at which it is not yet, seen from the plan's own; both
    the same for an estimate. `amount` and `amount_before` are the error budget as users write it, a share of 1.
    """

    budget: Budgeted
    value: float
    before: float
    amount: float | None
    amount_before: float | None
    exact: bool


def find_flip(
    program: Program,
    solution: Solution,
    exchanges: Exchanges,
    key: str,
    labels: Sequence[str],
    budget: Budgeted = "error",
) -> Flip | None:
    """The nearest budget at which a node would take one of some labels that it may take; None where none was found.

    An estimate is of the first label alone.
    """
    value = estimate_budget(program, exchanges, key, labels[0], budget)
    if len(program.keys) > EXACT_NODES:
        return _flip(program, budget, value, value, exact=False) if value is not None else None
    change = exchanges.change(exchanges.group(key), labels[0])
    upward = ((change.drift or 0.0) if budget == "error" else change.saved_bytes) > 0
    search = _Search(program, solution, key, labels, budget)
    for way in (upward, not upward):
        found = search.run(value if way == upward else None, upward=way)
        if found is not None:
            return _flip(program, budget, *found, exact=True)
    return None


def _flip(program: Program, budget: Budgeted, value: float, before: float, *, exact: bool) -> Flip:
    def amount(drift: float) -> float | None:
        found = program.amount(drift) if budget == "error" else math.inf
        return found if math.isfinite(found) else None

    return Flip(
        budget=budget, value=value, before=before, amount=amount(value), amount_before=amount(before), exact=exact
    )


class _Search:
    """Solves at one budget after the other, the other budget as in the plan."""

    def __init__(self, program: Program, solution: Solution, key: str, labels: Sequence[str], budget: Budgeted) -> None:
        self.problem = program.problem(
            drift=math.inf if solution.limit is None else solution.limit,
            saved_bytes=math.inf if solution.memory_limit is None else solution.memory_limit,
        )
        self.budget = budget
        self.node = program.keys.index(key)
        self.wanted = {self.problem.labels[self.node].index(label) for label in labels}
        allowed = self.problem.error_budget if budget == "error" else self.problem.memory_budget
        self.limited = math.isfinite(allowed)
        # what the plan uses, not what it was allowed: repairs hold a plan further back than its budget
        self.own = solution.drift if budget == "error" else float(solution.saved_bytes)
        most = max(self.own, self._extreme(np.max), allowed if self.limited else 0.0)
        self.resolver = Resolver(self._at(most))

    def run(self, estimate: float | None, *, upward: bool) -> tuple[float, float] | None:
        """(budget at which the label is chosen, a budget nearer to the plan's own at which it is not)."""
        own = self.own
        end = self._extreme(np.max) if upward else max(self._extreme(np.min), own * _LOWEST)
        if (not self.limited or end <= own) if upward else end >= own:
            return None
        start = math.sqrt(own * end) if estimate is None else min(max(estimate, min(own, end)), max(own, end))
        found = self._bracket(start, own, end)
        if found is None:
            return None
        value, before = found
        while max(value, before) > _CLOSE * min(value, before):
            middle = math.sqrt(value * before)
            value, before = (middle, before) if self._takes(middle) else (value, middle)
        return value, before

    def _bracket(self, start: float, own: float, end: float) -> tuple[float, float] | None:
        """A budget that takes the label and one nearer to the plan's own that does not, in growing steps from `start`:
        back towards the plan's own budget, at which the label is not taken, or on to the end of the way."""
        taken = self._takes(start)
        goal = own if taken else end
        last, step = start, _STEP
        while last != goal:
            point = min(last * step, goal) if goal > last else max(last / step, goal)
            step *= step
            if point == own or self._takes(point) != taken:
                return (last, point) if taken else (point, last)
            last = point
        return None

    def _takes(self, budget: float) -> bool:
        try:
            return self.resolver.solve(self._at(budget)).choice[self.node] in self.wanted
        except BudgetError:
            return False

    def _extreme(self, of: Callable[[Floats], float]) -> float:
        """The least or the most that nodes use of the budget: a bound of every choice, since ties are left out."""
        costs = self.problem.error if self.budget == "error" else self.problem.memory
        return float(sum(of(cost) for cost in costs))

    def _at(self, budget: float) -> AssignmentProblem:
        if self.budget == "error":
            return replace(self.problem, error_budget=budget)
        return replace(self.problem, memory_budget=budget)
