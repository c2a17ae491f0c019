"""Tensors to quantise, and what equals the simulator."""

from __future__ import annotations

import torch

from dsmp.codegen.kernels.scales import QUANTIZED_DTYPES
from dsmp.hardware_db.formats import FORMATS

FORMAT_NAMES = list(QUANTIZED_DTYPES)


def sample(*shape, dtype=torch.float32, seed=0):
    """Magnitudes over many binades, an outlier, a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 6, shape, generator=generator))
    if x.numel() > 200:
        x.view(-1)[17] = 3.0e4
        x[: shape[0] // 2, : min(128, shape[1])] = 0.0
    return x.to(dtype)


def bits(x):
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()]
    return x.contiguous().view(integer)


def assert_same(values, scale, expected, format):
    """values and scale are those of the simulator. inf and NaN of the input: where the format has an inf it is that
    one, where it has only NaN any NaN, and in int8 the scale of the block is NaN."""
    assert values.dtype is QUANTIZED_DTYPES[format] and values.shape == expected.values.shape
    finite = expected.values.isfinite()
    # the cast is exact: these are values of the format already
    cast = torch.where(finite, expected.values, 0.0).to(values.dtype)
    assert torch.equal(bits(values)[finite], bits(cast)[finite])
    if format != "int8":
        assert torch.equal(bits(scale), bits(expected.scale.reshape(scale.shape)))
        special, wanted = values.float()[~finite], expected.values[~finite]
        if FORMATS[format].inf_nan.has_inf:
            assert torch.equal(special.isnan(), wanted.isnan())
            assert torch.equal(special.nan_to_num(), wanted.nan_to_num())
        else:
            assert bool(special.isnan().all())
