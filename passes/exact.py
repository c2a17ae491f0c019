"""Proven optima of small instances: all choices at once where they are few, else HiGHS's branch and bound."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, hstack

from .budgets import Limits
from .contraction import Instance, Ints
from .linear_bound import relaxation

# choices that are simply all tried, a few thousand rows of numpy
FEW = 2**13
# binaries up to which branch and bound is worth a try, and the nodes after which it gives up
BINARIES = 4000
NODE_LIMIT = 2000
# what HiGHS's tolerances may add to its bound, relative
TOLERANCE = 1e-6


def few(instance: Instance) -> bool:
    """Whether `enumerate_choices` may be called."""
    return bool(math.prod(instance.allowed.sum(axis=1).tolist()) <= FEW)


def enumerate_choices(instance: Instance, limits: Limits) -> Iterator[Ints]:
    """All choices (n,) within the limits, the fastest first, the first labels first among equals."""
    layers = instance.layers
    base = instance.allowed.argmax(axis=1)
    counts = instance.allowed.sum(axis=1)
    # variables of one label have no layers left (`simplify`): they are not enumerated
    free = np.flatnonzero(counts > 1)
    place = np.full(len(instance) + 1, -1)
    place[free] = np.arange(len(free))
    labels = np.argsort(~instance.allowed[free], axis=1, kind="stable")
    total = math.prod(counts[free].tolist())
    steps = total // np.cumprod(counts[free])
    choices = labels[np.arange(len(free)), np.arange(total)[:, None] // steps % counts[free]]
    time, error, memory = (
        cost[free, choices].sum(axis=1) + float(np.delete(cost[np.arange(len(base)), base], free).sum())
        for cost in (instance.time, instance.error, instance.memory)
    )
    begin = np.searchsorted(layers.layer, np.arange(len(layers.weight) + 1))
    for k, (first, last) in enumerate(zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True)):
        paid = np.zeros(total, dtype=bool)
        for p in range(first, last):
            paid |= layers.wants[p, choices[:, place[layers.reader[p]]]]
        if layers.source[k] >= 0:
            paid &= ~layers.free[k, choices[:, place[layers.source[k]]]]
        time += np.where(paid, layers.weight[k], 0.0)
    within = np.flatnonzero((error <= limits.error) & (memory <= limits.memory))
    for i in within[np.argsort(time[within], kind="stable")].tolist():
        choice = base.copy()
        choice[free] = choices[i]
        yield choice


def branch_and_bound(instance: Instance, limits: Limits, gap: float) -> tuple[Ints | None, float]:
    """A choice (within the limits to HiGHS's tolerance) and a lower bound on the time; stops at the relative gap."""
    program = relaxation(instance)
    binaries, layers = len(program.variable), len(instance.layers.weight)
    constraints = [
        LinearConstraint(program.simplex, 1, 1),
        LinearConstraint(program.cover, -np.inf, 0),
    ]
    for cost, limit in ((instance.error, limits.error), (instance.memory, limits.memory)):
        if np.isfinite(limit):
            scale = limit or 1.0
            row = coo_array(cost[program.variable, program.label][None, :] / scale)
            constraints.append(LinearConstraint(hstack([row, coo_array((1, layers))]).tocsr(), -np.inf, limit / scale))
    scale = max(float(program.cost.max(initial=0.0)), np.finfo(float).tiny)
    with _nothing_printed():
        solved = milp(
            program.cost / scale,
            integrality=np.concatenate([np.ones(binaries), np.zeros(layers)]),
            bounds=Bounds(0, np.concatenate([np.ones(binaries), np.full(layers, np.inf)])),
            constraints=constraints,
            options={"node_limit": NODE_LIMIT, "mip_rel_gap": gap},
        )
    bound = -np.inf
    if solved.mip_dual_bound is not None and np.isfinite(solved.mip_dual_bound):
        bound = solved.mip_dual_bound * scale
        bound += instance.constant - TOLERANCE * abs(bound)
    if solved.x is None:
        return None, bound
    share = np.full(instance.allowed.shape, -1.0)
    share[program.variable, program.label] = solved.x[:binaries]
    return np.asarray(share.argmax(axis=1)), bound


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """HiGHS writes a line of its own to the process's standard output now and then, whatever its log options say; there
    it would stand in the middle of a plan's JSON."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError):  # there is no standard output
        yield
        return
    library = ctypes.CDLL(None) if os.name == "posix" else None
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        if library is not None:
            library.fflush(None)  # what C still holds back
        os.dup2(kept, 1)
        os.close(kept)
