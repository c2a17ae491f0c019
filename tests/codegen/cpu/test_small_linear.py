"""Products with packed weights against fp64, in every format, for sizes that fill no panel, step, group or tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_linears import FORMATS, bound, needs_kernels, pack
from torch import Tensor

ROWS = (0, 1, 2, 3, 5, 16, 33, 200)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    needs_kernels()


def check(weight: Tensor, x: Tensor, bias: Tensor | None, format: str) -> None:
    packed = pack(weight, format)
    exact = x.double() @ packed.values.double().t() + (0 if bias is None else bias.double())
    for name, product in packed.products.items():
        y = product(x, bias)
        assert y.dtype == torch.float32 and y.shape == exact.shape
        error = (y.double() - exact).abs()
        allowed = bound(x, packed.values, name, packed.group) + exact.abs() * 2.0**-23
        assert (error <= allowed).all(), f"{name}: {error.max():.3g}, allowed {allowed.min():.3g}"


def random(n: int, k: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 7 + k * 3 + m)
    weight, x = (torch.randn(rows, k, generator=generator) for rows in (n, m))
    return weight, x, torch.randn(n, generator=generator)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 7), (17, 130), (1000, 130), (17, 4096), (3, 1), (16, 1030)])
def test_products(n: int, k: int, format: str) -> None:
    for m in ROWS:
        weight, x, bias = random(n, k, m)
        check(weight, x, bias if m % 2 else None, format)


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 20), st.sampled_from(FORMATS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_products_of_any_size(n: int, k: int, m: int, format: str, biased: bool) -> None:
    weight, x, bias = random(n, k, m)
    check(weight, x, bias if biased else None, format)


@pytest.mark.parametrize("format", FORMATS)
def test_largest_values_overflow_nothing(format: str) -> None:
    """Every integer at its end, so that exact sums in int16 and int32 are as large as they get."""
    for sign in (1.0, -1.0):
        check(torch.full((16, 4096), 3.0), torch.full((5, 4096), sign * 2.0), None, format)


@pytest.mark.parametrize("format", FORMATS)
def test_outputs_do_not_depend_on_threads(format: str) -> None:
    weight, x, bias = random(500, 1030, 5)
    products = pack(weight, format).products
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([product(x, bias) for product in products.values()])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("format", FORMATS)
def test_leading_dimensions_and_strides(format: str) -> None:
    weight, _, bias = random(20, 70, 1)
    wide = torch.randn(2, 70, 3, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    for product in pack(weight, format).products.values():
        y = product(wide, bias)
        assert y.shape == (2, 3, 20)
        assert torch.equal(y, product(wide.contiguous().view(6, 70), bias).view(2, 3, 20))
        # as many rows as above: how rows are tiled decides how their sums are ordered
        row = product(wide[1, 1], bias)
        assert row.shape == (20,) and torch.allclose(row, y[1, 1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_not_finite(format: str, bad: float) -> None:
    """A row with one such entry gives none but such outputs; the others are as without it."""
    for m in (1, 2, 6):
        weight, x, _ = random(20, 130, m)
        spoilt = x.clone()
        spoilt[m - 1, 77] = bad
        for product in pack(weight + 4, format).products.values():
            y = product(spoilt, None)
            assert not y[m - 1].isfinite().any()
            assert torch.equal(y[: m - 1], product(x, None)[: m - 1])


def test_zero_and_tiny_rows() -> None:
    for format in FORMATS:
        weight, _, bias = random(20, 130, 1)
        for product in pack(weight, format).products.values():
            assert torch.equal(product(torch.zeros(3, 130), bias), bias.expand(3, 20))
            assert product(torch.full((2, 130), 1e-42), bias).sub(bias).abs().max() < 1e-35


def test_layers_without_inputs() -> None:
    ops = torch.ops.dsmp_cpu
    payload = ops.pack_fp32(torch.empty(5, 0))
    bias = torch.arange(5.0)
    assert torch.equal(ops.linear_fp32(torch.empty(3, 0), payload, bias, 5), bias.expand(3, 5))
    assert torch.equal(ops.linear_fp32(torch.empty(3, 0), payload, None, 5), torch.zeros(3, 5))


def test_mistakes() -> None:
    ops = torch.ops.dsmp_cpu
    payload = ops.pack_fp32(torch.randn(20, 30))
    with pytest.raises(ValueError, match="packed for other sizes or another format"):
        ops.linear_fp32(torch.randn(2, 40), payload, None, 20)
    with pytest.raises(ValueError, match="packed for other sizes or another format"):
        ops.linear_fp16(torch.randn(2, 30), payload, None, 20)
    with pytest.raises(ValueError, match="rows for a packed linear layer are fp32"):
        ops.linear_fp32(torch.randn(2, 30).double(), payload, None, 20)
    with pytest.raises(ValueError, match=r"the bias is fp32 of shape \[20\]"):
        ops.linear_fp32(torch.randn(2, 30), payload, torch.randn(1), 20)
    packed = ops.pack_int4(torch.randn(20, 130), 64, False, False)
    with pytest.raises(ValueError, match="scales of 20 x 130 weights in groups of 32"):
        ops.linear_int4(torch.randn(2, 130), *packed, None, 20, 32)
    with pytest.raises(ValueError, match="groups of int4 are 32, 64 or 128 columns, not 16"):
        ops.pack_int4(torch.randn(20, 130), 16, False, False)
