"""Any flow gives a lower bound; the relaxation gives the best of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from assignment_problems import cases, random_problem
from hypothesis import given, settings
from scipy.optimize import linprog

from dsmp.passes.budgets import Limits
from dsmp.passes.contraction import Instance, Layers, contract
from dsmp.passes.exact import enumerate_choices
from dsmp.passes.linear_bound import dual_value, linear_bound, relaxation


def instance_of(seed: int, nodes: int, labels: int, free_casts: bool) -> Instance:
    return contract(random_problem(seed, nodes, labels, free_casts=free_casts)).instance.priced(0.7, 0.0)


def optimum(instance: Instance) -> float:
    return instance.totals(next(enumerate_choices(instance, Limits(np.inf, np.inf))))[0]


@given(cases(7, 3))
@settings(max_examples=150, deadline=None)
def test_any_flow_bounds(case):
    seed, nodes, labels, free_casts = case
    instance = instance_of(seed, nodes, labels, free_casts)
    flow = np.random.default_rng(seed).normal(0, 5, len(instance.layers.layer))
    value = dual_value(instance, flow)
    bound, choice = linear_bound(instance)
    assert value <= bound + 1e-9 * abs(bound)
    assert bound <= optimum(instance) <= instance.totals(choice)[0] + 1e-9


def test_a_flow_below_zero_or_above_the_weight_does_not_count():
    """One cast that nobody needs: any flow that were taken as it is would bound at 5 us what costs nothing."""
    layers = Layers(
        weight=np.array([1.0]),
        source=np.array([0]),
        free=np.array([[False, True]]),
        layer=np.array([0]),
        reader=np.array([1]),
        wants=np.array([[False, True]]),
    )
    time = np.array([[100.0, 0.0], [0.0, 100.0]])
    instance = Instance(
        time=time,
        error=np.zeros((2, 2)),
        memory=np.zeros((2, 2)),
        allowed=np.ones((2, 2), dtype=bool),
        instead=np.tile([0, 1], (2, 1)),
        layers=layers,
        constant=0.0,
        error_budget=np.inf,
        memory_budget=np.inf,
    )
    assert dual_value(instance, np.array([-5.0])) == pytest.approx(0.0)
    # the other way round the cast is needed, and costs 1 us, not 5
    needed = replace(instance, time=time[::-1])
    assert needed.totals(np.array([0, 1]))[0] == 1.0
    assert dual_value(needed, np.array([5.0])) == pytest.approx(1.0)


@given(cases(40, 4))
@settings(max_examples=40, deadline=None)
def test_the_bound_is_the_relaxation_of_the_simplified_instance_or_better(case):
    seed, nodes, labels, free_casts = case
    instance = instance_of(seed, nodes, labels, free_casts)
    program = relaxation(instance)
    constraints = {"A_ub": program.cover, "b_ub": np.zeros(program.cover.shape[0])} if program.cover.shape[0] else {}
    solved = linprog(program.cost, A_eq=program.simplex, b_eq=np.ones(len(instance)), **constraints)
    assert linear_bound(instance)[0] >= (solved.fun + instance.constant) * (1 - 1e-7) - 1e-7


def test_choices_of_the_relaxation_are_points_of_it():
    instance = instance_of(5, 30, 3, free_casts=True)
    program = relaxation(instance)
    choice = np.random.default_rng(0).integers(0, 3, len(instance))
    choice = np.where(instance.allowed[np.arange(len(instance)), choice], choice, instance.allowed.argmax(axis=1))
    picked = (choice[program.variable] == program.label).astype(float)
    assert (program.simplex[:, : len(picked)] @ picked == 1).all()
    # the least layers that the covers admit are those that the choice pays
    need = program.cover[:, : len(picked)] @ picked
    paid = np.zeros(len(instance.layers.weight))
    np.maximum.at(paid, instance.layers.layer, need)
    time = program.cost @ np.concatenate([picked, paid]) + instance.constant
    assert time == pytest.approx(instance.totals(choice)[0])
