"""Operands in MX formats."""

from __future__ import annotations

import math

import torch

from dsmp.codegen.kernels.mx_gemm import to_e8m0
from dsmp.passes.rounding import quantize

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "fp4_e2m1": torch.uint8}

FP4 = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}


def packed(values):
    """fp4 values, an even number a row, two to a byte."""
    code = torch.tensor([FP4[abs(v)] | (8 if math.copysign(1, v) < 0 else 0) for v in values.flatten().tolist()])
    code = code.view(-1, 2)
    return (code[:, 0] | code[:, 1] << 4).to(torch.uint8).view(values.size(0), values.size(1) // 2)


def mx(x, name):
    """(values, E8M0 bytes) of the simulator's recipe mx32."""
    q = quantize(x, name, "mx32")
    values = packed(q.values) if name == "fp4_e2m1" else q.values.to(DTYPES[name])
    return values, to_e8m0(q.scale)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
