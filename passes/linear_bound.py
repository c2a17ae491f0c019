"""Lower bounds at fixed prices: the dual of the linear relaxation, for any flow, and the relaxation solved by HiGHS.

The relaxation of an instance without budgets has x[v, l] in [0, 1] per label and z[k] >= 0 per layer:

    min  constant + sum_vl time[v, l] x[v, l] + sum_k weight[k] z[k]
    s.t. sum_l x[v, l] = 1                                                            for every variable v
         z[k] >= sum_(l wanted by r) x[r, l] - sum_(l free in k) x[source(k), l]      for every pair (k, r)

Its dual has one flow f[k, r] >= 0 per pair with sum_r f[k, r] <= weight[k] and the value

    constant + sum_v min_l ( time[v, l] + sum_(pairs where v wants l) f  -  sum_(layers where v is source, l free) f )

which any feasible flow makes a lower bound: the flow of a minimum cut as well as HiGHS's multipliers, clipped into the
feasible set, so that no solver's tolerance can make the bound wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from .contraction import Floats, Instance, Ints, simplify, sum_at

# sums of up to a million terms in double precision stay well below this relative error
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Matrices of the relaxation. Columns are the allowed (variable, label) pairs in row order, then the layers."""

    cost: Floats
    simplex: csr_array
    cover: csr_array
    variable: Ints
    label: Ints


def relaxation(instance: Instance) -> Relaxation:
    """`simplex @ x = 1`, `cover @ x <= 0`, minimise `cost @ x`, x >= 0."""
    layers, allowed = instance.layers, instance.allowed
    variable, label = np.nonzero(allowed)
    number = np.full(allowed.shape, -1)
    number[variable, label] = np.arange(len(variable))
    pairs, width = len(layers.layer), len(variable) + len(layers.weight)
    source = layers.source[layers.layer]
    wanting, wanted = np.nonzero(layers.wants & allowed[layers.reader])
    sparing, spared = np.nonzero(layers.free[layers.layer] & allowed[source] & (source >= 0)[:, None])
    rows = np.concatenate([wanting, sparing, np.arange(pairs)])
    columns = [number[layers.reader[wanting], wanted], number[source[sparing], spared], len(variable) + layers.layer]
    data = np.concatenate([np.ones(len(wanting)), np.full(len(sparing) + pairs, -1.0)])
    one = np.ones(len(variable))
    return Relaxation(
        cost=np.concatenate([instance.time[variable, label], layers.weight]),
        simplex=coo_array((one, (variable, np.arange(len(variable)))), shape=(len(instance), width)).tocsr(),
        cover=coo_array((data, (rows, np.concatenate(columns))), shape=(pairs, width)).tocsr(),
        variable=variable,
        label=label,
    )


def dual_value(instance: Instance, flow: Floats) -> float:
    """Lower bound, microseconds, on the time of any choice, from any flow (P,); budgets are not looked at."""
    layers = instance.layers
    flow = np.maximum(flow, 0.0)
    sent = sum_at(layers.layer, flow, len(layers.weight))
    too_much = sent > layers.weight
    flow = flow * np.divide(layers.weight, sent, out=np.ones_like(sent), where=too_much)[layers.layer]
    sent = sum_at(layers.layer, flow, len(layers.weight))
    cost = np.where(instance.allowed, instance.time, np.inf)
    sourced = layers.source >= 0
    for label in range(cost.shape[1]):
        pairs, kept = layers.wants[:, label], sourced & layers.free[:, label]
        cost[:, label] += sum_at(layers.reader[pairs], flow[pairs], len(instance))
        cost[:, label] -= sum_at(layers.source[kept], sent[kept], len(instance))
    least = cost.min(axis=1, initial=np.inf) if len(cost) else np.zeros(0)
    value = float(least.sum()) + instance.constant
    return value - ROUNDING * (float(np.abs(least).sum()) + 2 * float(sent.sum()) + abs(instance.constant))


def linear_bound(instance: Instance) -> tuple[float, Ints]:
    """The relaxation's bound, microseconds, and the choice (n,) nearest to its solution; budgets are not looked at.

    What the relaxation need not decide is settled first, at the same optimum.
    """
    instance = simplify(instance)
    program = relaxation(instance)
    choice = np.where(instance.allowed, instance.time, np.inf).argmin(axis=1)
    flow: NDArray[np.float64] = np.zeros(len(instance.layers.layer))
    if len(flow):
        solved = linprog(
            program.cost,
            A_ub=program.cover,
            b_ub=np.zeros(program.cover.shape[0]),
            A_eq=program.simplex,
            b_eq=np.ones(len(instance)),
            method="highs",
        )
        if solved.status == 0:
            flow = -solved.ineqlin.marginals
            share = np.full(instance.allowed.shape, -1.0)
            share[program.variable, program.label] = solved.x[: len(program.variable)]
            choice = share.argmax(axis=1)
    return dual_value(instance, flow), choice
