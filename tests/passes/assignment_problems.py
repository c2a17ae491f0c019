"""Random assignment problems of every kind, and their optima found in other ways."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dsmp.passes.assignment import AssignmentProblem, SharedCast, Totals, totals_of

NAMES = ("fp32", "bf16", "fp8", "int8")


def best(problem: AssignmentProblem) -> Totals | None:
    """The totals of the fastest choice within the budgets, by trying them all; None where there is none."""
    choices = np.array(list(itertools.product(*(range(len(labels)) for labels in problem.labels))), dtype=int)
    choices = choices.reshape(-1, len(problem))

    def summed(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        return sum((row[choices[:, v]] for v, row in enumerate(values)), np.zeros(len(choices)))

    time, error, memory = summed(problem.time), summed(problem.error), summed(problem.memory)
    for cast in problem.casts:
        wanted = np.zeros(len(choices), dtype=bool)
        for reader, wants in cast.readers:
            wanted |= np.isin(choices[:, reader], list(wants))
        made = 0 if cast.source is None else choices[:, cast.source]
        time += np.where(wanted, np.array(cast.cost)[made], 0.0)
    time[(error > problem.error_budget) | (memory > problem.memory_budget)] = np.inf
    for tie in problem.ties:
        names = np.array([np.array(problem.labels[v])[choices[:, v]] for v in tie])
        time[(names != names[0]).any(axis=0)] = np.inf
    return totals_of(problem, choices[time.argmin()].tolist()) if np.isfinite(time.min()) else None


def by_milp(problem: AssignmentProblem) -> float:
    """The optimum by HiGHS from a formulation of its own: y per cast, t >= cost of the source's label - most (1 - y).

    Infinite where there is none.
    """
    number = [np.cumsum([0, *map(len, problem.labels)])[v] + np.arange(len(n)) for v, n in enumerate(problem.labels)]
    nodes, casts = sum(map(len, number)), len(problem.casts)
    rows: list[tuple[dict[int, float], float, float]] = [(dict.fromkeys(n.tolist(), 1.0), 1, 1) for n in number]
    for k, cast in enumerate(problem.casts):
        made, paid = nodes + k, nodes + casts + k
        for reader, wants in cast.readers:
            rows.append(({made: 1.0} | {int(number[reader][i]): -1.0 for i in wants}, 0, np.inf))
        most = max(cast.cost)
        cost_of = {} if cast.source is None else dict(zip(number[cast.source].tolist(), cast.cost, strict=True))
        row = {paid: 1.0, made: -most} | {i: -cost for i, cost in cost_of.items()}
        rows.append((row, -most if cost_of else 0, np.inf))
    for values, budget in ((problem.error, problem.error_budget), (problem.memory, problem.memory_budget)):
        if np.isfinite(budget):
            rows.append((dict(enumerate(np.concatenate(values).tolist())), -np.inf, budget))
    matrix = coo_array(
        (
            [value for row, _, _ in rows for value in row.values()],
            ([i for i, (row, _, _) in enumerate(rows) for _ in row], [j for row, _, _ in rows for j in row]),
        ),
        shape=(len(rows), nodes + 2 * casts),
    )
    solution = milp(
        np.concatenate([*problem.time, np.zeros(casts), np.ones(casts)]),
        integrality=np.concatenate([np.ones(nodes), np.zeros(2 * casts)]),
        bounds=Bounds(0, np.concatenate([np.ones(nodes + casts), np.full(casts, np.inf)])),
        constraints=LinearConstraint(matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows]),
        options={"mip_rel_gap": 1e-6},
    )
    assert solution.status in (0, 2)
    return float(solution.fun) if solution.status == 0 else np.inf


def random_problem(
    seed: int,
    nodes: int,
    labels: int,
    *,
    budgets: tuple[bool, bool] = (True, False),
    free_casts: bool = True,
    ties: int = 0,
) -> AssignmentProblem:
    """Nodes that read earlier ones, small whole numbers (ties and breakpoints abound), budgets between least and most.

    `free_casts`: casts with any cost per label of the source and readers that want any labels; otherwise one copy per
    label and value, free where the value has that label.
    """
    rng = np.random.default_rng(seed)
    names = []
    for _ in range(nodes):
        count = labels if not free_casts else int(rng.integers(1, labels + 1))
        names.append(tuple(rng.permutation(NAMES[:labels])[:count]) if free_casts else NAMES[:labels])
    time, error, memory = ([rng.integers(0, 12, len(n)).astype(float) for n in names] for _ in range(3))
    casts = []
    for source in (None, *range(nodes)):
        later = [v for v in range(nodes) if source is None or v > source]
        for form in range(labels):
            readers = [v for v in later if rng.random() < min(1.0, 3 / (1 + len(later)))]
            if not readers or rng.random() < 0.2:
                continue
            if free_casts:
                cost = tuple(rng.integers(0, 9, 1 if source is None else len(names[source])).astype(float).tolist())
                wants = [frozenset(np.flatnonzero(rng.random(len(names[v])) < 0.5).tolist()) for v in readers]
            else:
                price = float(rng.integers(1, 9))
                cost = (price,) if source is None else tuple(0.0 if q == form else price for q in range(labels))
                wants = [frozenset([form]) for _ in readers]
            casts.append(SharedCast(source=source, cost=cost, readers=tuple(zip(readers, wants, strict=True))))
    groups = []
    for _ in range(ties):
        members = [int(v) for v in rng.choice(nodes, size=min(nodes, 3), replace=False)]
        if set.intersection(*(set(names[v]) for v in members)):
            groups.append(tuple(members))
    limit = [np.inf, np.inf]
    for i, values in enumerate((error, memory)):
        if budgets[i]:
            low, high = sum(v.min() for v in values), sum(v.max() for v in values)
            limit[i] = float(np.floor(low + rng.random() * (high - low)))
    return AssignmentProblem(
        labels=tuple(names),
        time=tuple(time),
        error=tuple(error),
        memory=tuple(memory),
        casts=tuple(casts),
        ties=tuple(groups),
        error_budget=limit[0],
        memory_budget=limit[1],
    )


def cases(nodes: int, labels: int) -> st.SearchStrategy[tuple[int, int, int, bool]]:
    """(seed, nodes, labels, free casts), all from the seed: drawn one by one most of them would be the smallest."""

    def case(seed: int) -> tuple[int, int, int, bool]:
        rng = np.random.default_rng(seed)
        # the square root prefers the large
        return seed, *(1 + int(most * rng.random() ** 0.5) for most in (nodes, labels)), bool(rng.random() < 0.5)

    return st.integers(0, 2**32 - 1).map(case)


def problems(nodes: int, labels: int) -> st.SearchStrategy[AssignmentProblem]:
    """Problems of up to so many nodes and labels, all kinds of casts, budgets and ties."""

    def problem(case: tuple[int, int, int, bool]) -> AssignmentProblem:
        seed, size, width, free_casts = case
        rng = np.random.default_rng([seed, 1])
        budgets = (bool(rng.random() < 0.7), bool(rng.random() < 0.4))
        return random_problem(seed, size, width, budgets=budgets, free_casts=free_casts, ties=int(rng.integers(3)))

    return cases(nodes, labels).map(problem)
