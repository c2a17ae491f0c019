"""The operators of int8 graphs on CPUs, `torch.ops.dsmp_cpu.int8_*`: convolutions and linears of quantised activations,
opaque to compilers.

A quantised activation is a tensor of bytes [N, C, H, W] in channels_last order, each within [0, TOP]: it stands for
scale * (byte - zero). Without VNNI, AVX2 multiplies bytes in pairs that are added in int16, hence 7 bits: with weights
of 8 bits, bounded where four of one sign meet, nothing overflows and int32 sums are exact. Weights are the model's fp32
parameters: they are packed inside, once, with a scale per output channel, and anew after they change.

    int8_convolution(x, weight, bias, mean, variance, gain, shift, epsilon, residual, stride, padding, dilation, groups,
                     x_scale, x_zero, residual_scale, residual_zero, activation, out_scale, out_zero)

x: bytes, or fp32 of any strides, which is quantised first; weight: fp32 [O, C / groups, kh, kw]; bias, mean, variance,
gain, shift: fp32 [O] or None; residual: bytes or fp32 of the result's shape, or None. Per output channel, in fp32 from
an exact int32 sum over quantised weights q:

    y = (x_scale * weight_scale * f) * sum((x - x_zero) * q) + ((bias - mean) * f + shift)
    f = gain / sqrt(variance + epsilon)

then the residual is added and the activation applied. The result is fp32 with an `out_scale` of 0, else the bytes
clamp(rint(y / out_scale) + out_zero, 0, TOP); it lies in channels_last order.

    int8_linear(x, weight, bias, x_scale, x_zero, activation)  fp32 [..., K] by fp32 [N, K], transposed: fp32 [..., N]
    int8_dynamic_linear(x, weight, bias, transposed)           in steps of each row; by fp32 [K, N] if transposed
    int8_quantise(x, gate, scale, zero)                        fp32 [N, C, H, W], times [N, C, 1, 1] if given -> bytes
    int8_max_pool(x, kernel, stride, padding, dilation)        the bytes of the max-pool: rounding keeps the order
    int8_weight(weight, groups)                                what the weight is multiplied as, in its shape

The overloads `shared` take `steps`, fp64 [rows, 2] of a scale and a zero, and a row in the place of each such pair of
numbers (x_at, residual_at, out_at; -1 for none): graphs that differ in steps alone are compiled once (shared_steps.py).

Whoever holds a weight packed, and no fp32 one, has int8_pack(weight, groups) -> payload, scales, sums, and int8_unpack;
int8_convolution, int8_linear and int8_dynamic_linear are `_packed` where they read `payload, scales, sums, size` as
`weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _image(x: Tensor, channels: int, size: Sequence[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
    shape = (x.shape[0], channels, *size)
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def window(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
            dilation: Sequence[int]) -> list[int | torch.SymInt]:  # fmt: skip
    """Height and width of what a window that moves over x gives."""
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    return [(x.shape[2 + i] + 2 * padding[i] - reach[i]) // stride[i] + 1 for i in range(len(kernel))]


def _convolved(x: Tensor, size: Sequence[int], in_bytes: bool, *rest: Any) -> Tensor:
    stride, padding, dilation = rest[7:10]
    dtype = torch.uint8 if in_bytes else torch.float32
    return _image(x, size[0], window(x, size[2:], stride, padding, dilation), dtype)


def _multiplied(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _multiplied_packed(
    x: Tensor, payload: Tensor, scales: Tensor, sums: Tensor, size: Sequence[int], *_: Any
) -> Tensor:
    return x.new_empty((*x.shape[:-1], size[0]))


def _quantised(x: Tensor, *_: Any) -> Tensor:
    return _image(x, x.shape[1], x.shape[2:], torch.uint8)


FAKES: dict[str, Callable[..., Tensor]] = {
    "int8_convolution": lambda x, weight, *rest: _convolved(x, weight.shape, rest[-2] != 0, *rest),
    "int8_convolution.shared": lambda x, weight, *rest: _convolved(x, weight.shape, rest[-1] >= 0, *rest),
    "int8_convolution_packed": lambda x, w, scales, sums, size, *rest: _convolved(x, size, rest[-2] != 0, *rest),
    "int8_convolution_packed.shared": lambda x, w, scales, sums, size, *rest: _convolved(x, size, rest[-1] >= 0, *rest),
    "int8_linear_packed": _multiplied_packed,
    "int8_linear_packed.shared": _multiplied_packed,
    "int8_unpack": lambda payload, scales, sums, size, groups: scales.new_empty(size),
    "int8_dynamic_linear": lambda x, weight, bias, turned: x.new_empty(
        (*x.shape[:-1], weight.shape[1 if turned else 0])
    ),
    "int8_dynamic_linear_packed": _multiplied_packed,
    "int8_linear": _multiplied,
    "int8_linear.shared": _multiplied,
    "int8_quantise": _quantised,
    "int8_quantise.shared": _quantised,
    "int8_max_pool": lambda x, *how: _image(x, x.shape[1], window(x, *how), torch.uint8),
    "int8_weight": lambda weight, _: weight.new_empty(weight.shape),
}
"""What each operator returns on fake tensors."""
