"""Problems with packed weights, and bounds of what is right."""

from __future__ import annotations

import torch

from dsmp.codegen.kernels.packed_weights import quantize_weight


def problem(m, n, k, bits, group, dtype, zeros=False, scale_dtype=torch.float32):
    torch.manual_seed(m + n + k + bits)
    packed, scale = quantize_weight(torch.randn(n, k), bits, group, scale_dtype=scale_dtype)
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8) if zeros else None
    return torch.randn(m, k).to(dtype), packed, scale, zero


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32 sums of exact products: errors are of 2^-24 of the largest, times the root of their number."""
    assert result.shape == expected.shape
    assert (result.double() - expected).abs().max() <= 3e-6 * max(1.0, float(expected.abs().max()))
