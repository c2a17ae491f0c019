"""The cut against all choices between two labels, and its flow as a bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from assignment_problems import cases, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from dsmp.passes.contraction import Instance, Layers, contract, paid_layers
from dsmp.passes.linear_bound import dual_value
from dsmp.passes.min_cut import CutNetwork


def sides(instance: Instance) -> tuple[np.ndarray, np.ndarray]:
    last = instance.allowed.shape[1] - 1 - instance.allowed[:, ::-1].argmax(axis=1)
    return instance.allowed.argmax(axis=1), last


def solve(instance: Instance, zero: np.ndarray, one: np.ndarray) -> tuple[CutNetwork, float, float, float]:
    """The network, the values of both cuts, and the flow's bound."""
    network = CutNetwork(instance.layers, zero, one)
    rows = np.arange(len(instance))
    cuts = network.solve(instance.time[rows, zero], instance.time[rows, one])
    for choice in (cuts.least, cuts.most):
        assert ((choice == zero) | (choice == one)).all()
    values = (instance.totals(choice)[0] for choice in (cuts.least, cuts.most))
    return network, *values, dual_value(instance, cuts.flow)


def optimum(instance: Instance, zero: np.ndarray, one: np.ndarray) -> float:
    choices = itertools.product(*(sorted({int(a), int(b)}) for a, b in zip(zero, one, strict=True)))
    return min(instance.totals(np.array(choice, dtype=int))[0] for choice in choices)


@given(cases(9, 2), st.integers(-9, 9))
@settings(max_examples=150, deadline=None)
def test_two_labels_at_any_scale(case, exponent):
    seed, nodes, _, free_casts = case
    instance = contract(random_problem(seed, nodes, 2, free_casts=free_casts)).instance
    instance = scaled(instance.priced(10.0 ** (exponent % 3 - 1), 0.0), 10.0**exponent)
    zero, one = sides(instance)
    network, least, most, bound = solve(instance, zero, one)
    true = optimum(instance, zero, one)
    assert bound <= true
    if network.exact:
        assert (least, most, bound) == pytest.approx((true, true, true), rel=1e-6)
    assert free_casts or network.exact


def scaled(instance: Instance, factor: float) -> Instance:
    layers = instance.layers
    keep = {name: getattr(layers, name) for name in ("source", "free", "layer", "reader", "wants")}
    return Instance(
        time=instance.time * factor,
        error=instance.error,
        memory=instance.memory,
        allowed=instance.allowed,
        instead=instance.instead,
        layers=Layers(weight=layers.weight * factor, **keep),
        constant=instance.constant * factor,
        error_budget=np.inf,
        memory_budget=np.inf,
    )


@given(cases(7, 4))
@settings(max_examples=150, deadline=None)
def test_a_move_between_any_two_choices_is_never_worse_than_staying(case):
    seed, nodes, labels, _ = case
    instance = contract(random_problem(seed, nodes, labels)).instance.priced(0.5, 0.0)
    rng = np.random.default_rng(seed)
    zero, one = (np.where(instance.allowed, rng.random(instance.allowed.shape), -1).argmax(axis=1) for _ in range(2))
    network, least, _, _ = solve(instance, zero, one)
    assert least <= instance.totals(zero)[0] + 1e-9
    if network.exact:
        assert least == pytest.approx(optimum(instance, zero, one))


@given(cases(40, 4))
@settings(max_examples=150, deadline=None)
def test_no_move_is_worse_than_what_it_was_told(case):
    """Casts that fit no cut are charged at least what they cost: the cut's own value is never below the true one."""
    seed, nodes, labels, _ = case
    instance = contract(random_problem(seed, nodes, labels)).instance.priced(0.5, 0.0)
    rng = np.random.default_rng(seed)
    zero, one = (np.where(instance.allowed, rng.random(instance.allowed.shape), -1).argmax(axis=1) for _ in range(2))
    assert solve(instance, zero, one)[1] <= instance.totals(zero)[0] + 1e-9


def pair(weight: float, free: list[bool], wants: list[bool]) -> Layers:
    """One layer: variable 1 reads what variable 0 makes."""
    return Layers(
        weight=np.array([weight]),
        source=np.array([0]),
        free=np.array([free]),
        layer=np.array([0]),
        reader=np.array([1]),
        wants=np.array([wants]),
    )


def both(one: Layers, other: Layers) -> Layers:
    parts = {name: np.concatenate([getattr(one, name), getattr(other, name)]) for name in Layers.__slots__}
    return Layers(**parts | {"layer": np.array([0, 1])})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("own", [-3.0, -1.0, 0.5, 1.0])
def test_two_layers_that_no_orientation_fits(order, own):
    """Equal labels cost with one layer, different ones with the other: whichever does not fit must not look cheap."""
    layers = both(pair(2.0, [False, True], [True, False]), pair(2.0, [False, True], [False, True]))
    cost = np.array([[0.0, own], [0.0, own]])
    zero, one = np.full(2, order[0]), np.full(2, order[1])
    network = CutNetwork(layers, zero, one)
    assert not network.exact
    cuts = network.solve(cost[:, order[0]], cost[:, order[1]])

    def value(choice: np.ndarray) -> float:
        return float(cost[[0, 1], choice].sum() + layers.weight[paid_layers(layers, choice)].sum())

    assert value(cuts.least) <= value(zero)
    if order == (0, 1):
        # what is paid while nothing moves is charged to the source: it sees what it would save
        assert value(cuts.least) == min(value(np.array(choice)) for choice in np.ndindex(2, 2))


def test_arcs_between_the_same_variables_share_the_flow():
    """Tied nodes can read each other: both layers are the same arc, each with its own part of the flow."""
    layers = pair(1.0, [False, True], [False, True])
    back = pair(3.0, [True, False], [True, False])
    mutual = both(
        layers,
        Layers(**{n: getattr(back, n) for n in Layers.__slots__} | {"source": np.array([1]), "reader": np.array([0])}),
    )
    zero, one = np.array([0, 0]), np.array([1, 1])
    cuts = CutNetwork(mutual, zero, one).solve(np.array([0.0, 9.0]), np.array([2.0, 0.0]))
    # variable 1 wants low, which costs 1 + 3 us of casts or 2 us of variable 0's time: 2 us flow, split 1 to 3
    assert cuts.flow.tolist() == pytest.approx([0.5, 1.5])
    assert cuts.least.tolist() == [1, 1]


@given(cases(9, 2))
@settings(max_examples=60, deadline=None)
def test_labels_in_any_order_fit_if_casts_are_between_formats(case):
    """Which of the two labels comes first, node by node, must not matter to the cut."""
    seed, nodes, _, _ = case
    instance = contract(random_problem(seed, nodes, 2, free_casts=False)).instance.priced(1.0, 0.0)
    zero, one = sides(instance)
    swap = np.random.default_rng(seed).random(nodes) < 0.5
    network, least, _, bound = solve(instance, np.where(swap, one, zero), np.where(swap, zero, one))
    assert network.exact
    assert (least, bound) == pytest.approx((optimum(instance, zero, one),) * 2, rel=1e-6)


def test_ties_give_the_extreme_cuts():
    """Two nodes that gain by low exactly what the cast between them costs: any cut is a minimum."""
    layers = Layers(
        weight=np.array([2.0]),
        source=np.array([0]),
        free=np.array([[False, True]]),
        layer=np.array([0]),
        reader=np.array([1]),
        wants=np.array([[False, True]]),
    )
    zero, one = np.array([0, 0]), np.array([1, 1])
    cuts = CutNetwork(layers, zero, one).solve(np.array([1.0, 5.0]), np.array([3.0, 3.0]))
    assert cuts.least.sum() < cuts.most.sum()
    assert cuts.flow.tolist() == [2.0]


def test_a_network_is_solved_again_for_other_costs():
    instance = contract(random_problem(4, 9, 2, free_casts=False)).instance
    zero, one = sides(instance)
    rows = np.arange(len(instance))
    network = CutNetwork(instance.layers, zero, one)
    for price in (0.0, 3.0, 0.3, 100.0, 0.3):
        priced = instance.priced(price, 0.0)
        cuts = network.solve(priced.time[rows, zero], priced.time[rows, one])
        assert priced.totals(cuts.least)[0] == pytest.approx(optimum(priced, zero, one))
