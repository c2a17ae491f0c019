"""A module whose parameters are shards and whose call runs one rank's graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..codegen.audit import Audit
from ..codegen.sending import Sent
from ..errors import EmptyStateError, InputSpecError
from ..passes.graph import output_node, placeholders
from ..passes.shard_graph import ShardedGraph
from ..passes.sharding import Placements, ShardingPlan
from .joint_capture import JointCapture
from .sharded_execution import Halves, Sharded, mutated

log = logging.getLogger("dsmp")


class ShardedModule(nn.Module):
    """What `dsmp.parallelize` returns: a model's parameters and buffers under their own names, as DTensors, and a call
    that takes this rank's part of the inputs.

    A result that is whole on every rank is a plain tensor, one that stays divided a DTensor. The gradient of a
    parameter is a DTensor with the placements that the plan has for gradients; a loss is that of all ranks together,
    so no further averaging of gradients is needed. `sent` are the collectives for which a wire format was asked,
    `audit` says what runs for each planned node (None where no formats were planned).
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        plan: ShardingPlan,
        capture: JointCapture,
        graph: ShardedGraph,
        halves: Halves,
        sent: Sequence[Sent] = (),
        audit: Audit | None = None,
    ) -> None:
        super().__init__()
        self.sent, self.audit = tuple(sent), audit
        self.mesh, self.sharding_plan, self.graph = mesh, plan, graph
        self._capture, self._halves = capture, halves
        seen: dict[int, Any] = {}
        self._tied: list[tuple[str, str, str]] = []  # name, the name it shares its value with, kind
        first: dict[int, str] = {}
        for kind in ("parameter", "buffer"):
            for name, value in getattr(model, f"named_{kind}s")(remove_duplicate=False):
                if id(value) not in seen:
                    # of a copy: what is whole on a rank would share its memory with the model's
                    shards = shards_of(value.detach().clone(), mesh, plan.stored(name))
                    seen[id(value)] = nn.Parameter(shards, value.requires_grad) if kind == "parameter" else shards
                    first[id(value)] = name
                else:
                    self._tied.append((name, first[id(value)], kind))
                _register(self, model, name, seen[id(value)], kind)
        self.train(model.training)
        descriptors = [n.meta["desc"] for n in placeholders(graph.gm)]
        self._state = [d for d in descriptors if isinstance(d, (ParamAOTInput, BufferAOTInput))]
        self._gradients = {
            i: plan.gradient(d.target) for i, d in enumerate(self._state) if isinstance(d, ParamAOTInput)
        }
        self._inputs = {
            n.meta["desc"].idx: (capture.names[n.name], p, n.meta["val"], whole.meta["val"])
            for n, whole, p in zip(placeholders(graph.gm), placeholders(capture.gm), graph.inputs, strict=True)
            if isinstance(n.meta["desc"], PlainAOTInput)
        }
        ends: Any = zip(output_node(graph.gm).args[0], output_node(graph.gm).meta["desc"], strict=True)  # type: ignore[arg-type]
        given = {
            d.grad_of.idx
            for v, d in ends
            if isinstance(d, GradAOTOutput) and isinstance(d.grad_of, PlainAOTInput) and v is not None
        }
        self._differentiable = {name for i, (name, *_) in self._inputs.items() if i in given}
        self._results = output_node(graph.gm).meta["desc"][: halves.results]
        self._wholes = [v.meta["val"] for v in output_node(capture.gm).args[0][: halves.results]]  # type: ignore

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's part of the inputs (or on DTensors, which are laid out as the plan says).

        Raises InputSpecError for inputs that are not those that the model was sharded for, EmptyStateError where
        parameters or buffers are still on the meta device.
        """
        results = Sharded.apply(self._halves, self._gradients, *self._held(), *self._local_inputs(args, kwargs))
        for position, name in mutated(self._results).items():
            buffer: Any = self.get_buffer(name)
            with torch.no_grad():
                buffer.to_local().copy_(results[position])
        leaves = [
            self._result(value, self.graph.outputs[i], self._wholes[i])
            for i, value in enumerate(results)
            if isinstance(self._results[i], PlainAOTOutput)
        ]
        return tree_unflatten(leaves, self._capture.out_spec)

    def train(self, mode: bool = True) -> ShardedModule:
        """Set the mode, which the graph has already: another one than it was made in changes nothing but a flag."""
        if mode != self._capture.training:
            log.warning(
                "the graph was made in %s mode, and is the same in %s mode: shard the model in the mode in which it "
                "shall be used (a second dsmp.parallelize), and load this one's state_dict() into it",
                *(("training", "evaluation") if self._capture.training else ("evaluation", "training")),
            )
        return super().train(mode)

    def shard_inputs(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's part of inputs that every rank holds whole: (args, kwargs) for a call."""
        leaves, spec = tree_flatten((args, kwargs))
        for i, (_, placements, _, _) in self._inputs.items():
            if i < len(leaves) and isinstance(leaves[i], Tensor):
                leaves[i] = shards_of(leaves[i], self.mesh, placements, source=None).to_local()
        return tree_unflatten(leaves, spec)  # type: ignore[no-any-return]

    def _held(self) -> list[Tensor]:
        """Parameters and buffers in the order of the graph's placeholders."""
        held = [
            self.get_parameter(d.target) if isinstance(d, ParamAOTInput) else self.get_buffer(d.target)
            for d in self._state
        ]
        if empty := [d.target for d, value in zip(self._state, held, strict=True) if value.is_meta]:
            raise EmptyStateError(empty)
        return held

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModule:
        """`to`, `to_empty` and the like give every place a value of its own; what was shared is shared again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, shared, kind in self._tied:
            path, _, last = name.rpartition(".")
            values = getattr(self.get_submodule(path), f"_{kind}s")
            values[last] = getattr(self, f"get_{kind}")(shared)
        return self

    def _local_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self._capture.in_spec:
            raise InputSpecError(
                f"the model was sharded for inputs of the form {self._capture.in_spec}, and got {spec}. Call it as in "
                "dsmp.parallelize(..., inputs=...), or shard it anew."
            )
        found = []
        for i, (name, placements, local, whole) in self._inputs.items():
            value = leaves[i]
            if isinstance(local, Tensor):
                value = self._local_input(value, name, placements, local, whole)
            elif value != local:
                raise InputSpecError(f"input {name!r} was {local!r} when the model was sharded, and is {value!r} now.")
            found.append(value)
        return found

    def _local_input(self, value: Any, name: str, placements: Placements, local: Tensor, whole: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            value = value.redistribute(self.mesh, placements).to_local()
        if not isinstance(value, Tensor) or value.shape != local.shape or value.dtype != local.dtype:
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise InputSpecError(
                f"input {name!r} is {got}; each rank gives its part {local.dtype} {tuple(local.shape)} of the whole "
                f"{tuple(whole.shape)} that the model was sharded for (shard_inputs cuts whole inputs)."
            )
        if value.requires_grad and torch.is_grad_enabled() and name not in self._differentiable:
            raise InputSpecError(
                f"input {name!r} requires a gradient, and the graph has none for it. Give dsmp.parallelize an example "
                "input that requires a gradient, or detach() this one."
            )
        return value.contiguous()

    def _result(self, value: Any, placements: Placements | None, whole: Any) -> Any:
        if placements is None or all(isinstance(p, Replicate) for p in placements):
            return value
        return DTensor.from_local(
            value, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def shards_of(value: Tensor, mesh: DeviceMesh, placements: Placements, source: int | None = 0) -> DTensor:
    """A whole tensor as shards; of rank `source`'s values, or of each rank's own where it is None.

    A tensor on the meta device stays there: fill it with `to_empty` and `load_state_dict`.
    """
    if value.device.type != "meta":
        return distribute_tensor(value.detach().to(mesh.device_type), mesh, placements, src_data_rank=source)
    shape = list(value.shape)
    for i, p in enumerate(placements):
        if isinstance(p, Shard):
            shape[p.dim] //= mesh.size(i)
    local = torch.empty(shape, dtype=value.dtype, device="meta")
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def _register(root: nn.Module, model: nn.Module, name: str, value: Any, kind: str) -> None:
    """Put a parameter or buffer where the model has it, in modules that hold nothing else."""
    *path, last = name.split(".")
    here, there = root, model
    for part in path:
        there = there.get_submodule(part)
        if part not in here._modules:
            here.add_module(part, nn.Module())
        here = here.get_submodule(part)
    if kind == "parameter":
        here.register_parameter(last, value)
    else:
        here.register_buffer(last, value, persistent=last not in there._non_persistent_buffers_set)
