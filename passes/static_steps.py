"""Activations in bytes: static steps are fixed by the range that calibration saw, dynamic ones reach over each row.

A byte in [0, TOP] stands for scale * (byte - zero). 7 bits: AVX2 without VNNI multiplies bytes in pairs that are added
in int16, and only so can no pair overflow with weights of 8 bits (Intel, "Lower numerical precision deep learning
inference and training", 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

TOP = 127
"""The largest byte of a quantised activation."""
_SMALLEST = torch.finfo(torch.float32).tiny
"""Scales are fp32 and are divided by: no range is so narrow that its values matter below."""


class Steps(NamedTuple):
    """How bytes stand for numbers: scale * (byte - zero)."""

    scale: float
    zero: int


def has_steps(low: float, high: float) -> bool:
    """Whether a range is wide enough, and finite, for bytes to stand for its values."""
    scale = _scale(low, high)
    return scale >= _SMALLEST and math.isfinite(scale)


def steps_of(low: float, high: float) -> Steps:
    """The finest steps whose bytes [0, TOP] reach from `low` to `high` and hold 0 exactly; steps of 1 where the range
    has none."""
    if not has_steps(low, high):
        return Steps(1.0, 0)
    scale = _scale(low, high)
    return Steps(scale, round(-min(low, 0.0) / scale))


def _scale(low: float, high: float) -> float:
    return (max(high, 0.0) - min(low, 0.0)) / TOP


@torch.library.custom_op("dsmp::fake_quantize_static", mutates_args=())
def fake_quantize_static(x: Tensor, low: float, high: float) -> Tensor:
    """Every value of a float tensor rounded to the nearest of the steps that reach from `low` to `high`, values beyond
    to the last; dtype and strides kept, NaN stays."""
    return _rounded(x, steps_of(low, high))


@fake_quantize_static.register_fake
def _(x: Tensor, low: float, high: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dsmp::fake_quantize_dynamic", mutates_args=())
def fake_quantize_dynamic(x: Tensor, axis: int) -> Tensor:
    """Every vector of a float tensor along `axis` rounded to the nearest of the steps that reach from its smallest to
    its largest value; dtype and strides kept, NaN where a vector has infinities or NaN."""
    if not x.numel():
        return torch.empty_like(x)
    low, high = (end.to(torch.float32) for end in torch.aminmax(x, dim=axis, keepdim=True))
    scale = high.clamp_(min=0) / TOP - low.clamp_(max=0) / TOP  # finite wherever the values are
    scale = torch.where(scale < _SMALLEST, 1.0, scale)
    zero = (-low / scale).round_()
    rounded = ((x / scale).round_() + zero).clamp_(0, TOP)
    return torch.empty_like(x).copy_(rounded.sub_(zero).mul_(scale))


@fake_quantize_dynamic.register_fake
def _(x: Tensor, axis: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dsmp::fake_quantize_shared", mutates_args=())
def fake_quantize_shared(x: Tensor, steps: Tensor, at: int) -> Tensor:
    """As `fake_quantize_static`, in the steps of row `at` of float64 [rows, 2] on a CPU (`steps_tensor`)."""
    scale, zero = steps[at].tolist()
    return _rounded(x, Steps(scale, int(zero)))


@fake_quantize_shared.register_fake
def _(x: Tensor, steps: Tensor, at: int) -> Tensor:
    return torch.empty_like(x)


def _rounded(x: Tensor, steps: Steps) -> Tensor:
    rounded = (x / steps.scale + steps.zero).round_().clamp_(0, TOP)
    return torch.empty_like(x).copy_(rounded.sub_(steps.zero).mul_(steps.scale))


def steps_tensor(steps: Iterable[Steps]) -> Tensor:
    """float64 [rows, 2]: a scale and a zero in each row."""
    return torch.tensor([list(row) for row in steps], dtype=torch.float64)


def rounded_over_own_range(x: Tensor) -> Tensor:
    """As `fake_quantize_static` over the range of `x` itself, the nearest to calibration that one batch gives."""
    if not x.numel():
        return x
    low, high = torch.aminmax(x)
    rounded: Tensor = fake_quantize_static(x, float(low), float(high))
    return rounded
