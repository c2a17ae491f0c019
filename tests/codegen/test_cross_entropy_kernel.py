"""Cross-entropy kernels, interpreted, against fp64 and torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks.cross_entropy import check, draw
from row_kernels import CASES, CONFIGS, DTYPES, STRIDES, WALKED, laid_out

from dsmp.codegen.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_call,
    cross_entropy_configs,
    cross_entropy_reference,
)
from dsmp.codegen.targets import TARGETS

EXTRAS = ({}, {"label_smoothing": 0.1}, {"z_weight": 1e-3}, {"label_smoothing": 0.3, "z_weight": 1e-2})
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and inf


@pytest.mark.parametrize(("classes", "config"), CASES)
def test_equals_fp64_for_awkward_sizes(classes, config):
    check(*draw(5, classes), config=CONFIGS[config], label_smoothing=0.1, z_weight=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_formats_and_terms(dtype, extras):
    check(*draw(5, 129, dtype), **extras)


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_terms_where_rows_are_walked(extras):
    check(*draw(4, 200, torch.bfloat16), config=WALKED, **extras)


@pytest.mark.parametrize(("layout", "config"), STRIDES)
def test_any_strides(layout, config):
    logits, target = draw(4, 150)
    strided = torch.stack([target, torch.full_like(target, 10**6)], 1)[:, 0]
    check(laid_out(logits, layout), strided, config=CONFIGS[config])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_equals_torch(reduction, smoothing):
    logits, target = draw(7, 50)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    dloss = torch.linspace(1, 2, 7) if reduction == "none" else torch.tensor(1.5)
    (expected_gradient,) = torch.autograd.grad(expected, logits, dloss)
    logits = logits.detach()
    loss, statistics, none = cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    assert none is None
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    gradient = cross_entropy_backward(dloss, logits, target, statistics, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert cross_entropy(logits, target, reduction=reduction, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_masks_nan_and_inf_as_in_torch(config, smoothing):
    logits, _ = draw(8, 150)
    target = torch.tensor([3, 145, 0, 5, 5, 149, 7, 7])
    logits[0, 40:] = -torch.inf
    logits[1, :140] = -torch.inf  # the first block of a walk has nothing
    logits[2] = -torch.inf
    logits[3, 7] = torch.nan
    logits[4, 149] = torch.inf
    logits[5, 149] = torch.inf
    logits[6, 8:] = torch.finfo(torch.float32).min
    logits[7, 7] = -torch.inf  # the target is masked: the loss is infinite, its gradient is not
    logits.requires_grad_()
    expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    loss, _, gradient = cross_entropy(
        logits.detach(), target, reduction="none", label_smoothing=smoothing, gradient=True, config=CONFIGS[config]
    )
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS)
def test_targets_out_of_range_are_nan_and_read_nothing(config):
    """The addresses of such logits lie far outside: a read would end the process."""
    logits, _ = draw(5, 150)
    target = torch.tensor([150, -1, 2**62, 4, -(2**40)])
    loss, statistics, gradient = cross_entropy(logits, target, reduction="none", gradient=True, config=CONFIGS[config])
    bad = [0, 1, 2, 4]
    assert loss[bad].isnan().all() and gradient[bad].isnan().all()
    assert loss[3].isfinite() and gradient[3].isfinite().all()
    again = cross_entropy_backward(torch.ones(5), logits, target, statistics, reduction="none")
    assert torch.equal(again.isnan(), gradient.isnan())


def test_ignored_rows_are_zero_whatever_they_hold():
    logits, _ = draw(4, 60)
    logits[1] = torch.nan
    target = torch.tensor([1, 7, 7, 59])
    loss, _, gradient = cross_entropy(logits, target, ignore_index=7, gradient=True, z_weight=0.1, label_smoothing=0.1)
    assert gradient[1:3].eq(0).all() and gradient[[0, 3]].ne(0).all() and loss.isfinite()
    everything, _, gradient = cross_entropy(logits, torch.full((4,), 7), ignore_index=7, gradient=True)
    assert everything.isnan() and gradient.eq(0).all()  # as in torch


@pytest.mark.parametrize("config", CONFIGS)
def test_the_gradient_may_take_the_place_of_the_logits(config):
    logits, target = draw(5, 300)
    expected = cross_entropy(logits, target, reduction="none", gradient=True, config=WALKED)[2]
    chosen = CONFIGS[config] or dataclasses.replace(WALKED, blocks={"ROWS": 4, "BLOCK": 512})
    for wide in (False, True):
        z = logits.clone()
        call = cross_entropy_call(z, target, torch.ones(()), torch.empty(5), torch.empty(5, 2), z, config=chosen)
        dataclasses.replace(call, constants={**call.constants, "WIDE": wide}).run()
        torch.testing.assert_close(z, expected, rtol=1e-6, atol=1e-7)


def test_a_large_common_offset_cancels():
    """Losses are small differences of large logits: nothing of the offset may be seen in them."""
    logits, target = draw(5, 100)
    shifted = logits + 2.0**13
    check(shifted, target, label_smoothing=0.1)


def test_empty():
    loss, statistics, gradient = cross_entropy(torch.ones(0, 5), torch.ones(0, dtype=torch.int64), gradient=True)
    assert loss.isnan() and statistics.shape == (0, 2) and gradient.shape == (0, 5)
    total = cross_entropy(torch.ones(0, 5), torch.ones(0, dtype=torch.int64), reduction="sum")[0]
    assert total == 0
    nothing = cross_entropy(torch.ones(2, 0), torch.zeros(2, dtype=torch.int64), reduction="none", gradient=True)
    assert nothing[0].isnan().all() and nothing[2].shape == (2, 0)


def test_a_vocabulary():
    logits, target = draw(3, 128256, torch.bfloat16)
    walked = dataclasses.replace(WALKED, blocks={"ROWS": 1, "BLOCK": 65536})
    check(logits, target, config=walked, z_weight=1e-4)


def test_the_reference_is_torchs():
    logits, target = draw(5, 50, torch.float64)
    logits.requires_grad_()
    for smoothing, z_weight in ((0.0, 0.0), (0.2, 0.03)):
        expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
        expected = expected + z_weight * logits.logsumexp(1).square() * (target != -100)
        (gradient,) = torch.autograd.grad(expected.sum(), logits)
        found = cross_entropy_reference(logits, target, label_smoothing=smoothing, z_weight=z_weight)
        torch.testing.assert_close(found, (expected, gradient))


@given(
    rows=st.integers(1, 6),
    classes=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    config=st.sampled_from(sorted(CONFIGS)),
    extras=st.sampled_from(EXTRAS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=6, deadline=None)
def test_any_shape_and_magnitude(rows, classes, dtype, scale, config, extras, seed):
    logits, target = draw(rows + 1, classes, dtype, scale, seed)
    check(logits, target, config=CONFIGS[config], **extras)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_configurations_fit_the_target(target):
    for classes in (1, 100, 128, 4096, 16384, 128256):
        found = cross_entropy_configs(classes, target)
        assert found and all(c.num_warps * target.warp_size <= 512 for c in found)
    assert cross_entropy_configs(128256, target)[0].blocks == {"ROWS": 1, "BLOCK": 4096}
