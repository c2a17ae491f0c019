from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rounding_reference import (
    CARRIERS,
    FLOATS,
    INF,
    INTS,
    ML_DTYPES,
    NAN,
    NARROW,
    assert_same,
    every_16_bit,
    exact_round,
    hard_floats,
    through_ml_dtypes,
    through_tf32,
    values_of,
)

from dsmp.errors import RoundingError, UnknownFormatError, UnknownRecipeError
from dsmp.hardware_db.formats import FORMATS, InfNan, get_format
from dsmp.passes.rounding import fake_quantize, round_to


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small lose far more to waiting for a second thread on a busy machine than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", [*ML_DTYPES, "tf32", "int8", "int4", "int32", "fp32"])
@pytest.mark.parametrize("carrier", ["fp16", "bf16"])
def test_every_16_bit_input(carrier, name, saturate):
    x, fmt = every_16_bit(carrier), FORMATS[name]
    exact = x.double().numpy()
    if name in ML_DTYPES:
        want = through_ml_dtypes(x.float().numpy(), name)
    elif fmt.kind == "int":
        with np.errstate(invalid="ignore"):
            want = np.clip(np.rint(exact), -fmt.max, fmt.max) + 0.0
    else:
        want = exact  # 16-bit values have at most 10 mantissa bits, which fp32 and tf32 hold
    if saturate:
        want = np.where(np.abs(exact) > fmt.max, np.copysign(fmt.max, exact), want)
    # where the carrier lacks the format's limit, saturation stops at the largest magnitude that both have
    common = {
        ("fp16", "bf16"): 65280.0,
        ("bf16", "fp16"): 65280.0,
        ("bf16", "int32"): 2139095040.0,
    }.get((carrier, name), torch.finfo(x.dtype).max)
    want = torch.from_numpy(want).double()
    if saturate or fmt.inf_nan is InfNan.NONE:
        want = want.clamp(-common, common)
    got = round_to(x, name, saturate=saturate)
    assert got.dtype == x.dtype
    assert_same(got, want.to(x.dtype))


@pytest.mark.parametrize("name", sorted(ML_DTYPES))
def test_random_fp32_bit_patterns_against_ml_dtypes(name):
    x = np.random.default_rng(1).integers(0, 2**32, 2_000_000, dtype=np.uint32).view(np.float32)
    fmt = FORMATS[name]
    near = np.random.default_rng(2).normal(0, 1, 1_000_000) * min(fmt.max, 1e30) / 2.5
    near = near * 2.0 ** np.random.default_rng(3).integers(-24, 1, near.size)
    x = np.concatenate([x, near.astype(np.float32)])
    assert_same(round_to(torch.from_numpy(x), name), through_ml_dtypes(x, name))


@pytest.mark.parametrize("name", [n for n in FLOATS if hasattr(torch, FORMATS[n].torch_dtype or "-") and n != "tf32"])
def test_fp32_agrees_with_torch_casts_up_to_overflow(name):
    fmt = FORMATS[name]
    x = torch.randn(500_000, generator=torch.Generator().manual_seed(0)) * min(fmt.max, 1e30) / 6
    x = torch.cat([x, x * 1e-3, x * 1e-6, torch.tensor([0.0, -0.0, NAN])])
    x = x[~(x.abs() > fmt.max)]
    assert_same(round_to(x, name), x.to(getattr(torch, fmt.torch_dtype)).float())


def test_tf32_against_bit_arithmetic():
    rng = np.random.default_rng(4)
    x = rng.integers(0, 2**32, 1_000_000, dtype=np.uint32)
    x[:200_000] = (x[:200_000] & ~np.uint32(0x1FFF)) | np.uint32(0x1000)  # ties
    x[200_000:250_000] &= ~np.uint32(0x7F800000)  # subnormals
    x = np.concatenate([x.view(np.float32), np.float32([INF, -INF, NAN, 0.0, -0.0, 3.4028235e38, -3.4028235e38])])
    assert_same(round_to(torch.from_numpy(x), "tf32"), through_tf32(x))
    payload_in_low_bits_only = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_to(payload_in_low_bits_only, "tf32").isnan().all()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", NARROW)
def test_every_value_of_a_narrow_format_rounds_to_itself(name, carrier):
    v = torch.from_numpy(values_of(name)).to(CARRIERS[carrier])
    assert_same(v, values_of(name))
    assert_same(round_to(v, name), v)
    assert_same(round_to(v, name, saturate=True), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NARROW)
def test_ties_boundaries_and_their_neighbours(name, dtype):
    x = torch.from_numpy(hard_floats(name)).to(dtype)
    for saturate in (False, True):
        want = [exact_round(v, FORMATS[name], saturate) for v in x.double().tolist()]
        assert_same(round_to(x, name, saturate=saturate), want)


def test_fp64_is_rounded_once():
    just_above_a_tie = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert round_to(just_above_a_tie, "bf16")[0] == 1 + 2.0**-7
    assert round_to(just_above_a_tie, "fp16")[1] == round_to(just_above_a_tie, "tf32")[1] == 1 + 2.0**-10
    assert round_to(torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64), "fp8_e4m3") == 1.125


finite64 = st.floats(allow_nan=False, allow_infinity=False)
in_range = st.builds(
    lambda m, e, tail: (m + tail * 2.0**-36) * 2.0**e,
    st.integers(-(2**13), 2**13),
    st.integers(-162, 128),
    st.integers(-3, 3),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(finite64, in_range, st.sampled_from([INF, -INF, NAN, -0.0])), min_size=40, max_size=120))
@example([3.4028235677973366e38, 3.402823567797336e38, 65520.0, 65519.99999999999, 5e-324, 2.0**-150, 2.0**-25])
def test_fp64_against_rational_arithmetic(numbers):
    x = torch.tensor(numbers, dtype=torch.float64)
    for name, saturate in product(FORMATS, (False, True)):
        want = [exact_round(v, FORMATS[name], saturate) for v in numbers]
        assert_same(round_to(x, name, saturate=saturate), want)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.floats(width=32), in_range), min_size=40, max_size=120))
@example([1e-45, -1e-45, 1e-40, 2.0**-126, 65520.0, 61440.0, 464.0, 248.0, 29.0, 30.0, 7.75, 5.0, 127.5, 3.4e38])
def test_fp32_against_rational_arithmetic(numbers):
    x = torch.tensor(numbers, dtype=torch.float32)
    for name in FORMATS:
        want = torch.tensor([exact_round(v, FORMATS[name]) for v in x.tolist()], dtype=torch.float64)
        if name == "int32":  # 2^31 - 1 is no fp32 value
            want = want.clamp(-2147483520.0, 2147483520.0)
        assert_same(round_to(x, name), want.float())


@settings(max_examples=30, deadline=None)
@given(st.lists(finite64 | in_range, min_size=50, max_size=200), st.sampled_from([torch.float64, torch.float32]))
def test_rounding_is_monotone_idempotent_and_odd(numbers, dtype):
    x = torch.tensor(sorted(numbers), dtype=dtype)
    for name in FORMATS:
        y = round_to(x, name, saturate=True)
        assert (y.diff() >= 0).all() and y.isfinite().all(), name
        assert_same(round_to(y, name), y)
        assert torch.equal(round_to(-x, name, saturate=True), -y)
        free = round_to(x, name)
        assert_same(round_to(free, name), free)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", FORMATS)
def test_saturation_clamps_and_specials_follow_the_format(name, carrier):
    fmt, dtype = FORMATS[name], CARRIERS[carrier]
    special = torch.tensor([INF, -INF, NAN], dtype=dtype)
    clamped = round_to(special, name, saturate=True)
    limit = float(clamped[0])
    assert limit == -float(clamped[1]) and 0 < limit <= min(fmt.max, torch.finfo(dtype).max)
    assert limit == exact_round(limit, fmt), "the limit is a value of the format"
    if fmt.max <= torch.finfo(dtype).max and torch.tensor(fmt.max, dtype=dtype).double() == fmt.max:
        assert limit == fmt.max
    assert clamped[2].isnan()
    free = round_to(special, name)
    assert free[2].isnan()
    if fmt.inf_nan is InfNan.IEEE:
        assert free[:2].tolist() == [INF, -INF]
    elif fmt.inf_nan is InfNan.NONE:
        assert free[:2].tolist() == [limit, -limit]
    else:
        assert free.isnan().all()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", FORMATS)
def test_minus_zero(name, carrier):
    tiny = torch.finfo(CARRIERS[carrier]).smallest_normal
    y = round_to(torch.tensor([-0.0, -tiny, 0.0, tiny], dtype=CARRIERS[carrier]), name)
    lacks_it = "fnuz" in name or name in INTS
    assert y.signbit().tolist() == [not lacks_it, not lacks_it or bool(y[1] != 0), False, False]


def test_shapes_layouts_and_aliasing():
    x = torch.randn(6, 10, 4)
    for view in (x, x.transpose(0, 2), x[:, ::3], x[0, 0, 0], x[:0], x[:, :1].expand(6, 5, 4)):
        before = view.clone()
        for name in ("fp8_e4m3", "bf16", "fp32", "tf32", "int8", "fp64"):
            for y in (
                round_to(view, name),
                fake_quantize(view, name, "tensor"),
                fake_quantize(view, name, "none"),
            ):
                assert y.shape == view.shape and y.stride() == torch.empty_like(view).stride()
                assert y.numel() == 0 or y.data_ptr() != view.data_ptr()
                assert torch.equal(view, before)
        assert torch.equal(round_to(view, "fp8_e4m3"), round_to(view.contiguous(), "fp8_e4m3"))


def test_results_carry_no_gradient():
    x = torch.nn.Parameter(torch.randn(4, 40))
    for y in (round_to(x, "fp8_e4m3"), round_to(x, "fp32"), fake_quantize(x, "fp8_e4m3", "row")):
        assert not y.requires_grad and type(y) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    x = torch.ones(3).to(dtype)
    for call in (lambda: round_to(x, "bf16"), lambda: fake_quantize(x, "bf16", "row")):
        with pytest.raises(RoundingError, match=f"{dtype}; allowed: torch.float64"):
            call()


def test_unknown_names_are_refused():
    x = torch.ones(3)
    with pytest.raises(UnknownFormatError):
        round_to(x, "fp7")
    with pytest.raises(UnknownRecipeError):
        fake_quantize(x, "fp8_e4m3", "128")
    assert torch.equal(round_to(x / 3, get_format("fp4_e2m1")), round_to(x / 3, "fp4_e2m1"))
