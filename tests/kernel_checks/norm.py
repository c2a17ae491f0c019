"""Norms and their gradients against fp64."""

from __future__ import annotations

import torch
from row_kernels import ULP, assert_within

from dsmp.codegen.kernels.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from dsmp.codegen.kernels.norm_backward import layer_norm_backward, norm_backward_reference, rms_norm_backward

EPS = 1e-5


def draw(rows, size, dtype=torch.float32, mean=0.0, seed=0):
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype)


def check_forward(x, weight, bias, *, dtype=None, config=None, eps=EPS):
    """Both norms of x [M, N] within a few ulps of fp32 and the rounding of the output."""
    y, mean, rstd = layer_norm(x, weight, bias, eps, dtype=dtype, config=config)
    exact_y, exact_mean, exact_rstd = layer_norm_reference(x, weight, bias, eps)
    assert y.dtype == (dtype or x.dtype)
    w = 1.0 if weight is None else weight.double().abs()
    b = 0.0 if bias is None else bias.double().abs()
    n = layer_norm_reference(x, None, None, eps)[0].abs()
    assert_within(y, exact_y, 6 * ULP * ((1 + n) * w + b))
    assert_within(mean, exact_mean, 2 * ULP / exact_rstd)
    assert_within(rstd, exact_rstd, 6 * ULP * exact_rstd)
    y, rstd = rms_norm(x, weight, eps, dtype=dtype, config=config)
    exact_y, exact_rstd = rms_norm_reference(x, weight, eps)
    assert_within(y, exact_y, 6 * ULP * exact_y.abs())
    assert_within(rstd, exact_rstd, 6 * ULP * exact_rstd)


def check_backward(dy, x, weight, bias, *, dtype=None, config=None, eps=EPS):
    """Both backwards of x [M, N], errors relative to the sums of magnitudes of what is added."""
    for centred in (True, False):
        if centred:
            _, mean, rstd = layer_norm(x, weight, bias, eps, config=config)
            got = layer_norm_backward(dy, x, mean, rstd, weight, bias, dtype=dtype, config=config)
            n, _, exact_rstd = layer_norm_reference(x, None, None, eps)
        else:
            _, rstd = rms_norm(x, weight, eps, config=config)
            got = (*rms_norm_backward(dy, x, rstd, weight, dtype=dtype, config=config), None)
            n, exact_rstd = rms_norm_reference(x, None, eps)
        dx, dweight, dbias = norm_backward_reference(dy, x, weight, eps=eps, centred=centred)
        g = (dy.double() if weight is None else dy.double() * weight.double()).abs()
        n = n.abs() + 1
        size = g + g.mean(-1, keepdim=True) + n * (g * n).mean(-1, keepdim=True)
        assert_within(got[0], dx, 8 * ULP * size * exact_rstd[:, None])
        assert got[0].dtype == (dtype or x.dtype)
        if weight is None:
            assert got[1] is None
        else:
            assert got[1].dtype == weight.dtype
            assert_within(got[1], dweight, 8 * ULP * (dy.double().abs() * n).sum(0))
        if bias is None or not centred:
            assert got[2] is None
        else:
            assert_within(got[2], dbias, 4 * ULP * dy.double().abs().sum(0))
