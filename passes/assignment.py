"""The assignment problem: one label for each node, the least time, within budgets. Plain numbers, no graph.

`select_optimal` states the program and solves it; this module holds an instance of it and says what a solution costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedCast:
    """One converted copy of one value, made once however many nodes read it.

    `cost` is the time of making it for each label of the node that computes the value (0 where the value already lies
    in that form), a single entry where the value is an input or a parameter (`source` None). It is paid exactly when at
    least one reader has a label for which it reads the copy: `readers` pairs each reader with the indices of those
    labels.
    """

    source: int | None
    cost: tuple[float, ...]
    readers: tuple[tuple[int, frozenset[int]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentProblem:
    """An instance.

    `labels[v]` names the labels that node v may take, no name twice in a node; a label of the same name in two nodes is
    the same format. `time[v]`, `error[v]` and `memory[v]` hold one finite number >= 0 per label: microseconds, drift
    (additive, see `sensitivity`) and bytes. `ties` are groups of nodes that take labels of the same name; a label that
    one member lacks is out for all of them. Budgets may be infinite. `names` are what errors call the
    nodes: one for each, or none at all.
    """

    labels: tuple[tuple[str, ...], ...]
    time: tuple[Floats, ...]
    error: tuple[Floats, ...]
    memory: tuple[Floats, ...]
    casts: tuple[SharedCast, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    error_budget: float = np.inf
    memory_budget: float = np.inf
    names: tuple[str, ...] = ()

    def named(self, nodes: Sequence[int]) -> list[str]:
        """The names of some nodes; none where the problem has none."""
        return [self.names[v] for v in nodes] if self.names else []

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What an assignment costs in all: time with shared casts (and the casts alone), drift, bytes."""

    time: float
    cast_time: float
    error: float
    memory: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A solution: an index into `labels[v]` per node, what it costs, and how far from the optimum it can be.

    `bound` is a proven lower bound on the time of any feasible assignment, `gap` = (time - bound) / time.
    `error_price` and `memory_price` are the multipliers at which it was found: microseconds that one more unit of
    budget would save. `binding` names the budgets that hold it back ("error", "memory").
    """

    choice: tuple[int, ...]
    totals: Totals
    bound: float
    error_price: float = 0.0
    memory_price: float = 0.0
    binding: tuple[str, ...] = field(default=())

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound / self.totals.time) if self.totals.time > 0 else 0.0


def totals_of(problem: AssignmentProblem, choice: Sequence[int]) -> Totals:
    """What a choice of one label index per node costs. Sums are rounded once, whatever the order of nodes and casts."""
    casts = [cast_cost(cast, choice) for cast in problem.casts]
    return Totals(
        time=math.fsum([*(float(row[x]) for row, x in zip(problem.time, choice, strict=True)), *casts]),
        cast_time=math.fsum(casts),
        error=math.fsum(float(row[x]) for row, x in zip(problem.error, choice, strict=True)),
        memory=math.fsum(float(row[x]) for row, x in zip(problem.memory, choice, strict=True)),
    )


def cast_cost(cast: SharedCast, choice: Sequence[int]) -> float:
    """Time of a shared cast under a choice: 0 where no reader wants the copy."""
    if not any(choice[reader] in wanted for reader, wanted in cast.readers):
        return 0.0
    return cast.cost[0 if cast.source is None else choice[cast.source]]
