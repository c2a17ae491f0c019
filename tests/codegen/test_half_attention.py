"""Fused attention in scaled fp16: as exact as fp16 allows at any magnitude, and never silently wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from dsmp.codegen.half_attention import _half_bias
from dsmp.codegen.half_ops import HALF_OPS
from dsmp.codegen.half_scaling import enlarge, exponent_above, halve, largest
from dsmp.passes.rounding import fake_quantize

NAME = "aten._scaled_dot_product_flash_attention_for_cpu"
HALF, HALF_BACKWARD = HALF_OPS[NAME], HALF_OPS[f"{NAME}_backward"]
PLAIN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
PLAIN_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
WHAT = ("out", "dq", "dk", "dv")


def operands(
    scales: Sequence[float] = (1, 1, 1, 1), *, length: int = 32, width: int = 32, heads: int = 3, shared: int = 1
) -> list[Tensor]:
    """q, k, v and dO of [2, heads, length, width]; `shared` heads read the same keys and values."""
    torch.manual_seed(0)
    q, grad = (torch.randn(2, heads * shared, length, width) for _ in range(2))
    k, v = (torch.randn(2, heads, length, width).repeat_interleave(shared, 1) for _ in range(2))
    return [x * s for x, s in zip((q, k, v, grad), scales, strict=True)]


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool = False, mask: Tensor | None = None) -> Any:
    """Output and gradients in fp64."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    mask = None if mask is None else mask.double()
    out = scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=causal)
    return (out.detach(), *torch.autograd.grad(out, wide, grad.double()))


def step(
    ops: tuple[Any, Any], given: Sequence[Tensor], causal: bool = False, mask: Tensor | None = None,
    form: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[Tensor]:  # fmt: skip
    """Output and gradients by a pair of operators, each operand in a form."""
    q, k, v, grad = (form(x) for x in given)
    out, log_sum = ops[0](q, k, v, 0.0, causal, attn_mask=mask)
    return [out, *ops[1](grad, q, k, v, form(out), log_sum, 0.0, causal, attn_mask=mask)]


def half(given: Sequence[Tensor], causal: bool = False, mask: Tensor | None = None) -> list[Tensor]:
    return step((HALF, HALF_BACKWARD), given, causal, mask)


def simulated(given: Sequence[Tensor], causal: bool = False, mask: Tensor | None = None) -> list[Tensor]:
    return step((PLAIN, PLAIN_BACKWARD), given, causal, mask, lambda x: fake_quantize(x, "fp16", "tensor"))


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    return {name: float((f.double() - w).norm() / w.norm()) for name, f, w in zip(WHAT, found, wanted, strict=False)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "scales",
    [(1, 1, 1, 1), (4, 4, 1, 1e-9), (30, 30, 1, 1), (1e4, 1e-4, 1e4, 1e-9), (1, 1, 1e4, 1e4), (1e20, 1e-20, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize(("width", "shared"), [(32, 1), (20, 1), (64, 2)])
def test_scores_of_common_size_are_as_exact_as_the_simulation(
    causal: bool, scales: tuple[float, ...], width: int, shared: int
) -> None:
    given = operands(scales, width=width, shared=shared)
    found, wanted = half(given, causal), exact(*given, causal)
    limits = errors(simulated(given, causal), wanted)
    for name, error in errors(found, wanted).items():
        assert error <= 1.5 * limits[name], name
    assert {x.dtype for x in found} == {torch.float32}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [32, 300])
@pytest.mark.parametrize(
    "scales", [(1e-6, 1, 1, 1), (1e-6, 1e-6, 1, 1e-9), (1e-9,) * 4, (1e-4, 1e-4, 1e-6, 1e4)], ids=str
)
def test_small_scores_do_not_vanish(causal: bool, length: int, scales: tuple[float, ...]) -> None:
    """Where nothing else is rounded much, fp16 inside the library shows: P and results, which simulation leaves in
    fp32; and torch adds up the blocks of 32 and 64 queries of dk and dv in fp16 on CPUs (GPUs do in fp32)."""
    given = operands(scales, length=length)
    wanted = exact(*given, causal)
    limits = errors(simulated(given, causal), wanted)
    for name, error in errors(half(given, causal), wanted).items():
        assert error <= (1.8 if length == 32 or name in ("out", "dq") else 3.0) * limits[name], name


@pytest.mark.parametrize("length", [32, 300])
def test_nothing_is_lost_to_scaling(length: int) -> None:
    """Where plain fp16 can hold everything, scaled fp16 is exactly as far from fp64."""
    given = operands(length=length)
    wanted = exact(*given)
    plain = errors(step((PLAIN, PLAIN_BACKWARD), given, form=lambda x: x.half()), wanted)
    for name, error in errors(half(given), wanted).items():
        assert error == pytest.approx(plain[name], rel=0.02), name


@pytest.mark.parametrize("kind", ["query", "key", "value", "gradient"])
def test_outliers(kind: str) -> None:
    given = operands(length=64)
    index = ["query", "key", "value", "gradient"].index(kind)
    given[index][0, 1, 5] *= 1000 if index > 1 else 30
    wanted = exact(*given)
    limits = errors(simulated(given), wanted)
    for name, error in errors(half(given), wanted).items():
        assert error <= 2 * limits[name], name


def test_the_worst_that_gradients_can_add_up_to_fits() -> None:
    """All queries look at one key, and all their gradients point one way."""
    length, width = 512, 32
    q, k = torch.ones(1, 1, length, width), torch.zeros(1, 1, length, width)
    k[..., 0, :] = 100.0
    v, grad = torch.ones(1, 1, length, width), torch.full((1, 1, length, width), 3.0e4)
    v[..., 0, :] = -1.0
    found, wanted = half([q, k, v, grad]), exact(q, k, v, grad)
    assert all(x.isfinite().all() for x in found)
    assert errors(found, wanted)["dv"] < 2e-3
    # one half of the weight on each of two keys with opposite values: the largest dS there is
    k[..., 1, :] = 100.0
    v[..., 1, :] = 1.0
    found, wanted = half([q, k, v, grad]), exact(q, k, v, grad)
    assert all(x.isfinite().all() for x in found)
    assert errors(found, wanted)["dk"] < 2e-3


@pytest.mark.parametrize("which", range(4))
def test_zeros(which: int) -> None:
    for size in (1.0, 1e12):  # beside a zero operand the others may be of any size
        given = operands((size if which == 1 else 1, size if which == 0 else 1, 1, 1))
        given[which] = torch.zeros_like(given[which])
        wanted = exact(*given)
        for name, f, w in zip(WHAT, half(given), wanted, strict=True):
            assert f.isfinite().all()
            assert float((f - w).norm()) <= 2e-3 * float(w.norm()), name


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(which: int, value: float) -> None:
    given = operands()
    given[which][1, 2, 3, 4] = value
    found, wanted = half(given), exact(*given)
    for f, w in zip(found, wanted, strict=True):
        assert not f[~w.isfinite()].isfinite().any()
    assert any(not f.isfinite().all() for f in found)


@pytest.mark.parametrize("scales", [(1e6, 1e6, 1, 1), (1e30, 1e-3, 1, 1), (1e38, 1e38, 1, 1)], ids=str)
def test_scores_that_cannot_be_held_are_nan(scales: tuple[float, ...]) -> None:
    for found in half(operands(scales)):
        assert found.isnan().all()


def test_between_the_limits_of_forward_and_backward() -> None:
    given = operands((3000, 3000, 1, 1))
    out, *gradients = half(given)
    assert errors([out], exact(*given)[:1])["out"] <= 1.5 * errors(simulated(given)[:1], exact(*given)[:1])["out"]
    assert all(g.isnan().all() for g in gradients)


def test_masks() -> None:
    given = operands(length=40)
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(2, 1, 40, 40)
    mask[1, ..., 30:] = lowest
    mask[0, 0, 7] = lowest  # a row that is masked throughout attends to everything
    wanted = exact(*given, mask=mask)
    limits = errors(simulated(given, mask=mask), wanted)
    for name, error in errors(half(given, mask=mask), wanted).items():
        assert error <= (1.8 if name == "dv" else 1.5) * limits[name], name


def test_biases_of_gpu_kernels() -> None:
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([0.0, -3.3, lowest, -math.inf, 1e9, math.nan, 1e-3]).expand(2, 3, 5, 7)
    found = _half_bias(bias)
    assert found.dtype == torch.float16
    assert found.shape == bias.shape
    assert found.stride() == (0, 0, 0, 1)
    row = found[0, 0, 0]
    assert row[2] == torch.finfo(torch.float16).min
    assert row[3] == -math.inf
    assert row[4] == math.inf  # beyond fp16: the softmax is NaN, not wrong
    assert row[5].isnan()
    assert torch.equal(row[:2], bias[0, 0, 0, :2].half())
    rows = _half_bias(torch.randn(2, 1, 5, 7).expand(2, 3, 5, 7))
    assert rows.stride() == (5 * 16, 0, 16, 1)


def test_empty() -> None:
    given = [x[:0] for x in operands()]
    out, _ = HALF(*given[:3])
    assert out.shape == (0, 3, 32, 32)


@pytest.mark.parametrize("scale", [0.3, 7.0, 0.0])
def test_a_softmax_scale_of_its_own(scale: float) -> None:
    q, k, v, grad = operands((0.3, 0.3, 1e4, 1))
    out, log_sum = HALF(q, k, v, scale=scale)
    found = [out, *HALF_BACKWARD(grad, q, k, v, out, log_sum, 0.0, False, scale=scale)]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact_out = scaled_dot_product_attention(*wide, scale=scale)
    wanted = (exact_out.detach(), *torch.autograd.grad(exact_out, wide, grad.double()))
    for name, f, w in zip(WHAT, found, wanted, strict=True):
        assert float((f - w).norm()) <= 2e-3 * float(w.norm()), name


@pytest.mark.parametrize("width", [32, 20])
def test_fake_tensors_have_the_layouts_of_real_ones(width: int) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 9, 3, width).transpose(1, 2) for _ in range(4))
    out, log_sum = HALF(q, k, v)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(HALF, (q, k, v, 0.0, True), test_utils=checks)
    torch.library.opcheck(HALF_BACKWARD, (grad, q, k, v, out, log_sum, 0.0, False), test_utils=checks)
    assert out.stride() == q.stride()


def test_the_operators_of_gpus_take_their_arguments_by_name() -> None:
    """Shapes, dtypes and layouts only: fake tensors, whose operators check their arguments."""
    with FakeTensorMode():
        q = torch.empty(2, 40, 4, 20, device="cuda").transpose(1, 2)
        bias = torch.empty(2, 4, 40, 40, device="cuda")
        efficient = "aten._scaled_dot_product_efficient_attention"
        out, log_sum, seed, offset = HALF_OPS[efficient](q, q, q, bias, True)
        assert out.shape == q.shape
        assert out.dtype == torch.float32
        mask = [True, True, True, True]
        found = HALF_OPS[f"{efficient}_backward"](q, q, q, q, bias, out, log_sum, seed, offset, 0.0, mask)
        assert [x.shape for x in found] == [q.shape, q.shape, q.shape, bias.shape]
        assert {x.dtype for x in found} == {torch.float32}
        mask = [True, True, True, False]
        found = HALF_OPS[f"{efficient}_backward"](q, q, q, q, None, out, log_sum, seed, offset, 0.1, mask, True)
        assert [x.shape for x in found[:3]] == [q.shape] * 3
        assert [x.stride() for x in found[:3]] == [q.stride()] * 3
        assert found[3] is None
        flash = "aten._scaled_dot_product_flash_attention"
        out, log_sum, *rest = HALF_OPS[flash](q, q, q, 0.0, True)
        assert (out.shape, out.dtype) == (q.shape, torch.float32)
        found = HALF_OPS[f"{flash}_backward"](q, q, q, q, out, log_sum, *rest[:4], 0.0, True, *rest[4:6])
        assert [x.shape for x in found] == [q.shape] * 3


def test_powers_of_two() -> None:
    values = torch.tensor([1.0, 0.75, 0.5, 65504.0, 2.0**-149, 3.0e38, 0.0, math.inf, math.nan])
    assert [int(exponent_above(v)) for v in values] == [0, 0, -1, 16, -149, 128, 0, 0, 0]
    x = torch.tensor([1.5, -3.0e38, 1e-38, 0.0])
    for exponent in (-140, -3, 0, 7):
        assert torch.equal(enlarge(x, torch.tensor(exponent)), (x.double() * 2.0**exponent).float())
    assert torch.equal(halve(x[:1], torch.tensor(-10)), torch.tensor([1536.0], dtype=torch.float16))
    assert largest(torch.tensor([1.0, -5.0, math.nan])).isnan()
    assert float(largest(torch.empty(0, 3))) == 0.0
