"""Prices of the budgets: the Lagrangian dual by cutting planes, and the pool of choices and bounds found on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import linprog

from .budgets import Limits
from .contraction import Bools, Instance, Ints
from .expansion import minimise
from .linear_bound import ROUNDING, dual_value, linear_bound
from .min_cut import CutNetwork

STEPS = 80


@dataclass(frozen=True, slots=True)
class Point:
    """A choice and its totals."""

    choice: Ints
    time: float
    error: float
    memory: float

    def at(self, prices: Prices) -> float:
        return self.time + prices.error * self.error + prices.memory * self.memory


@dataclass(frozen=True, slots=True)
class Prices:
    """Microseconds per unit of error and per byte."""

    error: float
    memory: float


class Oracle(Protocol):
    """Minimises time plus priced budgets: the choices it found, and a lower bound on that minimum if it has one.

    `exact` says that the bound is the minimum, to rounding.
    """

    exact: bool

    def __call__(self, prices: Prices, starts: Sequence[Ints]) -> tuple[list[Ints], float]: ...


class CutOracle:
    """Exact where every variable has at most two labels and all casts fit one orientation: one minimum cut."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._zero = instance.allowed.argmax(axis=1)
        self._one = instance.allowed.shape[1] - 1 - instance.allowed[:, ::-1].argmax(axis=1)
        self._network = CutNetwork(instance.layers, self._zero, self._one)
        self.exact = self._network.exact

    def __call__(self, prices: Prices, starts: Sequence[Ints]) -> tuple[list[Ints], float]:
        priced = self._instance.priced(prices.error, prices.memory)
        rows = np.arange(len(priced))
        cuts = self._network.solve(priced.time[rows, self._zero], priced.time[rows, self._one])
        return [cuts.least, cuts.most], dual_value(priced, cuts.flow)


class ExpansionOracle:
    """Local minima by expansion moves from what is known; says nothing about the minimum."""

    exact = False

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def __call__(self, prices: Prices, starts: Sequence[Ints]) -> tuple[list[Ints], float]:
        priced = self._instance.priced(prices.error, prices.memory)
        alone = np.where(priced.allowed, priced.time, np.inf).argmin(axis=1)
        return [minimise(priced, [alone, *starts])], -np.inf


def oracle_of(instance: Instance) -> CutOracle | ExpansionOracle:
    if int(instance.allowed.sum(axis=1).max(initial=1)) <= 2:
        cuts = CutOracle(instance)
        if cuts.exact:
            return cuts
    return ExpansionOracle(instance)


class PriceSearch:
    """Everything found about one instance at some prices; budgets come with each question, so several share it."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.points: list[Point] = []
        self._oracle: Oracle = oracle_of(instance)
        self.exact = self._oracle.exact
        self._known: set[bytes] = set()
        self._bounds: list[tuple[Prices, float]] = []
        self._fastest: Ints | None = None

    def add(self, choice: Ints) -> Point:
        point = Point(choice, *self.instance.totals(choice))
        key = choice.tobytes()
        if key not in self._known:
            self._known.add(key)
            self.points.append(point)
        return point

    def narrowed(self, instance: Instance) -> PriceSearch:
        """A search in fewer labels of the same variables that starts from what is known here."""
        search = PriceSearch(instance)
        search._bounds = list(self._bounds)
        rows = np.arange(len(instance))
        for point in self.points:
            choice = instance.instead[rows, point.choice]
            inside: Bools = instance.allowed[rows, choice]
            if inside.all():
                search.add(choice)
        return search

    def fastest(self) -> Ints:
        """The fastest choice found without budgets."""
        if self._fastest is None:
            found, _ = self._oracle(Prices(0.0, 0.0), [])
            self._fastest = min((self.add(choice) for choice in found), key=lambda point: point.time).choice
        return self._fastest

    def bound(self, limits: Limits) -> float:
        """The best lower bound on the time within the limits; -inf if there is none yet."""
        return max((_less(value, prices, limits) for prices, value in self._bounds), default=-np.inf)

    def prove(self, prices: Prices) -> None:
        """Bound by the linear relaxation at these prices; its solution, rounded, joins the points."""
        value, choice = linear_bound(self.instance.priced(prices.error, prices.memory))
        self._bounds.append((prices, value))
        self.add(choice)

    def run(self, limits: Limits, tolerance: float) -> Prices:
        """Prices that maximise the dual, to a relative tolerance. Needs a point within the limits.

        Cutting planes (Kelley 1960): each point bounds the dual from above by a linear function of the prices; the
        next prices are where the least of these functions is largest. In one price that is where the lines of the
        two points on either side of the budget meet.
        """
        best, reached, tried = Prices(0.0, 0.0), -np.inf, set()
        for _ in range(STEPS):
            value, prices = self._upper(limits)
            if prices in tried:
                break
            tried.add(prices)
            starts = [min(self.points, key=lambda point: point.at(prices)).choice]
            found, bound = self._oracle(prices, starts)
            lowest = min(self.add(choice).at(prices) for choice in found)
            if np.isfinite(bound):
                self._bounds.append((prices, bound))
            lower = _less(lowest, prices, limits)
            if lower > reached:
                best, reached = prices, lower
            if value - lower <= tolerance * abs(value):
                break
        return best

    def _upper(self, limits: Limits) -> tuple[float, Prices]:
        """The maximum over prices of the least of the points' functions, and the prices."""
        time = np.array([point.time for point in self.points])
        over = [
            np.array([point.error for point in self.points]) - limits.error,
            np.array([point.memory for point in self.points]) - limits.memory,
        ]
        finite = [i for i, limit in enumerate((limits.error, limits.memory)) if np.isfinite(limit)]
        found = [0.0, 0.0]
        least = float(time.min())
        span = float(np.ptp(time)) or 1.0
        scales = {i: float(np.abs(over[i]).max()) or 1.0 for i in finite}
        rows = np.column_stack([np.ones(len(time)), *(-over[i] / scales[i] for i in finite)])
        solved = linprog(
            [-1.0] + [0.0] * len(finite),
            A_ub=rows,
            b_ub=(time - least) / span,
            bounds=[(None, None)] + [(0, None)] * len(finite),
            method="highs",
        )
        for i, price in zip(finite, solved.x[1:], strict=True):
            found[i] = max(0.0, float(price)) * span / scales[i]
        prices = Prices(*found)
        return float(min(_less(point.at(prices), prices, limits) for point in self.points)), prices


def _less(value: float, prices: Prices, limits: Limits) -> float:
    """A value at prices, less what the budgets are worth at them, rounded down."""
    worth = sum(p * limit for p, limit in ((prices.error, limits.error), (prices.memory, limits.memory)) if p)
    return value - worth - ROUNDING * (abs(value) + worth)
