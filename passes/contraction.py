"""The contracted form of an assignment problem: one variable per group of tied nodes, casts as layers, all in arrays.

A shared cast whose cost depends on its source's label is a sum of **layers**. With the distinct costs 0 <= c_1 < c_2
< ... of the cast, layer j weighs c_j - c_(j-1) and is paid when some reader wants the copy and the source's label is
not one of those that cost less than c_j (the layer's *free* labels). A layer is thus `weight * [source not free] * [any
reader wants]`, and everything after this module knows layers only.

What is simplified changes no optimum: ties become one variable, layers that always or never matter become node costs
or vanish, a source that reads its own copy becomes a node cost, equal layers are merged, labels that can never be
better than another one are dropped with the dearest casts they could save taken into account.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..errors import TieError
from .assignment import AssignmentProblem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """K layers of casts with P (layer, reader) pairs, sorted by layer.

    `weight` (K,) is microseconds, `source` (K,) a variable or -1, `free` (K, L) the source's labels that need no cast,
    `layer` and `reader` (P,) the pairs and `wants` (P, L) the reader's labels that read the copy.
    """

    weight: Floats
    source: Ints
    free: Bools
    layer: Ints
    reader: Ints
    wants: Bools

    def keep(self, layers: Bools, pairs: Bools) -> Layers:
        """The layers and pairs of two masks; pairs of layers that go, go too."""
        pairs = pairs & layers[self.layer]
        number = np.cumsum(layers) - 1
        return Layers(
            weight=self.weight[layers],
            source=self.source[layers],
            free=self.free[layers],
            layer=number[self.layer[pairs]],
            reader=self.reader[pairs],
            wants=self.wants[pairs],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """A contracted problem of n variables over L labels; a column is the same label in every variable.

    `time`, `error`, `memory` (n, L) are 0 where a label is not `allowed` (n, L). `instead` (n, L) is the label to take
    in place of one that was dropped because another is never worse, itself for all others. `constant` is time that
    every assignment pays. Budgets as in `AssignmentProblem`.
    """

    time: Floats
    error: Floats
    memory: Floats
    allowed: Bools
    instead: Ints
    layers: Layers
    constant: float
    error_budget: float
    memory_budget: float

    def __len__(self) -> int:
        return len(self.time)

    def priced(self, error_price: float, memory_price: float) -> Instance:
        """The same choices with budgets as prices in the time, microseconds per unit, instead of limits."""
        cost = self.time + error_price * self.error + memory_price * self.memory
        none = np.zeros_like(cost)
        return replace(self, time=cost, error=none, memory=none, error_budget=np.inf, memory_budget=np.inf)

    def only(self, allowed: Bools) -> Instance:
        """Without the labels outside `allowed` (n, L)."""
        time, error, memory = (np.where(allowed, cost, 0.0) for cost in (self.time, self.error, self.memory))
        return replace(self, allowed=allowed, time=time, error=error, memory=memory)

    def cast_time(self, choice: Ints) -> float:
        """Time of the layers that a choice pays."""
        return float(self.layers.weight[paid_layers(self.layers, choice)].sum())

    def totals(self, choice: Ints) -> tuple[float, float, float]:
        """Time (constant included), error and memory of a choice."""
        rows = np.arange(len(self))
        time = float(self.time[rows, choice].sum()) + self.cast_time(choice) + self.constant
        return time, float(self.error[rows, choice].sum()), float(self.memory[rows, choice].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """An instance and the way back: `group[v]` is node v's variable, `label[v, c]` node v's index of its label c.

    `whole` is the instance before `simplify`: all labels that tied nodes share, casts as they were given.
    """

    instance: Instance
    whole: Instance
    group: Ints
    label: Ints

    def expand(self, choice: Ints) -> tuple[int, ...]:
        """A label index per node from a label per variable."""
        return tuple(self.label[np.arange(len(self.group)), choice[self.group]].tolist())


def paid_layers(layers: Layers, choice: Ints) -> Bools:
    """Which layers a choice pays (K,)."""
    wanted = np.zeros(len(layers.weight), dtype=bool)
    wanted[layers.layer[layers.wants[np.arange(len(layers.reader)), choice[layers.reader]]]] = True
    return wanted & ~is_free(layers, choice)


def is_free(layers: Layers, choice: Ints) -> Bools:
    """Layers (K,) whose source has one of the free labels."""
    return (layers.source >= 0) & layers.free[np.arange(len(layers.source)), choice[layers.source]]


def sum_at(index: Ints, values: Floats, size: int) -> Floats:
    """Sums (size,) of the values at each index: numpy's bincount, which gives whole numbers where there are none."""
    return np.bincount(index, values, size).astype(np.float64, copy=False)


def contract(problem: AssignmentProblem) -> Contraction:
    """Ties to variables, casts to layers, then `simplify`.

    Raises TieError where tied nodes share no label.
    """
    group, label, columns = _variables(problem)
    n, width = int(group.max(initial=-1)) + 1, columns.shape[1]
    allowed = np.zeros((n, width), dtype=bool)
    allowed[group] = columns
    rows = np.arange(len(group))[:, None]

    def summed(values: Sequence[Floats]) -> Floats:
        table = np.zeros((n, width))
        np.add.at(table, group, np.where(columns, _padded(values)[rows, label], 0.0))
        return table

    whole = Instance(
        time=summed(problem.time),
        error=summed(problem.error),
        memory=summed(problem.memory),
        allowed=allowed,
        instead=np.tile(np.arange(width), (n, 1)),
        layers=_layers(problem, group, label, columns),
        constant=0.0,
        error_budget=float(problem.error_budget),
        memory_budget=float(problem.memory_budget),
    )
    return Contraction(instance=simplify(whole), whole=whole, group=group, label=label)


def simplify(instance: Instance) -> Instance:
    """The same problem with fewer labels and layers; variables stay where they are."""
    # equal layers are summed before anything is added up, so that the order of the casts shows nowhere
    instance = _settle(_merge(instance))
    while True:
        better = _dominated(instance)
        instead = np.take_along_axis(better, instance.instead, axis=1)
        if (instead == instance.instead).all():
            return _merge(instance)
        allowed = instance.allowed & (better == np.arange(better.shape[1]))
        instance = _settle(replace(instance.only(allowed), instead=instead))


def _padded(values: Sequence[Floats]) -> Floats:
    """Rows of different lengths as one array, zeros behind."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    table = np.zeros((len(values), int(lengths.max(initial=1))))
    table[np.arange(table.shape[1]) < lengths[:, None]] = np.concatenate([np.zeros(0), *values])
    return table


def _variables(problem: AssignmentProblem) -> tuple[Ints, Ints, Bools]:
    """Variable of each node, its label index per column, and which columns its variable has (N, L)."""
    count = len(problem)
    one = [tie[0] for tie in problem.ties for _ in tie[1:]]
    other = list(chain.from_iterable(tie[1:] for tie in problem.ties))
    joined = coo_array((np.ones(len(one)), (one, other)), shape=(count, count))
    found = connected_components(joined, directed=False)[1] if count else np.zeros(0)
    # numbers in the order of each variable's first node, whatever order the search went in
    _, first, inverse = np.unique(found, return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(first))[inverse].astype(np.int64)
    names: dict[str, int] = {}
    column = _ints(names.setdefault(name, len(names)) for name in chain.from_iterable(problem.labels))
    lengths = _ints(map(len, problem.labels))
    node = np.repeat(np.arange(count), lengths)
    label = np.zeros((count, max(1, len(names))), dtype=np.int64)
    label[node, column] = np.arange(len(node)) - (np.cumsum(lengths) - lengths)[node]
    has = np.zeros(label.shape, dtype=bool)
    has[node, column] = True
    common = np.ones((len(first), label.shape[1]), dtype=bool)
    np.logical_and.at(common, group, has)
    lost = np.flatnonzero(~common.any(axis=1))
    if len(lost):
        nodes = np.flatnonzero(group == lost[0]).tolist()
        raise TieError(nodes, problem.named(nodes))
    return group, label, common[group]


def _layers(problem: AssignmentProblem, group: Ints, label: Ints, columns: Bools) -> Layers:
    casts = problem.casts
    width = label.shape[1]
    count = len(casts)
    source = _ints(-1 if cast.source is None else cast.source for cast in casts)
    given = _padded([np.asarray(cast.cost) for cast in casts])
    cost = np.repeat(given[:, :1], width, axis=1)
    sourced = source >= 0
    if sourced.any():
        at = source[sourced]
        cost[sourced] = np.where(columns[at], given[np.flatnonzero(sourced)[:, None], label[at]], np.inf)
    sizes = _ints(len(cast.readers) for cast in casts)
    cast_of = np.repeat(np.arange(count), sizes)
    reader = _ints(node for cast in casts for node, _ in cast.readers)
    wanted = np.zeros((len(reader), int(max(map(len, problem.labels), default=1))), dtype=bool)
    amounts = _ints(len(wants) for cast in casts for _, wants in cast.readers)
    which = _ints(chain.from_iterable(wants for cast in casts for _, wants in cast.readers))
    wanted[np.repeat(np.arange(len(reader)), amounts), which] = True
    wants = wanted[np.arange(len(reader))[:, None], label[reader]] & columns[reader]
    variable = np.where(sourced, group[source], -1) if count else source
    return _peel(cost, variable, cast_of, group[reader], wants)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _peel(cost: Floats, source: Ints, cast_of: Ints, reader: Ints, wants: Bools) -> Layers:
    """One layer per distinct cost of each cast."""
    steps = np.sort(cost, axis=1)
    # labels that the source has not cost infinity and come last: no layer is theirs
    weights = np.diff(np.where(np.isfinite(steps), steps, 0.0), axis=1, prepend=0.0)
    layers, pairs = [], []
    offset = 0
    for j in range(cost.shape[1]):
        taken = np.isfinite(steps[:, j]) & (weights[:, j] > 0)
        number = np.cumsum(taken) - 1 + offset
        offset += int(taken.sum())
        free = (cost < steps[:, j, None]) & (source >= 0)[:, None]
        layers.append((weights[taken, j], source[taken], free[taken]))
        kept = taken[cast_of]
        pairs.append((number[cast_of[kept]], reader[kept], wants[kept]))
    weight, sources, free = (np.concatenate(part) for part in zip(*layers, strict=True))
    layer, readers, wanted = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return Layers(weight=weight, source=sources, free=free, layer=layer, reader=readers, wants=wanted)


def _settle(instance: Instance) -> Instance:
    """Layers that always or never matter, and sources that read their own copy, become node costs."""
    layers, allowed = instance.layers, instance.allowed
    if not len(layers.weight):
        return instance
    time = instance.time.copy()
    wants = layers.wants & allowed[layers.reader]
    sourced = layers.source >= 0
    possible = np.where(sourced[:, None], allowed[layers.source], False)
    free = layers.free & possible
    # a source that reads its own copy pays by itself on labels that want it and are not free; elsewhere the layer's
    # other readers decide, and none of them matters where it has paid
    own = layers.reader == layers.source[layers.layer]
    for_itself = np.zeros_like(free)
    np.logical_or.at(for_itself, layers.layer[own], wants[own])
    alone = for_itself & ~free
    np.add.at(time, layers.source[sourced], np.where(alone, layers.weight[:, None], 0.0)[sourced])
    free |= alone
    never = ~wants.any(axis=1) | own
    always = ~own & ~(allowed[layers.reader] & ~wants).any(axis=1)
    on = np.zeros(len(layers.weight), dtype=bool)
    on[layers.layer[always]] = True
    pay = np.where((on & sourced)[:, None] & possible & ~free, layers.weight[:, None], 0.0)
    np.add.at(time, layers.source[sourced], pay[sourced])
    constant = instance.constant + float(layers.weight[on & ~sourced].sum())
    loose = sourced & ~free.any(axis=1)
    source = np.where(loose, -1, layers.source)
    wanted = np.zeros(len(layers.weight), dtype=bool)
    wanted[layers.layer[~never]] = True
    gone = on | ~wanted | (sourced & ~(possible & ~free).any(axis=1))
    changed = replace(layers, source=source, free=free, wants=wants)
    return replace(instance, time=np.where(allowed, time, 0.0), constant=constant, layers=changed.keep(~gone, ~never))


def _merge(instance: Instance) -> Instance:
    """Layers sorted by what they are, equal ones as one layer of the summed weight, equal readers as one."""
    layers = instance.layers
    count, width = len(layers.weight), layers.wants.shape[1]
    if not count:
        return instance
    order = np.lexsort([*layers.wants.T, layers.reader, layers.layer])
    pair_key = np.column_stack([layers.layer, layers.reader])[order]
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (pair_key[1:] != pair_key[:-1]).any(axis=1)
    wants = np.logical_or.reduceat(layers.wants[order], np.flatnonzero(starts), axis=0)
    layer, reader = pair_key[starts].T
    rows = np.column_stack([reader, wants.astype(np.int64)])
    heads = np.column_stack([layers.source, layers.free.astype(np.int64)])
    begin = np.searchsorted(layer, np.arange(count + 1))
    text, size = np.ascontiguousarray(rows).tobytes(), rows.itemsize * (width + 1)
    head, head_size = np.ascontiguousarray(heads).tobytes(), heads.itemsize * (width + 1)
    seen: dict[bytes, int] = {}
    number = np.empty(count, dtype=np.int64)
    for k, (a, b) in enumerate(zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True)):
        number[k] = seen.setdefault(head[k * head_size : (k + 1) * head_size] + text[a * size : b * size], len(seen))
    names = sorted(seen)
    rank = np.empty(len(names), dtype=np.int64)
    rank[[seen[name] for name in names]] = np.arange(len(names))
    number = rank[number]
    # summed from the smallest, so that the order of the casts does not show in the last bit
    by_weight = np.lexsort([layers.weight, number])
    _, begins = np.unique(number[by_weight], return_index=True)
    first = np.full(len(names), count, dtype=np.int64)
    np.minimum.at(first, number, np.arange(count))
    size_of = np.diff(begin)[first]
    pairs = np.arange(int(size_of.sum())) + np.repeat(begin[first] - (np.cumsum(size_of) - size_of), size_of)
    merged = Layers(
        weight=np.add.reduceat(layers.weight[by_weight], begins),
        source=layers.source[first],
        free=layers.free[first],
        layer=np.repeat(np.arange(len(names)), size_of),
        reader=reader[pairs],
        wants=wants[pairs],
    )
    return replace(instance, layers=merged)


def _dominated(instance: Instance) -> Ints:
    """For each label (n, L) the label to take instead: one that beats it whatever the neighbours do, or itself."""
    layers, width = instance.layers, instance.time.shape[1]
    kept = instance.allowed.copy()
    better = np.tile(np.arange(width), (len(instance), 1))
    limited = [
        cost
        for cost, budget in ((instance.error, instance.error_budget), (instance.memory, instance.memory_budget))
        if np.isfinite(budget)
    ]
    sourced = layers.source >= 0
    for dropped in range(width):
        for other in range(width):
            beaten = kept[:, dropped] & kept[:, other]
            if other == dropped or not beaten.any():
                continue
            reads = layers.wants[:, other] & ~layers.wants[:, dropped]
            gives = sourced & layers.free[:, dropped] & ~layers.free[:, other]
            dearest = sum_at(layers.reader[reads], layers.weight[layers.layer[reads]], len(instance))
            dearest += sum_at(layers.source[gives], layers.weight[gives], len(instance))
            beaten &= instance.time[:, other] + dearest <= instance.time[:, dropped]
            for cost in limited:
                beaten &= cost[:, other] <= cost[:, dropped]
            kept[beaten, dropped] = False
            better[beaten] = np.where(better[beaten] == dropped, other, better[beaten])
    return better
