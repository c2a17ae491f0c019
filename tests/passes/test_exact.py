"""Enumeration and branch and bound of small instances."""

from __future__ import annotations

import numpy as np
import pytest
from assignment_problems import problems, random_problem
from hypothesis import given, settings

from dsmp.errors import TieError
from dsmp.passes.budgets import Limits
from dsmp.passes.contraction import contract, simplify
from dsmp.passes.exact import FEW, branch_and_bound, enumerate_choices, few


@given(problems(nodes=7, labels=3))
@settings(max_examples=80, deadline=None)
def test_all_choices_come_in_order_of_time(problem):
    try:
        instance = contract(problem).instance
    except TieError:
        return
    limits = Limits(instance.error_budget, instance.memory_budget)
    choices = list(enumerate_choices(instance, limits))
    times = [instance.totals(choice)[0] for choice in choices]
    assert times == sorted(times)
    assert all(limits.hold(*instance.totals(choice)[1:]) for choice in choices)
    everything = list(enumerate_choices(instance, Limits(np.inf, np.inf)))
    assert len({choice.tobytes() for choice in everything}) == len(everything) == instance.allowed.sum(axis=1).prod()
    within = [c for c in everything if limits.hold(*instance.totals(c)[1:])]
    assert {c.tobytes() for c in within} == {c.tobytes() for c in choices}
    solved, bound = branch_and_bound(instance, limits, 0.0)
    if choices:
        assert bound <= times[0]
        assert bound == pytest.approx(times[0], rel=1e-5, abs=1e-5)
        assert instance.totals(solved)[0] == pytest.approx(times[0], rel=1e-5)


def test_few_is_counted_in_choices():
    assert FEW == 2**13
    assert few(contract(random_problem(0, 13, 2, free_casts=False)).instance)
    assert not few(contract(random_problem(0, 30, 2, free_casts=False)).instance)
    # many variables that have no choice left are no obstacle
    forced = contract(random_problem(0, 100, 2, budgets=(False, False), free_casts=False)).instance
    only = forced.allowed & (np.cumsum(forced.allowed, axis=1) == 1)
    assert len(list(enumerate_choices(simplify(forced.only(only)), Limits(np.inf, np.inf)))) == 1
