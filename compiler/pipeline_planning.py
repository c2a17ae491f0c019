"""Plan a pipeline from a captured model: what its layers cost on each device, where to cut, what the schedule gives.

Nothing is run and no process group is needed; a model captured on the meta device is planned as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..errors import PipelineError, StageSplitError, TooFewLayersError, did_you_mean
from ..hardware_db.capability import Device
from ..passes.graph import calls, is_backward, is_float, numel_of, operands, output_node, placeholders, root, tensors_of
from ..passes.keys import DGRAD, WGRAD, key_of
from ..passes.layers import Positions, find_layers, joined
from ..passes.legalize import legalize
from ..passes.pipeline_cut import cut_stages, used_bytes
from ..passes.pipeline_plan import (
    BOUNDARIES,
    Boundary,
    Cut,
    LayerCost,
    PipelineDevice,
    PipelinePlan,
    Sending,
    stage_plans,
)
from ..passes.pipeline_timing import StageSeconds, live_microbatches, peak_live, simulate
from ..passes.plan import Decision, PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES
from .capture import Capture, CapturedGraph
from .execution import as_stored
from .pipeline import make_plan
from .pipeline_orders import schedule_kind, schedule_order
from .saved_activations import saved_activations
from .tracing import PARTITION_ARGUMENTS

OPTIMIZER_BYTES = 8
"""Bytes of optimizer state per trainable value: AdamW's two moments in fp32."""

_LAYER = "dsmp_layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """The device of a rank, and the bytes that stages may fill of its memory (None: all of it)."""

    device: Device
    memory_bytes: int | None = None


def plan_pipeline(
    capture: Capture,
    plan: PrecisionPlan | None,
    devices: Sequence[Device | RankDevice],
    stages: int | Sequence[str] | None,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    boundary: Boundary = "fp32",
    sending: Sending | None = None,
    optimizer_bytes: int = OPTIMIZER_BYTES,
) -> PipelinePlan:
    """Cut a model into stages on devices, one per rank, and predict the step.

    Args:
        capture: the model's training step on one microbatch (`dsmp.capture`), in one graph.
        plan: its precision plan for the devices of the plan's hardware; devices of another kind get plans of their own.
        stages: how many (by default one per rank, two where the schedule has several per rank), or the names of the
            layers or modules with which the second and all later stages begin, in place of the best cut.
        sending: what sending costs; by default the slowest device's link, 25e9 bytes/s where none is known.

    Raises PipelineError for a model in several graphs or without a backward pass, the errors of `schedule_order` and
    `cut_stages`, StageSplitError for names that are no layers.
    """
    ranked = [d if isinstance(d, RankDevice) else RankDevice(device=d) for d in devices]
    if not ranked:
        raise PipelineError("no devices were given; give one per rank.")
    if boundary not in BOUNDARIES:
        raise PipelineError(f"boundary is {boundary!r}; allowed: {', '.join(BOUNDARIES)}.")
    names = None if stages is None or isinstance(stages, int) else tuple(stages)
    count = len(names) + 1 if names is not None else stages if isinstance(stages, int) else None
    kind = schedule_kind(schedule)
    order = schedule_order(kind.name, len(ranked), microbatches, count)
    placement = [kind.rank_of(s, len(ranked)) for s in range(1 + max(w.stage for works in order for w in works))]
    moments = [live_microbatches(works) for works in order]
    by_id = {r.device.id: r.device for r in ranked}
    plans = {
        name: plan if plan is not None and plan.hardware == name else make_plan(capture, d, predict_memory=False)
        for name, d in by_id.items()
    }
    layers = layer_costs(capture, plans, by_id, boundary=boundary, optimizer_bytes=optimizer_bytes)
    places = [PipelineDevice(kind=r.device.id, memory_bytes=_memory(r)) for r in ranked]
    sending = sending or sending_between([r.device for r in ranked])
    if names is None:
        cut = cut_stages(layers, places, placement, microbatches, moments, sending)
    else:
        cut = Cut(ends=_ends(layers, names), busiest_s=0.0)
    found = stage_plans(layers, cut, placement, places)
    sends = [
        sending.seconds(stage.boundary_bytes) if s + 1 < len(found) and placement[s] != placement[s + 1] else 0.0
        for s, stage in enumerate(found)
    ]
    timing = simulate(order, [s.seconds for s in found], sends)
    return PipelinePlan(
        schedule=kind.name,
        microbatches=microbatches,
        boundary=boundary,
        devices=tuple(p.kind for p in places),
        stages=found,
        step_s=timing.step,
        bubble=timing.bubble,
        peak_microbatches=tuple(map(peak_live, order)),
        memory_bytes=tuple(used_bytes(layers, places, placement, moments, cut.ends)),
    )


def sending_between(devices: Sequence[Device]) -> Sending:
    """What it takes to send over the slowest link that these devices are known to have."""
    known = [d.link_bandwidth for d in devices if d.link_bandwidth]
    return Sending(bytes_per_s=min(known)) if known else Sending()


def layer_costs(
    capture: Capture,
    plans: Mapping[str, PrecisionPlan],
    devices: Mapping[str, Device],
    *,
    boundary: Boundary = "fp32",
    optimizer_bytes: int = OPTIMIZER_BYTES,
) -> list[LayerCost]:
    """The layers of a captured training step in order, with what they cost under the plan for each device.

    A layer's time is the sum of the predicted times of its nodes. Layers that share a parameter, and those between
    them, are one. Raises PipelineError for a capture that is no single training graph, TooFewLayersError for a model
    without layers.
    """
    if len(capture.graphs) != 1 or not capture.joint:
        what = f"{len(capture.graphs)} graphs (graph breaks)" if len(capture.graphs) != 1 else "no backward pass"
        raise PipelineError(
            f"{capture.source} was captured with {what}, and a pipeline is cut from one graph of a training step. "
            "Remove the graph breaks, or let a parameter require a gradient."
        )
    graph = capture.graphs[0]
    forward = [n for n in graph.gm.graph.nodes if n.op == "call_function" and not is_backward(n)]
    positions = find_layers(forward, _path, graph.parameters)
    if not positions.names:
        raise TooFewLayersError([], len(devices))
    of = _with_backward(graph, positions)
    groups = joined(len(positions.names), [positions.uses(p) for p in graph.parameters])
    group_of = [g for g, part in enumerate(groups) for _ in part]
    times = {name: _seconds(graph.gm, plan.by_key, of, group_of) for name, plan in plans.items()}
    kept = {name: _kept(graph, plans[name], d, positions, group_of) for name, d in devices.items()}
    sizes = _parameter_bytes(graph, positions, group_of, optimizer_bytes)
    borders = [_border_bytes(positions, part[-1], boundary) for part in groups]
    return [
        LayerCost(
            name=positions.names[part[0]],
            seconds={name: found[g] for name, found in times.items()},
            activation_bytes={name: found[g] for name, found in kept.items()},
            parameter_bytes=sizes[g],
            boundary_bytes=borders[g],
            names=tuple(positions.names[i] for i in part),
        )
        for g, part in enumerate(groups)
    ]


def _path(node: fx.Node) -> str:
    key = key_of(node)
    return "" if key is None else key.fqn


def _memory(ranked: RankDevice) -> int:
    return ranked.device.memory_bytes if ranked.memory_bytes is None else ranked.memory_bytes


def _ends(layers: Sequence[LayerCost], names: Sequence[str]) -> tuple[int, ...]:
    """How many layers come before each of the named ones. Raises StageSplitError."""
    ends = []
    for name in names:
        at = [i for i, x in enumerate(layers) if any(n == name or n.startswith(f"{name}.") for n in x.names)]
        known = [n for x in layers for n in x.names]
        if not at:
            hint = did_you_mean(name, known) or f"the layers are {', '.join(known)}"
            raise StageSplitError(f"a stage is to begin with {name!r}, which is no layer; {hint}")
        own = layers[at[0]]
        if len(own.names) > 1 and not (own.names[0] == name or own.names[0].startswith(f"{name}.")):
            raise StageSplitError(
                f"a stage cannot begin with {name!r}: {own.names[0]} to {own.names[-1]} share a parameter and must lie "
                "in one stage. Untie them, or cut elsewhere."
            )
        ends.append(at[0])
    if sorted(set(ends)) != ends or 0 in ends:
        raise StageSplitError(
            f"stages are to begin with {', '.join(names)}; name later layers than the first, each once, in the model's "
            f"order: {', '.join(x.name for x in layers)}."
        )
    return (*ends, len(layers))


def _with_backward(graph: CapturedGraph, positions: Positions) -> dict[fx.Node, int]:
    """Positions of all nodes with a predicted time. A backward node without a module reads what its layer's forward
    computed, else it passes on a gradient of the earliest layer that it reads."""
    index = {name: i for i, name in enumerate(positions.names)}
    found = dict(positions.of)
    last = len(index) - 1
    for node in calls(graph.gm):
        if node in found:
            continue
        if not is_backward(node):
            found[node] = min((positions.of[u] for u in node.users if u in positions.of), default=0)
            continue
        own = [i for name, i in index.items() if _path(node) == name or _path(node).startswith(f"{name}.")]
        read = [n for n in node.all_input_nodes if n in found]
        saved = [found[n] for n in read if n in positions.of]
        grads = [found[n] for n in read if is_backward(n)]
        found[node] = own[0] if own else max(saved) if saved else min(grads, default=last)
    return found


def _seconds(
    gm: fx.GraphModule, decisions: Mapping[str, Decision], of: Mapping[fx.Node, int], group_of: Sequence[int]
) -> list[StageSeconds]:
    sums = [[0.0, 0.0, 0.0] for _ in range(group_of[-1] + 1)]
    for node in calls(gm):
        key = key_of(node)
        decision = decisions.get(str(key))
        if key is None or decision is None:
            continue
        # of other nodes a calibrated plan has a time per storage format, a plan by default that of the chosen one
        name = (
            decision.output
            if decision.op not in GEMM_CLASSES and decision.output in decision.time_us
            else decision.compute
        )
        part = 2 if key.phase == WGRAD else 1 if key.phase == DGRAD or is_backward(node) else 0
        sums[group_of[of[node]]][part] += 1e-6 * decision.time_us.get(name, 0.0)
    return [StageSeconds(*s) for s in sums]


def _kept(
    graph: CapturedGraph, plan: PrecisionPlan, device: Device, positions: Positions, group_of: Sequence[int]
) -> list[int]:
    """Bytes that each group's forward saves for its backward, in the formats of the plan."""
    for node in graph.gm.graph.nodes:
        node.meta.pop(_LAYER, None)
    for node, position in positions.of.items():
        node.meta[_LAYER] = group_of[position]
    stored = as_stored(graph.gm, plan.by_key, device.storage)

    def change(gm: fx.GraphModule, parameters: frozenset[fx.Node]) -> None:
        legalize(gm, stored, same_device=True, storage=device.storage, parameters=parameters)

    found = [0] * (group_of[-1] + 1)
    for node, size in saved_activations(graph.gm, graph.parameters, change).items():
        found[_layer_of(node)] += size
    return found


def _layer_of(node: fx.Node) -> int:
    """The layer of a saved node; a cast that was put in has that of what it reads, a value of no layer the first."""
    while _LAYER not in node.meta and node.all_input_nodes:
        node = max(node.all_input_nodes, key=lambda n: n.meta.get(_LAYER, -1))
    return int(node.meta.get(_LAYER, 0))


def _parameter_bytes(
    graph: CapturedGraph, positions: Positions, group_of: Sequence[int], optimizer_bytes: int
) -> list[int]:
    """Weights, gradients and optimizer state of each group."""
    found = [0] * (group_of[-1] + 1)
    results: Any = output_node(graph.gm).args[0]
    gradients = results[graph.gm.meta[PARTITION_ARGUMENTS]["num_fwd_outputs"] :]  # one per placeholder, None for none
    trained = {p for p, g in zip(placeholders(graph.gm), gradients, strict=False) if g is not None}
    for parameter in graph.parameters:
        used = positions.uses(parameter)
        for tensor in tensors_of(parameter):
            size = numel_of(tensor) * tensor.element_size()
            if parameter in trained:
                size += size + optimizer_bytes * numel_of(tensor)
            found[group_of[used[0]] if used else 0] += size
    return found


def _border_bytes(positions: Positions, last: int, boundary: Boundary) -> int:
    """Bytes of the values that layers up to a position compute and later ones read, in the boundary's format."""
    crossing: dict[fx.Node, int] = {}
    for node, position in positions.of.items():
        if position <= last:
            continue
        for source in operands(node):
            value = root(source)
            if source in positions.of and positions.of[source] <= last and is_float(source):
                moved = sum(min(BOUNDARIES[boundary], t.element_size()) * numel_of(t) for t in tensors_of(source))
                crossing[value] = max(crossing.get(value, 0), moved)
    return sum(crossing.values())
