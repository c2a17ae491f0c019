"""Static steps: bytes that reach over a range."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsmp.passes.rounding_noise import Spread
from dsmp.passes.static_steps import TOP, Steps, fake_quantize_static, rounded_over_own_range, steps_of

ENDS = st.floats(-1e6, 1e6, width=32)


@given(ENDS, ENDS, st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_values_within_the_range_move_by_half_a_step_and_zero_stays(a, b, places):
    low, high = min(a, b, 0.0), max(a, b, 0.0)
    steps = steps_of(a, b) if a <= b else steps_of(b, a)
    x = torch.tensor([low + p * (high - low) for p in places] + [0.0])
    y = fake_quantize_static(x, min(a, b), max(a, b))
    assert 0 <= steps.zero <= TOP and float(y[-1]) == 0.0
    if high > low and math.isfinite(steps.scale) and steps.scale > 1e-30:
        # the zero point is rounded itself, so that the ends may be half a step off
        bound = steps.scale * (1.001 if low < 0 < high else 0.5001) + 1e-6 * (high - low)
        assert float((y - x).abs().max()) <= bound


def test_values_beyond_go_to_the_ends_and_nan_stays():
    y = fake_quantize_static(torch.tensor([9.0, -9.0, math.nan, math.inf]), 0.0, 1.27)
    assert torch.allclose(y[:2], torch.tensor([1.27, 0.0])) and y[2].isnan() and float(y[3]) == float(y[0])


def test_a_range_without_extent_has_steps_of_one():
    assert steps_of(0.0, 0.0) == Steps(1.0, 0) == steps_of(0.0, math.inf) == steps_of(0.0, 1e-40)
    assert fake_quantize_static(torch.zeros(2), 0.0, 1e-44).tolist() == [0.0, 0.0]


def test_strides_and_empty_tensors():
    x = torch.randn(3, 4, 5).transpose(0, 2)
    assert fake_quantize_static(x, -3.0, 3.0).stride() == x.stride()
    assert rounded_over_own_range(torch.zeros(0, 3)).shape == (0, 3)


def test_the_estimate_bounds_what_rounding_costs():
    """Gradients of one: the squared error is near the estimate for a symmetric range, below it for one side of 0."""
    for x, least in ((torch.rand(20_000), 0.2), (2 * torch.rand(20_000) - 1, 0.8)):
        spread = Spread(by_tensor=float(x.numel() * x.abs().max() ** 2))
        measured = float((rounded_over_own_range(x) - x).square().sum())
        assert least < measured / spread.variance("int8", "static") < 1.05
