"""Embedding look-ups in a table whose rows are divided over ranks.

Every rank looks up the tokens whose rows it holds, gives zeros for the others, and a sum over the ranks puts the parts
together. DTensor's own rule does the same with a partial sum that carries a mask, which meets other operators badly and
has no gradient where the sum was already reduced; here the sum is an ordinary one, and in the backward pass a rank adds
up the gradients of its own rows only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..errors import UnshardableError

aten = torch.ops.aten


def embed(
    mesh: DeviceMesh,
    table: DTensor,
    indices: DTensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DTensor:
    """`aten.embedding` of table float[V, D] and indices int[...]: float[..., D].

    Per mesh dimension: rows divided give a partial sum, columns divided a result divided in its last dimension, divided
    indices a result divided likewise.
    """
    placements: list[Placement] = []
    wanted: list[Placement] = []
    for t, i in zip(table.placements, indices.placements, strict=True):
        wanted.append(i if isinstance(t, Replicate) else Replicate())
        rows = isinstance(t, Shard) and t.dim == 0
        placements.append(Partial() if rows else Shard(indices.ndim) if isinstance(t, Shard) else i)
    indices = indices.redistribute(placements=wanted)
    own, foreign = _own_rows(mesh, table.placements, table.shape[0], indices.to_local())
    out = aten.embedding.default(table.to_local(), own, -1, scale_grad_by_freq, sparse)
    if foreign is not None:
        out = torch.where(foreign.unsqueeze(-1), 0.0, out)
    shape = torch.Size([*indices.shape, table.shape[1]])
    return _whole(out, mesh, placements, shape)


def embed_backward(
    mesh: DeviceMesh,
    table: tuple[Placement, ...],
    grad: DTensor,
    indices: DTensor,
    rows: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> DTensor:
    """`aten.embedding_dense_backward`: the gradient float[rows, D] of a table with the given placements.

    Where the indices are divided the result is a partial sum; else it lies as the table does. Raises UnshardableError
    with `scale_grad_by_freq`: how often a row is used is known to no rank alone.
    """
    if scale_grad_by_freq:
        raise UnshardableError(
            "an embedding with scale_grad_by_freq=True cannot be sharded: no rank knows how often a row is used. "
            "Build it with scale_grad_by_freq=False."
        )
    result: list[Placement] = []
    grads: list[Placement] = []
    ids: list[Placement] = []
    for t, i in zip(table, indices.placements, strict=True):
        divided = isinstance(i, Shard) and isinstance(t, Replicate)
        ids.append(i if divided else Replicate())
        columns = isinstance(t, Shard) and t.dim != 0
        grads.append(i if divided else Shard(indices.ndim) if columns else Replicate())
        result.append(Partial() if divided else t)
    grad, indices = grad.redistribute(placements=grads), indices.redistribute(placements=ids)
    local, taken = grad.to_local(), indices.to_local()
    own, foreign = _own_rows(mesh, table, rows, taken)
    count = rows
    for dim, p in enumerate(table):
        if isinstance(p, Shard) and p.dim == 0:
            count //= mesh.size(dim)
    if padding_idx >= 0:
        padding = taken == padding_idx
        foreign = padding if foreign is None else foreign | padding
    if foreign is not None:
        local = torch.where(foreign.unsqueeze(-1), 0.0, local)
    out = aten.embedding_dense_backward.default(local, own, count, -1, False)
    return _whole(out, mesh, result, torch.Size([rows, grad.shape[-1]]))


def _own_rows(
    mesh: DeviceMesh, table: tuple[Placement, ...], rows: int, indices: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Indices into this rank's rows, 0 where another rank has the row, and where that is; None if all rows are here."""
    first, count = 0, rows
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, p in enumerate(table):
        if isinstance(p, Shard) and p.dim == 0:
            count //= mesh.size(dim)
            first += coordinate[dim] * count
    if count == rows:
        return indices, None
    shifted = indices - first
    foreign = (shifted < 0) | (shifted >= count)
    return torch.where(foreign, 0, shifted), foreign


def _whole(local: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
