"""Time and memory of a step of one rank.

Computation is priced node by node on local shapes, as on one device. Collectives that are hidden run beside the
computation of their pass, and only what they take longer than it is exposed, by mesh dimension in proportion; every
other one is waited for. Blocks that the graph holds once count as often as they occur.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, GradAOTOutput, ParamAOTInput
from torch.distributed.tensor import Shard

from ..codegen.collective_nodes import Collective
from ..hardware_db.capability import Device
from ..passes.graph import is_backward, numel_of, output_node, placeholders, root, tensors_of
from ..passes.keys import ModuleNames, NodeKey, key_of
from ..passes.legalize import legalize
from ..passes.mesh_plan import CollectiveDecision, RankMemory, StepTime
from ..passes.plan import Decision
from ..passes.plan_fields import GEMM_CLASSES
from ..passes.sharding import Placements, ShardingPlan
from .block_folding import Repeats
from .execution import as_stored
from .rank_graph import RankGraph
from .saved_activations import copy_graph, lazily
from .sharded_execution import partition

Decided = Sequence[tuple[Collective, CollectiveDecision]]

_MOMENT_BYTES = 8  # two fp32 moments per value


def step_time(
    rank: RankGraph, decisions: Mapping[str, Decision], collectives: Decided, *, casts_us: float = 0.0
) -> StepTime:
    """Predicted time of a step of one rank; decisions are those of the rank's graph, `casts_us` what they leave out:
    casts that several nodes share."""
    passes = [0.0, 0.0]
    products = 0.0
    for node in rank.gm.graph.nodes:
        decision = decisions.get(str(key_of(node)))
        if decision is None:
            continue
        gemm = decision.op in GEMM_CLASSES
        times = decision.time_us  # of a product by what it computes in, of others by what they are stored in
        own = times.get(decision.compute if gemm else decision.output, times.get(decision.compute, 0.0))
        spent = own * rank.occurrences(node)
        passes[is_backward(node)] += spent
        products += spent if gemm else 0.0
    whole = sum(passes)
    passes = [us + casts_us * us / whole if whole else us for us in passes]
    exposed: defaultdict[str, float] = defaultdict(float)
    for backward in (False, True):
        hidden: defaultdict[str, float] = defaultdict(float)
        for c, decided in collectives:
            if is_backward(c.start) == backward:
                (hidden if decided.hidden else exposed)[decided.dim] += decided.time_us * rank.occurrences(c.start)
        total = sum(hidden.values())
        left = max(0.0, total - passes[backward])
        for dim, spent in hidden.items():
            exposed[dim] += left * spent / total if total else 0.0
    return StepTime(
        forward_us=round(passes[0], 3),
        backward_us=round(passes[1], 3),
        products_us=round(products, 3),
        exposed_us={dim: round(us, 3) for dim, us in exposed.items()},
    )


def rank_memory(rank: RankGraph, decisions: Mapping[str, Decision], device: Device, collectives: Decided) -> RankMemory:
    """Predicted bytes of a rank while it trains, or runs inference where its graph has no gradients."""
    parameters = gradients = trained = 0
    for node in placeholders(rank.gm):
        desc = node.meta.get("desc")
        if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
            parameters += _bytes(node.meta["val"]) * rank.repeats.count(desc.target)
    values = zip(output_node(rank.gm).args[0], output_node(rank.gm).meta["desc"], strict=True)  # type: ignore[arg-type]
    for value, desc in values:
        if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput) and isinstance(value, fx.Node):
            gradients += _bytes(value.meta["val"]) * rank.repeats.count(desc.grad_of.target)
            trained += _stored_values(rank, desc.grad_of) * rank.repeats.count(desc.grad_of.target)
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=_MOMENT_BYTES * trained,
        activations=_saved(rank, decisions, device) if gradients else 0,
        gathered=_gathered(rank, collectives),
        available=device.memory_bytes,
    )


def stored_bytes(joint: fx.GraphModule, plan: ShardingPlan, repeats: Repeats) -> int:
    """Bytes of parameters, gradients and optimizer state of a rank, from where a plan has them."""
    total = 0.0
    for node in placeholders(joint):
        desc = node.meta.get("desc")
        if isinstance(desc, ParamAOTInput):
            size = _bytes(node.meta["val"])
            stored, gradient = (_share(p, plan) for p in (plan.stored(desc.target), plan.gradient(desc.target)))
            moments = numel_of(node.meta["val"]) * _MOMENT_BYTES
            total += repeats.count(desc.target) * ((size + moments) * stored + size * gradient)
    return int(total)


def _share(placements: Placements, plan: ShardingPlan) -> float:
    """The part of a tensor that one rank holds."""
    return 1 / math.prod(n for p, n in zip(placements, plan.mesh.values(), strict=True) if isinstance(p, Shard))


def _bytes(tensor: Tensor) -> int:
    return numel_of(tensor) * tensor.element_size()


def _stored_values(rank: RankGraph, desc: ParamAOTInput) -> int:
    return next(numel_of(p.meta["val"]) for p in placeholders(rank.gm) if p.meta.get("desc") == desc)


def _saved(rank: RankGraph, decisions: Mapping[str, Decision], device: Device) -> int:
    """What the forward pass keeps for the backward pass, as the partitioner chooses with values as they are stored."""
    names = ModuleNames()
    with lazily():
        gm, parameters = copy_graph(rank.gm, rank.parameters)
        stored = as_stored(gm, decisions, device.storage)
        legalize(gm, stored, same_device=True, storage=device.storage, parameters=parameters)
        forward, _, results = partition(gm)
    total = 0
    seen: set[fx.Node] = set()
    for value in output_node(forward).args[0][results:]:  # type: ignore[index, union-attr]
        if not isinstance(value, fx.Node):
            continue
        source = root(value)
        if source.op == "placeholder" or source in seen:
            continue
        seen.add(source)
        total += rank.repeats.count(names.of(source)) * sum(map(_bytes, tensors_of(value)))
    return total


def _gathered(rank: RankGraph, collectives: Decided) -> int:
    """Bytes of the parameters that one block, and the next one beside it, has gathered."""
    blocks: defaultdict[str, int] = defaultdict(int)
    for c, decided in collectives:
        if c.kind == "all_gather" and decided.hidden and not is_backward(c.start):
            kept, _ = rank.repeats.of(NodeKey.parse(decided.key).fqn)
            blocks[kept] += sum(map(_bytes, tensors_of(c.start)))
    repeated = sum(n for kept, n in blocks.items() if kept)
    return max(blocks.get("", 0), 2 * repeated) if blocks else 0
