"""Softmax and log-softmax kernels, interpreted, against fp64 and torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks.softmax import check, draw
from row_kernels import CASES, CONFIGS, DTYPES, FORMATS, LAYOUTS, STRIDES, WALKED, assert_within, laid_out

from dsmp.codegen.kernels.softmax import (
    softmax,
    softmax_backward,
    softmax_backward_reference,
    softmax_call,
    softmax_configs,
    softmax_reference,
)
from dsmp.codegen.targets import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and inf


@pytest.mark.parametrize(("size", "config"), CASES)
def test_equals_fp64_for_awkward_sizes(size, config):
    check(draw(5, size), draw(5, size, seed=1), config=CONFIGS[config])


@pytest.mark.parametrize(("inner", "outer", "config"), FORMATS)
def test_formats_mix(inner, outer, config):
    check(draw(4, 129, inner), draw(4, 129, outer, seed=1), dtype=outer, config=CONFIGS[config])


@pytest.mark.parametrize(("layout", "config"), STRIDES)
def test_any_strides(layout, config):
    other = LAYOUTS[LAYOUTS.index(layout) - 1]
    check(laid_out(draw(4, 150), layout), laid_out(draw(4, 150, seed=1), other), config=CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
def test_small_results_have_all_their_digits(config):
    """e^-80 by exp2(-80 log2 e), the usual way, is off by 60 ulps."""
    x = -torch.arange(80.0).repeat(2)[None]
    check(x, draw(1, 160, seed=1), config=CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("log", [False, True])
def test_masks_nan_and_inf_as_in_torch(log, config):
    x, dy = draw(8, 150), draw(8, 150, seed=1)
    x[0, 40:] = -torch.inf
    x[1, :140] = -torch.inf  # the first blocks of a walk have nothing
    x[2] = -torch.inf
    x[3, 7] = torch.nan
    x[4, 149] = torch.inf
    x[5] = torch.inf
    x[6, ::2] = torch.finfo(torch.float32).min
    x.requires_grad_()
    expected = F.log_softmax(x, -1) if log else F.softmax(x, -1)
    (expected_dx,) = torch.autograd.grad(expected, x, dy)
    y = softmax(x.detach(), log=log, config=CONFIGS[config])
    assert y[2:6].isnan().all() and not y[[0, 1, 6, 7]].isnan().any()
    torch.testing.assert_close(y, expected.detach(), equal_nan=True, rtol=1e-5, atol=1e-6)
    dx = softmax_backward(dy, y, log=log, config=CONFIGS[config])
    torch.testing.assert_close(dx, expected_dx, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_leading_dimensions_and_outputs_of_any_strides():
    x = draw(24, 40).view(2, 3, 4, 40).transpose(0, 2)
    y = softmax(x)
    assert_within(y, softmax_reference(x), 1e-6)
    assert_within(softmax_backward(x, y), softmax_backward_reference(x, y), 1e-5)
    assert_within(softmax(x[0, 0, 0], log=True), softmax_reference(x[0, 0, 0], log=True), 1e-5)
    flat, out = draw(5, 130), torch.empty(130, 5).t()
    for wide in (False, True):
        call = softmax_call(flat, out.fill_(torch.nan), config=WALKED)
        dataclasses.replace(call, constants={**call.constants, "WIDE": wide}).run()
        assert_within(out, softmax_reference(flat), 1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_empty(shape):
    x = torch.ones(shape)
    assert softmax(x).shape == softmax_backward(x, x).shape == shape


def test_references_are_torchs():
    x, dy = draw(4, 50, torch.float64).requires_grad_(), draw(4, 50, torch.float64, seed=1)
    for log in (False, True):
        y = F.log_softmax(x, -1) if log else F.softmax(x, -1)
        torch.testing.assert_close(softmax_reference(x, log=log), y)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(softmax_backward_reference(dy, y, log=log), dx)


@given(
    rows=st.integers(1, 6),
    size=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.01, 1.0, 30.0, 1000.0]),
    config=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=8, deadline=None)
def test_any_shape_and_magnitude(rows, size, dtype, scale, config, seed):
    x = draw(rows, size, dtype, scale, seed)
    check(x, draw(rows, size, seed=seed + 1), dtype=torch.float32, config=CONFIGS[config])


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_configurations_fit_the_target(target):
    for size in (1, 100, 128, 4096, 16384, 128256):
        found = softmax_configs(size, target)
        assert found and len(found) == len({(c.text, c.num_warps) for c in found})
        assert all(c.num_warps * target.warp_size <= 512 for c in found)
    assert softmax_configs(16384, target)[0].blocks["BLOCK"] == 16384
    assert softmax_configs(128, target)[0].blocks == {"ROWS": 8, "BLOCK": 128}
