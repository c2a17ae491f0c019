"""Rounding as opaque operators: what Inductor must not see through.

A compiler that meets fp32 -> bf16 -> fp32 may drop both casts, and with them the rounding that a simulated plan is
about. As custom operators the two steps stay, in both executors, and in fake tensors they have the right shapes and
dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rounding import fake_quantize


@torch.library.custom_op("dsmp::fake_quantize", mutates_args=())
def fake_quantize_op(x: Tensor, format: str, recipe: str, axis: int) -> Tensor:
    """Every value rounded to `format` with the scales of `recipe` along `axis`; dtype and strides kept.

    Besides the recipes of plans there is "channel": one scale for each index of `axis`, over all other dimensions.
    """
    if recipe == "channel":
        return fake_quantize(x, format, "row", axis=[d for d in range(x.dim()) if d != axis % x.dim()])
    return fake_quantize(x, format, recipe, axis=axis)


@fake_quantize_op.register_fake
def _(x: Tensor, format: str, recipe: str, axis: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dsmp::cast", mutates_args=())
def cast_op(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of `x` in another dtype, rounded to nearest even."""
    return torch.empty_like(x, dtype=dtype).copy_(x)


@cast_op.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
