"""`dsmp.parallelize`: a model of one device on a mesh of many, by sharding its joint graph."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from ..codegen.collectives import rewrite_collectives
from ..errors import InvalidOptionError, ShardingPlanError
from ..hardware_db.detect import detect, resolve_hardware
from ..passes.keys import key_of
from ..passes.mesh_plan import MeshPlan
from ..passes.parallel_candidates import propose
from ..passes.plan import PrecisionPlan, load_plan
from ..passes.shard_graph import ShardedGraph
from ..passes.sharding import ShardingPlan, ShardingRule
from ..passes.wire_formats import FP32, WireFormat, parse_wire
from .batches import split_inputs
from .block_folding import Repeats
from .collective_decisions import is_worth_encoding, wires_by_dim
from .joint_capture import JointCapture, capture_joint, check_names
from .lost_ranks import watched
from .mesh_groups import shard_over
from .model_arguments import check_device_mesh, check_module
from .pipeline import check_plan_hardware
from .plan_agreement import agree, collectives_digest
from .rank_graph import RankGraph
from .sharded_execution import Executor, build_halves
from .sharded_formats import Formats
from .sharded_module import ShardedModule

log = logging.getLogger("dsmp")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan | PrecisionPlan | str | os.PathLike[str] = "auto",
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    rules: Sequence[ShardingRule] = (),
    zero: int = 0,
    sequence: bool = False,
    wire: str | Mapping[str, str] | None = None,
    hardware: str | None = None,
    executor: Executor = "eager",
) -> ShardedModule:
    """Cut a model into this rank's part of a mesh; every rank calls it with the same arguments.

    Args:
        model: a module as it runs on one device, in training or evaluation mode as it shall be used. Its parameters
            are taken from rank 0; on the meta device they stay there.
        mesh: a DeviceMesh with named dimensions, made by the caller.
        plan: where everything lies, or "auto": data parallel on dimensions called dp, data or fsdp, tensor parallel on
            one called tp, tensor or model. Or a precision plan that was made for a mesh (`dsmp.plan(..., mesh=...)`),
            or the path of its file: then nodes are computed, and collectives sent, in the formats that it says.
        inputs: example inputs of the whole model, of global shapes: positional as a sequence, or by name as a mapping.
        rules: for parameters; they win over the plan's own.
        zero: with "auto", the ZeRO stage of the data-parallel dimension: 2 divides gradients, 3 parameters, too.
        sequence: with "auto", divide sequences over the tensor-parallel dimension where the model is not.
        wire: how collectives send: "fp32" (as they are), "bf16", "int8", "int4", "int8:64" ..., for all of them or per
            mesh dimension, as in {"dp": "int8"}; by default as the plan says, without a precision plan as they are.
            Losses, statistics (one value per row) and what has fewer than 1024 values stay as they are. `sent`
            of the result says what each collective sends.
        hardware: a device by whose tier formats of nodes are chosen ("auto": the running one); by default the plan's
            own formats, without a precision plan those that the model was written in. `audit` of the result says what
            runs for each node.
        executor: "eager" runs the graphs op by op, "inductor" compiles them.

    Raises ShardingPlanError for a plan that does not fit the model or the mesh, IndivisibleError for sizes that the
    mesh does not divide, UnshardableError for operators without a sharded form, CaptureError for a model that cannot be
    traced, RanksDisagreeError where ranks hold different plans or models, UnknownWireFormatError and
    InvalidWireFormatError for a wire format, InvalidOptionError for one of a dimension that the mesh lacks,
    PlanSchemaError for a file that is no plan, UnknownHardwareError and PlanHardwareError for its device. A call of
    the result, and its backward pass, raise RankLostError when a rank dies or does not answer within the process
    group's timeout.
    """
    check_module(model)
    check_device_mesh(mesh)
    wires_by_dim(wire, mesh.mesh_dim_names or ())  # before the work
    cut = cut_model(model, mesh, plan, inputs=inputs, rules=rules, zero=zero, sequence=sequence, hardware=hardware)
    return assemble(cut, wire=wire, executor=executor)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutModel:
    """A model and the graph of one rank of a mesh, before wire formats and executor are chosen. `planned` has what the
    collectives of a precision plan send, by key."""

    model: nn.Module
    mesh: DeviceMesh
    plan: ShardingPlan
    capture: JointCapture
    graph: ShardedGraph
    formats: Formats | None
    planned: Mapping[str, str]


def cut_model(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ShardingPlan | PrecisionPlan | str | os.PathLike[str] = "auto",
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    rules: Sequence[ShardingRule] = (),
    zero: int = 0,
    sequence: bool = False,
    hardware: str | None = None,
) -> CutModel:
    """The first half of `parallelize`: capture, plan and shard. Raises as it does."""
    precision = _precision_plan(plan)
    formats = _formats(mesh, precision, hardware)
    saved = model.state_dict(keep_vars=True)
    if lost := [n for n, b in model.named_buffers() if b.is_meta and n not in saved]:
        log.warning("on the meta device, and in no checkpoint; fill after to_empty(): %s", ", ".join(lost))
    args, kwargs = split_inputs(inputs)
    where = _sharding(plan) if precision is None else ShardingPlan.from_dict(_mesh_plan(precision).sharding)
    if isinstance(where, ShardingPlan):
        check_dimensions(where, mesh)
    capture = capture_joint(model, args, kwargs, device=mesh.device_type)
    where = plan_for(mesh, where, capture, rules, zero=zero, sequence=sequence)
    agree(mesh, f"{where.digest()} {formats.digest if formats is not None else ''}", "plans")
    graph = shard_over(capture, mesh, where)
    planned = _mesh_plan(precision).wires if precision is not None else {}
    return CutModel(model=model, mesh=mesh, plan=where, capture=capture, graph=graph, formats=formats, planned=planned)


def assemble(
    cut: CutModel, *, wire: str | Mapping[str, str] | None = None, executor: Executor = "eager"
) -> ShardedModule:
    """The second half of `parallelize`: formats of nodes and collectives, and a module with shards of its own. Leaves
    the cut as it is, so that several formats can be tried. Raises as `parallelize` does."""
    mesh = cut.mesh
    graph = replace(cut.graph, gm=fx.GraphModule(cut.graph.gm, copy.deepcopy(cut.graph.gm.graph)))
    groups: dict[str, str] = {mesh.get_group(i).group_name: name for i, name in enumerate(cut.plan.mesh)}
    chosen = _chosen(
        RankGraph(graph, groups, Repeats()), cut.planned if wire is None else wires_by_dim(wire, tuple(cut.plan.mesh))
    )
    if wire is None:
        warn_of_strangers(cut.planned, RankGraph(graph, groups, Repeats()))
    audit = cut.formats.apply(graph) if cut.formats is not None else None
    sent = rewrite_collectives(graph.gm, chosen)
    agree(mesh, collectives_digest(graph, mesh), "collectives in the graph")
    halves = watched(build_halves(graph.gm, executor), mesh)
    return ShardedModule(cut.model, mesh, cut.plan, cut.capture, graph, halves, sent, audit)


def _precision_plan(plan: Any) -> PrecisionPlan | None:
    """The precision plan that is given, or whose file is."""
    if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
        return load_plan(plan)
    return plan if isinstance(plan, PrecisionPlan) else None


def _sharding(plan: Any) -> ShardingPlan | Literal["auto"]:
    if isinstance(plan, ShardingPlan):
        return plan
    if plan != "auto":
        allowed = "'auto', a ShardingPlan, a PrecisionPlan for a mesh, or the path of its file, NAME.json"
        raise ShardingPlanError(f"plan is {plan!r}; allowed: {allowed}.")
    return "auto"


def _mesh_plan(plan: PrecisionPlan) -> MeshPlan:
    if plan.mesh is None:
        raise ShardingPlanError(
            f"the plan for {plan.model.source} is for one {plan.hardware}: it does not say where anything lies. Make "
            "it for a mesh (dsmp.plan(..., mesh={'dp': 2}), dsmp plan --mesh dp=2), or give a ShardingPlan."
        )
    return plan.mesh


def _formats(mesh: DeviceMesh, plan: PrecisionPlan | None, hardware: str | None) -> Formats | None:
    """What decides formats; None where nodes stay as they are written."""
    if plan is None and hardware is None:
        return None
    running = resolve_hardware("cpu") if mesh.device_type == "cpu" else detect()
    wanted = plan.hardware if plan is not None and hardware is None else hardware
    device = running if wanted in ("auto", running.id) else resolve_hardware(wanted)
    if plan is None:
        return Formats(device=device, running=running)
    check_plan_hardware(plan, device)
    return Formats(device=device, running=running, plan=plan)


def warn_of_strangers(planned: Mapping[str, str], rank: RankGraph) -> None:
    """Say which of a plan's collectives the graph lacks: what the plan has for them reaches nothing."""
    known = {str(key_of(c.start)) for c in rank.collectives}
    if strange := [key for key in planned if key not in known]:
        shown = ", ".join(strange[:8])
        log.warning("%d collectives of the plan are not in the graph, and are ignored: %s", len(strange), shown)


def _chosen(rank: RankGraph, wires: Mapping[str, str | WireFormat]) -> dict[fx.Node, WireFormat]:
    """The formats of collectives that are large enough to matter, from formats by key or mesh dimension."""
    found = {}
    for c in rank.collectives:
        wanted = wires.get(str(key_of(c.start)), wires.get(rank.dim(c)))
        wire = parse_wire(wanted) if isinstance(wanted, str) else wanted
        if wire is not None and wire != FP32 and c.kind != "all_to_all" and is_worth_encoding(c):
            found[c.start] = wire
    return found


def plan_for(
    mesh: DeviceMesh,
    plan: ShardingPlan | Literal["auto"],
    capture: JointCapture,
    rules: Sequence[ShardingRule] = (),
    *,
    zero: int = 0,
    sequence: bool = False,
) -> ShardingPlan:
    """The plan with its rules, checked against the mesh and the captured model. Raises as `parallelize` does."""
    if isinstance(plan, str):
        found = propose(capture.gm, _sizes(mesh), capture.names, zero=zero, sequence=sequence)
        for verdict in found.verdicts:
            if not verdict and dist.get_rank() == 0:  # all ranks find the same
                log.warning("not divided: %s", verdict.reason)
        plan = found.plan
    elif zero or sequence:
        name, value = ("zero", zero) if zero else ("sequence", sequence)
        raise InvalidOptionError(name, value, "with plan='auto' only: this plan says where everything lies")
    check_dimensions(plan, mesh)
    plan = plan.with_rules(rules)
    check_names(capture, plan)
    return plan


def check_dimensions(plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Raise ShardingPlanError for a plan that is for another mesh."""
    if tuple(plan.dims) != tuple(_sizes(mesh).items()):
        raise ShardingPlanError(f"the plan is for a mesh {dict(plan.dims)}, and the mesh is {_sizes(mesh)}.")


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    if not mesh.mesh_dim_names:
        raise ShardingPlanError("the mesh's dimensions have no names; make it with mesh_dim_names=('dp', 'tp').")
    return {name: mesh.size(i) for i, name in enumerate(mesh.mesh_dim_names)}
