"""The Lagrangian dual: its maximum, and bounds that hold for every budget."""

from __future__ import annotations

import numpy as np
import pytest
from assignment_problems import cases, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from dsmp.passes.budgets import Limits, feasible_choice
from dsmp.passes.contraction import Instance, contract
from dsmp.passes.exact import enumerate_choices
from dsmp.passes.prices import CutOracle, ExpansionOracle, Prices, PriceSearch, oracle_of


def searched(instance: Instance, limits: Limits) -> tuple[PriceSearch, Prices] | None:
    first = feasible_choice(instance, limits)
    if not limits.hold(*instance.totals(first)[1:]):
        return None
    search = PriceSearch(instance)
    search.add(first)
    return search, search.run(limits, 1e-7)


def dual(choices: list[np.ndarray], instance: Instance, limits: Limits, prices: Prices) -> float:
    """The dual's value by looking at all choices."""
    totals = [instance.totals(choice) for choice in choices]
    value = min(t + prices.error * e + prices.memory * m for t, e, m in totals)
    return value - sum(p * b for p, b in ((prices.error, limits.error), (prices.memory, limits.memory)) if p)


@given(cases(8, 2), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_prices_maximise_the_dual(case, by_error, by_memory):
    seed, nodes, _, _ = case
    instance = contract(random_problem(seed, nodes, 2, budgets=(by_error, by_memory), free_casts=False)).instance
    limits = Limits(instance.error_budget, instance.memory_budget)
    found = searched(instance, limits)
    if found is None:
        return
    search, prices = found
    choices = list(enumerate_choices(instance, Limits(np.inf, np.inf)))
    reached = dual(choices, instance, limits, prices)
    assert search.exact
    assert search.bound(limits) == pytest.approx(reached, abs=1e-6)
    rng = np.random.default_rng(seed)
    for factor in (0.0, 0.5, 0.9, 1.1, 2.0):
        for shift in (0.0, rng.random()):
            near = Prices(
                *(
                    p * factor + shift * np.isfinite(b)
                    for p, b in ((prices.error, limits.error), (prices.memory, limits.memory))
                )
            )
            assert dual(choices, instance, limits, near) <= reached + 1e-5
    for price, budget in ((prices.error, limits.error), (prices.memory, limits.memory)):
        assert price == 0.0 or np.isfinite(budget)


@given(cases(7, 3))
@settings(max_examples=80, deadline=None)
def test_bounds_hold_for_every_budget(case):
    seed, nodes, labels, free_casts = case
    instance = contract(random_problem(seed, nodes, labels, budgets=(True, True), free_casts=free_casts)).instance
    found = searched(instance, Limits(instance.error_budget, instance.memory_budget))
    if found is None:
        return
    search, prices = found
    search.prove(prices)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        limits = Limits(*(float(rng.integers(0, 60)) for _ in range(2)))
        best = next(enumerate_choices(instance, limits), None)
        if best is not None:
            assert search.bound(limits) <= instance.totals(best)[0]


def test_which_oracle():
    two = contract(random_problem(2, 30, 2, free_casts=False)).instance
    assert isinstance(oracle_of(two), CutOracle)
    assert isinstance(oracle_of(contract(random_problem(2, 30, 3, free_casts=False)).instance), ExpansionOracle)
    odd = contract(random_problem(2, 30, 2, free_casts=True)).instance
    assert isinstance(oracle_of(odd), ExpansionOracle)


def test_a_narrowed_search_knows_what_is_left():
    instance = contract(random_problem(3, 40, 2, free_casts=False)).instance
    limits = Limits(instance.error_budget, np.inf)
    search, _ = searched(instance, limits)
    fastest = search.fastest()
    allowed = instance.allowed.copy()
    allowed[0, 1 - fastest[0]] = False
    assume = search.narrowed(instance.only(allowed))
    assert assume.bound(limits) == search.bound(limits)
    assert {p.choice.tobytes() for p in assume.points} <= {p.choice.tobytes() for p in search.points}
    assert all(p.choice[0] == fastest[0] for p in assume.points)
    assert fastest.tobytes() in {p.choice.tobytes() for p in assume.points}
