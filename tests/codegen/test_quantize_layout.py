"""Operands that are quantised as a whole lie in memory as they did before: views of them stay views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsmp.codegen.ops import quantize
from dsmp.passes import rounding

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "heads": lambda x: x.transpose(1, 2),
    "sliced": lambda x: x[..., 3:11],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
    "matrix": lambda x: x[0, 0].T,
    "vector": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["fp16", "fp8_e4m3"])
def test_values_lie_as_their_source(layout: str, format: str) -> None:
    x = LAYOUTS[layout](torch.randn(2, 5, 7, 16))
    values, scale = quantize(x, format, "tensor", -1)
    assert values.stride() == torch.empty_like(x).stride()
    exact = rounding.quantize(x, format, "tensor")
    assert torch.equal(values.float(), exact.values)
    assert torch.equal(scale, exact.scale)
    torch.library.opcheck(quantize, (x, format, "tensor", -1), test_utils=("test_schema", "test_faketensor"))
