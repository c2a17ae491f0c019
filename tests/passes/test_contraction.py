"""Contraction changes what a problem looks like, never what a choice costs nor which is best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from assignment_problems import best, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dsmp.errors import TieError
from dsmp.passes.assignment import AssignmentProblem, SharedCast, totals_of
from dsmp.passes.budgets import Limits
from dsmp.passes.contraction import Contraction, contract, simplify
from dsmp.passes.exact import enumerate_choices, few


def contracted(problem: AssignmentProblem) -> Contraction | None:
    try:
        return contract(problem)
    except TieError:
        return None


@given(problems(nodes=10, labels=4), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_choices_cost_the_same(problem, seed):
    contraction = contracted(problem)
    if contraction is None:
        return
    instance = contraction.instance
    rng = np.random.default_rng(seed)
    choice = np.where(instance.allowed, rng.random(instance.allowed.shape), -1.0).argmax(axis=1)
    totals = totals_of(problem, contraction.expand(choice))
    assert_allclose(instance.totals(choice), (totals.time, totals.error, totals.memory), atol=1e-9)


@given(problems(nodes=8, labels=3))
@settings(max_examples=100, deadline=None)
def test_the_optimum_stays(problem):
    contraction, optimum = contracted(problem), best(problem)
    if contraction is None or not few(contraction.instance):
        return
    limits = Limits(problem.error_budget, problem.memory_budget)
    choice = next(enumerate_choices(contraction.instance, limits), None)
    assert (choice is None) == (optimum is None)
    assert choice is None or contraction.instance.totals(choice)[0] == pytest.approx(optimum.time)


@given(problems(nodes=8, labels=4), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_what_is_taken_instead_of_a_dropped_label_is_never_worse(problem, seed):
    problem = replace(problem, ties=())
    contraction = contract(problem)
    rng = np.random.default_rng(seed)
    names = [rng.integers(len(labels)) for labels in problem.labels]
    every = list(dict.fromkeys(name for labels in problem.labels for name in labels))
    column = np.array([every.index(problem.labels[v][i]) for v, i in enumerate(names)])
    before = totals_of(problem, names)
    instead = contraction.instance.instead[np.arange(len(problem)), column]
    assert contraction.instance.allowed[np.arange(len(problem)), instead].all()
    after = totals_of(problem, contraction.expand(instead))
    assert after.time <= before.time
    if np.isfinite(problem.error_budget):
        assert after.error <= before.error
    if np.isfinite(problem.memory_budget):
        assert after.memory <= before.memory


@given(problems(nodes=10, labels=3))
@settings(max_examples=60, deadline=None)
def test_simplifying_again_changes_nothing(problem):
    contraction = contracted(problem)
    if contraction is None:
        return
    once, again = contraction.instance, simplify(contraction.instance)
    assert (once.allowed == again.allowed).all()
    assert_allclose(once.time, again.time)
    assert_allclose(once.layers.weight, again.layers.weight)
    assert (once.layers.wants == again.layers.wants).all()
    single = once.allowed.sum(axis=1) == 1
    assert not single[once.layers.reader].any()
    assert not single[once.layers.source[once.layers.source >= 0]].any()


def two(casts: list[SharedCast], *, nodes: int = 3, **more: object) -> AssignmentProblem:
    """Nodes whose labels differ in error only, against each other."""
    return AssignmentProblem(
        labels=(("high", "low"),) * nodes,
        time=(np.array([9.0, 1.0]),) * nodes,
        error=(np.array([0.0, 1.0]),) * nodes,
        memory=(np.zeros(2),) * nodes,
        casts=tuple(casts),
        error_budget=2.0,
        **more,
    )


def low(*readers: int) -> tuple[tuple[int, frozenset[int]], ...]:
    return tuple((reader, frozenset([1])) for reader in readers)


def test_casts_become_layers_by_cost():
    instance = contract(two([SharedCast(source=0, cost=(2.5, 1.0), readers=low(1, 2))])).instance
    # 1 us for any label of the source, 1.5 us more for high: low is free of that
    layers = instance.layers
    assert dict(zip(layers.weight.tolist(), layers.source.tolist(), strict=True)) == {1.0: -1, 1.5: 0}
    assert layers.free[layers.weight == 1.5].tolist() == [[False, True]]
    assert sorted(zip(layers.layer.tolist(), layers.reader.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_equal_casts_are_one():
    cast = SharedCast(source=0, cost=(2.0, 0.0), readers=low(1, 2))
    turned = SharedCast(source=0, cost=(0.5, 0.0), readers=low(2, 1, 2))
    layers = contract(two([cast, turned, SharedCast(source=0, cost=(4.0, 0.0), readers=low(1))])).instance.layers
    assert sorted(layers.weight.tolist()) == [2.5, 4.0]


def test_ties_merge_what_they_make_equal():
    casts = [SharedCast(source=v, cost=(2.0, 0.0), readers=low(v + 1)) for v in (0, 2)]
    contraction = contract(two(casts, nodes=4, ties=((0, 2), (1, 3))))
    assert contraction.group.tolist() == [0, 1, 0, 1]
    assert contraction.instance.time.tolist() == [[18.0, 2.0], [18.0, 2.0]]
    assert contraction.instance.layers.weight.tolist() == [4.0]
    # all in one: the cast is between a node and itself, free where both are low, never made where both are high
    alone = contract(two(casts, nodes=4, ties=((0, 2), (1, 3), (0, 1))))
    assert (len(alone.instance), len(alone.instance.layers.weight)) == (1, 0)
    assert alone.instance.time.tolist() == [[36.0, 4.0]]


def test_a_source_that_reads_its_own_copy_pays_for_all():
    # tied 0 and 2: wants the copy when high, which is not free when high
    cast = SharedCast(source=0, cost=(3.0, 2.0), readers=((2, frozenset([0])), *low(1)))
    contraction = contract(two([cast], ties=((0, 2),)))
    for choice in np.ndindex(2, 2):
        totals = totals_of(two([cast]), contraction.expand(np.array(choice)))
        assert contraction.instance.totals(np.array(choice))[0] == totals.time


def test_labels_are_dropped_only_where_casts_cannot_make_up_for_it():
    problem = replace(two([]), error=(np.zeros(2),) * 3)
    assert contract(problem).instance.allowed.tolist() == [[False, True]] * 3
    # 8 us faster, but it may cost a cast of 9 us
    problem = replace(problem, casts=(SharedCast(source=None, cost=(9.0,), readers=low(0)),))
    assert contract(problem).instance.allowed.tolist() == [[True, True], [False, True], [False, True]]
    problem = replace(problem, casts=(SharedCast(source=0, cost=(0.0, 9.0), readers=((1, frozenset([0, 1])),)),))
    assert contract(problem).instance.allowed.tolist() == [[True, False], [False, True], [False, True]]


def test_error_and_memory_count_only_where_they_are_limited():
    problem = replace(two([]), error_budget=np.inf)
    assert contract(problem).instance.allowed.tolist() == [[False, True]] * 3
    assert contract(two([])).instance.allowed.all()


def test_tied_nodes_share_labels_by_name():
    problem = replace(two([]), labels=(("high", "low"), ("low", "high"), ("low", "other")), ties=((0, 1, 2),))
    contraction = contract(problem)
    assert contraction.expand(np.array([1])) == (1, 0, 0)
    with pytest.raises(TieError, match=r"2 tied nodes \(node 0, node 2\) have no format in common") as caught:
        contract(apart := replace(problem, labels=(("high", "x"), ("y", "z"), ("low", "other")), ties=((0, 2),)))
    assert caught.value.nodes == (0, 2)
    with pytest.raises(TieError, match=r"2 tied nodes \(a, c\) have no format in common"):
        contract(replace(apart, names=("a", "b", "c")))


def test_a_layer_without_a_reader_that_can_want_it_goes():
    never = SharedCast(source=0, cost=(5.0, 0.0), readers=((1, frozenset()),))
    always = SharedCast(source=0, cost=(5.0, 0.0), readers=((1, frozenset([0, 1])),))
    free = SharedCast(source=0, cost=(0.0, 0.0), readers=low(1))
    instance = contract(two([never, always, free])).instance
    assert len(instance.layers.weight) == 0
    assert instance.time.tolist() == [[14.0, 1.0], [9.0, 1.0], [9.0, 1.0]] or not instance.allowed[0, 0]
