"""What is right where quantisation is fused with something."""

from __future__ import annotations

import torch

from dsmp.passes.rounding import quantize


def assert_quantized(blocks, result, format, recipe="1x128"):
    """blocks holds `result` quantised, along rows and, where there are, columns."""
    for values, scale, axis in ((blocks.rows, blocks.row_scale, 1), (blocks.columns, blocks.column_scale, 0)):
        if values is not None:
            expected = quantize(result, format, recipe, axis=axis)
            assert torch.equal(values.float(), expected.values)
            assert torch.equal(scale, expected.scale)


def assert_close(found, reference, ulps=16.0):
    """fp32 of a sum of products: a few ulps of the largest value of a row."""
    bound = ulps * 2.0**-24 * reference.abs().amax(-1, keepdim=True).clamp(min=1.0)
    assert bool(((found.double() - reference).abs() <= bound).all())
