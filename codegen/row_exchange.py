"""Rows of a matrix sent to the ranks that work on them, and back: the two communications of expert parallelism.

An all-to-all with uneven parts. Rows travel in a wire format, each encoded for itself (the scales of its blocks stand
in its payload), so that they can be cut between any two and a rank may send or get none. The gradient of an exchange is
the exchange back (Lepikhin et al., GShard, https://arxiv.org/abs/2006.16668; payloads of fp8 codes and scales as in
DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..passes.wire_formats import parse_wire
from .wire import decode_rows, encode_rows


class _Exchanged(torch.autograd.Function):
    """Rows after an all-to-all; their gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: str, wire: str, back: str
    ) -> Tensor:
        ctx.splits, ctx.group, ctx.back = (sent, received), group, back
        return move_rows(x, sent, received, group, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        sent, received = ctx.splits
        return move_rows(grad, received, sent, ctx.group, ctx.back), None, None, None, None, None


def _apply(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str, wire: str, back: str) -> Tensor:
    exchanged: Tensor = _Exchanged.apply(x, sent, received, group, wire, back)
    return exchanged


exchange_rows: Callable[[Tensor, Sequence[int], Sequence[int], str, str, str], Tensor]
# Dynamo would trace the function into an operator of its own, whose backward nodes do not say that they are backward.
exchange_rows = torch._dynamo.allow_in_graph(_apply)  # type: ignore[no-untyped-call]
"""exchange_rows(x, sent, received, group, wire, back): the rows that this rank gets, [sum(received), count].

x: [sum(sent), count], the rows for rank 0 first; sent and received are rows per rank. wire and back are the formats of
the rows and of their gradients; "fp32" sends what is there in its own dtype, as does a format that is no smaller.
Differentiable with respect to x; every rank of the group has to call it, and to go through it backwards.
"""


def move_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str, wire: str) -> Tensor:
    """One exchange without a gradient, in x's dtype."""
    if not rows_are_narrower(wire, x.shape[1], x.dtype):
        return _moved(x.contiguous(), sent, received, group)
    payload: Tensor = encode_rows(x, wire)
    rows: Tensor = decode_rows(_moved(payload, sent, received, group), x.shape[1], wire, x.dtype)
    return rows


def rows_are_narrower(wire: str, count: int, dtype: torch.dtype) -> bool:
    """Whether a format makes a row of `count` values smaller than it is."""
    format = parse_wire(wire)
    return format.name != "fp32" and format.payload_bytes(count) < count * dtype.itemsize


def exchange_counts(counts: Tensor, ranks: int, group: str) -> Tensor:
    """counts [ranks * n], n numbers for each rank: what the ranks have for this one, [ranks * n], rank 0's first."""
    splits = [counts.shape[0] // ranks] * ranks
    return _moved(counts, splits, splits, group)


def _moved(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    started = functional.all_to_all_single(x, list(received), list(sent), group)
    finished: Tensor = functional.wait_tensor(started)
    return finished
