"""Whether budgets can be met: answers against all choices."""

from __future__ import annotations

import numpy as np
from assignment_problems import cases, random_problem
from hypothesis import given, settings

from dsmp.passes.budgets import Limits, feasible_choice, least_choice, refusal, restrict
from dsmp.passes.contraction import contract
from dsmp.passes.exact import enumerate_choices


@given(cases(7, 3))
@settings(max_examples=200, deadline=None)
def test_a_choice_is_found_where_there_is_one(case):
    seed, nodes, labels, both = case
    problem = random_problem(seed, nodes, labels, budgets=(True, both))
    instance = contract(problem).instance
    # a budget below the middle is met by few choices
    limits = Limits(instance.error_budget * 0.8, instance.memory_budget * 0.8)
    choice = feasible_choice(instance, limits)
    there = next(enumerate_choices(instance, limits), None) is not None
    assert limits.hold(*instance.totals(choice)[1:]) == there
    if not there:
        error = refusal(problem, instance, choice, limits, np.arange(len(instance)))
        cost, limit = (instance.error, limits.error) if error.name == "error" else (instance.memory, limits.memory)
        assert error.least > limit
        given_error = limits.error if "within the error budget" in str(error) else np.inf
        reachable = enumerate_choices(instance, Limits(given_error, np.inf))
        rows = np.arange(len(instance))
        assert error.least == min(float(cost[rows, c].sum()) for c in reachable)
        # the nodes named are enough: without what they cost the budget would be met
        assert error.nodes


@given(cases(7, 3))
@settings(max_examples=100, deadline=None)
def test_only_labels_that_no_choice_within_the_budgets_takes_are_ruled_out(case):
    seed, nodes, labels, _ = case
    instance = contract(random_problem(seed, nodes, labels, budgets=(True, True))).instance
    limits = Limits(instance.error_budget, instance.memory_budget)
    narrow = restrict(instance, limits)
    rows = np.arange(len(instance))
    for choice in enumerate_choices(instance, limits):
        assert narrow.allowed[rows, choice].all()
    for limit in (Limits(limits.error, np.inf), Limits(np.inf, limits.memory)):
        alone = restrict(instance, limit)
        if next(enumerate_choices(instance, limit), None) is not None:
            taken = np.zeros_like(instance.allowed)
            for choice in enumerate_choices(instance, limit):
                taken[rows, choice] = True
            assert (alone.allowed == taken).all()


def test_the_least_of_one_thing_then_of_another():
    instance = contract(random_problem(0, 30, 3)).instance
    choice = least_choice(instance, instance.error, instance.memory)
    rows = np.arange(len(instance))
    key = np.where(instance.allowed, instance.error * 1e6 + instance.memory * 1e3 + instance.time, np.inf)
    assert (key[rows, choice] == key.min(axis=1)).all()
