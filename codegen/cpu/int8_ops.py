"""The operators of int8 graphs on CPUs: convolutions and linears of quantised activations, opaque to compilers.

A quantised activation is a tensor of bytes [N, C, H, W] in channels_last order, each within [0, TOP]: it stands for
scale * (byte - zero). Without VNNI, AVX2 multiplies bytes in pairs that are added in int16, hence 7 bits: with weights
of 8 bits, bounded where four of one sign meet, nothing overflows and int32 sums are exact. Weights are the model's fp32
parameters: they are packed inside, once, with a scale per output channel (`packs`), and anew after they change.

A convolution computes, per output channel, in fp32 from an exact int32 sum:

    y = (x_scale * weight_scale * f) * sum((x - x_zero) * q) + ((bias - mean) * f + shift)
    f = gain / sqrt(variance + epsilon)

then adds the residual, applies the activation, and rounds to the nearest byte: clamp(rint(y / out_scale) + out_zero).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import KernelUnavailableError
from .extension import cpu_operators
from .packs import packed

TOP = 127
"""The largest byte of a quantised activation."""
ACTIVATIONS = ("none", "relu", "hardswish", "relu6")
"""What a convolution may end in; the position is the number that kernels know it by."""


class Steps(NamedTuple):
    """How bytes stand for numbers: scale * (byte - zero)."""

    scale: float
    zero: int


def steps_of(low: float, high: float) -> Steps:
    """The finest steps whose bytes [0, TOP] reach from `low` to `high` and hold 0 exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / TOP
    if not scale > 0.0 or not math.isfinite(scale):
        return Steps(1.0, 0)
    return Steps(scale, round(-low / scale))


_LIBRARY: Any = torch.library.Library("dsmp", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"dsmp::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.dsmp, name).default


def _native() -> Any:
    """The C++ operators. Raises KernelUnavailableError where they cannot be built."""
    verdict = cpu_operators()
    if not verdict.ok:
        raise KernelUnavailableError(f"int8 convolutions on CPUs: {verdict.reason}")
    return torch.ops.dsmp_cpu


def _packed(weight: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes as kernels read them, fp32 scales [O], int32 sums of the quantised weights [O]."""
    native = _native()
    return packed(weight, f"int8 convolution, {groups} groups", lambda w: native.int8_pack.default(w, groups))


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    x_scale: float,
    x_zero: int,
    residual_scale: float,
    residual_zero: int,
    activation: str,
    out_scale: float,
    out_zero: int,
) -> Tensor:
    payload, scales, sums = _packed(weight, groups)
    made: Tensor = torch.ops.dsmp_cpu.int8_convolution.default(
        x, x_scale, x_zero, payload, scales, sums, bias, mean, variance, gain, shift, epsilon, weight.shape[2:], stride,
        padding, dilation, groups, residual, residual_scale, residual_zero, ACTIVATIONS.index(activation), out_scale,
        out_zero,
    )  # fmt: skip
    return made


def _image(x: Tensor, channels: int, size: Sequence[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
    shape = (x.shape[0], channels, *size)
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def _pooled(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
            dilation: Sequence[int]) -> list[int | torch.SymInt]:  # fmt: skip
    return [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(len(kernel))
    ]


def _convolution_fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    stride, padding, dilation = rest[7:10]
    dtype = torch.uint8 if rest[-2] else torch.float32
    return _image(x, weight.shape[0], _pooled(x, weight.shape[2:], stride, padding, dilation), dtype)


convolution = _define(
    "int8_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? mean, Tensor? variance, Tensor? gain, "
    "Tensor? shift, float epsilon, Tensor? residual, int[] stride, int[] padding, int[] dilation, int groups, "
    "float x_scale, int x_zero, float residual_scale, int residual_zero, str activation, float out_scale, int out_zero) "
    "-> Tensor",
    _convolution,
    _convolution_fake,
)
"""One convolution with what follows it. x: bytes, or fp32 of any strides, which is quantised first; weight: fp32
[O, C / groups, kh, kw]; bias, mean, variance, gain, shift: fp32 [O] or None; residual: bytes, or fp32, of the result's
shape. `out_scale` of 0 asks for an fp32 result, else it is bytes. The result is in channels_last order."""


def _quantise(x: Tensor, gate: Tensor | None, scale: float, zero: int) -> Tensor:
    made: Tensor = _native().int8_quantise.default(x, gate, scale, zero)
    return made


quantise = _define(
    "int8_quantise(Tensor x, Tensor? gate, float scale, int zero) -> Tensor",
    _quantise,
    lambda x, gate, scale, zero: _image(x, x.shape[1], x.shape[2:], torch.uint8),
)
"""fp32 [N, C, H, W] of any strides -> bytes; `gate`, fp32 [N, C, 1, 1], multiplies before."""


def _max_pool(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
              dilation: Sequence[int]) -> Tensor:  # fmt: skip
    made: Tensor = _native().int8_max_pool.default(x, kernel, stride, padding, dilation)
    return made


max_pool = _define(
    "int8_max_pool(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation) -> Tensor",
    _max_pool,
    lambda x, kernel, stride, padding, dilation: _image(
        x, x.shape[1], _pooled(x, kernel, stride, padding, dilation), torch.uint8
    ),
)
"""A max-pool of bytes: the bytes of the fp32 max-pool, as rounding keeps the order."""


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: float, x_zero: int, activation: str) -> Tensor:
    rows = x.reshape(-1, x.shape[-1], 1, 1)
    y = _convolution(
        rows, weight[:, :, None, None], bias, None, None, None, None, 0.0, None, (1, 1), (0, 0), (1, 1), 1, x_scale,
        x_zero, 0.0, 0, activation, 0.0, 0,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], len(weight))


linear = _define(
    "int8_linear(Tensor x, Tensor weight, Tensor? bias, float x_scale, int x_zero, str activation) -> Tensor",
    _linear,
    lambda x, weight, *rest: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
"""x fp32 [..., K] by weight fp32 [N, K], transposed, with x quantised in steps known before: fp32 [..., N]."""
