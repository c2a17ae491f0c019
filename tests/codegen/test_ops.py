"""The operators' shapes, dtypes and strides are what their fakes tell compilers, for empty operands as well."""

from __future__ import annotations

import pytest
import torch

from dsmp.codegen import ops

SHAPES = [(0, 0), (0, 5), (3, 0), (1, 1), (17, 130), (128, 256)]
CHECKS = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("recipe", ["tensor", "row", "1x128", "128x128", "mx32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize(shape: tuple[int, int], recipe: str, axis: int) -> None:
    torch.library.opcheck(ops.quantize, (torch.randn(shape), "fp8_e4m3", recipe, axis), test_utils=CHECKS)


@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_both(shape: tuple[int, int]) -> None:
    torch.library.opcheck(ops.quantize_both, (torch.randn(shape), "fp8_e4m3"), test_utils=CHECKS)


@pytest.mark.parametrize("shape", SHAPES)
def test_gated_quantize(shape: tuple[int, int]) -> None:
    gate, up = torch.randn(shape), torch.randn(shape)
    for op in (ops.gated_quantize, ops.gated_quantize_both):
        torch.library.opcheck(op, (gate, up, "fp8_e4m3"), test_utils=CHECKS)
