"""Gradients to unscale, and what equals the reference."""

from __future__ import annotations

import math

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(x):
    integer = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(integer)


def sample(size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-30, 12, (size,), generator=generator))
    x[::7] = 0.0
    return x.to(dtype)


def inverse(scale):
    return torch.tensor(1.0 / scale)


def assert_statistics(found, expected):
    assert torch.equal(found.histogram, expected.histogram)
    assert torch.equal(found.found_inf, expected.found_inf)
    assert torch.equal(bits(found.amax), bits(expected.amax))
