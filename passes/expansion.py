"""Local minima at fixed prices, by moves that let any number of variables change label at once.

An expansion move offers one label to every variable that may take it; the best answer of all variables together is a
minimum cut (`min_cut`). Where casts depend on labels in a way that no cut can express, the cut works with costs that
are never too low, so a move that lowers the cut's cost lowers the true one. Offers need not be one label: merging with
another choice is the same move with another offer (a fusion move).

Sources: Boykov, Veksler, Zabih, Fast approximate energy minimization via graph cuts, PAMI 2001 (expansion); Lempitsky,
Rother, Roth, Blake, Fusion moves for Markov random field optimization, PAMI 2010.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .contraction import Bools, Instance, Ints, is_free, sum_at
from .min_cut import CutNetwork

# what a move must gain, relative to the value, to be more than rounding
GAIN = 1e-12


def expand(instance: Instance, choice: Ints) -> Ints:
    """Expansion moves from a choice (n,) until no label's offer lowers the time. Budgets are not looked at."""
    labels = np.flatnonzero(instance.allowed.any(axis=0)).tolist()
    waiting = list(labels)
    while waiting:
        label = waiting.pop(0)
        moved = fuse(instance, choice, np.where(_hopeful(instance, choice, label), label, choice))
        if moved is not choice:
            choice = moved
            waiting += [other for other in labels if other != label and other not in waiting]
    return choice


def fuse(instance: Instance, choice: Ints, offer: Ints) -> Ints:
    """The better of two choices variable by variable; `choice` itself, the same object, where nothing is gained."""
    moving = offer != choice
    if not moving.any():
        return choice
    layers, rows = instance.layers, np.arange(len(instance))
    touched = (layers.source >= 0) & moving[layers.source]
    touched[layers.layer[moving[layers.reader]]] = True
    network = CutNetwork(layers.keep(touched, touched[layers.layer]), choice, offer)
    moved = network.solve(instance.time[rows, choice], instance.time[rows, offer]).least
    before, after = instance.totals(choice)[0], instance.totals(moved)[0]
    return moved if after < before - GAIN * abs(before) else choice


def _hopeful(instance: Instance, choice: Ints, label: int) -> Bools:
    """Variables (n,) that could gain by a label if all casts fell in its favour."""
    layers, n = instance.layers, len(instance)
    now = layers.wants[np.arange(len(layers.layer)), choice[layers.reader]]
    reads = now & ~layers.wants[:, label]
    gives = (layers.source >= 0) & layers.free[:, label] & ~is_free(layers, choice)
    most = sum_at(layers.reader[reads], layers.weight[layers.layer[reads]], n)
    most += sum_at(layers.source[gives], layers.weight[gives], n)
    return instance.allowed[:, label] & (instance.time[:, label] - most < instance.time[np.arange(n), choice])


def minimise(instance: Instance, starts: Iterable[Ints]) -> Ints:
    """The local minimum reached from the cheapest start, merged with the other starts. Budgets are not looked at."""
    ranked = sorted(starts, key=lambda start: instance.totals(start)[0])
    choice = expand(instance, ranked[0])
    for other in ranked[1:]:
        choice = fuse(instance, choice, other)
    return choice
