"""`dsmp.pipeline`: a model of one device as stages on several, run in a schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_flatten, tree_map_only

from ..errors import InputSpecError, InvalidOptionError, PipelineError, ScheduleError, StageSplitError
from ..hardware_db.detect import resolve_hardware
from ..passes.pipeline_plan import BOUNDARIES, Boundary, PipelinePlan, Sending
from .batches import split_inputs
from .capture import capture
from .joint_capture import input_names
from .model_arguments import check_device_mesh, check_module, check_positive
from .options import Executor, parse_options
from .pipeline_orders import schedule_kind, schedule_order
from .pipeline_planning import RankDevice, plan_pipeline
from .plan_agreement import agree
from .stage_graphs import TARGET, Loss, StageGraph, argument_name, cut_graph, export_model

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    microbatches: int,
    schedule: str = "1f1b",
    split: PipelinePlan | Literal["auto"] | Sequence[str] = "auto",
    stages: int | None = None,
    loss_fn: Loss | None = None,
    boundary: Boundary = "fp32",
    compile: bool = True,
    executor: Executor = "inductor",
    options: Mapping[str, Any] | None = None,
    hardware: str | Sequence[str] | None = None,
    memory: int | Sequence[int] | None = None,
    sending: Sending | None = None,
) -> Pipelined:
    """Cut a model into stages and build and compile this rank's; every rank calls it with the same arguments.

    Args:
        model: a module whose forward is one graph (torch.export), as it runs on one device, in training mode if dropout
            is to act. It may be on the meta device: load the stages' parameters then (`to_empty`, `load_state_dict`).
        mesh: a DeviceMesh of one dimension, or with one called pp, or a process group; one rank per device.
        inputs: example inputs of a whole batch: positional as a sequence, or by name as a mapping. Every tensor has the
            batch in dimension 0 and is cut there into `microbatches` equal parts.
        schedule: "gpipe", "1f1b", "interleaved", and, with compile=False, "zbv" and "dualpipev".
        split: "auto" for the cut with the least predicted time that fits, the names of layers or modules with which the
            second and all later stages begin, or a PipelinePlan.
        stages: how many; by default one per rank, two per rank where the schedule has several.
        loss_fn: called with the model's output and `target` of a microbatch. Without one the model returns its loss.
            Losses and gradients are means over microbatches.
        boundary: "bf16" or "fp16" cast values and gradients before they go from stage to stage; "fp32" leaves them.
        compile: False runs stages op by op as torch does, without dsmp.
        executor, options: as for `torch.compile(backend="dsmp", options=...)`; a plan in the options is the model's.
        hardware: the devices to predict for, one name or one per rank; by default each rank's own.
        memory: bytes that stages may fill, of every rank or per rank; by default the devices' memory.

    Raises PipelineError and its kinds (TooFewLayersError, LayerTooLargeError, PipelineMemoryError, StageSplitError,
    UnknownScheduleError, ScheduleError), CaptureError for a model that cannot be traced, InputSpecError for a batch
    that microbatches do not divide, RanksDisagreeError where ranks hold different plans.
    """
    check_module(model)
    kind = schedule_kind(schedule)
    checked = parse_options(options)
    if "executor" in (options or {}):
        raise InvalidOptionError("options", dict(options or {}), "without 'executor', an argument of dsmp.pipeline")
    settings = {**(options or {}), "executor": parse_options({"executor": executor}).executor}
    if kind.splits_backward and compile:
        raise ScheduleError(
            f"{kind.name} computes input and weight gradients apart, which needs the autograd graph of each operator, "
            "and a compiled stage is one node of it: torch fails with 'Failed to run stage backward input'. Pass "
            "compile=False to run the stages op by op, or take '1f1b' or 'interleaved' for compiled stages."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise InvalidOptionError("loss_fn", loss_fn, "a function of the model's output and the target")
    if sending is not None and not isinstance(sending, Sending):
        raise InvalidOptionError("sending", sending, "a Sending: seconds of a message, bytes per second")
    if boundary not in BOUNDARIES:
        raise InvalidOptionError("boundary", boundary, " or ".join(repr(b) for b in BOUNDARIES))
    mesh = _line(mesh)
    args, kwargs = _microbatch(inputs, microbatches)
    if isinstance(split, PipelinePlan):
        plan = split
        _check_plan(plan, mesh.size(), microbatches, kind.name, boundary)
    else:
        names = _names(split, stages)
        schedule_order(kind.name, mesh.size(), microbatches, len(names) + 1 if names is not None else stages)
        captured = capture(model, args, kwargs)
        plan = plan_pipeline(
            captured,
            checked.plan,
            _devices(mesh, hardware, memory),
            stages if names is None else names,
            microbatches,
            kind.name,
            boundary=boundary,
            sending=sending,
        )
    agree(mesh, plan.digest(), "pipeline plans")
    exported = export_model(model, args, kwargs)
    if loss_fn is None and not exported.returns_number:
        raise PipelineError(
            "without loss_fn the model must return its loss, one number, and it returns something else. Pass "
            "loss_fn=..., called with the model's output and target."
        )
    rank = mesh.get_local_rank()
    own = [i for i, s in enumerate(plan.stages) if s.rank == rank]
    device = _own_device(mesh)
    graphs = cut_graph(
        exported, plan.stage_of(), len(plan.stages), own, wire=_DTYPES.get(boundary), device=device, loss=loss_fn
    )
    if compile:
        for graph in graphs.values():
            graph.module.compile(backend="dsmp", options=settings)
    arguments = input_names(model, args, kwargs)
    return Pipelined(plan, mesh, graphs, arguments, (args, kwargs), device, has_loss=loss_fn is not None)


class Pipelined(nn.Module):
    """What `dsmp.pipeline` returns: this rank's stages, whose parameters have the names they have in the model.

    `plan` says what lies where and what was predicted, `stages` are the modules by their number.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        mesh: DeviceMesh,
        graphs: Mapping[int, StageGraph],
        names: Sequence[str],
        example: Any,
        device: torch.device,
        *,
        has_loss: bool,
    ) -> None:
        super().__init__()
        self.plan, self.device, self.has_loss = plan, device, has_loss
        self._stages = nn.ModuleDict({str(i): g.module for i, g in graphs.items()})
        self._names, self._example = tuple(names), example
        group = mesh.get_group()
        last = len(plan.stages) - 1
        self.first, self.last = 0 in graphs, last in graphs
        made = []
        for i, graph in graphs.items():
            got = graph.received if i else (torch.empty(1, device="meta"),)
            sent = graph.sent if i < last else (torch.empty(1, device="meta"),)
            # without these torch would run every stage once more to find out what is sent
            made.append(
                PipelineStage(
                    graph.module,
                    i,
                    len(plan.stages),
                    device,
                    input_args=_needing(got, i > 0),
                    output_args=_needing(sent, True),
                    group=group,
                )
            )
        kind = schedule_kind(plan.schedule)
        self.schedule = kind.schedule_class(made if kind.multi else made[0], plan.microbatches, loss_fn=_own_loss)

    @property
    def stages(self) -> dict[int, nn.Module]:
        """This rank's stages by their number."""
        return {int(i): m for i, m in self._stages.items()}

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor | None:
        """Forward and backward of a whole batch, which every rank passes whole; gradients are added to `.grad`.

        Returns the losses of the microbatches, float[microbatches], on the rank of the last stage, None on others.
        Raises InputSpecError for inputs unlike those that the pipeline was made for, PipelineError under
        `torch.no_grad()`.
        """
        if not torch.is_grad_enabled():
            raise PipelineError("step() runs forward and backward, and gradients are off: call it outside no_grad().")
        given = self._inputs(args, kwargs)
        batch = next(iter(given.values())).shape[0]
        if self.has_loss:
            if not isinstance(target, Tensor) or target.shape[:1] != (batch,):
                raise InputSpecError(f"target must be a tensor of {batch} rows, as the inputs are; loss_fn gets it.")
            given[TARGET] = target.to(self.device)
        elif target is not None:
            raise InputSpecError("target is given, and the pipeline was made without loss_fn, which would get it.")
        anchor = (torch.zeros(self.plan.microbatches, device=self.device),) if self.first else ()
        losses: list[Tensor] = []
        before = {p: p.grad for p in self.parameters() if p.grad is not None}
        for p in before:  # the schedule divides whatever is in .grad by the number of microbatches
            p.grad = None
        self.schedule.step(
            *anchor,
            target=torch.zeros(self.plan.microbatches, device=self.device) if self.last else None,
            losses=losses if self.last else None,
            **given,
        )
        for p, grad in before.items():
            p.grad = grad if p.grad is None else grad.add_(p.grad)
        return torch.stack([x.detach() for x in losses]) if self.last else None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the model."""
        for stage in self._stages.values():
            yield from stage.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the model's state, under the model's names."""
        return {n: v for stage in self._stages.values() for n, v in stage.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's part from a state of the whole model. Raises PipelineError for what is missing in it."""
        missing = [n for n in self.state_dict() if n not in state_dict]
        if strict and missing:
            raise PipelineError(f"the state lacks {', '.join(missing[:8])}, which this rank's stages hold.")
        for stage in self._stages.values():
            own = {n: state_dict[n] for n in stage.state_dict() if n in state_dict}
            stage.load_state_dict(own, strict=strict, assign=assign)
        return None

    def __repr__(self) -> str:
        return f"{self.plan}\n  this rank runs stages {', '.join(self._stages)}"

    __str__ = __repr__

    def _inputs(self, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """The tensors of a whole batch as arguments of stages."""
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        example, wanted = tree_flatten(self._example)
        if spec != wanted:
            raise InputSpecError(f"the pipeline was made for inputs of the form {wanted}, and got {spec}.")
        found: dict[str, Tensor] = {}
        for name, value, like in zip(self._names, leaves, example, strict=True):
            if not isinstance(like, Tensor):
                if value != like:
                    raise InputSpecError(
                        f"input {name!r} was {like!r} when the pipeline was made, and is {value!r} now."
                    )
                continue
            shape = (like.shape[0] * self.plan.microbatches, *like.shape[1:])
            if not isinstance(value, Tensor) or value.shape != shape or value.dtype != like.dtype:
                got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise InputSpecError(f"input {name!r} is {got}; the pipeline was made for {like.dtype} {tuple(shape)}.")
            found[argument_name(name)] = value.to(self.device)
        return found


def _own_loss(output: Tensor, _: Any) -> Tensor:
    """The loss that the last stage computed itself; no view, since torch detaches losses in place."""
    return output.sum()


def _needing(values: Sequence[Tensor], gradient: bool) -> tuple[Tensor, ...]:
    return tuple(v.requires_grad_(gradient) for v in values)


def _names(split: Any, stages: Any) -> tuple[str, ...] | None:
    """The layers that stages begin with; None where they are to be found. Raises InvalidOptionError."""
    listed = isinstance(split, Sequence) and not isinstance(split, str) and all(isinstance(n, str) for n in split)
    if split != "auto" and not listed:
        raise InvalidOptionError("split", split, "'auto', a list of layers' names, or a PipelinePlan")
    if stages is not None:
        check_positive("stages", stages)
    names = tuple(split) if listed else None
    if names is not None and stages not in (None, len(names) + 1):
        raise InvalidOptionError("stages", stages, f"{len(names) + 1} or none: as many as split has names, and one")
    return names


def _line(mesh: Any) -> DeviceMesh:
    """The one-dimensional mesh to lay stages on."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim == 1:
            return mesh
        if "pp" in (mesh.mesh_dim_names or ()):
            return mesh["pp"]
        raise PipelineError(
            f"the mesh has dimensions {mesh.mesh_dim_names}; name the one for stages pp, or pass mesh[name]."
        )
    if not isinstance(mesh, dist.ProcessGroup):
        check_device_mesh(mesh)
    device = "cuda" if dist.get_backend(mesh) == "nccl" else "cpu"
    return DeviceMesh.from_group(mesh, device, mesh_dim_names=("pp",))


def _own_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _microbatch(inputs: Sequence[Any] | Mapping[str, Any], microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first microbatch of example inputs, as (args, kwargs)."""
    check_positive("microbatches", microbatches)
    args, kwargs = split_inputs(inputs)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    sizes = {x.shape[0] if x.ndim else None for x in tensors}
    if len(sizes) != 1 or None in sizes:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors) or "no tensor"
        raise InputSpecError(f"every tensor of the inputs has the batch in dimension 0, of one size; got {shapes}.")
    batch = sizes.pop()
    if not batch or batch % microbatches:
        raise InputSpecError(
            f"a batch of {batch} cannot be cut into {microbatches} equal microbatches. Take a multiple of "
            f"{microbatches}."
        )
    part = batch // microbatches
    args, kwargs = tree_map_only(Tensor, lambda x: x[:part], (args, kwargs))
    return args, kwargs


def _devices(
    mesh: DeviceMesh, hardware: str | Sequence[str] | None, memory: int | Sequence[int] | None
) -> list[RankDevice]:
    """The device of every rank. By default each rank tells the others which it has."""
    ranks = mesh.size()
    if hardware is None:
        name = resolve_hardware("cpu" if mesh.device_type == "cpu" else None)
        devices: list[Any] = [name] * ranks
        if dist.get_backend(mesh.get_group()) != "fake":
            dist.all_gather_object(devices, name, group=mesh.get_group())
    else:
        names: list[Any] = [hardware] * ranks if not isinstance(hardware, (list, tuple)) else list(hardware)
        if len(names) != ranks or not all(isinstance(n, str) for n in names):
            raise InvalidOptionError("hardware", hardware, f"one name, or {ranks}: one per rank")
        devices = [resolve_hardware(n) for n in names]
    rooms: list[Any] = list(memory) if isinstance(memory, (list, tuple)) else [memory] * ranks
    if len(rooms) != ranks or not all(m is None or (isinstance(m, int) and m > 0) for m in rooms):
        raise InvalidOptionError("memory", memory, f"bytes, or {ranks} numbers of them: one per rank")
    return [RankDevice(device=d, memory_bytes=m) for d, m in zip(devices, rooms, strict=True)]


def _check_plan(plan: PipelinePlan, ranks: int, microbatches: int, schedule: str, boundary: str) -> None:
    """Raise StageSplitError for a plan that is for something else than what is asked."""
    asked = {"ranks": ranks, "microbatches": microbatches, "schedule": schedule, "boundary": boundary}
    has = {
        "ranks": len(plan.devices),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "boundary": plan.boundary,
    }
    different = [f"{name} {has[name]} and not {asked[name]}" for name in asked if has[name] != asked[name]]
    if different:
        raise StageSplitError(f"the pipeline plan has {', '.join(different)}. Pass what it was made for, or plan anew.")
    schedule_order(plan.schedule, ranks, microbatches, len(plan.stages))
