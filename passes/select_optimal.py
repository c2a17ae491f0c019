"""The fastest labels within the budgets: the mathematical program, and how it is solved.

**Variables.** x[v] for every node v, one of its labels: the format and recipe in which it is computed and stored. y[k]
in {0, 1} for every shared cast k: whether the copy is made.

**Program.**

    min   sum_v time[v, x[v]]  +  sum_k cost[k, x[source(k)]] * y[k]
    s.t.  y[k] >= [x[r] in wanted(k, r)]              for every reader r of cast k: a copy is paid once
          sum_v error[v, x[v]]  <= error budget
          sum_v memory[v, x[v]] <= memory budget
          x[v] and x[w] have the same name            for v, w in one tie

**Contraction** (`contraction`). Tied nodes are one variable; a cast is a sum of layers `weight * [source not free] *
[any reader wants]`; labels that others beat whatever happens around them are dropped. Labels that break a budget even
if everything else takes its least are dropped as well (`budgets`).

**Dual.** With prices p, q >= 0 on the budgets E and M,

    L(p, q) = min_x time(x) + p error(x) + q memory(x)      and      bound = max over p, q of L(p, q) - p E - q M.

No feasible choice is faster than the bound. L is concave and piecewise linear; its maximum is found by cutting planes
(`prices`). With two labels per variable and casts of one orientation, L is an exact minimum cut (`min_cut`). Otherwise
expansion moves find good choices at the prices (`expansion`), and L is bounded from below by the linear relaxation,

    z[k] >= sum_(l wanted by r) x[r, l] - sum_(l free in k) x[source(k), l],    0 <= x, z,    sum_l x[v, l] = 1,

solved by HiGHS only where the gap is still too large. Bounds are evaluated from flows, feasible for its dual
(`linear_bound`): neither integer capacities nor a solver's tolerance can make them wrong.

**Choice** (`polish`). The choices at the optimal prices lie on either side of the budgets. Where they differ, variables
that share casts form components; those are taken over one by one while they fit, the best saving per price first.
Single variables follow while that saves time, and at last those that make less error in no more time. Picking by time
saved per error, and every single label as far as it is feasible, are tried for comparison, so the answer is never worse
than they are. Instances with few choices are enumerated, small ones that keep too large a gap go through HiGHS's branch
and bound (`exact`).

The result's `bound` holds for this program, its `gap` is therefore true, not an estimate. The same problem gives the
same choice, in whatever order its casts are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from .assignment import Assignment, AssignmentProblem, totals_of
from .budgets import Limits, feasible_choice, refusal, restrict
from .contraction import Contraction, Instance, Ints, contract, simplify
from .exact import BINARIES, branch_and_bound, enumerate_choices, few
from .polish import Room, calm, greedy, improve, merge
from .prices import Prices, PriceSearch

# sums of the same numbers in another order differ by less than this, relative
ROUNDING = 1e-12
# how many of the choices that are best at the prices are merged into the answer
OFFERS = 8
# how often the relaxation is solved, at prices that are better each time
PROOFS = 4
# the dual is maximised to this part of the gap asked for
SHARE = 0.01


def select_optimal(problem: AssignmentProblem, *, gap: float = 1e-3) -> Assignment:
    """The fastest choice of one label per node within the budgets, and a proof of how far it can be from the optimum.

    `gap` is the relative distance to the bound at which the search stops; the result's own `gap` says what was reached,
    which is more where the instance is too large for branch and bound, and 1e-6 at least where that decided. A budget
    is `binding` if it has a price, or if it forbids labels that the fastest choice without budgets takes; prices are 0
    where a little more budget would save nothing.

    Raises UnreachableBudgetError where a budget cannot be met, TieError where tied nodes share no label.
    """
    contraction = contract(problem)
    return _solve(problem, contraction, PriceSearch(contraction.instance), gap)


def front(problem: AssignmentProblem, budgets: Sequence[float], *, gap: float = 1e-3) -> list[Assignment]:
    """`select_optimal` for each of several error budgets, in their order; the problem's own error budget is not used.

    The answers share their work: choices and bounds found for one budget serve all, and more budget is never slower.

    Raises UnreachableBudgetError where the smallest budget cannot be met, TieError as `select_optimal`.
    """
    finite = [budget for budget in budgets if np.isfinite(budget)]
    # labels are compared by error, too, if any budget is finite
    resolver = Resolver(replace(problem, error_budget=max(finite, default=np.inf)), gap=gap)
    found = {budget: resolver.solve(replace(problem, error_budget=budget)) for budget in sorted(set(budgets))}
    return [found[budget] for budget in budgets]


class Resolver:
    """`select_optimal` for one problem under many budgets; the answers share their work, so that each is cheaper than
    the first. `problem` carries the largest finite budget of each kind that will be asked for."""

    def __init__(self, problem: AssignmentProblem, *, gap: float = 1e-3) -> None:
        self._gap = gap
        self._contraction = contract(problem)
        self._search = PriceSearch(self._contraction.instance)

    def solve(self, problem: AssignmentProblem) -> Assignment:
        """The choice for the same problem with other budgets. Raises UnreachableBudgetError and TieError."""
        return _solve(problem, self._contraction, self._search, self._gap)


def _solve(problem: AssignmentProblem, contraction: Contraction, shared: PriceSearch, gap: float) -> Assignment:
    """Solve for the budgets of `problem`; `shared` knows choices of the contraction and learns those that are found."""
    limits = _limits(problem, ROUNDING)
    instance = contraction.instance
    narrow = restrict(instance, limits)
    search = shared if narrow is instance else shared.narrowed(simplify(narrow))
    listed = enumerate_choices(search.instance, limits) if few(search.instance) else iter(())
    fastest = next(listed, None)
    first = feasible_choice(narrow, limits) if fastest is None else fastest
    if not limits.hold(*narrow.totals(first)[1:]):
        raise refusal(problem, narrow, first, limits, contraction.group)
    first = search.instance.instead[np.arange(len(instance)), first]
    search.add(first)
    prices, bound = search.run(limits, gap * SHARE), np.inf
    candidates: Iterator[Ints] = chain([first], listed)
    if fastest is None:
        for choice in _simple_choices(contraction.whole, search.instance, first, limits):
            search.add(choice)
        prices, bound = _close(search, limits, prices, gap)
        candidates = _candidates(search, problem, prices)
    for choice in candidates:
        expanded = contraction.expand(choice)
        totals = totals_of(problem, expanded)
        if totals.error <= problem.error_budget and totals.memory <= problem.memory_budget:
            break
    else:
        raise refusal(problem, narrow, first, _limits(problem, -ROUNDING), contraction.group)
    shared.add(choice)
    calmer = contraction.expand(calm(contraction.whole, choice, limits))
    found = totals_of(problem, calmer)
    within = found.error <= problem.error_budget and found.memory <= problem.memory_budget
    if within and found.time <= totals.time and found.error < totals.error:
        expanded, totals = calmer, found
    return Assignment(
        choice=expanded,
        totals=totals,
        bound=min(bound, totals.time),
        error_price=prices.error,
        memory_price=prices.memory,
        binding=_binding(shared, limits, prices),
    )


def _limits(problem: AssignmentProblem, slack: float) -> Limits:
    return Limits(problem.error_budget * (1 + slack), problem.memory_budget * (1 + slack))


def _simple_choices(whole: Instance, instance: Instance, first: Ints, limits: Limits) -> Iterator[Ints]:
    """Single labels wherever they are allowed, and greedy picking from the least error, in labels of the instance."""
    rows = np.arange(len(whole))
    for label in np.flatnonzero(whole.allowed.any(axis=0)).tolist():
        uniform = instance.instead[:, label]
        yield np.where(instance.allowed[rows, uniform], uniform, first)
    start = feasible_choice(whole, limits)
    if limits.hold(*whole.totals(start)[1:]):
        yield instance.instead[rows, greedy(whole, start, Room(limits, Prices(0.0, 0.0)))]


def _close(search: PriceSearch, limits: Limits, prices: Prices, gap: float) -> tuple[Prices, float]:
    """Work on choice and bound until they are within the gap or nothing more helps. Choices join the points."""

    def polished() -> float:
        return search.add(_polish(search, limits, prices)).time

    def is_open() -> bool:
        return time - search.bound(limits) > gap * time

    time = polished()
    for _ in range(0 if search.exact else PROOFS):
        if not is_open():
            break
        search.prove(prices)
        used, prices = prices, search.run(limits, gap * SHARE)
        time = polished()
        if prices == used:
            break
    bound = search.bound(limits)
    counts = search.instance.allowed.sum(axis=1)
    if is_open() and int(counts[counts > 1].sum()) <= BINARIES:
        choice, proven = branch_and_bound(search.instance, limits, gap)
        bound = max(bound, proven)
        if choice is not None:
            search.add(choice)
            polished()
    return prices, bound


def _polish(search: PriceSearch, limits: Limits, prices: Prices) -> Ints:
    """The best known choice within the limits with what it can take over from others, then changed node by node."""
    room = Room(limits, prices)
    inside = [point for point in search.points if limits.hold(point.error, point.memory)]
    if not inside:
        return search.points[0].choice
    choice = min(inside, key=lambda point: point.time).choice
    for point in sorted(search.points, key=lambda point: point.at(prices))[:OFFERS]:
        choice = merge(search.instance, choice, point.choice, room)
    return improve(search.instance, choice, room)


def _candidates(search: PriceSearch, problem: AssignmentProblem, prices: Prices) -> Iterator[Ints]:
    """Choices within the budgets to rounding, the fastest first; then, in case rounding fails it, a stricter one."""
    limits = _limits(problem, ROUNDING)
    inside = sorted((p for p in search.points if limits.hold(p.error, p.memory)), key=lambda p: p.time)
    yield inside[0].choice
    yield _polish(search, _limits(problem, -ROUNDING), prices)
    for point in inside[1:]:
        yield point.choice


def _binding(shared: PriceSearch, limits: Limits, prices: Prices) -> tuple[str, ...]:
    """Budgets with a price, and those that forbid labels of the fastest choice without budgets."""
    free = shared.fastest()
    rows = np.arange(len(free))
    binding = []
    for name, price, alone in (
        ("error", prices.error, Limits(limits.error, np.inf)),
        ("memory", prices.memory, Limits(np.inf, limits.memory)),
    ):
        if price > 0 or not restrict(shared.instance, alone).allowed[rows, free].all():
            binding.append(name)
    return tuple(binding)
