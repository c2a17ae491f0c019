"""Error feedback: gradients of data-parallel replicas in few bits, without a bias that stays.

In each step a rank sends its gradient plus what its earlier sendings had lost, and keeps what this sending loses:

    sent_t = Q(g_t + r_t)        r_(t+1) = g_t + r_t - sent_t

What was sent in n steps then differs from the sum of the gradients by r_(n+1) - r_1 alone, so that the error of their
mean falls as 1 / n. An all-reduce rounds twice, and both roundings are fed back: the rank's own one as above, that of
the sums by the rank that forms them (Karimireddy et al., https://arxiv.org/abs/1901.09847; Tang et al., DoubleSqueeze,
https://arxiv.org/abs/1905.05957).

The residuals are buffers of the module that owns the parameter, so they are saved and loaded with it; each rank has its
own. They take (1 + 1 / ranks) fp32 copies of the parameters. Residuals of values that are not finite are set to zero:
a step that a gradient scaler skips leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import FeedbackError
from ..passes.wire_formats import WireFormat, parse_wire
from .averaging import is_narrower, mean_over_ranks, new_residuals, waited

_LOCAL, _OWNER = "_dsmp_ef_", "_dsmp_ef_owner_"
AVERAGED = "_dsmp_averaged"
"""Attribute of modules whose parameters have stand-ins that see to their gradients."""


def compress_gradients(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, wire: str | WireFormat = "int4"
) -> nn.Module:
    """Average the gradients of a module over a group of replicas, in a wire format with error feedback.

    Every rank holds the whole module and calls it on its own share of the batch; after `backward()` each parameter's
    `grad` is the mean over the ranks, equal on all of them. No DistributedDataParallel is needed, or allowed, around
    it. Works in eager mode and inside compiled graphs. Parameters that the format would not make smaller are averaged
    in fp32, and so are all under "fp32".

    module: changed in place and returned; names of parameters stay, buffers `_dsmp_ef_NAME` (the parameter's shape) and
    `_dsmp_ef_owner_NAME` ([ceil(n / ranks)]) are added beside each. Inside the forward pass a parameter's attribute
    gives a stand-in for it; `parameters()` gives the parameter itself. The module can be copied, not pickled whole.
    group: default, all ranks. Raises FeedbackError, UnknownWireFormatError, InvalidWireFormatError.
    """
    format = parse_wire(wire)
    if not (dist.is_available() and dist.is_initialized()):
        raise FeedbackError(
            "gradients are averaged over a process group and there is none: call torch.distributed.init_process_group "
            "before compress_gradients."
        )
    if not isinstance(module, nn.Module):
        raise FeedbackError(f"module is {module!r}; allowed: an nn.Module.")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise FeedbackError(f"group is {group!r}; allowed: a process group, such as mesh.get_group('dp'), or None.")
    own = group or dist.group.WORLD
    assert own is not None
    check_averageable(module)
    if not any(p.requires_grad for p in module.parameters()):
        name = type(module).__name__
        raise FeedbackError(f"{name} has no parameter that requires a gradient. Set requires_grad before this call.")
    average_gradients(module, own, format)
    return module


def average_gradients(
    module: nn.Module, group: dist.ProcessGroup, wire: WireFormat, without: Collection[nn.Parameter] = ()
) -> None:
    """What `compress_gradients` does to a module that was checked, for all parameters but those in `without`."""
    left_out = {id(p) for p in without}
    for owner in list(module.modules()):
        own = {n: p for n, p in owner._parameters.items() if p is not None and p.requires_grad}
        names = [n for n, p in own.items() if id(p) not in left_out]
        if names:
            _parametrise(owner, names, group.group_name, group.size(), wire)


def is_averaged(module: nn.Module) -> bool:
    """Whether something sees to the gradients of a module, or of a part of it, already."""
    return any(getattr(m, AVERAGED, False) for m in module.modules())


def mark_averaged(module: nn.Module) -> None:
    """Note that something sees to the gradients of a module."""
    setattr(module, AVERAGED, True)


def check_averageable(module: nn.Module) -> None:
    """Raise FeedbackError for a module whose gradients cannot be averaged by stand-ins, or are averaged already."""
    name = type(module).__name__
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise FeedbackError(
            "DistributedDataParallel averages gradients itself: pass the module inside it instead, or give its own "
            "reductions a format with dsmp.compress_ddp."
        )
    if is_averaged(module):
        raise FeedbackError(f"the gradients of {name}, or of a part of it, are compressed already. Call this once.")
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise FeedbackError(
            f"parameters of {name} are DTensors, whose gradients FSDP or the sharding averages. Compress whole "
            "parameters, or leave the wire format to the option 'wire' of the backend."
        )


def _parametrise(owner: nn.Module, names: list[str], group: str, ranks: int, wire: WireFormat) -> None:
    """Put properties in the place of parameters, in a class of the module's own, and residuals beside them."""
    members: dict[str, Any] = {AVERAGED: True}
    for name in names:
        parameter = owner._parameters[name]
        assert parameter is not None
        narrow = is_narrower(parameter, ranks, wire)
        if narrow:
            for prefix, residual in zip((_LOCAL, _OWNER), new_residuals(parameter, ranks), strict=True):
                owner.register_buffer(prefix + name, residual)
        members[name] = property(_getter(name, group, ranks, str(wire) if narrow else "fp32"))
    kind = type(owner)
    owner.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def _getter(name: str, group: str, ranks: int, wire: str) -> Callable[[nn.Module], Tensor | None]:
    local, owned = _LOCAL + name, _OWNER + name

    def get(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        if parameter is None or not torch.is_grad_enabled():
            return parameter
        averaged: Tensor = _averaged(parameter, self._buffers.get(local), self._buffers.get(owned), group, ranks, wire)
        return averaged

    return get


class _Averaged(torch.autograd.Function):
    """A parameter whose gradient is averaged over the ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, local: Tensor | None, owned: Tensor | None, group: str, ranks: int, wire: str
    ) -> Tensor:
        # not saved for backward, which would refuse that they are written to
        ctx.residuals, ctx.group, ctx.ranks, ctx.wire = (local, owned), group, ranks, wire
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        local, owned = ctx.residuals
        if local is None:
            total = waited(torch.ops._c10d_functional.all_reduce(grad, "sum", ctx.group))
            return total / ctx.ranks, None, None, None, None, None
        (mean,) = mean_over_ranks([grad], [(local, owned)], ctx.group, ctx.ranks, ctx.wire)
        return mean, None, None, None, None, None


def _apply(parameter: Tensor, local: Tensor | None, owned: Tensor | None, group: str, ranks: int, wire: str) -> Tensor:
    averaged: Tensor = _Averaged.apply(parameter, local, owned, group, ranks, wire)
    return averaged


# Dynamo would trace the function into an operator of its own, whose backward nodes do not say that they are backward.
_averaged: Callable[..., Any] = torch._dynamo.allow_in_graph(_apply)  # type: ignore[no-untyped-call]
