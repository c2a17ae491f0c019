"""Nodes that take the same format, because users expect it and a plan of few kinds of nodes is easier to read.

    repeated blocks   the same key up to numbers in its module path (layers, experts), of the same shapes
    siblings          forward GEMMs that read one activation and sum over the same length (q, k, v; gate, up), and with
                      them their gradients
    residual stream   additions of two tensors of one shape, one of which is the previous such addition

Only nodes that may take the same labels are tied, and only where there is a choice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from torch import fx

from .candidates import NodeWays
from .dataflow import source_of
from .gemm import gemm_op, operand_nodes
from .graph import is_backward, node_op, root, shape_of, value_of
from .keys import DGRAD, FPROP, WGRAD
from .select_default import shapes_of
from .workload import gemm_shape

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a module path


def ties_of(nodes: Sequence[NodeWays], parameters: frozenset[fx.Node]) -> list[list[str]]:
    """Disjoint groups of two or more keys, in graph order.

    `nodes` are those of all graphs, each key once, `parameters` the placeholders that are parameters in any.
    """
    free = [n for n in nodes if len(n.allowed) > 1]
    labels = {str(n.key): tuple(w.label for w in n.allowed) for n in free}
    groups = _Groups(labels)
    for n in free:
        place = (_NUMBER.sub("#", n.key.fqn), n.key.phase, n.key.op, n.key.ordinal)
        shapes = tuple(map(tuple, shapes_of(n.node)))
        groups.unite_alike(("block", place, shapes), str(n.key))
    for reads, keys in _siblings(free, parameters):
        for key in keys:
            groups.unite_alike(reads, key)
    for first, second in _residual_joins(free):
        groups.unite(first, second)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key in labels:
        found[groups.head(key)].append(key)
    return [keys for keys in found.values() if len(keys) > 1]


class _Groups:
    """Disjoint sets of keys; keys with different labels never meet."""

    def __init__(self, labels: dict[str, tuple[str, ...]]) -> None:
        self._labels = labels
        self._parent = {key: key for key in labels}
        self._first: dict[Hashable, str] = {}

    def head(self, key: str) -> str:
        while self._parent[key] != key:
            self._parent[key] = self._parent[self._parent[key]]
            key = self._parent[key]
        return key

    def unite(self, first: str, second: str) -> None:
        if self._labels[first] == self._labels[second]:
            self._parent[self.head(second)] = self.head(first)

    def unite_alike(self, kind: Hashable, key: str) -> None:
        """Unite a key with the earlier ones of its kind and labels."""
        self.unite(self._first.setdefault((kind, self._labels[key]), key), key)


def _siblings(nodes: Iterable[NodeWays], parameters: frozenset[fx.Node]) -> Iterator[tuple[Hashable, list[str]]]:
    """(what they read, keys) of every forward GEMM on a parameter, and the same for its gradients."""
    keys = {n.key: str(n.key) for n in nodes}
    for n in nodes:
        if gemm_op(n.node) is None or n.key.phase != FPROP:
            continue
        weight = [root(o, through_casts=True) in parameters for o in operand_nodes(n.node)]
        shape = gemm_shape(n.node)
        if sorted(weight) != [False, True] or shape is None:
            continue
        read = source_of(operand_nodes(n.node)[weight.index(False)])
        for phase in (FPROP, DGRAD, WGRAD):
            key = type(n.key)(n.key.fqn, phase, n.key.op, n.key.ordinal)
            if key in keys:
                yield ("sibling", read, n.key.op, phase, shape.k), [keys[key]]


def _residual_joins(nodes: Iterable[NodeWays]) -> Iterator[tuple[str, str]]:
    """(earlier, later) keys of additions of which the later reads the earlier."""
    joins = {n.node: str(n.key) for n in nodes if _is_join(n.node)}
    for node, key in joins.items():
        for operand in node.all_input_nodes:
            source = root(operand, through_slices=False)
            if source in joins and _shape(source) == _shape(node) and is_backward(source) == is_backward(node):
                yield joins[source], key


def _is_join(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape."""
    if node_op(node) != "aten.add" or len(node.args) < 2:
        return False
    return all(isinstance(a, fx.Node) and _shape(a) == _shape(node) for a in node.args[:2])


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = value_of(node)
    return shape_of(value) if value is not None else None
