"""Ranks compare what they are about to run before they run it: a difference would leave collectives waiting."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RanksDisagreeError
from ..passes.graph import node_op, tensors_of
from ..passes.shard_graph import ShardedGraph


def agree(mesh: DeviceMesh, digest: str, what: str) -> None:
    """Compare a text among all ranks of a mesh, along one mesh dimension after the other.

    Every rank learns of every difference before any raises, so none is left waiting. Nothing is compared over the
    fake process group. Raises RanksDisagreeError on all ranks of the mesh.
    """
    known = {dist.get_rank(): digest}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if dist.get_backend(group) == "fake":
            return
        parts: list[dict[int, str]] = [{} for _ in range(mesh.size(dim))]
        dist.all_gather_object(parts, known, group=group)
        known = {rank: text for part in parts for rank, text in part.items()}
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(known.items()):
        groups.setdefault(hashlib.sha256(text.encode()).hexdigest(), []).append(rank)
    if len(groups) > 1:
        listed = "; ".join(f"ranks {ranks} have {text[:12]}" for text, ranks in groups.items())
        raise RanksDisagreeError(
            f"ranks hold different {what}: {listed}. Give every rank the same model, plan, inputs and rules."
        )


def collectives_digest(graph: ShardedGraph, mesh: DeviceMesh) -> str:
    """A hash of the collectives of a graph in order: operator, mesh dimension, shape and dtype of the result."""
    dims: dict[str, int] = {mesh.get_group(i).group_name: i for i in range(mesh.ndim)}
    lines = []
    for node in graph.gm.graph.nodes:
        name = node_op(node)
        if name.startswith("_c10d_functional.") and not name.endswith("wait_tensor"):
            groups = [dims.get(a, a) for a in node.args if isinstance(a, str)]
            lines.append(f"{name} {groups} {[(tuple(t.shape), str(t.dtype)) for t in tensors_of(node)]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
