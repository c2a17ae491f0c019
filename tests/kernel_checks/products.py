"""Every kernel that multiplies against fp64, on any device: by its plain entry, or cut as a configuration says."""

from __future__ import annotations

import torch

from dsmp.codegen.kernels.block_gemm import block_gemm, block_gemm_call, block_gemm_configs, block_gemm_reference
from dsmp.codegen.kernels.gemm import gemm, gemm_reference
from dsmp.codegen.kernels.gemm_configs import gemm_configs
from dsmp.codegen.kernels.grouped_gemm import (
    grouped_columns_call,
    grouped_gemm,
    grouped_gemm_columns,
    grouped_gemm_columns_reference,
    grouped_gemm_configs,
    grouped_gemm_reference,
    grouped_rows_call,
)
from dsmp.codegen.kernels.mx_gemm import mx_gemm, mx_gemm_call, mx_gemm_configs, mx_gemm_reference
from dsmp.codegen.kernels.weight_only import weight_only, weight_only_configs, weight_only_reference

from .block_gemm import operands
from .gemm import explicit, operand
from .grouped_gemm import ends, fp8, random, scattered
from .mx_gemm import mx
from .mx_gemm import random as mx_random
from .weight_only import close, problem

FP32_UNIT = 2.0**-24
TRIED = 5  # configurations of each autotune space


def unit_of(device, format):
    """What an addition in a device's accumulator may lose, relative: half a step of fp32, or a step of the bits that it
    really keeps where they are fewer (Hopper's fp8; https://arxiv.org/abs/2412.19437, section 3.3.2)."""
    bits = device.accumulator_mantissa_bits(format)
    return FP32_UNIT if bits is None or bits >= 23 else 2.0**-bits


def assert_sums(got, exact, magnitude, k, unit=FP32_UNIT, promoted=None):
    """fp32 `got` is a sum of k products: element by element within the worst that roundings of `unit` can do to the sum
    of magnitudes, and as a whole within what they do to random signs, whose errors grow as the root of k.

    promoted: so many products are added up in units of `unit`, their sums in fp32.
    """
    assert got.dtype is torch.float32 and got.shape == exact.shape
    error = (got.double() - exact).abs()
    worst = (k + 16) * FP32_UNIT + (min(k, promoted) + 3) * unit if promoted else (k + 3) * unit
    limit = worst * magnitude + 2.0**-23 * exact.abs() + 1e-30
    excess = (error - limit).nan_to_num(torch.inf)
    assert (excess <= 0).all(), f"{float(excess.max()):.3g} above the bound of an element"
    typical = 16 * unit * magnitude.norm() + 2.0**-23 * exact.norm() + 1e-30
    assert error.norm() <= typical, f"errors are {float(error.norm() / typical):.3g} of what is typical"


def check_gemm(m, n, k, format, *, device, target=None, unit=FP32_UNIT, column_major=False):
    """The GEMM by its entry, or with a target in each of its first configurations."""
    a = operand(m, k, format=format).to(device)
    b = operand(n, k, format=format, seed=1).to(device).t() if column_major else None
    b = operand(k, n, format=format, seed=1).to(device) if b is None else b
    exact = gemm_reference(a, b, out_dtype=torch.float32, **explicit(format))
    magnitude = a.double().abs() @ b.double().abs()
    for config in gemm_configs(m, n, k, format, target)[:TRIED] if target else [None]:
        got = gemm(a, b, out_dtype=torch.float32, config=config, **explicit(format))
        if format == "int8":
            assert torch.equal(got.double(), exact), config
        else:
            assert_sums(got, exact, magnitude, k, unit)


def check_gemm_epilogue(format, *, device, unit=FP32_UNIT, m=130, n=96, k=192):
    """Scales per row, bias, residual and activation at once; bounds as of the plain sums, an activation of 1.13."""
    a, b = operand(m, k, format=format).to(device), operand(k, n, format=format, seed=1).to(device)
    sa, sb = (operand(s).abs().to(device) + 0.1 for s in (m, n))
    bias, residual = operand(n, format="bf16").to(device), operand(m, n, format="fp16").to(device)
    parts = {"scale_a": sa, "scale_b": sb, "alpha": 0.25, "bias": bias, "residual": residual, "activation": "silu"}
    parts |= explicit(format)
    got = gemm(a, b, out_dtype=torch.float32, **parts)
    exact = gemm_reference(a, b, out_dtype=torch.float32, **parts)
    magnitude = 0.25 * (a.double().abs() @ b.double().abs()) * sa.double()[:, None] * sb.double()
    allowed = 1.2 * (k + 3) * unit * magnitude + 2.0**-20 * (1 + exact.abs() + residual.double().abs())
    assert ((got.double() - exact).abs() <= allowed).all()


def check_block_gemm(m, n, k, phase, formats, *, device, target=None, unit=FP32_UNIT):
    """The three GEMMs of a linear layer on block-scaled operands; `unit` counts within the 128 that are promoted."""
    a, b, sa, sb = (t.to(device) for t in operands(phase, m, n, k, *formats))
    exact = block_gemm_reference(a, b, sa, sb)
    magnitude = block_gemm_reference(a.double().abs(), b.double().abs(), sa, sb)
    for config in block_gemm_configs(m, n, k, target)[:TRIED] if target else [None]:
        if config is None:
            got = block_gemm(a, b, sa, sb, dtype=torch.float32)
        else:
            got = torch.full((m, n), torch.nan, device=device)
            block_gemm_call(a, b, got, sa, sb, config=config).run()
        assert_sums(got, exact, magnitude, k, unit, promoted=128)


def check_mx_gemm(m, n, k, first, second, *, device, target=None):
    """MX operands; with a target in each configuration."""
    a, sa = (t.to(device) for t in mx(mx_random(m, k), first))
    b, sb = (t.to(device) for t in mx(mx_random(n, k, seed=1), second))
    exact = mx_gemm_reference(a, b, sa, sb)
    magnitude = _absolute_mx(a, b, sa, sb)
    for config in mx_gemm_configs(m, n, k, target, dtype=a.dtype)[:TRIED] if target else [None]:
        if config is None:
            got = mx_gemm(a, b, sa, sb, dtype=torch.float32)
        else:
            got = torch.full((m, n), torch.nan, device=device)
            mx_gemm_call(a, b, got, sa, sb, config=config).run()
        assert_sums(got, exact, magnitude, k)


def _absolute_mx(a, b, sa, sb):
    """The sum of magnitudes: fp8 values and codes of fp4 lose their signs in different ways."""
    parts = []
    for values, scale in ((a, sa), (b, sb)):
        plain = values & 0x77 if values.dtype is torch.uint8 else values.double().abs()
        parts.append((plain, scale))
    return mx_gemm_reference(parts[0][0], parts[1][0], parts[0][1], parts[1][1])


def check_grouped_rows(sizes, n, k, dtype, *, device, target=None, unit=FP32_UNIT, behind=3):
    """fprop of a mixture of experts: plain values, or fp8 with scales of blocks."""
    m, offsets = sum(sizes) + behind, ends(sizes).to(device)
    if dtype is torch.float8_e4m3fn:
        a, sa = (t.to(device) for t in fp8(random(m, k), "1x128")[:2])
        b, sb = (t.to(device) for t in fp8(random(len(sizes), n, k), "128x128")[:2])
    else:
        a, b = random(m, k).to(device, dtype), random(len(sizes), n, k).to(device, dtype)
        sa = sb = None
    exact = grouped_gemm_reference(a, b, offsets, sa, sb)
    magnitude = grouped_gemm_reference(a.double().abs(), b.double().abs(), offsets, sa, sb)
    rows = m // len(sizes)
    for config in grouped_gemm_configs(rows, n, target, dtype=dtype)[:TRIED] if target else [None]:
        if config is None:
            got = grouped_gemm(a, b, offsets, sa, sb, dtype=torch.float32)
        else:
            got = torch.full((m, n), torch.nan, device=device)
            grouped_rows_call(a, b, got, offsets, sa, sb, config=config).run()
        assert torch.equal(got[m - behind :], torch.zeros(behind, n, device=device)), "rows behind the last group"
        assert_sums(got, exact, magnitude, k, unit, promoted=128 if sa is not None else None)


def check_grouped_columns(sizes, n, k, dtype, *, device, target=None, unit=FP32_UNIT, behind=3):
    """wgrad of a mixture of experts."""
    m, offsets = sum(sizes) + behind, ends(sizes).to(device)
    if dtype is torch.float8_e4m3fn:
        a, sa = (t.to(device) for t in scattered(random(m, n), sizes)[:2])
        b, sb = (t.to(device) for t in scattered(random(m, k, seed=1), sizes)[:2])
    else:
        a, b = random(m, n).to(device, dtype), random(m, k, seed=1).to(device, dtype)
        sa = sb = None
    exact = grouped_gemm_columns_reference(a, b, offsets, sa, sb)
    magnitude = grouped_gemm_columns_reference(a.double().abs(), b.double().abs(), offsets, sa, sb)
    for config in grouped_gemm_configs(n, k, target, dtype=dtype)[:TRIED] if target else [None]:
        if config is None:
            got = grouped_gemm_columns(a, b, offsets, sa, sb, dtype=torch.float32)
        else:
            got = torch.full((len(sizes), n, k), torch.nan, device=device)
            grouped_columns_call(a, b, got, offsets, sa, sb, config=config).run()
        assert_sums(got, exact, magnitude, max(sizes), unit, promoted=128 if sa is not None else None)


def check_weight_only(m, n, k, bits, group, dtype, *, device, target=None, units=128):
    """Weights of 4 and 8 bits; with a target in each of the first configurations."""
    parts = problem(m, n, k, bits, group, dtype, zeros=bits == 4)
    x, packed, scale, zero = (t if t is None else t.to(device) for t in parts)
    exact = weight_only_reference(x, packed, scale, group=group, zero=zero)
    space = weight_only_configs(m, n, k, group, bits, dtype, target, units=units)[:TRIED] if target else [None]
    for config in space:
        got = weight_only(x, packed, scale, group=group, zero=zero, config=config, out_dtype=torch.float32)
        close(got, exact)
