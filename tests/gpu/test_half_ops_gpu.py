"""Attention and convolutions in scaled fp16 by the libraries of the running GPU, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dsmp.codegen.half_ops import HALF_OPS

pytestmark = pytest.mark.gpu

SCALES = [(1, 1, 1, 1), (1e-6, 1, 1, 1e-9), (1e-6, 1e-6, 1e4, 1e-9), (1e4, 1e-4, 1e-6, 1e4)]


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("length", "width"), [(128, 64), (1000, 128), (77, 20)])
def test_attention(scales, causal, masked, length, width, device):
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(2, length, 4, width, device=device).transpose(1, 2) * s for s in scales)
    mask = None
    if masked:
        rows = torch.zeros(2, 4, length, -(-length // 16) * 16, device=device)[..., :length]
        rows[0, :, :, length // 2 :] = torch.finfo(torch.float32).min
        mask = rows
    name = "aten._scaled_dot_product_efficient_attention"
    out, log_sum, seed, offset = HALF_OPS[name](q, k, v, mask, True, 0.0, causal)
    wanted_of = [True, True, True, False]
    gradients = HALF_OPS[f"{name}_backward"](
        dy, q, k, v, mask, out, log_sum, seed, offset, 0.0, wanted_of, causal
    )  # fmt: skip
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = scaled_dot_product_attention(*wide, attn_mask=None if mask is None else mask.double(), is_causal=causal)
    wanted = (exact.detach(), *torch.autograd.grad(exact, wide, dy.double()))
    for found, w in zip((out, *gradients), wanted, strict=False):
        assert found.dtype == torch.float32
        assert error(found, w) < 3e-3


@pytest.mark.parametrize("scales", [(1, 1, 1), (1e-6, 1e4, 1e-9), (1e4, 1e4, 1e4)], ids=str)
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(scales, groups, transposed, layout, device):
    torch.manual_seed(0)
    x = torch.randn(4, 64, 28, 28, device=device).to(memory_format=layout) * scales[0]
    weight = torch.randn(64, 64 // groups, 3, 3, device=device) * scales[1]
    how = ([2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)
    mask = [True, True, False]
    exact = torch.ops.aten.convolution(x.double(), weight.double(), None, *how)
    dy = torch.randn_like(exact).float() * scales[2]
    wanted = torch.ops.aten.convolution_backward(dy.double(), x.double(), weight.double(), None, *how, mask)
    found = HALF_OPS["aten.convolution_backward"](dy, x, weight, None, *how, mask)
    assert error(HALF_OPS["aten.convolution"](x, weight, None, *how), exact) < 1e-3
    for f, w in zip(found[:2], wanted[:2], strict=True):
        assert error(f, w) < 1e-3
