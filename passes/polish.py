"""Better choices within the budgets, starting from choices that are there: all changes are judged by the true totals.

Three ways: take over from a better choice that breaks a budget as many of its differences as fit (`merge`), change
single variables (`improve`), and pick labels by time saved per error without looking at casts (`greedy`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from .budgets import Limits
from .contraction import Bools, Floats, Instance, Ints, is_free, sum_at
from .prices import Prices

# what a change must gain, relative to the time, to be more than rounding
GAIN = 1e-12


@dataclass(frozen=True, slots=True)
class Room:
    """Limits on totals, and what a unit of each budget is worth when changes are ranked."""

    limits: Limits
    prices: Prices

    def holds(self, error: float, memory: float) -> bool:
        return self.limits.hold(error, memory)

    def worth(self, error: Floats, memory: Floats) -> Floats:
        """What changes use of the budgets, in microseconds; in shares of the budgets where they have no prices."""
        price, other = self.prices.error, self.prices.memory
        if price == other == 0:
            price, other = (1 / limit if limit else 1.0 for limit in (self.limits.error, self.limits.memory))
        return price * error + other * memory


def merge(instance: Instance, choice: Ints, offer: Ints, room: Room) -> Ints:
    """Take differences of `offer` into a feasible `choice` while they save time and fit.

    Differing variables that share a layer change together; those components do not touch each other, so their effects
    add. At the prices where two cuts tie, every component saves the same per worth: fit the large ones first, too.
    """
    differs = np.flatnonzero(choice != offer)
    if not len(differs):
        return choice
    part = _components(instance, choice != offer)
    count = int(part.max()) + 1
    rows = np.arange(len(instance))

    def change(table: Floats) -> Floats:
        delta = table[rows, offer] - table[rows, choice]
        return sum_at(part[differs], delta[differs], count)

    time = change(instance.time) + _cast_changes(instance, choice, offer, part, count)
    error, memory = change(instance.error), change(instance.memory)
    _, spent, held = instance.totals(choice)
    worth = room.worth(error, memory)
    rate = np.divide(time, worth, out=np.full(count, -np.inf), where=worth > 0)
    best, saved = np.zeros(count, dtype=bool), 0.0
    for order in (np.lexsort([time, rate]), np.argsort(time, kind="stable")):
        taken, total, e, m = np.zeros(count, dtype=bool), 0.0, spent, held
        for c in order.tolist():
            if time[c] < 0 and room.holds(e + error[c], m + memory[c]):
                taken[c], total, e, m = True, total + time[c], e + error[c], m + memory[c]
        if total < saved:
            best, saved = taken, total
    merged = choice.copy()
    merged[differs] = np.where(best[part[differs]], offer[differs], choice[differs])
    return merged


def improve(instance: Instance, choice: Ints, room: Room) -> Ints:
    """Change single variables of a feasible choice, best saving per worth first, until none saves time and fits."""
    state = _State(instance, choice)
    rows = np.arange(len(instance))
    while True:
        # sums anew: what was added up step by step must not drift
        time, error, memory = instance.totals(state.choice)
        least = GAIN * time
        change = single_changes(instance, state.choice)
        extra_error = instance.error - instance.error[rows, state.choice][:, None]
        extra_memory = instance.memory - instance.memory[rows, state.choice][:, None]
        fits = (error + extra_error <= room.limits.error) & (memory + extra_memory <= room.limits.memory)
        variable, label = np.nonzero(fits & (change < -least))
        if not len(variable):
            return state.choice
        worth = room.worth(extra_error, extra_memory)[variable, label]
        gain = -change[variable, label]
        rate = np.where(worth > 0, gain / np.where(worth > 0, worth, 1.0), np.inf)
        state.begin()
        for i in np.lexsort([-gain, -rate]).tolist():
            v, to = int(variable[i]), int(label[i])
            e, m = error + float(extra_error[v, to]), memory + float(extra_memory[v, to])
            if room.holds(e, m) and state.change(v, to, float(change[v, to])) < -least:
                state.take(v, to)
                error, memory = e, m


def calm(instance: Instance, choice: Ints, limits: Limits) -> Ints:
    """Change single variables of a feasible choice to labels of less error that take no more time, the largest cut
    first: where a budget has room, what costs nothing is still not wasted."""
    state = _State(instance, choice)
    rows = np.arange(len(instance))
    while True:
        _, _, memory = instance.totals(state.choice)
        change = single_changes(instance, state.choice)
        cut = instance.error[rows, state.choice][:, None] - instance.error
        extra_memory = instance.memory - instance.memory[rows, state.choice][:, None]
        least = GAIN * instance.error[rows, state.choice][:, None]
        variable, label = np.nonzero(
            (change <= 0.0) & (cut > least) & (memory + np.maximum(extra_memory, 0.0) <= limits.memory)
        )
        if not len(variable):
            return state.choice
        state.begin()
        for i in np.lexsort([change[variable, label], -cut[variable, label]]).tolist():
            v, to = int(variable[i]), int(label[i])
            m = memory + float(extra_memory[v, to])
            if m <= limits.memory and state.change(v, to, float(change[v, to])) <= 0.0:
                state.take(v, to)
                memory = m


class _State:
    """A choice under single changes: how many readers want each layer, and what changed since `begin`."""

    def __init__(self, instance: Instance, choice: Ints) -> None:
        layers, n = instance.layers, len(instance)
        self.choice = choice.copy()
        self._instance = instance
        wants = layers.wants[np.arange(len(layers.layer)), choice[layers.reader]]
        self._wanting = np.bincount(layers.layer, wants, len(layers.weight)).astype(np.int64)
        self._read = np.argsort(layers.reader, kind="stable")
        self._first_read = np.searchsorted(layers.reader[self._read], np.arange(n + 1))
        self._given = np.argsort(layers.source, kind="stable")
        self._first_given = np.searchsorted(layers.source[self._given], np.arange(n + 1))
        self.begin()

    def begin(self) -> None:
        """Changes of time computed by `single_changes` hold from here on, until a neighbour changes."""
        self._changed = np.zeros(len(self._instance), dtype=bool)
        self._touched = np.zeros(len(self._instance.layers.weight), dtype=bool)

    def _at(self, v: int) -> tuple[Ints, Ints]:
        """The pairs in which v reads, and the layers of which it is the source."""
        pairs = self._read[self._first_read[v] : self._first_read[v + 1]]
        return pairs, self._given[self._first_given[v] : self._first_given[v + 1]]

    def change(self, v: int, to: int, known: float) -> float:
        """Change of the time if v alone took a label; infinite if it changed already. `known` holds where untouched."""
        if self._changed[v]:
            return np.inf
        layers, now = self._instance.layers, int(self.choice[v])
        pairs, given = self._at(v)
        read = layers.layer[pairs]
        if not (self._touched[read].any() or self._touched[given].any()):
            return known
        before = layers.wants[pairs, now]
        others = self._wanting[read] - before
        source = layers.source[read]
        paying = (source < 0) | ~layers.free[read, self.choice[source]]
        gained = (layers.wants[pairs, to].astype(float) - before) * (paying & (others == 0)) @ layers.weight[read]
        spared = layers.free[given, now].astype(float) - layers.free[given, to]
        given_up = spared * (self._wanting[given] > 0) @ layers.weight[given]
        return float(self._instance.time[v, to] - self._instance.time[v, now] + gained + given_up)

    def take(self, v: int, to: int) -> None:
        layers = self._instance.layers
        pairs, given = self._at(v)
        read = layers.layer[pairs]
        self._wanting[read] += layers.wants[pairs, to].astype(np.int64) - layers.wants[pairs, self.choice[v]]
        self._touched[read] = True
        self._touched[given] = True
        self._changed[v] = True
        self.choice[v] = to


def single_changes(instance: Instance, choice: Ints) -> Floats:
    """Change of the time (n, L), casts included, if one variable alone took a label; infinite where not allowed."""
    layers, n = instance.layers, len(instance)
    rows = np.arange(n)
    change = instance.time - instance.time[rows, choice][:, None]
    wants = layers.wants[np.arange(len(layers.layer)), choice[layers.reader]]
    wanting = np.bincount(layers.layer, wants, len(layers.weight))
    free = is_free(layers, choice)
    weight = np.where(free, 0.0, layers.weight)[layers.layer]
    last = np.where(wants & (wanting == 1)[layers.layer], weight, 0.0)
    first = np.where((wanting == 0)[layers.layer], weight, 0.0)
    sourced = (layers.source >= 0) & (wanting > 0)
    given = np.where(sourced & ~free, layers.weight, 0.0)
    asked = np.where(sourced & free, layers.weight, 0.0)
    at = np.where(layers.source >= 0, layers.source, 0)
    for label in range(change.shape[1]):
        wanted, spared = layers.wants[:, label], layers.free[:, label]
        change[:, label] += sum_at(layers.reader, np.where(wanted, first, -last), n)
        change[:, label] += sum_at(at, np.where(spared, -given, asked), n)
    return np.where(instance.allowed, change, np.inf)


def greedy(instance: Instance, choice: Ints, room: Room) -> Ints:
    """From a feasible choice, other labels by node time saved per worth, casts not looked at, as long as they fit."""
    choice = choice.copy()
    rows = np.arange(len(instance))
    saving = instance.time[rows, choice][:, None] - instance.time
    extra_error = instance.error - instance.error[rows, choice][:, None]
    extra_memory = instance.memory - instance.memory[rows, choice][:, None]
    variable, label = np.nonzero(instance.allowed & (saving > 0))
    worth = room.worth(extra_error, extra_memory)[variable, label]
    rate = np.where(worth > 0, saving[variable, label] / np.where(worth > 0, worth, 1.0), np.inf)
    _, error, memory = instance.totals(choice)
    held = choice.copy()
    for i in np.lexsort([-saving[variable, label], -rate]).tolist():
        v, to = int(variable[i]), int(label[i])
        now = choice[v]
        e = error + float(instance.error[v, to] - instance.error[v, now])
        m = memory + float(instance.memory[v, to] - instance.memory[v, now])
        if now == held[v] and room.holds(e, m):
            choice[v], error, memory = to, e, m
    return choice


def _components(instance: Instance, differs: Bools) -> Ints:
    """Component (n,) of each differing variable among those connected through a layer; -1 for the others."""
    layers, n = instance.layers, len(instance)
    pairs = differs[layers.reader]
    sources = np.flatnonzero((layers.source >= 0) & differs[layers.source])
    vertex = np.concatenate([layers.reader[pairs], layers.source[sources]])
    layer = n + np.concatenate([layers.layer[pairs], sources])
    size = n + len(layers.weight)
    graph = coo_array((np.ones(len(vertex)), (vertex, layer)), shape=(size, size))
    _, part = connected_components(graph, directed=False)
    found = np.full(n, -1)
    found[differs] = np.unique(part[:n][differs], return_inverse=True)[1]
    return found


def _cast_changes(instance: Instance, choice: Ints, offer: Ints, part: Ints, count: int) -> Floats:
    """Change of cast time if one component alone takes the offer, per component."""
    layers = instance.layers
    # all members of a layer that differ lie in one component: take the layer's value with them changed
    owner = np.full(len(layers.weight), -1)
    np.maximum.at(owner, layers.layer, part[layers.reader])
    sourced = layers.source >= 0
    owner[sourced] = np.maximum(owner[sourced], part[layers.source[sourced]])
    pairs = np.arange(len(layers.layer))

    def paid(labels: Ints) -> Floats:
        wanted = np.zeros(len(layers.weight), dtype=bool)
        wanted[layers.layer[layers.wants[pairs, labels[layers.reader]]]] = True
        return np.where(wanted & ~is_free(layers, labels), layers.weight, 0.0)

    touched = owner >= 0
    return sum_at(owner[touched], (paid(offer) - paid(choice))[touched], count)
