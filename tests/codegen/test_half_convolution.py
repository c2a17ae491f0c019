"""Convolutions in scaled fp16: no result overflows, whatever the operands' magnitudes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsmp.codegen.half_ops import HALF_OPS
from dsmp.passes.rounding import fake_quantize

HALF, HALF_BACKWARD = HALF_OPS["aten.convolution"], HALF_OPS["aten.convolution_backward"]
PLAIN, PLAIN_BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
ALL = [True, True, True]

# shapes of x and of the weight; stride, padding, dilation, transposed, output padding, groups
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "plain": ((2, 16, 14, 14), (24, 16, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "grouped and strided": ((2, 16, 14, 14), (24, 4, 3, 3), ([2, 2], [1, 1], [1, 1], False, [0, 0], 4)),
    "depthwise": ((2, 16, 14, 14), (16, 1, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 16)),
    "transposed": ((2, 16, 7, 7), (16, 6, 3, 3), ([2, 2], [1, 1], [1, 1], True, [1, 1], 2)),
    "one axis, dilated": ((2, 8, 50), (12, 8, 5), ([1], [0], [2], False, [0], 1)),
    "three axes": ((1, 4, 5, 6, 7), (8, 4, 2, 3, 1), ([1] * 3, [1, 1, 0], [1] * 3, False, [0] * 3, 1)),
    "one position": ((3, 512, 1, 1), (10, 512, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
}
SCALES = [(1, 1, 1), (1e-6, 1e4, 1e-9), (1e4, 1e4, 1e4), (1e18, 1e-20, 1e-18), (1e-9, 1, 1e-20)]


def operands(case: str, scales: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """x, weight, bias, dy and how they are convolved."""
    torch.manual_seed(0)
    x_shape, weight_shape, how = CASES[case]
    x, weight = torch.randn(x_shape) * scales[0], torch.randn(weight_shape) * scales[1]
    channels = weight_shape[1] * how[5] if how[3] else weight_shape[0]
    bias = torch.randn(channels) * (scales[0] * scales[1])
    dy = torch.randn(PLAIN(x, weight, bias, *how).shape) * scales[2]
    return x, weight, bias, dy, how


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_as_exact_as_the_simulation(case: str, scales: tuple[float, ...]) -> None:
    x, weight, bias, dy, how = operands(case, scales)
    given = ([bias.numel()], *how, ALL)
    wide = [t.double() for t in (x, weight, bias, dy)]
    wanted = [PLAIN(*wide[:3], *how), *PLAIN_BACKWARD(wide[3], *wide[:2], *given)]
    rounded = [fake_quantize(t, "fp16", "tensor") for t in (x, weight, dy)]
    limits = [PLAIN(*rounded[:2], bias, *how), *PLAIN_BACKWARD(rounded[2], *rounded[:2], *given)]
    found = [HALF(x, weight, bias, *how), *HALF_BACKWARD(dy, x, weight, *given)]
    for f, limit, w in zip(found, limits, wanted, strict=True):
        assert f.dtype == torch.float32
        assert error(f, w) <= 1.5 * error(limit, w)


@pytest.mark.parametrize("case", CASES)
def test_the_largest_sums_fit(case: str) -> None:
    """Operands of one value each: every product has the same sign, the bound is met."""
    x, weight, _, dy, how = operands(case, (1, 1, 1))
    x, weight, dy = (torch.full_like(t, v) for t, v in ((x, 6.0e4), (weight, -1.0), (dy, 3.0e-3)))
    wide = [t.double() for t in (x, weight, dy)]
    wanted = [PLAIN(*wide[:2], None, *how), *PLAIN_BACKWARD(wide[2], *wide[:2], None, *how, [True, True, False])[:2]]
    found = [HALF(x, weight, None, *how), *HALF_BACKWARD(dy, x, weight, None, *how, [True, True, False])[:2]]
    for f, w in zip(found, wanted, strict=True):
        assert error(f, w) < 1e-3


def test_a_long_sum_of_heavy_tailed_gradients() -> None:
    """200,704 positions, among them few large gradients: what they are divided by must not lose the others."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, 224, 224), torch.randn(4, 3, 3, 3)
    dy = torch.randn(4, 4, 224, 224) * 1e-6
    dy[0, :, 7, 9] *= 1e4
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    wanted = PLAIN_BACKWARD(dy.double(), x.double(), weight.double(), None, *how, [True, True, False])
    found = HALF_BACKWARD(dy, x, weight, None, *how, [True, True, False])
    assert found[2] is None
    for f, w in zip(found[:2], wanted[:2], strict=True):
        assert error(f, w) < 5e-4


@pytest.mark.parametrize("which", range(3))
def test_zeros(which: int) -> None:
    given = list(operands("plain", (1, 1, 1)))
    index = (0, 1, 3)[which]
    given[index] = torch.zeros_like(given[index])
    x, weight, bias, dy, how = given
    y = HALF(x, weight, bias, *how)
    gradients = HALF_BACKWARD(dy, x, weight, [24], *how, ALL)
    assert all(t.isfinite().all() for t in (y, *gradients))
    if which < 2:
        assert torch.equal(y, bias.reshape(-1, 1, 1).expand_as(y))
    zero = {0: [1], 1: [0], 2: [0, 1, 2]}[which]
    assert [i for i, g in enumerate(gradients) if not g.any()] == zero


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_seen(which: int, value: float) -> None:
    given = list(operands("plain", (1, 1, 1)))
    tensor = given[(0, 1, 3)[which]]
    tensor.view(-1)[tensor.numel() // 2 + 7] = value
    x, weight, _, dy, how = given
    mask = [True, True, False]
    wanted = [PLAIN(x, weight, None, *how), *PLAIN_BACKWARD(dy, x, weight, None, *how, mask)[:2]]
    found = [HALF(x, weight, None, *how), *HALF_BACKWARD(dy, x, weight, None, *how, mask)[:2]]
    seen = False
    for f, w in zip(found, wanted, strict=True):
        assert not f[~w.isfinite()].isfinite().any()
        seen |= not bool(w.isfinite().all())
    assert seen


@pytest.mark.parametrize("case", ["plain", "grouped and strided", "transposed", "one axis, dilated"])
def test_fake_tensors_have_the_layouts_of_real_ones(case: str) -> None:
    x, weight, bias, dy, how = operands(case, (1, 1, 1))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(HALF, (x, weight, bias, *how), test_utils=checks)
    torch.library.opcheck(HALF_BACKWARD, (dy, x, weight, [bias.numel()], *how, ALL), test_utils=checks)
    if x.dim() == 4:
        last = x.contiguous(memory_format=torch.channels_last)
        torch.library.opcheck(HALF, (last, weight, None, *how), test_utils=checks)


def test_narrow_operands_are_taken_as_they_are() -> None:
    x, weight, bias, _, how = operands("plain", (1, 1, 1))
    y = HALF(x.half(), weight, bias, *how)
    assert y.dtype == torch.float32
    assert torch.equal(y, HALF(x.half().float(), weight, bias, *how))
