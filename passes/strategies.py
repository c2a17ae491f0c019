"""What DTensor does not know by itself: rules for attention on the CPU, and which sizes a mesh can divide.

An uneven shard would be legal for DTensor, but heads cannot be cut and collectives of uneven parts need padding, so a
size that a mesh dimension does not divide is a verdict, never a silent gather.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from ..hardware_db.capability import Verdict

aten = torch.ops.aten

_BATCH_OR_HEADS = (Replicate(), Shard(0), Shard(1))


@functools.cache
def register_cpu_attention() -> None:
    """Teach DTensor the fused CPU attention and its backward: whole, by batch, by head. Once a process."""

    def forward(
        query: Any, key: Any, value: Any, *flags: Any, attn_mask: Any = None, scale: float | None = None
    ) -> Sequence[tuple[list[Any], list[Any]]]:
        return [([p] * 2, [p] * 3 + _mask(attn_mask, p)) for p in _BATCH_OR_HEADS]

    def backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, *flags: Any,
        attn_mask: Any = None, scale: float | None = None,
    ) -> Sequence[tuple[list[Any], list[Any]]]:  # fmt: skip
        return [([p] * 3, [p] * 6 + _mask(attn_mask, p)) for p in _BATCH_OR_HEADS]

    register: Any = register_sharding  # without types
    register(aten._scaled_dot_product_flash_attention_for_cpu.default)(forward)
    register(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(backward)


def _mask(mask: Any, placement: Placement) -> list[Placement]:
    """The placement of an additive mask [batch or 1, heads or 1, L, S] or [L, S] beside queries [batch, heads, ...]."""
    if mask is None:
        return []
    if not isinstance(placement, Shard):
        return [placement]
    dim = placement.dim - (4 - len(mask.shape))
    return [Shard(dim) if dim >= 0 and mask.shape[dim] > 1 else Replicate()]


def divides(what: str, size: int, mesh_dim: str, ranks: int) -> Verdict:
    """Whether a mesh dimension of `ranks` ranks divides `size` of something, e.g. ("the kv heads of 'a.k'", 4)."""
    if size % ranks == 0:
        return Verdict(True, f"{what}: {size} over the {ranks} ranks of mesh dimension {mesh_dim!r}")
    return Verdict(False, f"{what}: {size} cannot be divided by the {ranks} ranks of mesh dimension {mesh_dim!r}")


def shards_evenly(
    name: str, shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[tuple[str, int]]
) -> list[Verdict]:
    """Verdicts on every shard of a tensor: the dimension exists and each mesh dimension divides what is left of it.

    `mesh` lists (name, ranks) per mesh dimension, in the order of `placements`.
    """
    left = list(shape)
    found = []
    taken: dict[int, str] = {}
    for placement, (mesh_dim, ranks) in zip(placements, mesh, strict=True):
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim
        if not -len(left) <= dim < len(left):
            found.append(Verdict(False, f"{name} has {len(left)} dimensions, mesh dimension {mesh_dim!r} wants {dim}"))
            continue
        dim %= len(left)
        if dim in taken:
            # Gathering the outer one alone would need the ranks in another order (DTensor's strided shards).
            why = f"dimension {dim} of {name} is already divided by mesh dimension {taken[dim]!r}; take another"
            found.append(Verdict(False, f"mesh dimension {mesh_dim!r}: {why}"))
            continue
        taken[dim] = mesh_dim
        verdict = divides(f"dimension {dim} of {name}", left[dim], mesh_dim, ranks)
        found.append(verdict)
        if verdict:
            left[dim] //= ranks
    return found
