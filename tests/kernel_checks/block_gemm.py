"""Operands with a scale per block, what they stand for, and bounds of what is right."""

from __future__ import annotations

import torch

from dsmp.codegen.kernels.block_gemm import FORMAT_OF
from dsmp.passes.rounding import quantize

DTYPES = {name: dtype for dtype, name in FORMAT_OF.items()}

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def quantized(x, name, recipe, axis=-1):
    """Values in the format's dtype, and scales."""
    q = quantize(x, name, recipe, axis=axis)
    return q.values.to(DTYPES[name]), q.scale


def operands(phase, m, n, k, first="fp8_e4m3", second="fp8_e4m3", seed=0):
    """Operands of one GEMM of a linear layer as views of tensors of the layer: output [m, n], contraction k."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))

    if phase == "wgrad":
        a, sa = quantized(random(k, m), first, "1x128", 0)
        b, sb = quantized(random(k, n), second, "1x128", 0)
        return a.t(), b.t(), sa.t(), sb.t()
    a, sa = quantized(random(m, k), first, "1x128")
    if phase == "fprop":
        return a, *_swapped(*quantized(random(n, k), second, "128x128"), sa)
    b, sb = quantized(random(k, n), second, "128x128", 0)
    return a, *_swapped(b.t(), sb.t(), sa)


def _swapped(b, sb, sa):
    return b, sa, sb


def dequantized(values, scale):
    """An independent formula: one scale after the other."""
    out = values.double()
    step = values.size(0) if scale.size(0) == 1 else (1 if scale.size(0) == values.size(0) else 128)
    for i in range(scale.size(0)):
        for j in range(scale.size(1)):
            out[i * step : (i + 1) * step, j * 128 : (j + 1) * 128] *= scale[i, j].double()
    return out


def bound(a, b, sa, sb, dtype):
    """Of the error of fp32 sums of k products, each scaled, and of rounding the result."""
    x, w = dequantized(a, sa), dequantized(b, sb)
    k = a.size(1)
    return (k + 16) * 2.0**-24 * (x.abs() @ w.abs().T) + EPSILON[dtype] * (x @ w.T).abs() + 2.0**-24
