"""The best choice between two labels per variable at fixed prices, by an s-t minimum cut.

Side 1 of the cut is the source's side. A layer that is paid when a reader sits on side d and its source does not is an
arc between them of the layer's weight, through one auxiliary vertex where several readers share it; without a source
the auxiliary vertex hangs on a terminal. Which of its two labels a variable calls side 1 is free, so orientations are
first made to agree where they can (parity over the connected components of layers). What still does not fit is replaced
by node costs that are never below the true cost and equal to it where all variables keep side 0: the cut can then miss
the optimum, but never says worse than side 0, and the bound of `linear_bound` stays valid, since any flow gives one.

Capacities are integers: weights are scaled and rounded down, node costs are cut off where they outweigh all that is
incident. The flow is read back in microseconds and bounds the true problem whatever the rounding did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow

from .contraction import Bools, Floats, Ints, Layers, sum_at

# per vertex, so that sums of what is incident fit the int32 that maximum_flow computes in
CAPACITY = 2**30


@dataclass(frozen=True, slots=True)
class Cuts:
    """The two extreme minimum cuts, equal unless there are ties, as labels per variable, and the maximum flow.

    `flow` (P,) is microseconds per pair of the layers: a reader's share of its layer's weight.
    """

    least: Ints
    most: Ints
    flow: Floats


class CutNetwork:
    """The network of layers between labels `zero` and `one` (n,) of each variable; node costs come with each solve.

    `exact` says whether every layer fits, so that `solve` finds the optimum and its flow proves it.
    """

    def __init__(self, layers: Layers, zero: Ints, one: Ints) -> None:
        self._sides = np.column_stack([zero, one])
        self._flow = np.zeros(len(layers.layer))
        self._shift = np.zeros((len(zero), 2))
        terms = self._settle(layers)
        self._build(layers, terms)

    def _settle(self, layers: Layers) -> _Terms:
        """What the cut has to decide; layers that need no decision become node costs."""
        n, count = len(self._sides), len(layers.weight)
        sourced = layers.source >= 0
        free = layers.free[np.arange(count)[:, None], self._sides[layers.source]] & sourced[:, None]
        wants = layers.wants[np.arange(len(layers.layer))[:, None], self._sides[layers.reader]]
        on = np.zeros(count, dtype=bool)
        always = wants.all(axis=1)
        on[layers.layer[always]] = True
        open_pair = (wants[:, 0] != wants[:, 1]) & ~(on | free.all(axis=1))[layers.layer]
        tied = free[:, 0] != free[:, 1]
        flip = _flips(n, layers, open_pair, wants[:, 1], tied & ~on, free[:, 1])
        bit = wants[:, 1] ^ flip[layers.reader]
        votes = sum_at(layers.layer[open_pair], np.where(bit[open_pair], 1.0, -1.0), count)
        direction = np.where(tied, free[:, 1] ^ flip[layers.source], votes > 0)
        odd = open_pair & (bit != direction[layers.layer])
        self.exact = not odd.any()
        on[layers.layer[odd & wants[:, 0]]] = True
        pays = odd & wants[:, 1]
        np.add.at(self._shift, (layers.reader[pays], 1), layers.weight[layers.layer[pays]])
        due = on & sourced
        np.add.at(self._shift, layers.source[due], np.where(free[due], 0.0, layers.weight[due, None]))
        _, first = np.unique(layers.layer[always], return_index=True)
        chosen = np.flatnonzero(always)[first]
        self._flow[chosen] = layers.weight[layers.layer[chosen]]
        open_pair &= ~odd & ~on[layers.layer]
        readers = np.bincount(layers.layer[open_pair], minlength=count)
        lone = open_pair & (readers == 1)[layers.layer] & ~tied[layers.layer]
        np.add.at(self._shift, (layers.reader[lone], wants[lone, 1].astype(int)), layers.weight[layers.layer[lone]])
        self._flow[lone] = layers.weight[layers.layer[lone]]
        self._flip = flip
        return _Terms(pair=np.flatnonzero(open_pair & ~lone), tied=tied, direction=direction, readers=readers)

    def _build(self, layers: Layers, terms: _Terms) -> None:
        pair, layer = terms.pair, layers.layer[terms.pair]
        reader = layers.reader[pair]
        used = np.unique(layer)
        shared = used[terms.readers[used] > 1]
        self._variables = np.unique(np.concatenate([reader, layers.source[used[terms.tied[used]]]]))
        vertex = np.full(len(self._sides) + 1, -1)
        vertex[self._variables] = np.arange(len(self._variables))
        middle = np.full(len(layers.weight), -1)
        middle[shared] = len(self._variables) + np.arange(len(shared))
        far = np.where(middle[layer] >= 0, middle[layer], vertex[layers.source[layer]])
        rooted = shared[terms.tied[shared]]
        count = len(self._variables) + len(shared)
        tail = np.concatenate([vertex[reader], middle[rooted]])
        head = np.concatenate([far, vertex[layers.source[rooted]]])
        weight = np.concatenate([layers.weight[layer], layers.weight[rooted]])
        forward = np.concatenate([terms.direction[layer], terms.direction[rooted]])
        tail, head = np.where(forward, tail, head), np.where(forward, head, tail)
        hanging = shared[~terms.tied[shared]]
        incident = sum_at(
            np.concatenate([tail, head, middle[hanging]]),
            np.concatenate([weight, weight, layers.weight[hanging]]),
            count,
        )
        self._scale = CAPACITY / incident.max() if incident.size and incident.max() > 0 else 1.0
        self._incident = np.ceil(incident * self._scale).astype(np.int64) + 1
        capacity = np.floor(weight * self._scale).astype(np.int64)
        terminal = np.arange(count)
        source, sink = np.full(count, count), np.full(count, count + 1)
        # every arc with its reverse and every vertex with both terminals, so that the structure never changes
        rows = np.concatenate([tail, head, source, terminal, terminal, sink])
        columns = np.concatenate([head, tail, terminal, source, sink, terminal])
        data = np.concatenate([capacity, np.zeros(len(capacity) + 4 * count, dtype=np.int64)])
        graph = coo_array((data, (rows, columns)), shape=(count + 2, count + 2)).tocsr()
        graph.sum_duplicates()
        self._graph = csr_array((graph.data.astype(np.int32), graph.indices, graph.indptr), shape=graph.shape)
        self._from_source = graph.indptr[count] + terminal
        self._to_sink = graph.indptr[1 : count + 1] - 1
        self._fixed = np.zeros(count, dtype=np.int64)
        self._fixed[middle[hanging]] = np.where(terms.direction[hanging], -1, 1) * np.floor(
            layers.weight[hanging] * self._scale
        ).astype(np.int64)
        keys = np.repeat(np.arange(count + 2), np.diff(graph.indptr)) * (count + 2) + graph.indices
        arcs = len(pair)
        self._arc = np.searchsorted(keys, tail[:arcs] * (count + 2) + head[:arcs])
        self._pair = pair
        self._capacity = capacity[:arcs]

    def solve(self, zero_cost: Floats, one_cost: Floats) -> Cuts:
        """The best sides for node costs (n,), microseconds, of either label."""
        cost = np.column_stack([zero_cost, one_cost]) + self._shift
        cost = np.where(self._flip[:, None], cost[:, ::-1], cost)
        least = cost[:, 1] < cost[:, 0]
        most = cost[:, 1] <= cost[:, 0]
        flow = self._flow.copy()
        if len(self._variables):
            pull = self._fixed.copy()
            at = self._variables
            scaled = np.rint((cost[at, 0] - cost[at, 1]) * self._scale)
            limit = self._incident[: len(at)]
            pull[: len(at)] = np.clip(scaled, -limit, limit).astype(np.int64)
            self._graph.data[self._from_source] = np.maximum(pull, 0)
            self._graph.data[self._to_sink] = np.maximum(-pull, 0)
            count = len(pull)
            sent = maximum_flow(self._graph, count, count + 1).flow
            left = _where(self._graph, self._graph.data > sent.data)
            least[at] = _reached(left, count)[: len(at)]
            most[at] = ~_reached(left.T.tocsr(), count + 1)[: len(at)]
            moved = np.maximum(sent.data[self._arc], 0)
            # arcs between the same two vertices were merged: each gets its part of the flow
            share = self._capacity / np.maximum(self._graph.data[self._arc], 1)
            flow[self._pair] = moved * share / self._scale
        rows = np.arange(len(self._sides))
        return Cuts(
            least=self._sides[rows, (least ^ self._flip).astype(int)],
            most=self._sides[rows, (most ^ self._flip).astype(int)],
            flow=flow,
        )


@dataclass(frozen=True, slots=True)
class _Terms:
    """Pairs that the cut decides; per layer whether its source takes part, the side its readers pay on, how many."""

    pair: Ints
    tied: Bools
    direction: Bools
    readers: Ints


def _flips(n: int, layers: Layers, pairs: Bools, wants_one: Bools, tied: Bools, free_one: Bools) -> Bools:
    """Variables (n,) that call their label `zero` side 1, so that as many layers as possible fit."""
    paired = np.flatnonzero(pairs)
    rooted = np.flatnonzero(tied & (np.bincount(layers.layer[pairs], minlength=len(tied)) > 0))
    plus = 2 * n + 2 * np.concatenate([layers.layer[paired], rooted])
    literal = np.concatenate(
        [2 * layers.reader[paired] + wants_one[paired], 2 * layers.source[rooted] + free_one[rooted]]
    )
    one, other = np.concatenate([plus, plus + 1]), np.concatenate([literal, literal ^ 1])
    size = 2 * n + 2 * len(tied)
    _, part = connected_components(coo_array((np.ones(len(one)), (one, other)), shape=(size, size)), directed=False)
    zero, side_one = part[0 : 2 * n : 2], part[1 : 2 * n : 2]
    _, first, inverse = np.unique(np.minimum(zero, side_one), return_index=True, return_inverse=True)
    flips: Bools = (side_one != side_one[first][inverse]) & (zero != side_one)
    return flips


def _where(graph: csr_array, kept: Bools) -> csr_array:
    """The entries of a mask; csgraph would follow explicit zeros."""
    indptr = np.concatenate([[0], np.cumsum(kept)])[graph.indptr]
    return csr_array((np.ones(int(kept.sum()), dtype=np.int32), graph.indices[kept], indptr), shape=graph.shape)


def _reached(graph: csr_array, start: int) -> Bools:
    """The vertices that can be reached from one."""
    seen: Bools = np.zeros(graph.shape[0], dtype=bool)
    seen[breadth_first_order(graph, start, return_predecessors=False)] = True
    return seen
