"""Experts on a mesh, as planning sees them: rows of tokens travel to the ranks of their experts and back.

How many rows an expert gets is known at run time only. For planning every expert gets the same share, so that an
exchange keeps the shape of what each rank holds: (rows, features), sharded by rows on every mesh dimension. On mesh
dimensions that divide the experts it is an all-to-all; on those that divide the batch alone, rows stay with their
replica of the experts; on others, which hold all rows, each rank takes its part, and what the experts make of all
tokens is gathered once it is added up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .sharding import Placements, ShardingPlan


@torch.library.custom_op("dsmp::send_rows", mutates_args=())
def send_rows(rows: Tensor, back: bool) -> Tensor:
    """Rows (rows, features) in the order of tokens, to the ranks of their experts; with `back` the other way round.

    On one device nothing travels: the rows themselves.
    """
    return rows.clone()


@send_rows.register_fake
def _(rows: Tensor, back: bool) -> Tensor:
    return torch.empty_like(rows)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return send_rows(grad, not ctx.back), None


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.back = inputs[1]


send_rows.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("dsmp::all_rows", mutates_args=())
def all_rows(rows: Tensor) -> Tensor:
    """Rows (tokens, features) for every rank that computes with these tokens; on one device the rows themselves."""
    return rows.clone()


@all_rows.register_fake
def _(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


all_rows.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("dsmp::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Products of groups of rows, in any dtype: a (rows, k) with b (groups, k, n) gives (rows, n), rows
    ends[i - 1]:ends[i] of `a` times b[i]; a (m, rows) with b (rows, n) gives (groups, m, n), the sums over the groups.
    """
    bounds = [0, *ends.tolist()]
    if b.ndim == 3:
        parts = [a[i:j] @ w for i, j, w in zip(bounds, bounds[1:], b.unbind(), strict=False)]
        return torch.cat([*parts, a.new_zeros(a.shape[0] - bounds[-1], b.shape[-1])])
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in itertools.pairwise(bounds)])


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[-1]) if b.ndim == 3 else (ends.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    a, b, ends = ctx.saved_tensors
    return grouped_mm(grad, b.transpose(-2, -1), ends), grouped_mm(a.transpose(0, 1), grad, ends), None


def _product_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


grouped_mm.register_autograd(_product_backward, setup_context=_product_setup)


def exchange(
    mesh: DeviceMesh, rows: DTensor, back: bool, expert_dims: Sequence[str], whole_dims: Sequence[str]
) -> DTensor:
    """The exchange on shards. `expert_dims` divide the experts, `whole_dims` hold every row on each rank."""
    names = mesh.mesh_dim_names or ()
    local = rows
    if not back:
        split = [Shard(0) if _divides(rows, mesh, i, n, whole_dims) else p for i, (n, p) in _placed(names, rows)]
        local = rows.redistribute(placements=split)
    value = local.to_local()
    for i, name in enumerate(names):
        if name in expert_dims and mesh.size(i) > 1:
            ranks, group = mesh.size(i), mesh.get_group(i).group_name
            parts = [value.shape[0] // ranks] * ranks
            value = torch.ops._c10d_functional.all_to_all_single(value.contiguous(), parts, parts, group)
            value = torch.ops._c10d_functional.wait_tensor(value)
    return DTensor.from_local(value, mesh, local.placements, run_check=False, shape=rows.shape, stride=rows.stride())


def gather_rows(mesh: DeviceMesh, rows: DTensor, whole_dims: Sequence[str]) -> DTensor:
    """The rows whole on the mesh dimensions that hold every token."""
    names = mesh.mesh_dim_names or ()
    placements = [Replicate() if n in whole_dims else p for n, p in zip(names, rows.placements, strict=True)]
    return rows.redistribute(placements=placements)


def _placed(names: Sequence[str], value: DTensor) -> Any:
    return enumerate(zip(names, value.placements, strict=True))


def _divides(rows: DTensor, mesh: DeviceMesh, i: int, name: str, whole_dims: Sequence[str]) -> bool:
    return name in whole_dims and rows.to_local().shape[0] % mesh.size(i) == 0


def expert_shards(plan: ShardingPlan) -> Placements:
    """Shards of the first dimension on the mesh dimensions that divide the experts."""
    return tuple(Shard(0) if dim in plan.expert_dims else Replicate() for dim in plan.mesh)


@functools.cache
def register_grouped_products() -> None:
    """Teach DTensor grouped products: by expert, and by rows of every expert. Once a process."""

    def rule(a: Any, b: Any, ends: Any) -> Sequence[tuple[list[Any], list[Any]]]:
        whole = [Replicate()], [Replicate()] * 3
        if len(b.shape) == 3:  # (rows, k) x (experts, k, n)
            return [([Shard(0)], [Shard(0)] * 3), ([Shard(0)], [Shard(0), Replicate(), Replicate()]), whole]
        by_expert = [Shard(0)], [Shard(1), Shard(0), Shard(0)]  # (m, rows) x (rows, n)
        return [by_expert, ([Partial()], [Shard(1), Shard(0), Replicate()]), whole]

    register: Any = register_sharding  # without types
    register(torch.ops.dsmp.grouped_mm.default)(rule)
