"""Collectives in a graph: which there are, among how many ranks, and how many bytes a rank sends.

Bytes are those that each of w ranks sends in a ring (or directly, to all others), for a tensor of B bytes:

    all-reduce                   2 B (w - 1) / w
    all-gather                     B (w - 1)       B being one rank's share
    reduce-scatter, all-to-all     B (w - 1) / w   B being a rank's whole input
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import fx

from ..passes.graph import calls, is_backward, node_op, numel_of, tensors_of, value_of
from ..passes.keys import BWD, FPROP, NodeKey, Phase, give_key

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
GroupSize = Callable[[str], int]

_KINDS: dict[str, Kind] = {
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.all_reduce": "all_reduce",
}
_ALL_TO_ALL: dict[str, Kind] = {"_c10d_functional.all_to_all_single": "all_to_all"}
_WAIT = "_c10d_functional.wait_tensor"
_COALESCED = "_coalesced"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Collective:
    """One collective of a graph. `wait` is None where the result is used other than through one `wait_tensor`."""

    start: fx.Node
    wait: fx.Node | None
    kind: Kind
    group: str
    ranks: int
    reduce_op: str

    @property
    def source(self) -> fx.Node:
        """The node whose value is sent."""
        source = self.start.args[0]
        assert isinstance(source, fx.Node)
        return source

    @property
    def value(self) -> torch.Tensor:
        """The (fake) tensor that is sent."""
        value = value_of(self.source)
        assert value is not None
        return value

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends, as written."""
        return ring_bytes(self.kind, numel_of(self.value) * self.value.dtype.itemsize, self.ranks)


def group_size_by_name(name: str) -> int:
    """The number of ranks of the process group with this name, as collectives in graphs know it."""
    return dist.distributed_c10d._get_group_size_by_name(cast("Any", name))


def find_collectives(gm: fx.GraphModule, group_size: GroupSize = group_size_by_name) -> list[Collective]:
    """All-gathers, reduce-scatters and all-reduces of single tensors, in graph order.

    Those whose group is no name but a value of the graph are left out: who takes part is then not known.
    """
    return _found(gm, _KINDS, group_size)


def find_exchanges(gm: fx.GraphModule, group_size: GroupSize = group_size_by_name) -> list[Collective]:
    """All-to-alls of single tensors, in graph order; what they send is in its wire format already."""
    return _found(gm, _ALL_TO_ALL, group_size)


def name_collectives(collectives: Iterable[Collective], dims: Mapping[str, str], owners: Mapping[fx.Node, str]) -> None:
    """Give collectives of a sharded graph keys, `fqn|phase|kind@dim|ordinal`.

    `dims` names the mesh dimension of each process group, `owners` the module that each node belongs to.
    """
    numbers: Counter[tuple[str, Phase, str]] = Counter()
    for c in collectives:
        phase: Phase = BWD if is_backward(c.start) else FPROP
        place = owners[c.start], phase, f"{c.kind}@{dims.get(c.group, c.group)}"
        give_key(c.start, NodeKey(*place, numbers[place]))
        numbers[place] += 1


def _found(gm: fx.GraphModule, kinds: Mapping[str, Kind], group_size: GroupSize) -> list[Collective]:
    found = []
    for node in calls(gm):
        kind = kinds.get(node_op(node))
        group = node.args[-1] if node.args else None
        if kind is None or not isinstance(group, str) or value_of(node) is None:
            continue
        users = list(node.users)
        waited = len(users) == 1 and node_op(users[0]) == _WAIT
        found.append(
            Collective(
                start=node,
                wait=users[0] if waited else None,
                kind=kind,
                group=group,
                ranks=_ranks(node, group, group_size),
                reduce_op=str(node.args[1]) if kind in ("reduce_scatter", "all_reduce") else "",
            )
        )
    return found


def ring_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends for a tensor of `size` bytes; kinds are those of `Collective` and `all_to_all`."""
    if kind == "all_gather":
        return size * (ranks - 1)
    return size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def graph_ring_bytes(gm: fx.GraphModule, group_size: GroupSize = group_size_by_name) -> float:
    """Bytes that each rank sends for all the collectives of a graph, also those of several tensors at once."""
    total = 0.0
    for node in calls(gm):
        name = node_op(node)
        kind = _KINDS.get(name.removesuffix(_COALESCED)) or _ALL_TO_ALL.get(name)
        group = node.args[-1] if node.args else None
        if kind is None or not isinstance(group, str):
            continue
        sources: list[fx.Node] = []
        fx.node.map_arg(node.args[0], sources.append)
        size = sum(numel_of(t) * t.dtype.itemsize for s in sources for t in tensors_of(s))
        total += ring_bytes(kind, size, _ranks(node, group, group_size))
    return total


def _ranks(node: fx.Node, group: str, group_size: GroupSize) -> int:
    """The number of ranks that a collective's arguments state, else that of its group."""
    sizes = [a for a in node.args[1:] if isinstance(a, int)]
    if sizes:
        return sizes[0]
    splits = next((a for a in node.args[1:] if isinstance(a, (list, tuple))), None)
    return len(splits) if splits is not None else group_size(group)
