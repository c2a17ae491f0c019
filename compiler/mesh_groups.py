"""The process groups that a sharded graph communicates over: those of the mesh it was made for.

DTensor remembers how it propagated placements, meshes included, and two meshes of equal layout are the same to it: the
graph for a second one would name the first one's groups, which differ from rank to rank and may be gone.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..passes.graph import calls, node_op


def use_own_groups(gm: fx.GraphModule, mesh: DeviceMesh) -> None:
    """Let collectives that name a group with the ranks of one of the mesh's own groups use that one, in place."""
    groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    own = {tuple(dist.get_process_group_ranks(g)): g.group_name for g in reversed(groups)}
    names = {g.group_name for g in groups}
    for node in calls(gm):
        name = node.args[-1] if node.args and node_op(node).startswith("_c10d_functional.") else None
        if isinstance(name, str) and name not in names:
            other = dist.distributed_c10d._resolve_process_group(cast("Any", name))  # type: ignore[attr-defined]
            node.args = (*node.args[:-1], own.get(tuple(dist.get_process_group_ranks(other)), name))
    gm.recompile()
