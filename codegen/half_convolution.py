"""Convolutions of libraries (cuDNN, MIOpen) in scaled fp16: operands divided by a power of two each, the result, which
the library adds up in fp32 and stores in fp16, multiplied back in fp32.

The bound that is kept: no result exceeds 2^15. By Hoelder's inequality a result is at most amax(a) * reach(b), where
reach(b) is the largest sum of magnitudes of b that enters one result:

    forward            a = x,  reach of w: the weights of one output channel
    input's gradient   a = dy, reach of w: the weights that one input channel meets
    weight's gradient  a = x,  reach of dy: one channel at all positions of all samples

reach(b) = kappa * amax(b) with 1 <= kappa <= K, the length of the sum, so K * amax(a') * amax(b') <= 2^15 is enough
and never asked for in full. What room there is, 15 - log2(kappa) binades, is divided equally between both operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .half_scaling import TOP, enlarge, exponent_above, halve, largest

aten = torch.ops.aten


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """`aten.convolution` in scaled fp16, its bias added in fp32. Operands of any float dtype; the result is fp32."""
    how = (stride, padding, dilation, transposed, output_padding, groups)
    x_exponent, weight_exponent = _exponents(x, weight, *_reach(weight, groups, by_rows=not transposed))
    y = aten.convolution(_operand(x, x_exponent), _operand(weight, weight_exponent), None, *how)
    y = enlarge(y.to(torch.float16), x_exponent + weight_exponent)
    return y if bias is None else y + bias.to(torch.float32).reshape(-1, *[1] * (weight.dim() - 2))


def convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`aten.convolution_backward` in scaled fp16: each gradient is a product with scales of its own.

    Operands of any float dtype; gradients are fp32. That of the bias is summed in fp32 from `dy` as it is.
    """
    how = (stride, padding, dilation, transposed, output_padding, groups)
    dx = dw = db = None
    if output_mask[0]:
        dy_exponent, weight_exponent = _exponents(dy, weight, *_reach(weight, groups, by_rows=transposed))
        given = (_operand(dy, dy_exponent), _shape_of(x), _operand(weight, weight_exponent))
        found = aten.convolution_backward(*given, None, *how, [True, False, False])[0]
        dx = enlarge(found.to(torch.float16), dy_exponent + weight_exponent)
    others = [d for d in range(dy.dim()) if d != 1]
    if output_mask[1]:
        length = dy.numel() // max(1, dy.shape[1])
        x_exponent, dy_exponent = _exponents(x, dy, _sum(dy, others), length)
        given = (_operand(dy, dy_exponent), _operand(x, x_exponent), _shape_of(weight))
        found = aten.convolution_backward(*given, None, *how, [False, True, False])[1]
        dw = enlarge(found.to(torch.float16), x_exponent + dy_exponent)
    if output_mask[2]:
        db = dy.sum(others, dtype=torch.float32)
    return dx, dw, db


def _operand(x: Tensor, exponent: Tensor) -> Tensor:
    """x / 2^exponent as a library multiplies it; on CPUs, where torch adds up fp16 convolutions in fp16, widened."""
    return halve(x, exponent).to(_dtype(x))


def _shape_of(x: Tensor) -> Tensor:
    """A stand-in for an operand of which only the shape is read, without memory."""
    return x.new_empty((1,), dtype=_dtype(x)).expand(x.shape)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "cpu" else torch.float16


def _exponents(a: Tensor, b: Tensor, reach: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Exponents of both operands' scales: amax(a') * reach(b') <= 2^TOP, with equal room for amax(a') and amax(b')."""
    magnitude = largest(b)
    kappa = exponent_above((reach / magnitude).clamp(1, max(1, length)))
    room = TOP - kappa
    first = torch.div(room, 2, rounding_mode="floor")
    return exponent_above(largest(a)) - first, exponent_above(magnitude) - (room - first)


def _reach(weight: Tensor, groups: int, *, by_rows: bool) -> tuple[Tensor, int]:
    """The largest sum of magnitudes along a weight's first axis (by_rows: of one index of it) and the sum's length.

    weight: [rows, columns per group, taps...]; rows of different groups meet different columns.
    """
    rows, columns = weight.shape[:2]
    taps = math.prod(weight.shape[2:])
    if by_rows:
        return _sum(weight, list(range(1, weight.dim()))), columns * taps
    grouped = weight.reshape(groups, rows // groups, columns, taps)
    return _sum(grouped, [1, 3]), rows // groups * taps


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The largest of the sums of magnitudes over `dims`, fp32."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    sums: Tensor = torch.linalg.vector_norm(x.detach(), 1, dim=list(dims), dtype=torch.float32)
    return sums.amax()
