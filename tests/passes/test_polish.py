"""Improvements within budgets: what they predict is what happens, and they never break a budget."""

from __future__ import annotations

import numpy as np
from assignment_problems import cases, random_problem
from hypothesis import given, settings
from numpy.testing import assert_allclose

from dsmp.passes.assignment import AssignmentProblem
from dsmp.passes.budgets import Limits
from dsmp.passes.contraction import Instance, contract
from dsmp.passes.polish import Room, greedy, improve, merge, single_changes
from dsmp.passes.prices import Prices

small = given(cases(12, 4))


def instance_of(seed: int, nodes: int, labels: int, free_casts: bool) -> Instance:
    return contract(random_problem(seed, nodes, labels, budgets=(True, True), free_casts=free_casts)).instance


def some(instance: Instance, seed: int) -> np.ndarray:
    return np.where(instance.allowed, np.random.default_rng(seed).random(instance.allowed.shape), -1.0).argmax(axis=1)


def room_for(instance: Instance, choice: np.ndarray, seed: int) -> Room:
    """Budgets that leave the choice a little room."""
    _, error, memory = instance.totals(choice)
    rng = np.random.default_rng(seed)
    return Room(Limits(error + rng.integers(0, 9), memory + rng.integers(0, 9)), Prices(rng.random(), rng.random()))


@small
@settings(max_examples=100, deadline=None)
def test_changes_of_one_variable_are_what_the_totals_say(case):
    seed, nodes, labels, free_casts = case
    instance = instance_of(seed, nodes, labels, free_casts)
    choice = some(instance, seed)
    change, time = single_changes(instance, choice), instance.totals(choice)[0]
    for v, label in zip(*np.nonzero(instance.allowed), strict=True):
        other = choice.copy()
        other[v] = label
        assert_allclose(change[v, label], instance.totals(other)[0] - time, atol=1e-9)
    assert np.isinf(change[~instance.allowed]).all()


@small
@settings(max_examples=150, deadline=None)
def test_improving_stays_within_the_budgets_and_leaves_no_single_change(case):
    seed, nodes, labels, free_casts = case
    instance = instance_of(seed, nodes, labels, free_casts)
    choice = some(instance, seed)
    room = room_for(instance, choice, seed)
    before, given = instance.totals(choice)[0], choice.copy()
    better = improve(instance, choice, room)
    assert (choice == given).all()
    time, error, memory = instance.totals(better)
    assert time <= before
    assert room.holds(error, memory)
    change = single_changes(instance, better)
    for v, label in zip(*np.nonzero(change < -1e-9), strict=True):
        other = better.copy()
        other[v] = label
        assert not room.holds(*instance.totals(other)[1:])


def test_a_variable_that_changed_is_not_changed_again_by_old_numbers():
    """Variable 0 takes a label of less error, variable 1 then uses the room: label c of 0 would be too much."""
    instance = contract(
        AssignmentProblem(
            labels=(("a", "b", "c"), ("a", "b")),
            time=(np.array([10.0, 5.0, 4.0]), np.array([10.0, 1.0])),
            error=(np.array([5.0, 0.0, 7.0]), np.array([0.0, 2.0])),
            memory=(np.array([0.0, 1.0, 1.0]), np.zeros(2)),
            error_budget=7.0,
            memory_budget=9.0,
        )
    ).instance
    room = Room(Limits(7.0, 9.0), Prices(1.0, 0.0))
    assert improve(instance, np.array([0, 0]), room).tolist() == [1, 1]


@small
@settings(max_examples=150, deadline=None)
def test_merging_takes_over_what_fits(case):
    seed, nodes, labels, free_casts = case
    instance = instance_of(seed, nodes, labels, free_casts)
    choice, offer = some(instance, seed), some(instance, seed + 1)
    room = room_for(instance, choice, seed)
    merged = merge(instance, choice, offer, room)
    assert ((merged == choice) | (merged == offer)).all()
    assert instance.totals(merged)[0] <= instance.totals(choice)[0] + 1e-9
    assert room.holds(*instance.totals(merged)[1:])
    # without limits every component that saves is taken: the offer as a whole cannot be better
    free = merge(instance, choice, offer, Room(Limits(np.inf, np.inf), Prices(0.0, 0.0)))
    assert instance.totals(free)[0] <= instance.totals(offer)[0] + 1e-9


@small
@settings(max_examples=60, deadline=None)
def test_greedy_picking_stays_within_the_budgets(case):
    seed, nodes, labels, free_casts = case
    instance = instance_of(seed, nodes, labels, free_casts)
    choice = some(instance, seed)
    room = room_for(instance, choice, seed)
    picked = greedy(instance, choice, room)
    assert room.holds(*instance.totals(picked)[1:])
    rows = np.arange(len(instance))
    assert (instance.time[rows, picked] <= instance.time[rows, choice]).all()
