"""Int8 linears in steps of each row, against fp64 arithmetic on the very numbers that they multiply."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_models import needs_operators
from torch import Tensor, nn

import dsmp
from dsmp.passes.static_steps import TOP, fake_quantize_dynamic

pytestmark = needs_operators
ops = torch.ops.dsmp_cpu


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp64 of the rounded rows by the rounded weight."""
    rows = fake_quantize_dynamic(x, -1).double() @ ops.int8_weight(weight, 1).double().t()
    return rows if bias is None else rows + bias.double()


@pytest.mark.parametrize("shape", [(1, 64), (5, 130), (2, 3, 7), (50, 96), (97, 8), (3, 1)])
@pytest.mark.parametrize("n", [1, 16, 50])
def test_values(shape: tuple[int, ...], n: int) -> None:
    torch.manual_seed(n)
    x = (torch.randn(shape) + 0.5) * 10 ** torch.empty(*shape[:-1], 1).uniform_(-3, 3)
    weight, bias = torch.randn(n, shape[-1]), torch.randn(n)
    y, right = ops.int8_dynamic_linear(x, weight, bias, False), exact(x, weight, bias)
    assert y.shape == right.shape and y.dtype == torch.float32
    reach = x.amax(-1, keepdim=True).clamp(min=0) - x.amin(-1, keepdim=True).clamp(max=0)
    off = (y - right).abs()
    close = 1e-5 * (1 + shape[-1] * reach * weight.abs().amax(1))
    assert (off <= close + reach / TOP * weight.abs().amax(1)).all()  # a number at a tie may be rounded the other way
    assert (off <= close).double().mean() > 0.97
    assert ((ops.int8_dynamic_linear(x, weight, None, False) + bias - y).abs() <= close).all()
    assert torch.equal(ops.int8_dynamic_linear(x, weight.t().contiguous(), bias, True), y)
    packed = ops.int8_pack(weight, 1)
    assert torch.equal(ops.int8_dynamic_linear_packed(x, *packed, list(weight.shape), bias), y)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    assert ops.int8_dynamic_linear(torch.zeros(shape), torch.randn(4, 8), None, False).shape == (*shape[:-1], 4)
    assert fake_quantize_dynamic(torch.zeros(shape), -1).shape == shape


def test_a_row_does_not_depend_on_others_nor_on_threads() -> None:
    torch.manual_seed(0)
    x, weight, threads = torch.randn(200, 96), torch.randn(40, 96), torch.get_num_threads()
    x[3] *= 1e4
    try:
        torch.set_num_threads(3)
        y = ops.int8_dynamic_linear(x, weight, None, False)
        torch.set_num_threads(1)
        for rows in (x, x[:1], x[3:7], x[100:]):
            first = int((x == rows[0]).all(1).nonzero())
            assert torch.equal(ops.int8_dynamic_linear(rows, weight, None, False), y[first : first + len(rows)])
    finally:
        torch.set_num_threads(threads)


def test_rows_that_no_steps_reach_over() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(8, 33), torch.randn(20, 33), torch.randn(20)
    x[0, 32], x[1, 0], x[2, 5] = float("nan"), float("inf"), -float("inf")
    x[3], x[4] = 0.0, 1e-44
    x[5] *= 3e38 / x[5].abs().max()  # its ends are further apart than the largest number
    x[5, 0], weight = -3e38, weight * 1e-3
    y, simulated = ops.int8_dynamic_linear(x, weight, bias, False), fake_quantize_dynamic(x, -1)
    assert y[:3].isnan().all() and simulated[:3].isnan().all()
    assert torch.equal(y[3:5], bias.expand(2, -1)) and not simulated[3:5].any()
    assert y[5:].isfinite().all()


def test_rows_that_are_not_contiguous() -> None:
    x, weight = torch.randn(64, 30).t(), torch.randn(16, 64)
    assert torch.equal(
        ops.int8_dynamic_linear(x, weight, None, False), ops.int8_dynamic_linear(x.contiguous(), weight, None, False)
    )


def test_compilers_know_shapes_and_mistakes_are_named() -> None:
    checks = ("test_schema", "test_faketensor")
    x, weight = torch.randn(2, 5, 8), torch.randn(4, 8)
    for turned in (False, True):
        args = (x, weight.t().contiguous() if turned else weight, torch.randn(4), turned)
        torch.library.opcheck(ops.int8_dynamic_linear.default, args, test_utils=checks)
    packed = (*ops.int8_pack(weight, 1), [4, 8], None)
    torch.library.opcheck(ops.int8_dynamic_linear_packed.default, (x, *packed), test_utils=checks)
    torch.library.opcheck(torch.ops.dsmp.fake_quantize_dynamic.default, (x, -1), test_utils=checks)
    with pytest.raises(RuntimeError, match="a weight of 4 by 8 does not fit"):
        ops.int8_dynamic_linear(x[..., :7], weight, None, False)
    with pytest.raises(RuntimeError, match="does not fit"):
        ops.int8_dynamic_linear(x.double(), weight, None, False)
    with pytest.raises(RuntimeError, match="4 fp32 numbers are wanted as a bias, not 3"):
        ops.int8_dynamic_linear(x, weight, torch.randn(3), False)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**31), st.floats(-3, 3), st.integers(-6, 6))
def test_rounded_rows_stay_within_half_a_step(rows: int, n: int, seed: int, shift: float, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, n, generator=generator) + shift) * 10.0**power
    y = fake_quantize_dynamic(x, 1)
    step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)) / TOP
    assert ((y - x).abs() <= step[:, None] * 1.0001).all()  # the ends, where the zero point was rounded: a whole step
    assert ((y - x).abs() <= step[:, None] * 0.5001).double().mean() >= 1 - 2 / n
    assert torch.allclose(fake_quantize_dynamic(x.t(), 0), y.t())
    assert all(len(row.unique()) <= TOP + 1 for row in y)


class Turned(nn.Module):
    """A product by a parameter [K, N], as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 48)), nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_a_rule_needs_no_calibration_and_weights_are_followed() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Turned(), nn.GELU(), nn.Linear(48, 24)).eval(), torch.randn(32, 64)
    rules = {"*|linear|*": "int8 dynamic/row"}
    plan = dsmp.plan(model, (x,), hardware="cpu", training=False, rules=rules)
    assert [(d.recipe, d.accumulate, d.output) for d in plan if d.op == "linear"] == [
        ("dynamic/row", "int32", "fp32")
    ] * 2
    run = torch.compile(model, backend="dsmp", options={"plan": plan, "executor": "eager", "strict": True})
    with torch.no_grad():
        for _ in range(2):
            hidden = nn.functional.gelu(exact(x, model[0].weight.t(), model[0].bias).float())
            right = exact(hidden, model[2].weight, model[2].bias)
            assert (run(x) - right).norm() <= 2e-3 * right.norm()
            model[0].weight.mul_(1.5)
            model[2].weight.neg_()
    assert {e.implementation for e in dsmp.audit(run) if e.op == "linear"} == {"cpu_int8_dynamic"}
