"""Rounding as operators: registered right, strides kept, and not removed by compilers."""

from __future__ import annotations

import pytest
import torch

from dsmp.passes import rounding_ops
from dsmp.passes.rounding import fake_quantize

LAYOUTS = {
    "contiguous": torch.randn(4, 6),
    "transposed": torch.randn(6, 4).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 6).expand(4, 6),
    "sliced": torch.randn(8, 9)[::2, 1:7],
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "empty": torch.randn(0, 4),
    "scalar": torch.randn(()),
}
SCHEMES = [
    ("fp8_e4m3", "1x128"),
    ("fp8_e4m3", "128x128"),
    ("fp8_e4m3", "mx32"),
    ("fp16", "tensor"),
    ("tf32", "none"),
    ("bf16", "none"),
    ("int8", "row"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_keep_what_they_promise(layout):
    x = LAYOUTS[layout]
    for format, recipe in SCHEMES[:3] + SCHEMES[4:5]:
        if recipe == "128x128" and x.dim() < 2:
            continue
        torch.library.opcheck(rounding_ops.fake_quantize_op, (x, format, recipe, -1))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        torch.library.opcheck(rounding_ops.cast_op, (x, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("format", "recipe"), SCHEMES)
def test_values_and_strides_of_rounding(layout, format, recipe):
    x = LAYOUTS[layout]
    kept = x.clone()
    y = torch.ops.dsmp.fake_quantize(x, format, recipe, -1)
    assert torch.equal(y, fake_quantize(x, format, recipe, axis=-1))
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(x, kept)
    assert x.numel() == 0 or y.data_ptr() != x.data_ptr(), "a result must not alias its input"


def test_a_format_that_holds_the_input_still_gives_a_new_tensor():
    x = torch.randn(3, 4)
    y = torch.ops.dsmp.fake_quantize(x, "fp32", "none", -1)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_and_strides_of_casts(layout, dtype):
    x = LAYOUTS[layout]
    y = torch.ops.dsmp.cast(x, dtype)
    assert torch.equal(y, x.to(dtype)) and y.dtype == dtype
    assert y.stride() == torch.empty_like(x, dtype=dtype).stride()


def test_casts_round_to_nearest_even_and_overflow_to_infinity():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -0.0, float("nan")])
    y = torch.ops.dsmp.cast(x, torch.bfloat16).float()
    assert y[:2].tolist() == [1.0, 1 + 2**-6] and torch.isinf(y[2]) and torch.isnan(y[4])
    assert torch.signbit(y[3])


@pytest.mark.slow
def test_inductor_removes_no_rounding():
    def function(x):
        narrow = torch.ops.dsmp.cast(x * 1.5, torch.bfloat16).float()
        return narrow + 1, torch.ops.dsmp.fake_quantize(x * 1.5, "bf16", "none", -1) + 1

    x = torch.randn(1000)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)(x)
    expected = (x * 1.5).bfloat16().float() + 1
    for actual in compiled:
        assert torch.equal(actual, expected)
    assert not torch.equal(expected, x * 1.5 + 1)
