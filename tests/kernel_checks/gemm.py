"""Operands of the GEMM kernels, and bounds of what is right."""

from __future__ import annotations

import torch

from dsmp.codegen.kernels.gemm_configs import FORMAT_OF_DTYPE
from dsmp.hardware_db.formats import FORMATS

FP8 = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz")

FORMATS_TAKEN = ("fp32", "tf32", "bf16", "fp16", *FP8, "int8")


def dtype_of(format):
    return getattr(torch, FORMATS[format].torch_dtype)


def operand(*shape, format="fp32", seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (x * 40).round().clamp(-127, 127).to(torch.int8) if format == "int8" else x.to(dtype_of(format))


def integers(*shape, low=-3, high=4, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=generator).float()


def explicit(format):
    return {"format": "tf32"} if format == "tf32" else {}


def error_bound(a, b, k, factor=1.0):
    """Of the sum: k roundings in fp32, each of at most the sum of magnitudes. Products are exact in fp32 but for
    fp32 operands, whose rounding is one more."""
    return factor * (k + 3) * 2.0**-24 * (a.double().abs() @ b.double().abs())


def assert_close(got, expected, bound, dtype):
    """Equal up to `bound` and one rounding to dtype, which two neighbouring values may take apart."""
    fmt = FORMATS[FORMAT_OF_DTYPE[dtype]]
    spacing = fmt.epsilon * expected.abs() if fmt.kind == "float" else torch.ones_like(expected)
    error = (got.double() - expected).abs()
    assert got.dtype == dtype
    # a result may only differ by a step of its grid where the error of the sum can carry it over
    limit = bound + torch.where(bound > 0, spacing + fmt.smallest_subnormal, 0.0)
    assert (error <= limit).all(), float((error - limit).max())
