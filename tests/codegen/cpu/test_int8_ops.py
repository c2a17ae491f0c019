"""Int8 operators against fp64 arithmetic on the very numbers that they multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from int8_models import needs_operators
from torch import Tensor

from dsmp.passes.static_steps import TOP, Steps, steps_of

pytestmark = needs_operators
ops = torch.ops.dsmp_cpu
FP32, DEFAULT = Steps(0.0, 0), Steps(0.05, 60)

# channels, out, kernel, stride, padding, dilation, groups, height, width
SHAPES = [
    (8, 16, 1, 1, 0, 1, 1, 5, 5),
    (16, 40, 3, 1, 1, 1, 1, 7, 9),
    (3, 64, 7, 2, 3, 1, 1, 23, 21),
    (5, 3, 3, 1, 2, 2, 1, 6, 7),
    (24, 17, 3, 2, 1, 1, 1, 8, 8),
    (16, 16, 3, 1, 1, 1, 16, 9, 9),
    (72, 72, 5, 2, 2, 1, 72, 11, 13),
    (7, 7, 3, 1, 1, 1, 7, 5, 5),
    (33, 33, 3, 1, 2, 2, 33, 6, 6),
    (32, 64, 3, 1, 1, 1, 4, 6, 5),
    (12, 36, 3, 2, 1, 1, 3, 6, 6),
    (4, 8, 3, 1, 1, 1, 4, 6, 6),
    (1, 1, 1, 1, 0, 1, 1, 1, 1),
    (200, 80, 1, 1, 0, 1, 1, 3, 3),
]


def bytes_like(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, TOP + 1, shape, generator=generator, dtype=torch.uint8)
    return x.contiguous(memory_format=torch.channels_last)


def widened(x: Tensor, steps: Steps) -> Tensor:
    return (x.double() - steps.zero) * steps.scale


def convolve(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, norm: tuple[Tensor, ...] = (),
             residual: Tensor | None = None, residual_steps: Steps = FP32, stride: int = 1, padding: int = 0,
             dilation: int = 1, groups: int = 1, steps: Steps = DEFAULT, activation: str = "none",
             out: Steps = FP32) -> Tensor:  # fmt: skip
    vectors: tuple[Any, ...] = norm or (None,) * 4
    result: Tensor = ops.int8_convolution(
        x, weight, bias, *vectors, 1e-5, residual, [stride] * 2, [padding] * 2, [dilation] * 2, groups, *steps,
        *residual_steps, activation, *out,
    )  # fmt: skip
    return result


def activated(y: Tensor, activation: str) -> Tensor:
    functions = {"none": lambda y: y, "relu": F.relu, "hardswish": F.hardswish, "relu6": F.relu6}
    return functions[activation](y)


def assert_bytes(found: Tensor, exact: Tensor, out: Steps) -> None:
    """Bytes are the nearest ones, up to fp32's own rounding right at a tie."""
    wanted = (exact / out.scale + out.zero).clamp(0, TOP)
    assert found.dtype == torch.uint8
    assert ((found.double() - wanted).abs() <= 0.5 + 1e-3).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_sums_are_exact(shape: tuple[int, ...], batch: int) -> None:
    c, o, k, stride, padding, dilation, groups, h, w = shape
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    torch.manual_seed(c)
    weight, bias, x = torch.randn(o, c // groups, k, k), torch.randn(o), bytes_like((batch, c, h, w))
    steps = Steps(0.05, 60)
    exact = F.conv2d(widened(x, steps), ops.int8_weight(weight, groups).double(), bias.double(), **how)
    y = convolve(x, weight, bias=bias, steps=steps, **how)
    assert y.shape == exact.shape and y.is_contiguous(memory_format=torch.channels_last)
    assert (y - exact).abs().max() <= 1e-6 * (1 + exact.abs().max()) * 4
    out = Steps(exact.abs().max().item() / 90, 64)  # some results are beyond the bytes' ends
    assert_bytes(convolve(x, weight, bias=bias, steps=steps, out=out, **how), exact, out)


@pytest.mark.parametrize("activation", ["none", "relu", "hardswish", "relu6"])
@pytest.mark.parametrize("residual", ["none", "bytes", "fp32"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("groups,o", [(1, 24), (16, 16), (1, 5)])
def test_what_follows_is_fused(activation: str, residual: str, normed: bool, groups: int, o: int) -> None:
    torch.manual_seed(o)
    weight, bias = torch.randn(o, 16 // groups, 3, 3) * 0.1, torch.randn(o)
    x, steps, other_steps = bytes_like((2, 16, 6, 6)), Steps(0.02, 30), Steps(0.03, 50)
    norm = (torch.randn(o), torch.rand(o) + 0.1, torch.randn(o), torch.randn(o)) if normed else ()
    exact = F.conv2d(widened(x, steps), ops.int8_weight(weight, groups).double(), bias.double(), 1, 1, 1, groups)
    if normed:
        mean, variance, gain, shift = (v.double() for v in norm)
        exact = F.batch_norm(exact, mean, variance, gain, shift, eps=1e-5)
    other = None if residual == "none" else bytes_like((2, o, 6, 6), seed=1)
    if other is not None and residual == "fp32":
        other = widened(other, other_steps).float()
    if other is not None:
        exact = exact + (widened(other, other_steps) if residual == "bytes" else other.double())
    exact = activated(exact, activation)
    how: dict[str, Any] = {"bias": bias, "norm": norm, "residual": other, "residual_steps": other_steps, "padding": 1,
                           "groups": groups, "steps": steps, "activation": activation}  # fmt: skip
    y = convolve(x, weight, **how)
    assert (y - exact).abs().max() <= 4e-6 * (1 + exact.abs().max())
    out = steps_of(exact.min().item(), exact.max().item())
    assert_bytes(convolve(x, weight, out=out, **how), exact, out)


def test_weights_of_one_sign_do_not_overflow() -> None:
    x = torch.full((1, 32, 3, 3), TOP, dtype=torch.uint8)
    for weight in (torch.ones(16, 32, 1, 1), -torch.ones(16, 32, 1, 1), torch.rand(16, 32, 1, 1) + 0.5):
        exact = F.conv2d(widened(x, Steps(1.0, 0)), ops.int8_weight(weight, 1).double())
        assert torch.equal(convolve(x, weight, steps=Steps(1.0, 0)).double(), exact.float().double())
        assert (ops.int8_weight(weight, 1) - weight).abs().max() <= weight.abs().max() / 64 / 2 * 1.05


def test_weights_are_rounded_to_the_nearest_of_255() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, 3, 3)
    scale = weight.abs().amax((1, 2, 3), keepdim=True) / 127
    error = (ops.int8_weight(weight, 1) - weight).abs() / scale
    assert error.max() <= 0.5 * 1.3  # few channels take a larger scale for the sake of four large weights
    assert error.mean() < 0.27
    assert torch.equal(ops.int8_weight(torch.zeros(3, 8, 1, 1), 1), torch.zeros(3, 8, 1, 1))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("c", [3, 16, 24])
def test_quantise(layout: str, c: int) -> None:
    torch.manual_seed(c)
    x = torch.randn(2, c, 5, 18 if layout == "strided" else 19)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        x = x[:, :, 1:, ::2]
    steps, gate = Steps(0.03, 70), torch.rand(2, c, 1, 1)
    assert_bytes(ops.int8_quantise(x, None, *steps), x.double(), steps)
    assert_bytes(ops.int8_quantise(x, gate, *steps), x.double() * gate.double(), steps)
    assert torch.equal(convolve(x, torch.ones(1, c, 1, 1), steps=steps),
                       convolve(ops.int8_quantise(x, None, *steps), torch.ones(1, c, 1, 1), steps=steps))  # fmt: skip


def test_quantise_clips_and_turns_nan_into_the_lowest() -> None:
    x = torch.tensor([1e30, -1e30, float("inf"), -float("inf"), float("nan"), 0.0]).repeat(4).reshape(1, 24, 1, 1)
    assert ops.int8_quantise(x, None, 0.1, 3).flatten().tolist() == [127, 0, 127, 0, 0, 3] * 4


@pytest.mark.parametrize("kernel,stride,padding,dilation", [(3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 2), (3, 2, 0, 1)])
def test_max_pool_is_that_of_the_numbers(kernel: int, stride: int, padding: int, dilation: int) -> None:
    x = bytes_like((2, 11, 9, 8))
    how = [[n, n] for n in (kernel, stride, padding, dilation)]
    wanted = F.max_pool2d(x.double(), kernel, stride, padding, dilation)
    assert torch.equal(ops.int8_max_pool(x, *how).double(), wanted)


@pytest.mark.parametrize("shape", [(1, 64), (5, 130), (2, 3, 7), (33, 96), (0, 8)])
@pytest.mark.parametrize("n", [1, 16, 50])
def test_linear(shape: tuple[int, ...], n: int) -> None:
    torch.manual_seed(n)
    x, weight, bias = torch.randn(shape), torch.randn(n, shape[-1]), torch.randn(n)
    steps = steps_of(-3.0, 3.0)
    rounded = ((x / steps.scale).round() + steps.zero).clamp(0, TOP)
    exact = F.linear(widened(rounded, steps), ops.int8_weight(weight, 1).double(), bias.double()).relu()
    y = ops.int8_linear(x, weight, bias, *steps, "relu")
    assert y.shape == exact.shape
    # a number right at a tie may be rounded the other way
    assert ((y - exact).abs() <= 1e-5 + steps.scale * weight.abs().amax(1)).all()
    assert ((y - exact).abs() <= 1e-5 * (1 + exact.abs())).double().mean() > 0.98 or y.numel() == 0


def test_an_empty_batch() -> None:
    y = convolve(torch.zeros(0, 16, 5, 5, dtype=torch.uint8), torch.randn(8, 16, 3, 3), out=Steps(0.1, 0))
    assert y.shape == (0, 8, 3, 3) and y.dtype == torch.uint8


def test_numbers_of_threads_do_not_matter() -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    dense = (bytes_like((2, 64, 28, 28)), torch.randn(64, 64, 3, 3), 1)
    depthwise = (bytes_like((2, 64, 56, 56)), torch.randn(64, 1, 3, 3), 64)
    try:
        for x, weight, groups in (dense, depthwise):
            torch.set_num_threads(1)
            one = convolve(x, weight, groups=groups, padding=1)
            torch.set_num_threads(3)
            assert torch.equal(convolve(x, weight, groups=groups, padding=1), one)
    finally:
        torch.set_num_threads(threads)


def test_compilers_know_shapes_and_strides() -> None:
    x, weight = bytes_like((2, 16, 6, 6)), torch.randn(24, 16, 3, 3)
    checks = ("test_schema", "test_faketensor")
    call = (x, weight, None, None, None, None, None, 0.0, None, [2, 2], [1, 1], [1, 1], 1, 0.1, 3, 0.0, 0, "relu")
    torch.library.opcheck(ops.int8_convolution.default, (*call, 0.1, 3), test_utils=checks)
    torch.library.opcheck(ops.int8_convolution.default, (*call, 0.0, 0), test_utils=checks)
    torch.library.opcheck(ops.int8_quantise.default, (torch.randn(2, 3, 4, 5), None, 0.1, 3), test_utils=checks)
    torch.library.opcheck(ops.int8_max_pool.default, (x, [3, 3], [2, 2], [1, 1], [1, 1]), test_utils=checks)
    torch.library.opcheck(ops.int8_linear.default, (torch.randn(3, 8), torch.randn(4, 8), None, 0.1, 3, "none"),
                          test_utils=checks)  # fmt: skip


def test_mistakes_are_named() -> None:
    x, weight = bytes_like((1, 16, 4, 4)), torch.randn(8, 16, 3, 3)
    with pytest.raises(RuntimeError, match="does not fit 16 channels"):
        convolve(x, torch.randn(8, 15, 3, 3))
    with pytest.raises(RuntimeError, match="ends in none, relu"):
        convolve(x, weight, activation="gelu")
    with pytest.raises(RuntimeError, match="another shape"):
        convolve(x, weight, residual=torch.zeros(1, 8, 4, 4))
    with pytest.raises(RuntimeError, match="8 fp32 numbers"):
        convolve(x, weight, bias=torch.zeros(7))


def test_steps_hold_zero_and_both_ends() -> None:
    for low, high in ((-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 1e-3)):
        steps = steps_of(low, high)
        assert 0 <= steps.zero <= TOP
        assert steps.scale * -steps.zero <= min(low, 0) + steps.scale / 2
        assert steps.scale * (TOP - steps.zero) >= max(high, 0) - steps.scale / 2
    assert steps_of(0.0, 0.0) == Steps(1.0, 0) == steps_of(0.0, float("inf"))


def test_channels_of_next_to_nothing_are_packed() -> None:
    weight = torch.ones(4, 16) * 0.1
    for tiny in (1e-38, 1e-40, 1e-42, 1e-43, 1e-45, 0.0):
        weight[1] = tiny
        packed = ops.int8_pack(weight, 1)
        found = ops.int8_unpack(*packed, [4, 16], 1)
        assert (found[1] - weight[1]).abs().max() <= torch.finfo(torch.float32).tiny
        assert torch.allclose(found[0], weight[0], rtol=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.randn(8, 8, 1, 1)
    weight[3, 2] = value
    for pack in (lambda: ops.int8_pack(weight, 1), lambda: convolve(bytes_like((1, 8, 2, 2)), weight)):
        with pytest.raises(ValueError, match="infinite or NaN"):
            pack()


def test_the_longest_sums_are_exact_and_longer_ones_refused() -> None:
    weight, x = torch.full((2, 2**18), 0.01), torch.full((1, 2**18), 4.0)
    y = ops.int8_linear(x, weight, None, 4.0 / TOP, 0, "none")
    exact = x.double() @ ops.int8_weight(weight, 1).double().t()
    assert torch.allclose(y.double(), exact, rtol=1e-6)
    with pytest.raises(ValueError, match="int32"):
        ops.int8_pack(torch.ones(1, 2**18 + 1), 1)


@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "hardswish"])
def test_a_bias_that_is_no_number_stays_one(activation: str) -> None:
    bias = torch.zeros(16)
    bias[5] = float("nan")
    y = convolve(bytes_like((1, 8, 3, 3)), torch.randn(16, 8, 1, 1), bias=bias, activation=activation)
    assert y[:, 5].isnan().all() and y.isnan().sum() == 9
