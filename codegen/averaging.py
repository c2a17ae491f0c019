"""The mean of the ranks' gradients while they travel in a wire format, with or without error feedback.

Encoded rows go to the ranks that sum them (all-to-all), sums are formed in fp32 and go back to all, encoded once more
(all-gather). With feedback both roundings are corrected in the next step; `feedback.py` says by whom and why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..passes.wire_formats import WireFormat, parse_wire
from .wire import decode, encode, reduce, row_length

Residuals = tuple[Tensor, Tensor]
"""What the last sending of a gradient lost, fp32 of its shape, and what that of the sums this rank forms lost, fp32
[ceil(n / ranks)]."""


def is_narrower(parameter: Tensor, ranks: int, wire: WireFormat) -> bool:
    """Whether a format makes the gradient of a parameter smaller."""
    written = parameter.numel() * parameter.itemsize
    return wire.name != "fp32" and wire.payload_bytes(row_length(parameter.numel(), ranks)) * ranks < written


def new_residuals(parameter: Tensor, ranks: int) -> Residuals:
    """Residuals of a parameter that has not been sent yet."""
    local = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
    return local, local.new_zeros(row_length(parameter.numel(), ranks))


def mean_over_ranks(
    gradients: Sequence[Tensor], residuals: Sequence[Residuals], group: str, ranks: int, wire: str
) -> list[Tensor]:
    """The means of these gradients over a group, each in its gradient's shape and dtype.

    They share their payloads. `residuals`, one pair for each, are updated; empty for a mean without feedback.
    """
    if not residuals and parse_wire(wire).is_sparse:
        return _sparse_mean(gradients, group, ranks, wire)
    counts = [row_length(g.numel(), ranks) for g in gradients]
    wanted = [g.float() for g in gradients]
    if residuals:
        wanted = [g + local for g, (local, _) in zip(wanted, residuals, strict=True)]
    payload = encode(wanted, ranks, wire)
    if residuals:
        sent = decode(payload, counts, wire, torch.float32)
        for x, s, (local, _) in zip(wanted, sent, residuals, strict=True):
            local.copy_(_residual(x, _like(s, x)))
    moved = waited(torch.ops._c10d_functional.all_to_all_single(payload, [1] * ranks, [1] * ranks, group))
    sums = reduce(moved, counts, wire, torch.float32, False)
    if residuals:
        sums = [s + owned for s, (_, owned) in zip(sums, residuals, strict=True)]
    payload = encode(sums, 1, wire)
    if residuals:
        sent = decode(payload, counts, wire, torch.float32)
        for x, s, (_, owned) in zip(sums, sent, residuals, strict=True):
            owned.copy_(_residual(x, s.reshape(-1)))
    found = decode(_gathered(payload, group, ranks), counts, wire, torch.float32)
    return [(_like(s, g) / ranks).to(g.dtype) for s, g in zip(found, gradients, strict=True)]


def _sparse_mean(gradients: Sequence[Tensor], group: str, ranks: int, wire: str) -> list[Tensor]:
    """Every rank's largest values summed by every rank: sums are not made sparse again."""
    gathered = _gathered(encode(list(gradients), 1, wire), group, ranks)
    means = reduce(gathered, [g.numel() for g in gradients], wire, torch.float32, True)
    return [m.reshape(g.shape).to(g.dtype) for m, g in zip(means, gradients, strict=True)]


def _gathered(payload: Tensor, group: str, ranks: int) -> Tensor:
    return waited(torch.ops._c10d_functional.all_gather_into_tensor(payload, ranks, group))


def waited(started: Tensor) -> Tensor:
    """The result of a functional collective."""
    finished: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return finished


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """Rows without what they were filled up with, in the shape of x."""
    return rows.reshape(-1)[: x.numel()].reshape(x.shape)


def _residual(wanted: Tensor, sent: Tensor) -> Tensor:
    return (wanted - sent).nan_to_num(0.0, 0.0, 0.0)
