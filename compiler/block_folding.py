"""Repeated blocks of a model once: a short copy that is captured and sharded in seconds, and what its blocks stand for.

A list of layers is cut after the first block of each kind. Blocks are of one kind when their classes, parameters,
submodules and settings are equal (but for a number that counts the blocks). No block changes its place, so that a model
that treats its first layers in a special way still does; the first block stands for itself alone, since what feeds it
may need no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..passes.keys import NodeKey
from ..passes.plan import Decision

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """Which blocks, by module path, each kept block stands for, itself first; blocks that stand for themselves alone
    are left out."""

    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, path: str) -> tuple[str, tuple[str, ...]]:
        """The kept block that a module or parameter path lies in and the blocks it stands for; `""` for none."""
        for kept, blocks in self.blocks.items():
            if path == kept or path.startswith(kept + "."):
                return kept, blocks
        return "", ("",)

    def count(self, path: str) -> int:
        """How often what has this path occurs in the whole model."""
        return len(self.of(path)[1])

    def paths(self, path: str) -> list[str]:
        """The paths in the whole model of what has this path in the short one."""
        kept, blocks = self.of(path)
        return [block + path[len(kept) :] for block in blocks]

    def expand(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Decisions for the whole model: those of a kept block again for every block that it stands for."""
        found = []
        for d in decisions:
            key = NodeKey.parse(d.key)
            modules = self.paths(d.module)
            for path, module in zip(self.paths(key.fqn), modules, strict=True):
                own = NodeKey(path, key.phase, key.op, key.ordinal)
                found.append(d.model_copy(update={"key": str(own), "module": module}))
        return found


def fold_blocks(model: nn.Module, *, fold: bool = True) -> tuple[nn.Module, Repeats]:
    """A copy of a model on the meta device with every list of blocks cut as the module says (unless not to `fold`)."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    short = copy.deepcopy(model, memo)
    blocks: dict[str, tuple[str, ...]] = {}
    inside: list[str] = []
    for path, module in list(short.named_modules()):
        if not fold or not isinstance(module, nn.ModuleList) or any(path.startswith(p + ".") for p in inside):
            continue
        inside.append(path)
        kinds = _kinds(module)
        kept = 1 + max((kinds.index(k, 1) for k in set(kinds[1:])), default=0)
        if kept >= len(kinds):
            continue
        for i in range(1, kept):
            if i == max(j for j in range(1, kept) if kinds[j] == kinds[i]):
                same = (i, *(j for j in range(kept, len(kinds)) if kinds[j] == kinds[i]))
                if len(same) > 1:
                    blocks[f"{path}.{i}"] = tuple(f"{path}.{j}" for j in same)
        del module[kept:]
    return short, Repeats(blocks=blocks)


def _kinds(blocks: nn.ModuleList) -> list[int]:
    """A number per block, equal for blocks of one kind."""
    described = [_description(b) for b in blocks]
    if not described:
        return []
    shared = set(described[0]).intersection(*described[1:])
    counters = {k for k in shared if _counts([d[k] for d in described])}
    numbers: dict[frozenset[Any], int] = {}
    return [numbers.setdefault(frozenset((k, v) for k, v in d.items() if k not in counters), i) for i, d in
            enumerate(described)]  # fmt: skip


def _counts(values: Sequence[Any]) -> bool:
    """Whether values number the blocks one after the other."""
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        return False
    return len(values) > 1 and all(v == values[0] + i for i, v in enumerate(values))


def _description(block: nn.Module) -> dict[tuple[str, str], Any]:
    """What makes a block's kind, by (module path, name): classes, tensors and plain settings."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        found[path, "class"] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN):
                found[path, name] = value
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found[name, "tensor"] = tensor.shape, tensor.dtype, tensor.requires_grad
    return found
