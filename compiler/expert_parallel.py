"""`dsmp.expert_parallel`: the experts of a model divided among ranks, each of which has its own part of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..codegen.expert_rows import Exchange, connected, route, shared_weight
from ..codegen.feedback import AVERAGED, average_gradients, check_averageable
from ..errors import ExpertsError, IndivisibleError, InvalidWireFormatError
from ..passes.wire_formats import FP32, WIRE_NAMES, WireFormat, parse_wire
from .expert_modules import Experts, check_share, find_experts
from .model_arguments import check_module
from .plan_agreement import agree
from .sharded_module import shards_of


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    dispatch: str = "fp32",
    combine: str = "fp32",
    gradients: str = "fp32",
    experts: Sequence[str] | None = None,
) -> nn.Module:
    """Divide the experts of a model among ranks, and average the gradients of all else over them.

    Every rank holds the whole of the rest, calls the model on its own part of the batch and, after `backward()`, has
    the gradient of the mean of the ranks' losses: of its own experts, and of everything else, equal on all ranks. So
    the group is that of data parallelism, too, and neither DistributedDataParallel nor `compress_gradients` goes with
    it. Works in eager mode, and compiled as one graph with fullgraph=True (without it, a compiled graph ends where
    tokens are counted, unless torch._dynamo.config.capture_scalar_outputs is set).

    Args:
        model: changed in place. Modules of experts are found by what they hold and how they are called (see
            `compiler/expert_modules.py`) and compute as they did, on the rows that reach them: to compile, transformers
            models need their grouped products, which is the default (experts_implementation "grouped_mm"). Values of
            parameters and buffers are taken from rank 0; on the meta device they stay there.
        mesh: a DeviceMesh of one dimension, as in mesh["ep"], or a process group.
        dispatch: the wire format of the rows that go to the experts: "fp32" (as they are), "bf16", "fp16", "fp8",
            "int8", "int4", "int8:64" ... Rows are encoded one by one.
        combine: that of the results on their way back. The gradients of both take the opposite ways, in "bf16", or as
            they are where both formats are "fp32".
        gradients: the format in which the gradients of the replicated parameters are averaged, with error feedback as
            in `compress_gradients`. "fp32" leaves them to the option 'wire' of the backend.
        experts: names (globs) of the modules to divide; default all.

    The parameters of a module of experts become this rank's rows of them, plain tensors under the same names.
    `state_dict()` gives them as DTensors, Shard(0) of the whole; `load_state_dict` takes DTensors, whole tensors, as
    in a checkpoint of the undivided model, and this rank's rows. An optimizer's state is each rank's own. Norms over
    all gradients differ between ranks: take those of the experts' squares together before gradients are clipped.

    Raises ExpertsError for a model without experts, for experts of which a share does not compute what all of them do,
    and for what is no mesh of one dimension; IndivisibleError for a number of experts that the ranks do not divide;
    FeedbackError for gradients that something averages already; RanksDisagreeError where ranks hold different models
    or ask for different formats; UnknownWireFormatError and InvalidWireFormatError for a wire format.
    """
    check_module(model)
    formats = {n: _format(text) for n, text in (("dispatch", dispatch), ("combine", combine))}
    wire = parse_wire(gradients)
    mesh = _one_dimension(mesh, model)
    check_averageable(model)
    found = find_experts(model, experts)
    reasons = [
        f"{mesh.size()} ranks do not divide the {e.count} experts of {e.shown}" for e in found if e.count % mesh.size()
    ]
    if reasons:
        raise IndivisibleError(reasons)
    agree(mesh, _digest(model, found, [dispatch, combine, gradients]), "models or formats")
    for e in found:
        check_share(e, mesh.size())
    weights = [e.module._parameters[n] for e in found for n in e.weights]
    divided = [w for w in weights if w is not None]
    _replicate(model, mesh, divided)
    average_gradients(model, mesh.get_group(), wire, without=divided)
    back = "fp32" if all(f == FP32 for f in formats.values()) else "bf16"
    shares: dict[int, nn.Parameter] = {}
    for e in found:
        exchange = Exchange(
            group=mesh.get_group().group_name,
            ranks=mesh.size(),
            experts=e.count,
            dispatch=dispatch,
            combine=combine,
            gradients=back,
        )
        _divide(e, mesh, exchange, shares)
    return model


def _format(text: str) -> WireFormat:
    format = parse_wire(text)
    if format.is_sparse:
        whole = [n for n in WIRE_NAMES if n != format.name]
        raise InvalidWireFormatError(text, f"formats that send every value of a row: {', '.join(whole)}")
    return format


def _one_dimension(mesh: Any, model: nn.Module) -> DeviceMesh:
    if isinstance(mesh, dist.ProcessGroup):
        kinds = {p.device.type for p in model.parameters()} - {"meta"}
        default = "cuda" if "nccl" in dist.get_backend(mesh) else "cpu"
        return DeviceMesh.from_group(mesh, kinds.pop() if len(kinds) == 1 else default, mesh_dim_names=("ep",))
    if not isinstance(mesh, DeviceMesh):
        raise ExpertsError(f"mesh is {mesh!r}; allowed: a DeviceMesh of one dimension, or a process group.")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise ExpertsError(
            f"the mesh has {mesh.ndim} dimensions {names}: pass the one that divides the experts, as in mesh['ep']."
        )
    return mesh


def _digest(model: nn.Module, found: Sequence[Experts], formats: Sequence[str]) -> str:
    """A hash of what has to be equal on all ranks: formats, experts and the layout of all parameters and buffers."""
    lines = [*formats, *(f"{e.name} {e.count} {e.weights}" for e in found)]
    for kind, values in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        lines += [f"{kind} {n} {tuple(v.shape)} {v.dtype} {v.requires_grad} {v.device.type}" for n, v in values]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _replicate(model: nn.Module, mesh: DeviceMesh, divided: Sequence[Tensor]) -> None:
    """Give parameters and buffers that every rank holds whole rank 0's values."""
    apart = {id(w) for w in divided}
    for value in [*model.parameters(), *model.buffers()]:
        if id(value) in apart or value.is_meta:
            continue
        sent = value.detach().contiguous()
        dist.broadcast(sent, group=mesh.get_group(), group_src=0)
        if sent.data_ptr() != value.data_ptr():
            value.detach().copy_(sent)


def _divide(experts: Experts, mesh: DeviceMesh, exchange: Exchange, shares: dict[int, nn.Parameter]) -> None:
    """Leave a module this rank's experts, and let its call exchange rows, in a class of its own.

    shares: divided parameters by the id of the whole one, so that tied ones stay tied.
    """
    module, kind = experts.module, type(experts.module)
    for name in experts.weights:
        whole: Any = module._parameters[name]
        if id(whole) not in shares:
            local = shards_of(whole, mesh, (Shard(0),)).to_local()
            shares[id(whole)] = nn.Parameter(local.clone(), whole.requires_grad)
        module._parameters[name] = shares[id(whole)]
    for name in experts.counts:
        setattr(module, name, experts.count // exchange.ranks)
    trained = [n for n in experts.weights if getattr(module, n).requires_grad]
    members: dict[str, Any] = {
        AVERAGED: True,
        "__module__": kind.__module__,
        "forward": _forward(kind, experts.arguments, trained, exchange),
        "_save_to_state_dict": _save(kind, experts.weights, mesh),
        "_load_from_state_dict": _load(kind, experts.weights, mesh),
    }
    members |= {n: property(_getter(n, exchange.ranks)) for n in trained}
    module.__class__ = type(kind.__name__, (kind,), members)


def _getter(name: str, ranks: int) -> Callable[[nn.Module], Tensor | None]:
    def get(self: nn.Module) -> Tensor | None:
        weight = self._parameters[name]
        if weight is None or not torch.is_grad_enabled():
            return weight
        return shared_weight(weight, ranks)

    return get


def _forward(
    kind: type[nn.Module], names: tuple[str, ...], trained: list[str], exchange: Exchange
) -> Callable[..., Tensor]:
    """The call of a module of experts, around that of its class for the rows that reach this rank."""
    own: Any = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = (args[i] if i < len(args) else kwargs[n] for i, n in enumerate(names))

        def compute(rows: Tensor, experts: Tensor) -> Tensor:
            results = own(self, rows, experts.unsqueeze(1), rows.new_ones((rows.shape[0], 1)))
            return connected(results, [rows, *(getattr(self, n) for n in trained)])

        x = hidden.reshape(-1, hidden.shape[-1])
        k = index.shape[-1]
        return route(compute, x, index.reshape(-1, k), weights.reshape(-1, k), exchange).view(hidden.shape)

    return forward


def _save(kind: type[nn.Module], weights: Sequence[str], mesh: DeviceMesh) -> Callable[..., None]:
    own: Any = kind._save_to_state_dict

    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own(self, destination, prefix, keep_vars)
        for name in weights:
            local = destination[prefix + name]
            destination[prefix + name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    return save


def _load(kind: type[nn.Module], weights: Sequence[str], mesh: DeviceMesh) -> Callable[..., None]:
    own: Any = kind._load_from_state_dict

    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        mine = dict(state_dict)
        for name in weights:
            if prefix + name in mine:
                mine[prefix + name] = _rows_of(mine[prefix + name], self._parameters[name], mesh)
        own(self, mine, prefix, *args)

    return load


def _rows_of(value: Any, local: Tensor | None, mesh: DeviceMesh) -> Any:
    """This rank's rows of a value that is a DTensor, or whole; what is neither is left to the check of its shape."""
    if isinstance(value, DTensor):
        if value.device_mesh == mesh:
            return value.redistribute(mesh, [Shard(0)]).to_local()
        value = value.full_tensor()
    if isinstance(value, Tensor) and local is not None and value.shape[:1] == (local.shape[0] * mesh.size(),):
        return value.chunk(mesh.size())[mesh.get_local_rank()].clone()
    return value
