"""Attention masks that are made from nothing for every sample of the batch: made for a rank's own samples only."""

from __future__ import annotations

import math

from torch import fx
from torch.distributed.tensor import Replicate, Shard

from .gemm import gemm_op
from .graph import calls, shape_of, value_of
from .sharding import Placements, ShardingPlan


def masks_of_batches(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """Nodes at which a value that depends on no input gets the batch as its first dimension, where nothing but
    attention over as many samples reads what comes of it."""
    from_inputs: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or any(n in from_inputs for n in node.all_input_nodes):
            from_inputs.add(node)
    batches: dict[fx.Node, set[int]] = {}

    def batches_of(node: fx.Node) -> set[int]:
        """First sizes of what attention reads beside a constant; holds 0 where something else reads it."""
        if node not in batches:
            batches[node] = set()
            for user in node.users:
                if user not in from_inputs:
                    batches[node] |= batches_of(user)
                    continue
                op = gemm_op(user)
                query = user.args[0] if op is not None and op.kind == "sdpa" else None
                sizes = shape_of(query.meta["val"]) if isinstance(query, fx.Node) else (0,)
                batches[node].add(sizes[0])
        return batches[node]

    found = set()
    for node in calls(gm):
        value = value_of(node)
        if node in from_inputs or value is None or value.ndim < 3 or value.shape[0] < 2:
            continue
        enters = all(_first(n, value.ndim) == 1 for n in node.all_input_nodes)
        if enters and batches_of(node) == {shape_of(value)[0]}:
            found.add(node)
    return frozenset(found)


def batch_shards(batch: int, plan: ShardingPlan) -> Placements:
    """Shards of the first dimension on the mesh dimensions that divide the batch; none where they do not divide it."""
    ranks = math.prod(n for dim, n in plan.dims if dim in plan.gathered)
    divided = [dim in plan.gathered and batch % ranks == 0 for dim in plan.mesh]
    return tuple(Shard(0) if d else Replicate() for d in divided)


def _first(node: fx.Node, ndim: int) -> int:
    """The size that a value has in the first of `ndim` dimensions."""
    value = value_of(node)
    if value is None:
        return 0
    return 1 if value.ndim < ndim else shape_of(value)[0]
