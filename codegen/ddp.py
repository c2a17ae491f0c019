"""A wire format for the reductions of DistributedDataParallel, through its communication hook.

DDP hands over a bucket of gradients at a time, and after the first step makes other buckets. What is sent is therefore
encoded by parameter within a bucket's payload, and residuals belong to parameters. They are no buffers of the module:
DDP sends buffers from rank 0 to all others, and each rank has residuals of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..errors import GradientOwnerError, InvalidOptionError, ResidualsError
from ..passes.wire_formats import WireFormat, parse_wire
from .averaging import Residuals, is_narrower, mean_over_ranks, new_residuals, waited
from .collective_nodes import ring_bytes
from .feedback import is_averaged, mark_averaged
from .wire import row_length


class DdpCompression:
    """How a DDP module's gradients are sent: the state of its communication hook.

    `sent_bytes` are those that a rank sends in a step (as in `bench.distributed`, ring bytes), `bytes_as_written` those
    of DDP alone. `state_dict()` has the residuals of this rank under names that no other rank uses, so that
    torch.distributed.checkpoint saves all of them; it is empty without feedback.
    """

    def __init__(self, ddp: DistributedDataParallel, wire: WireFormat, feedback: bool) -> None:
        group = ddp.process_group
        self.wire, self.feedback = wire, feedback
        self.group, self.ranks, self.rank = group.group_name, group.size(), dist.get_rank(group)
        ignored = ddp.parameters_to_ignore
        self._names = {p: n for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored}
        self._narrow = {p for p in self._names if is_narrower(p, self.ranks, wire)}
        self._residuals: dict[str, Residuals] = {}
        if feedback:
            self._residuals = {n: new_residuals(p, self.ranks) for p, n in self._names.items() if p in self._narrow}

    @property
    def bytes_as_written(self) -> float:
        """Bytes that a rank sends in a step when gradients travel in the dtypes of their parameters."""
        return sum(ring_bytes("all_reduce", p.numel() * p.itemsize, self.ranks) for p in self._names)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(self._sent(p) for p in self._names)

    def _sent(self, parameter: Tensor) -> float:
        count = parameter.numel()
        if parameter not in self._narrow:
            return ring_bytes("all_reduce", count * parameter.itemsize, self.ranks)
        if self.wire.is_sparse and not self.feedback:
            return ring_bytes("all_gather", self.wire.payload_bytes(count), self.ranks)
        share = self.wire.payload_bytes(row_length(count, self.ranks))
        return ring_bytes("all_to_all", share * self.ranks, self.ranks) + ring_bytes("all_gather", share, self.ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals of this rank: `rankR.local.NAME` of the parameter's shape, `rankR.owner.NAME` of its share."""
        return {
            f"rank{self.rank}.{part}.{name}": value
            for name, pair in self._residuals.items()
            for part, value in zip(("local", "owner"), pair, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over residuals that the same rank of as many ranks saved. Raises ResidualsError for others."""
        own = self.state_dict()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise ResidualsError(f"missing {missing[:3]}, unknown {unknown[:3]}", self.rank, self.ranks)
        for name, value in own.items():
            if state[name].shape != value.shape:
                raise ResidualsError(
                    f"{name} is {tuple(state[name].shape)}, not {tuple(value.shape)}", self.rank, self.ranks
                )
        for name, value in own.items():
            value.copy_(state[name])

    def average(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Replace the gradients of some parameters by their means over the ranks, in place."""
        narrow = [p for p in gradients if p in self._narrow]
        if narrow:
            residuals = [self._residuals[self._names[p]] for p in narrow] if self.feedback else []
            given = [gradients[p] for p in narrow]
            for grad, mean in zip(
                given, mean_over_ranks(given, residuals, self.group, self.ranks, str(self.wire)), strict=True
            ):
                grad.copy_(mean)
        wide = [g for p, g in gradients.items() if p not in self._narrow]
        if wide:
            flat = torch.cat([g.reshape(-1) for g in wide])
            means = waited(torch.ops._c10d_functional.all_reduce(flat, "sum", self.group)) / self.ranks
            for grad, mean in zip(wide, means.split_with_sizes([g.numel() for g in wide]), strict=True):
                grad.copy_(mean.reshape(grad.shape))


def compress_ddp(
    ddp: DistributedDataParallel, *, wire: str | WireFormat = "int8", feedback: bool = True
) -> DdpCompression:
    """Send the gradients of a DistributedDataParallel module in a wire format, from the next step on.

    After `backward()` each parameter's `grad` is the mean over the ranks, equal on all of them, as always with DDP.
    With `feedback` what rounding lost is sent with the next step's gradient (see `compress_gradients`); save the
    result's `state_dict()` with the model's. Gradients that the format would not make smaller are sent as they are.
    Each bucket is encoded, sent and decoded before the backward pass goes on, so that the ranks' buckets keep their
    order.

    Raises InvalidOptionError for what is no DistributedDataParallel, GradientOwnerError where something else sends the
    gradients already, UnknownWireFormatError and InvalidWireFormatError.
    """
    format = parse_wire(wire)
    if not isinstance(ddp, DistributedDataParallel):
        raise InvalidOptionError("ddp", type(ddp).__name__, "a DistributedDataParallel module")
    _check(ddp)
    state = DdpCompression(ddp, format, feedback)
    try:
        ddp.register_comm_hook(state, _reduce_bucket)
    except RuntimeError as error:  # hooks built into torch are known to its reducer alone
        ddp._comm_hooks.pop()
        raise GradientOwnerError("a hook built into torch is registered", "Leave that hook out") from error
    mark_averaged(ddp.module)
    return state


def _check(ddp: DistributedDataParallel) -> None:
    hooks = [hook for hook, _ in ddp._comm_hooks]
    if _reduce_bucket in hooks:
        raise GradientOwnerError("this module's gradients are compressed already", "Call compress_ddp once")
    if hooks:
        name = getattr(hooks[0], "__qualname__", repr(hooks[0]))
        raise GradientOwnerError(
            f"the hook {name} is registered", "Leave that hook out, and mixed_precision= of the constructor"
        )
    if is_averaged(ddp.module):
        raise GradientOwnerError(
            "compress_gradients averages the gradients of the module inside", "Use it without DistributedDataParallel"
        )
    if ddp._use_python_reducer:
        raise GradientOwnerError(
            "torch._dynamo.config.optimize_ddp='python_reducer' reduces one gradient at a time",
            "Build the module under another setting of it",
        )


def _reduce_bucket(state: Any, bucket: Any) -> Future[Tensor]:
    with torch.no_grad():
        state.average(dict(zip(bucket.parameters(), bucket.gradients(), strict=True)))
    done: Future[Tensor] = Future(devices=[bucket.buffer().device] if bucket.buffer().device.type != "cpu" else None)
    done.set_result(bucket.buffer())
    return done


# DDP compares annotations with these classes, not with their names.
_reduce_bucket.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}  # type: ignore[attr-defined]
