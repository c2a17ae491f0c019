"""Powers of two between which and fp16 a tensor is held: computed on its device, applied exactly.

An exponent is an int32 tensor without dimensions, so nothing waits for the device. Scales are not those of
`passes.rounding`, which put the largest magnitude just below 65504: a library also stores its *results* in fp16, and
they have to fit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOP = 15
"""No scaled operand and no stored result exceeds 2^TOP: half of fp16's largest value, so that rounding, and the few
units by which a bound is computed too small in fp32, do not matter."""


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of `x` as fp32, NaN if there is one; 0 of an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    found: Tensor = torch.linalg.vector_norm(x.detach(), math.inf)
    return found.to(torch.float32)


def exponent_above(value: Tensor) -> Tensor:
    """The least e with value <= 2^e; 0 where the value is 0 or not finite (a scale of 1, as in `passes.rounding`)."""
    mantissa, exponent = torch.frexp(value)
    exponent = exponent.to(torch.int32) - (mantissa == 0.5).to(torch.int32)
    return torch.where((value > 0) & value.isfinite(), exponent, torch.zeros_like(exponent))


def halve(x: Tensor, exponent: Tensor) -> Tensor:
    """x / 2^exponent in fp16: exact but for fp16's one rounding."""
    return enlarge(x, -exponent).to(torch.float16)


def enlarge(x: Tensor, exponent: Tensor) -> Tensor:
    """x * 2^exponent in fp32.

    In two steps of the same direction, since 2^exponent alone may be beyond fp32's range where the product is not.
    """
    half = torch.div(exponent, 2, rounding_mode="trunc")
    return (x.to(torch.float32) * _power(half)).mul_(_power(exponent - half))


def _power(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, from its bits; beyond fp32's normal range the nearest power that is in it."""
    return exponent.clamp(-126, 127).add(127).to(torch.int32).bitwise_left_shift(23).view(torch.float32)


def poisoned(exponent: Tensor, valid: Tensor, x: Tensor) -> Tensor:
    """x * 2^exponent in fp32 where `valid` holds; NaN throughout where it does not."""
    return enlarge(x, exponent).mul_(torch.where(valid, 1.0, math.nan))
