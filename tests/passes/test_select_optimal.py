"""The solver against all choices of small problems, HiGHS's branch and bound on medium ones, and what it promises."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from assignment_problems import best, by_milp, cases, problems, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dsmp.errors import BudgetError, TieError
from dsmp.passes import exact
from dsmp.passes.assignment import Assignment, AssignmentProblem, SharedCast, totals_of
from dsmp.passes.prices import Prices, PriceSearch
from dsmp.passes.select_optimal import front, select_optimal

HALF = np.array([4.0, 1.0])


def holds(problem: AssignmentProblem, answer: Assignment) -> None:
    """What is true of every answer."""
    assert answer.totals == totals_of(problem, answer.choice)
    assert answer.totals.error <= problem.error_budget
    assert answer.totals.memory <= problem.memory_budget
    assert answer.bound <= answer.totals.time
    for tie in problem.ties:
        assert len({problem.labels[v][answer.choice[v]] for v in tie}) == 1


def solved(problem: AssignmentProblem) -> Assignment | None:
    """The answer, checked; None where a budget cannot be met or tied nodes share no label."""
    try:
        answer = select_optimal(problem)
    except (BudgetError, TieError):
        return None
    holds(problem, answer)
    return answer


@given(problems(nodes=12, labels=2))
@settings(max_examples=150, deadline=None)
def test_two_labels_give_the_optimum(problem):
    answer, optimum = solved(problem), best(problem)
    assert (answer is None) == (optimum is None)
    assert answer is None or answer.totals.time == optimum.time == answer.bound


@given(problems(nodes=7, labels=3))
@settings(max_examples=150, deadline=None)
def test_three_labels_give_the_optimum_within_the_gap(problem):
    answer, optimum = solved(problem), best(problem)
    assert (answer is None) == (optimum is None)
    if answer is not None:
        assert answer.bound <= optimum.time * (1 + 1e-12)
        assert optimum.time <= answer.totals.time <= optimum.time / (1 - answer.gap) * (1 + 1e-12)


@given(problems(nodes=8, labels=3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_prices_and_bounds_are_right_without_trying_all_choices(problem, branching):
    with mock.patch.object(exact, "FEW", 0), mock.patch("dsmp.passes.select_optimal.BINARIES", 4000 * branching - 1):
        answer = solved(problem)
    optimum = best(problem)
    assert (answer is None) == (optimum is None)
    if answer is not None:
        assert answer.bound <= optimum.time * (1 + 1e-12)
        assert optimum.time <= answer.totals.time <= optimum.time / (1 - answer.gap) * (1 + 1e-12)
        assert not branching or answer.gap <= 1e-3 + 1e-6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("nodes", "labels", "free_casts", "both"),
    [
        (400, 2, False, False),
        (300, 2, False, True),
        (100, 2, True, False),
        (150, 3, False, False),
        (100, 3, True, True),
    ],
)
def test_equals_branch_and_bound_on_medium_problems(seed, nodes, labels, free_casts, both):
    problem = random_problem(seed, nodes, labels, budgets=(True, both), free_casts=free_casts)
    answer, optimum = solved(problem), by_milp(problem)
    if answer is None:
        assert optimum == np.inf
        return
    assert answer.gap <= 2e-3
    assert answer.bound <= optimum * (1 + 2e-6)
    assert optimum * (1 - 2e-6) <= answer.totals.time <= optimum * (1 + answer.gap) * (1 + 2e-6)


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_more_budget_is_never_slower(seed, labels):
    problem = random_problem(seed, 90, labels, free_casts=seed == 0)
    low, high = (float(sum(pick(e) for e in problem.error)) for pick in (np.min, np.max))
    budgets = [*np.linspace(low, high, 9).tolist(), np.inf]
    answers = front(problem, budgets)
    for budget, answer in zip(budgets, answers, strict=True):
        holds(replace(problem, error_budget=budget), answer)
        assert answer.gap <= 2e-3
    times = [answer.totals.time for answer in answers]
    assert times == sorted(times, reverse=True)
    for budget, answer in list(zip(budgets, answers, strict=True))[::4]:
        alone = select_optimal(replace(problem, error_budget=budget))
        assert alone.totals.time * (1 - 2e-3) <= answer.totals.time <= alone.totals.time * (1 + 2e-3)


def test_front_keeps_the_order_and_reports_the_budget_that_is_too_small():
    problem = random_problem(1, 10, 2)
    low, most = (float(sum(pick(e) for e in problem.error)) for pick in (np.min, np.max))
    loose, tight, same = front(problem, [most, (low + most) / 2, most])
    assert loose == same
    assert loose.totals.time <= tight.totals.time
    with pytest.raises(BudgetError):
        front(problem, [most, -1.0])


@given(problems(nodes=40, labels=3), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_the_same_problem_gives_the_same_choice_in_any_order_of_casts(problem, random):
    casts = [replace(c, readers=tuple(random.sample(c.readers, len(c.readers)))) for c in problem.casts]
    random.shuffle(casts)
    answer = solved(problem)
    assert answer == solved(problem) == solved(replace(problem, casts=tuple(casts)))


NO_BRANCHING = mock.patch("dsmp.passes.select_optimal.BINARIES", -1)


@NO_BRANCHING
@pytest.mark.parametrize("seed", [1, 8, 11, 14, 24])
def test_more_budget_is_never_slower_where_gaps_stay_open(seed):
    """Solved one by one, each of these is slower with more budget somewhere."""
    problem = random_problem(seed, 40, 3, free_casts=seed % 2 == 0)
    low, high = (float(sum(pick(e) for e in problem.error)) for pick in (np.min, np.max))
    times = [answer.totals.time for answer in front(problem, np.linspace(low, high, 60).tolist())]
    assert times == sorted(times, reverse=True)


@NO_BRANCHING
def test_gaps_without_branching():
    gaps = [select_optimal(random_problem(seed, 60, 3, free_casts=False)).gap for seed in range(12)]
    # 0.014 if single nodes are not changed at the end
    assert np.mean(gaps) < 0.012


@NO_BRANCHING
def test_rounding_at_the_budget_costs_one_node_not_all():
    """Three times 0.1 is more than 0.3 in binary: the third node does not fit, the other two must stay."""
    problem = replace(chain([0.0] * 29, error_budget=0.3), error=(np.array([0.0, 0.1]),) * 30)
    answer = select_optimal(problem)
    holds(problem, answer)
    assert sum(answer.choice) == 2


@NO_BRANCHING
def test_blocks_that_tie_are_taken_one_by_one():
    """All blocks change at one price, and no node of a block alone: the budget must still be used up."""
    blocks, size = 50, 4
    casts = tuple(
        SharedCast(source=v, cost=cost, readers=((v + 1, frozenset([form])),))
        for v in range(blocks * size)
        if v % size < size - 1
        for form, cost in ((0, (0.0, 7.0)), (1, (7.0, 0.0)))
    )
    # picking by each node's own saving starts everywhere at once
    time = tuple(np.array([saved, 0.0]) for saved in (1.0, 5.0, 2.0, 4.0)) * blocks
    problem = replace(chain([0.0] * (blocks * size - 1), error_budget=23 * size + 0.4), casts=casts, time=time)
    answer = select_optimal(problem)
    holds(problem, answer)
    assert answer.totals.error == 23 * size
    assert sum(answer.choice[::size]) == 23
    assert answer.gap <= 5e-3


def unhelped(problem: AssignmentProblem) -> Assignment:
    """The answer if prices, merging, single changes and branching find nothing."""
    found = mock.patch("dsmp.passes.select_optimal.merge", lambda instance, choice, *_: choice)
    better = mock.patch("dsmp.passes.select_optimal.improve", lambda instance, choice, *_: choice)
    with NO_BRANCHING, found, better, mock.patch.object(PriceSearch, "run", lambda *_: Prices(0.0, 0.0)):
        return select_optimal(problem)


def test_a_single_label_for_all_is_a_candidate():
    """Picking by rate starts with the last label and runs out of budget: mixtures pay casts, the middle label none."""
    nodes = 20
    problem = AssignmentProblem(
        labels=(("high", "middle", "low"),) * nodes,
        time=tuple(np.array([9.0, 5.0, 0.5]) + v / 1000 for v in range(nodes)),
        error=(np.array([0.0, 1.0, 1.9]),) * nodes,
        memory=(np.zeros(3),) * nodes,
        casts=tuple(
            SharedCast(
                source=v, cost=tuple(50.0 * (i != label) for i in range(3)), readers=((v + 1, frozenset([label])),)
            )
            for v in range(nodes - 1)
            for label in range(3)
        ),
        error_budget=float(nodes),
    )
    assert unhelped(problem).choice == (1,) * nodes
    assert select_optimal(problem).choice == (1,) * nodes


@pytest.mark.parametrize("free_casts", [False, True])
@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_never_slower_than_single_labels_and_greedy_picking(seed, helped, free_casts):
    problem = random_problem(seed, 80, 3, free_casts=free_casts)
    # no two rates alike, so that there is one order
    rng = np.random.default_rng(seed)
    time, error = (tuple(row + rng.random(len(row)) / 9 for row in rows) for rows in (problem.time, problem.error))
    problem = replace(problem, time=time, error=error, error_budget=problem.error_budget + 9)
    time = (select_optimal(problem) if helped else unhelped(problem)).totals.time
    for name in {n for names in problem.labels for n in names}:
        if all(name in names for names in problem.labels):
            uniform = totals_of(problem, [names.index(name) for names in problem.labels])
            assert uniform.error > problem.error_budget or time <= uniform.time
    choice = [int(np.lexsort([t, e])[0]) for t, e in zip(problem.time, problem.error, strict=True)]
    moves = []
    for v, (t, e) in enumerate(zip(problem.time, problem.error, strict=True)):
        moves += [
            ((t[choice[v]] - t[i]) / max(e[i] - e[choice[v]], 1e-9), v, i) for i in range(len(t)) if t[i] < t[choice[v]]
        ]
    done = set()
    for _, v, i in sorted(moves, reverse=True):
        offer = [*choice[:v], i, *choice[v + 1 :]]
        if v not in done and totals_of(problem, offer).error <= problem.error_budget:
            choice = offer
            done.add(v)
    assert time <= totals_of(problem, choice).time


@given(cases(11, 2))
@settings(max_examples=40, deadline=None)
def test_a_budget_that_is_met_exactly_is_met(case):
    seed, nodes, _, _ = case
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, nodes, 2, budgets=(False, False))
    # a budget that is a sum of numbers which are no exact binary fractions
    problem = replace(problem, error=tuple(rng.random(len(e)) / 10 for e in problem.error))
    some = [int(rng.integers(len(names))) for names in problem.labels]
    tight = replace(problem, error_budget=totals_of(problem, some).error)
    answer = select_optimal(tight)
    holds(tight, answer)
    assert answer.totals.time <= totals_of(problem, some).time
    again = replace(problem, error_budget=answer.totals.error)
    assert select_optimal(again).totals == answer.totals


def chain(costs: list[float], *, error_budget: float = np.inf, **more: object) -> AssignmentProblem:
    """Nodes in a row with labels high and low of time 4 and 1 and error 0 and 1, casts both ways in between."""
    nodes = len(costs) + 1
    casts = [
        SharedCast(source=v, cost=cost, readers=((v + 1, frozenset([form])),))
        for v, price in enumerate(costs)
        for form, cost in ((0, (0.0, price)), (1, (price, 0.0)))
    ]
    return AssignmentProblem(
        labels=(("high", "low"),) * nodes,
        time=(HALF,) * nodes,
        error=(np.array([0.0, 1.0]),) * nodes,
        memory=(np.zeros(2),) * nodes,
        casts=tuple(casts),
        error_budget=error_budget,
        **more,
    )


def test_casts_keep_neighbours_together():
    assert select_optimal(chain([2.0, 2.0, 2.0], error_budget=2)).choice in {(0, 0, 1, 1), (1, 1, 0, 0)}
    assert select_optimal(chain([9.0, 9.0, 9.0], error_budget=3)).choice == (0, 0, 0, 0)


def test_prices_and_binding_budgets():
    loose = select_optimal(chain([1.0, 1.0]))
    assert (loose.choice, loose.error_price, loose.binding) == ((1, 1, 1), 0.0, ())
    tight = select_optimal(chain([0.0] * 99, error_budget=50))
    # each unit of error saves the 3 us between the labels
    assert_allclose(tight.error_price, 3.0)
    assert (sum(tight.choice), tight.binding) == (50, ("error",))
    # none of the labels fits at all, and a little more budget would not change that
    closed = select_optimal(chain([0.0], error_budget=0.5))
    assert (closed.choice, closed.error_price, closed.binding) == ((0, 0), 0.0, ("error",))


def test_both_budgets_bind():
    rng = np.random.default_rng(0)
    nodes = 300
    problem = AssignmentProblem(
        labels=(("fp32", "bf16", "fp8"),) * nodes,
        time=tuple(rng.permutation([9.0, 5.0, 2.0]) + rng.random(3) for _ in range(nodes)),
        error=tuple(rng.random(3) for _ in range(nodes)),
        memory=tuple(rng.random(3) for _ in range(nodes)),
        error_budget=105.0,
        memory_budget=105.0,
    )
    answer = select_optimal(problem)
    holds(problem, answer)
    assert answer.binding == ("error", "memory")
    assert answer.gap <= 1e-3
    for name in ("error_budget", "memory_budget"):
        assert select_optimal(replace(problem, **{name: np.inf})).totals.time < answer.totals.time * 0.99


def test_the_price_is_what_a_little_more_budget_saves():
    rng = np.random.default_rng(3)
    base = random_problem(3, 400, 2, free_casts=False)
    problem = replace(base, error=tuple(e + rng.random(len(e)) for e in base.error))
    low = float(sum(e.min() for e in problem.error))
    before, after = (select_optimal(replace(problem, error_budget=low + b), gap=1e-4) for b in (200.0, 230.0))
    saved = (before.totals.time - after.totals.time) / 30
    assert after.error_price * 0.9 <= saved <= before.error_price * 1.1


def test_edges():
    empty = AssignmentProblem(labels=(), time=(), error=(), memory=())
    nothing = select_optimal(empty)
    assert (nothing.choice, nothing.totals.time, nothing.bound, nothing.gap) == ((), 0.0, 0.0, 0.0)
    assert select_optimal(chain([])).choice == (1,)
    assert select_optimal(chain([], error_budget=0)).choice == (0,)
    free = replace(chain([0.0] * 3), time=(np.zeros(2),) * 4)
    assert select_optimal(free).totals.time == 0.0
    assert select_optimal(free).gap == 0.0
    harmless = replace(chain([1.0] * 3, error_budget=0), error=(np.zeros(2),) * 4)
    assert select_optimal(harmless).choice == (1, 1, 1, 1)
    tied = chain([1.0] * 40, error_budget=40, ties=(tuple(range(41)),))
    assert select_optimal(tied).choice == (0,) * 41
    assert select_optimal(replace(tied, error_budget=41)).choice == (1,) * 41


def test_ties_of_different_labels():
    problem = replace(
        chain([1.0, 1.0]), labels=(("high", "low"), ("low", "high"), ("low", "other")), ties=((0, 1), (1, 2))
    )
    assert select_optimal(problem).choice == (1, 0, 0)
    with pytest.raises(TieError, match="3 tied nodes") as caught:
        select_optimal(replace(problem, labels=(("high",), *problem.labels[1:]), time=(HALF[:1], HALF, HALF)))
    assert caught.value.nodes == (0, 1, 2)


def test_a_budget_that_cannot_be_met_says_what_stands_in_the_way():
    problem = replace(chain([1.0] * 3), error=tuple(np.array([e, e + 1]) for e in (1.0, 7.0, 2.0, 5.0)))
    with pytest.raises(BudgetError, match=r"budget of 4 cannot be met: the least .* is 15") as caught:
        select_optimal(replace(problem, error_budget=4.0))
    # without nodes 1 and 3 the others need 3
    assert (caught.value.least, caught.value.nodes) == (15.0, (1, 3))
    assert "What binds: node 1, node 3." in str(caught.value)
    with pytest.raises(BudgetError, match=r"What binds: b, d\. Raise"):
        select_optimal(replace(problem, error_budget=4.0, names=("a", "b", "c", "d")))
    assert select_optimal(replace(problem, error_budget=15.0)).choice == (0, 0, 0, 0)
    both = replace(problem, memory=(np.array([3.0, 0.0]),) * 4, error_budget=17.0, memory_budget=5.0)
    with pytest.raises(BudgetError, match=r"memory budget of 5 bytes cannot be met within the error budget 17: .* 6"):
        select_optimal(both)
    with mock.patch.object(exact, "FEW", 0), pytest.raises(BudgetError, match="within the error budget 17"):
        select_optimal(both)
    assert select_optimal(replace(both, memory_budget=6.0)).totals.memory == 6.0
    with pytest.raises(BudgetError, match=r"memory budget of -1 bytes cannot be met: the least .* is 0"):
        select_optimal(replace(both, memory_budget=-1.0))


def test_large_problems_close_the_gap():
    rng = np.random.default_rng(7)
    problem = random_problem(7, 900, 2, free_casts=False)
    problem = replace(problem, time=tuple(t * rng.lognormal(0, 1) for t in problem.time))
    answer = select_optimal(problem)
    holds(problem, answer)
    assert answer.gap <= 1e-3
