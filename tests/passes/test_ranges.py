from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsmp.passes.ranges import Range, range_of
from dsmp.passes.rounding import round_to


def test_counts_by_binade():
    seen = range_of(torch.tensor([0.0, 1.0, 1.5, -300.0, 1e-40, math.inf, math.nan]))
    assert seen == Range(absmax=300.0, exponents={-127: 1, 0: 2, 8: 1}, zeros=1, nonfinite=2, low=-300.0, high=1.5)
    assert seen.count == 7


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_the_largest_magnitude_and_the_count(values):
    x = torch.tensor(values, dtype=torch.float32)
    seen = range_of(x)
    assert seen.absmax == float(x.abs().max())
    assert seen.count == len(values)
    assert seen.zeros == int((x == 0).sum())


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_flush_and_overflow_agree_with_rounding(name):
    """Up to the binade of the format's borders, which is counted as within."""
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.linspace(-40, 40, 20_000)
    rounded = round_to(x, name)
    seen = range_of(x)
    lost = float(((rounded == 0) & (x != 0)).float().mean())
    over = float((~rounded.isfinite()).float().mean())
    assert seen.flushed(name) == pytest.approx(lost, abs=0.02)
    assert seen.overflowed(name) == pytest.approx(over, abs=0.02)


def test_scaling_to_the_top_of_a_format_saves_small_values():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-6
    seen = range_of(x)
    assert seen.flushed("fp8_e4m3") == 1.0
    assert seen.flushed("fp8_e4m3", scaled=True) < 0.01


def test_merging_is_seeing_both():
    a, b = torch.randn(100), 1e3 * torch.randn(100)
    assert range_of(a).merged(range_of(b)) == range_of(torch.cat([a, b]))


def test_the_ends_of_a_range_are_known_or_not():
    seen = range_of(torch.tensor([-2.0, 1.0, 5.0]))
    assert seen.ends == (-2.0, 5.0) and seen.reaching(-3.0, 1.0).ends == (-3.0, 5.0)
    assert seen.reaching(math.nan, 9.0).ends == (-2.0, 5.0), "what is not finite is no end"
    assert Range(absmax=1.0, exponents={}).ends is None and range_of(torch.zeros(0)).ends is None


def test_other_dtypes_and_empty_tensors():
    assert range_of(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).absmax == 2.0
    assert range_of(torch.zeros(0)).count == 0
    assert range_of(torch.zeros(3)).absmax == 0.0
