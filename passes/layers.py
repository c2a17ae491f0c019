"""The layers of a model in a forward graph: what a pipeline is cut between.

A layer is a repeated block (`model.layers.3`, `encoder.layer_3`) or a module outside of them (`lm_head`). Layers stand
in the order in which the graph comes to them, and a value belongs to the layer that computes it, or to a later one if
it reads a value of that. What depends on no parameter (positions, masks, rotary tables) belongs to none: it is computed
wherever it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

_BLOCK = re.compile(r"(?:.*_)?\d+")


def layer_of(path: str) -> str | None:
    """The layer that a module path lies in: up to its first numbered component, else the whole; None for the root."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if _BLOCK.fullmatch(part):
            return ".".join(parts[: i + 1])
    return path or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Layers in order, and the position of the layer of every forward value that depends on a parameter."""

    names: tuple[str, ...]
    of: dict[fx.Node, int]

    def uses(self, parameter: fx.Node) -> list[int]:
        """Positions of the layers that read a parameter."""
        return sorted({self.of[user] for user in parameter.users if user in self.of})


def find_layers(
    nodes: Sequence[fx.Node],
    path_of: Callable[[fx.Node], str],
    parameters: Collection[fx.Node],
    position_of: Callable[[str], int | None] | None = None,
) -> Positions:
    """Positions of forward calls in graph order. `position_of` gives those of layers that are known already (None: of
    no layer); without it they are numbered as they come."""
    names: dict[str, int] = {}
    bound: dict[fx.Node, int] = {}
    reached = 0
    for node in nodes:
        read = [bound[n] for n in node.all_input_nodes if n in bound]
        if not read and not any(n in parameters for n in node.all_input_nodes) and not _must_not_repeat(node):
            continue
        layer = layer_of(path_of(node))
        own: int | None = None
        if layer is not None:
            own = names.setdefault(layer, len(names)) if position_of is None else position_of(layer)
        if own is None and not read:
            own = reached
        bound[node] = max([*read, *([] if own is None else [own])])
        reached = max(reached, bound[node])
    return Positions(names=tuple(names), of=bound)


def _must_not_repeat(node: fx.Node) -> bool:
    """Whether a call would not do the same if it was done in several places: it draws at random or writes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable


def joined(count: int, uses: Sequence[Sequence[int]]) -> list[range]:
    """Positions in groups: those from the first to the last use of one parameter are together."""
    ends: dict[int, int] = {}
    for positions in uses:
        if len(positions) > 1:
            ends[positions[0]] = max(positions[-1], ends.get(positions[0], 0))
    groups: list[range] = []
    start = 0
    while start < count:
        end, i = start, start
        while i <= end:
            end = max(end, ends.get(i, 0))
            i += 1
        groups.append(range(start, end + 1))
        start = end + 1
    return groups
