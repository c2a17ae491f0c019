"""Rewrite the collectives of a graph so that their tensors travel in a wire format.

    all-gather      encode, gather the payloads, decode
    reduce-scatter  encode a row for each rank, all-to-all of the payloads, sum locally in fp32
    all-reduce      reduce-scatter as above, then all-gather of the sums, encoded once more
                    under top-k: gather every rank's values and positions, sum locally

No sum is ever formed in a narrow format, and what every rank has of an all-reduce is the same to the bit.

Collectives of one kind, group, dtype, format and half of the step that do not depend on each other share a *bucket*:
one payload and one set of operators, so that neither compile time nor latency grows with the number of parameters. A
bucket is a run of them in graph order, of `bucket_bytes` at most. It runs where its last member stood; what reads
earlier members moves behind it, unless that would change the order of writes or of random numbers.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..passes.graph import aten, is_backward, is_joint
from ..passes.insertion import insert_call
from ..passes.keys import key_of
from ..passes.wire_formats import WireFormat
from .collective_nodes import Collective, GroupSize, group_size_by_name
from .sending import Sent, plan_sending

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel takes: large enough to fill a link, small enough to overlap."""

_Size = int | fx.Node

# `sending` imports `wire`, which registers them.
_encode, _decode, _reduce = (getattr(torch.ops.dsmp, f"wire_{step}").default for step in ("encode", "decode", "reduce"))


def rewrite_collectives(
    gm: fx.GraphModule,
    wires: Mapping[fx.Node, WireFormat],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    group_size: GroupSize = group_size_by_name,
) -> list[Sent]:
    """Send the tensors of these collectives in these formats, in place; "fp32" leaves one exactly as it is.

    `wires` maps the nodes that start collectives (`find_collectives`). Returns `plan_sending`'s entries with the
    buckets that the collectives went into.
    """
    planned = plan_sending(gm, wires, group_size)
    by_kind: defaultdict[tuple[Any, ...], dict[fx.Node, Collective]] = defaultdict(dict)
    for c, sent in planned.items():
        if not sent.reason:
            by_kind[_bucket_key(c, wires[c.start])][c.start] = c
    joint = bool(by_kind) and is_joint(gm)
    numbers: dict[Collective, int] = {}
    for members in by_kind.values():
        for bucket in _buckets(gm, members, bucket_bytes):
            number = len(set(numbers.values()))
            numbers |= dict.fromkeys(bucket.members, number)
            _Writer(gm.graph, bucket, wires[bucket.members[0].start], joint).write()
    if by_kind:
        gm.graph.lint()
        gm.recompile()
    return [replace(sent, bucket=numbers.get(c)) for c, sent in planned.items()]


def _bucket_key(c: Collective, wire: WireFormat) -> tuple[Any, ...]:
    """What members of one bucket have in common."""
    value, meta = c.value, c.start.meta
    remat = (meta.get("recompute"), meta.get("ac_graph_id"))
    return (c.kind, c.group, c.ranks, c.reduce_op, value.dtype, value.device, wire, is_backward(c.start), *remat)


@dataclass(kw_only=True, slots=True)
class _Bucket:
    """A run of independent collectives and what stands between them.

    `late` are the nodes after the first member that read a member's result; the first `moved` of them stand before the
    last member and have to move behind it.
    """

    members: list[Collective]
    size: float
    tainted: set[fx.Node]
    late: list[fx.Node] = field(default_factory=list)
    moved: int = 0
    writes: bool = False
    draws_late: bool = False
    draws_early: bool = False

    def takes(self, c: Collective, most: int) -> bool:
        """Whether a collective, the next in the graph, can be a member."""
        depends = bool(self.tainted.intersection(c.start.all_input_nodes))
        reorders = self.writes or (self.draws_late and self.draws_early)
        return not depends and not reorders and self.size + c.sent_bytes <= most

    def add(self, c: Collective) -> None:
        """Take a collective that `takes` allowed."""
        self.members.append(c)
        self.size += c.sent_bytes
        self.tainted.add(c.start)
        self.moved = len(self.late)

    def passes(self, node: fx.Node) -> None:
        """Note a node behind the last member."""
        late = bool(self.tainted.intersection(node.all_input_nodes))
        if late:
            self.tainted.add(node)
            self.late.append(node)
        if _writes(node):
            self.writes = True
        if _draws(node):
            self.draws_late, self.draws_early = self.draws_late or late, self.draws_early or not late


def _buckets(gm: fx.GraphModule, members: Mapping[fx.Node, Collective], most: int) -> list[_Bucket]:
    """Runs of members, in the graph's order, of which none reads another's result.

    Runs follow each other, so an arrow from a later run to an earlier one would run against the order of the graph.
    """
    found: list[_Bucket] = []
    for node in gm.graph.nodes:
        c = members.get(node)
        if c is None:
            if found:
                found[-1].passes(node)
        elif found and found[-1].takes(c, most):
            found[-1].add(c)
        else:
            found.append(_Bucket(members=[c], size=c.sent_bytes, tainted={node}))
    return found


def _writes(node: fx.Node) -> bool:
    """Whether a call may change what others read."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers from a generator."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


class _Writer:
    """Writes the operators of one bucket into the graph, behind its last member."""

    def __init__(self, graph: fx.Graph, bucket: _Bucket, wire: WireFormat, joint: bool) -> None:
        first = bucket.members[0]
        self.graph, self.bucket, self.wire, self.joint = graph, bucket, str(wire), joint
        self.first, self.sparse = first, wire.is_sparse
        self.dtype, self.average = first.value.dtype, first.reduce_op == "avg"
        self.point = bucket.members[-1].start.next

    def write(self) -> None:
        members = self.bucket.members
        results = {"all_gather": self._all_gather, "reduce_scatter": self._reduce_scatter}.get(
            self.first.kind, self._all_reduce_sparse if self.sparse else self._all_reduce
        )()
        gone = {n for c in members for n in (c.start, c.wait)}
        for node in self.bucket.late[: self.bucket.moved]:
            if node not in gone:
                self.point.prepend(node)
        for c, result in zip(members, results, strict=True):
            assert c.wait is not None
            key = key_of(c.start)
            if key is not None:
                result.meta["dsmp_key"] = key
            result.meta["dsmp_wire"] = self.wire
            c.wait.replace_all_uses_with(result)
            self.graph.erase_node(c.wait)
            self.graph.erase_node(c.start)

    def _all_gather(self) -> list[fx.Node]:
        counts = [self._numel(c) for c in self.bucket.members]
        gathered = self._gathered(self._call(_encode, self._sources(), 1, self.wire))
        parts = self._items(self._call(_decode, gathered, counts, self.wire, self.dtype))
        return [self._shaped(c, p, rows=self.first.ranks) for c, p in zip(self.bucket.members, parts, strict=True)]

    def _reduce_scatter(self) -> list[fx.Node]:
        parts = self._scattered([self._share(self._numel(c)) for c in self.bucket.members], self.dtype)
        return [self._shaped(c, p, parts=self.first.ranks) for c, p in zip(self.bucket.members, parts, strict=True)]

    def _all_reduce(self) -> list[fx.Node]:
        members, ranks = self.bucket.members, self.first.ranks
        sizes = [self._numel(c) for c in members]
        counts = [self._share(n) for n in sizes]
        sums = self._scattered(counts, torch.float32)
        gathered = self._gathered(self._call(_encode, sums, 1, self.wire))
        parts = self._items(self._call(_decode, gathered, counts, self.wire, self.dtype))
        results = []
        for c, part, size in zip(members, parts, sizes, strict=True):
            if not isinstance(size, int) or size % ranks:
                part = self._call(aten.slice.Tensor, self._call(aten.view.default, part, [-1]), 0, 0, size)
            results.append(self._shaped(c, part))
        return results

    def _all_reduce_sparse(self) -> list[fx.Node]:
        counts = [self._numel(c) for c in self.bucket.members]
        gathered = self._gathered(self._call(_encode, self._sources(), 1, self.wire))
        parts = self._items(self._call(_reduce, gathered, counts, self.wire, self.dtype, self.average))
        return [self._shaped(c, p) for c, p in zip(self.bucket.members, parts, strict=True)]

    def _scattered(self, counts: Sequence[_Size], dtype: torch.dtype) -> list[fx.Node]:
        """The sums of what all ranks have in this rank's row of each member."""
        ranks, group = self.first.ranks, self.first.group
        payload = self._call(_encode, self._sources(), ranks, self.wire)
        moved = self._waited(
            torch.ops._c10d_functional.all_to_all_single.default, payload, [1] * ranks, [1] * ranks, group
        )
        return self._items(self._call(_reduce, moved, counts, self.wire, dtype, self.average))

    def _gathered(self, payload: fx.Node) -> fx.Node:
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        return self._waited(gather, payload, self.first.ranks, self.first.group)

    def _waited(self, target: Any, *args: Any) -> fx.Node:
        return self._call(torch.ops._c10d_functional.wait_tensor.default, self._call(target, *args))

    def _items(self, parts: fx.Node) -> list[fx.Node]:
        return [self._call(operator.getitem, parts, i) for i in range(len(self.bucket.members))]

    def _sources(self) -> list[fx.Node]:
        return [c.source for c in self.bucket.members]

    def _shaped(self, c: Collective, x: fx.Node, *, rows: int = 1, parts: int = 1) -> fx.Node:
        """x in the shape of what the collective sent, with `rows` times as many rows or a `parts`th of them."""
        shape: list[_Size] = [self._size(c, d) for d in range(c.value.dim())]
        if rows != 1:
            shape[0] = self._compute(operator.mul, shape[0], rows)
        if parts != 1:
            shape[0] = self._compute(operator.floordiv, shape[0], parts)
        return self._call(aten.view.default, x, shape, like=c.start)

    def _share(self, count: _Size) -> _Size:
        """`row_length` of a size that may be symbolic."""
        ranks = self.first.ranks
        return self._compute(operator.floordiv, self._compute(operator.add, count, ranks - 1), ranks)

    def _numel(self, c: Collective) -> _Size:
        count = c.value.numel()
        return count if isinstance(count, int) else self._call(aten.sym_numel.default, c.source)

    def _size(self, c: Collective, dim: int) -> _Size:
        size = c.value.shape[dim]
        return size if isinstance(size, int) else self._call(aten.sym_size.int, c.source, dim)

    def _compute(self, function: Callable[[Any, Any], Any], a: _Size, b: int) -> _Size:
        return function(a, b) if isinstance(a, int) else self._call(function, a, b)

    def _call(self, target: Any, *args: Any, like: fx.Node | None = None) -> fx.Node:
        like = like or self.first.start
        node = insert_call(self.graph, target, args, {}, like=like, joint=self.joint, before=self.point)
        node.meta["dsmp_wire"] = self.wire
        return node
