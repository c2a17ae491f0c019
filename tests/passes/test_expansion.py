"""Expansion moves: never worse, and nothing that one label or one offer could still improve."""

from __future__ import annotations

import numpy as np
import pytest
from assignment_problems import cases, random_problem
from hypothesis import given, settings

from dsmp.passes.budgets import Limits
from dsmp.passes.contraction import Instance, contract
from dsmp.passes.exact import enumerate_choices
from dsmp.passes.expansion import expand, fuse, minimise
from dsmp.passes.linear_bound import linear_bound


def instance_of(seed: int, nodes: int, labels: int, free_casts: bool) -> Instance:
    return contract(random_problem(seed, nodes, labels, free_casts=free_casts)).instance.priced(0.7, 0.0)


def some(instance: Instance, seed: int) -> np.ndarray:
    return np.where(instance.allowed, np.random.default_rng(seed).random(instance.allowed.shape), -1.0).argmax(axis=1)


@given(cases(8, 4))
@settings(max_examples=100, deadline=None)
def test_moves_never_make_it_worse(case):
    seed, nodes, labels, free_casts = case
    instance = instance_of(seed, nodes, labels, free_casts)
    start, other = some(instance, seed), some(instance, seed + 1)
    moved, merged = expand(instance, start), fuse(instance, start, other)
    assert instance.allowed[np.arange(len(instance)), moved].all()
    assert instance.totals(moved)[0] <= instance.totals(start)[0]
    assert instance.totals(merged)[0] <= instance.totals(start)[0]
    assert expand(instance, moved) is moved
    assert instance.totals(minimise(instance, [start, other]))[0] <= min(
        instance.totals(start)[0], instance.totals(other)[0]
    )


@given(cases(7, 3))
@settings(max_examples=60, deadline=None)
def test_casts_between_formats_leave_no_better_label_for_many_nodes_at_once(case):
    seed, nodes, labels, _ = case
    """With such casts every move is an exact cut: no set of nodes gains by taking one label together."""
    instance = instance_of(seed, nodes, labels, free_casts=False)
    moved = expand(instance, some(instance, seed))
    time = instance.totals(moved)[0]
    for label in range(instance.allowed.shape[1]):
        for members in range(2 ** len(instance)):
            inside = (members >> np.arange(len(instance)) & 1).astype(bool) & instance.allowed[:, label]
            assert instance.totals(np.where(inside, label, moved))[0] >= time - 1e-9


@pytest.mark.parametrize("free_casts", [False, True])
def test_local_minima_are_close_to_the_bound(free_casts):
    ratios = []
    for seed in range(20):
        instance = instance_of(seed, 60, 4, free_casts)
        alone = np.where(instance.allowed, instance.time, np.inf).argmin(axis=1)
        ratios.append(instance.totals(expand(instance, alone))[0] / linear_bound(instance)[0])
    # casts of any shape relax badly: there the bound is what is loose
    assert np.mean(ratios) < (1.1 if free_casts else 1.02)


def test_small_instances_usually_reach_the_optimum():
    reached = 0
    for seed in range(40):
        instance = instance_of(seed, 7, 3, free_casts=False)
        alone = np.where(instance.allowed, instance.time, np.inf).argmin(axis=1)
        best = next(enumerate_choices(instance, Limits(np.inf, np.inf)))
        reached += instance.totals(expand(instance, alone))[0] <= instance.totals(best)[0] + 1e-9
    assert reached >= 36
