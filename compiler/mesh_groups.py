"""Shard a captured model over the process groups of the mesh it is sharded for, and no others.

DTensor remembers how it propagated placements, meshes included, and two meshes of equal layout are the same to it: the
graph for a second one would name the first one's groups, which differ from rank to rank, may be gone, or may have
given their names to others.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ..passes.graph import calls, node_op
from ..passes.shard_graph import ShardedGraph, shard_graph
from ..passes.sharding import ShardingPlan
from .joint_capture import JointCapture

_Groups = tuple[tuple[str, tuple[int, ...]], ...]

_latest: list[_Groups] = []  # name and ranks of the groups that were sharded over last


def shard_over(capture: JointCapture, mesh: DeviceMesh, plan: ShardingPlan) -> ShardedGraph:
    """`shard_graph`, with collectives over the mesh's own groups. Raises as it does."""
    groups: _Groups = tuple((g.group_name, tuple(dist.get_process_group_ranks(g))) for g in mesh.get_all_groups())
    if _latest != [groups]:
        _latest[:] = [groups]
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    graph = shard_graph(capture.gm, mesh, plan, capture.names)
    _use(graph.gm, groups)
    return graph


def _use(gm: fx.GraphModule, groups: _Groups) -> None:
    """Let collectives that name a group with the ranks of one of these use that one, in place."""
    own = {ranks: name for name, ranks in reversed(groups)}
    names = {name for name, _ in groups}
    for node in calls(gm):
        name = node.args[-1] if node.args and node_op(node).startswith("_c10d_functional.") else None
        if isinstance(name, str) and name not in names:
            other = dist.distributed_c10d._resolve_process_group(cast("Any", name))  # type: ignore[attr-defined]
            node.args = (*node.args[:-1], own.get(tuple(dist.get_process_group_ranks(other)), name))
    gm.recompile()
