"""Softmax and its gradient against fp64."""

from __future__ import annotations

import torch
from row_kernels import ULP, assert_within

from dsmp.codegen.kernels.softmax import softmax, softmax_backward, softmax_backward_reference, softmax_reference

TINY = 2.0**-126  # what is not a normal number may be zero


def draw(rows, size, dtype=torch.float32, scale=4.0, seed=0):
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check(x, dy, *, dtype=None, config=None):
    """Forward and backward of both, within the rounding of x - max (whose exponential it multiplies by 1 + |x - max|
    ulps) and of a few operations."""
    for log in (False, True):
        y = softmax(x, log=log, dtype=dtype, config=config)
        exact = softmax_reference(x, log=log)
        assert y.dtype == (dtype or x.dtype)
        depth = 6 + (x.double().amax(-1, keepdim=True) - x.double()).abs()
        assert_within(y, exact, ULP * (depth if log else (exact * depth).nan_to_num(0) + TINY))
        dx = softmax_backward(dy, y, log=log, dtype=dtype, config=config)
        d, out = dy.double(), y.double()
        if log:
            size = d.abs() + out.exp() * (1 + out.abs().nan_to_num(0, 0, 0)) * d.abs().sum(-1, keepdim=True)
        else:
            size = out.abs() * (d.abs() + (out * d).abs().sum(-1, keepdim=True))
        slack = (6 * ULP * size).nan_to_num(0) + TINY
        assert_within(dx, softmax_backward_reference(dy, y, log=log), slack)
