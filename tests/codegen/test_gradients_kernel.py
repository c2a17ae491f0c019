"""Unscaling with statistics is bit-equal to plain torch, and sees what torch's gradient scaler sees."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks.gradients import DTYPES, assert_statistics, bits, inverse, sample

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.gradients import (
    BINS,
    GradientStatistics,
    flush_and_overflow,
    gradients_call,
    gradients_configs,
    gradients_reference,
    unscale_gradients,
)
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS
from dsmp.hardware_db.formats import FORMATS
from dsmp.passes.rounding import round_to


@pytest.mark.parametrize("size", [1, 2, 17, 127, 128, 129, 300, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(size, dtype):
    x = sample(size, dtype)
    for output in DTYPES:
        (y,), (found,) = unscale_gradients([x], inverse(1024.0), output=output)
        expected, statistics = gradients_reference(x, inverse(1024.0), output)
        assert torch.equal(bits(y), bits(expected)) and y.dtype is output
        assert_statistics(found, statistics)
        assert int(found.histogram.sum()) == size


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_special_value_is_found(special, dtype):
    x = sample(300, dtype)
    x[211] = special
    (y,), (found,) = unscale_gradients([x], inverse(8.0), output=torch.float32)
    expected, statistics = gradients_reference(x, inverse(8.0))
    assert float(found.found_inf) == 1.0 and int(found.histogram[255]) == 1
    assert torch.equal(bits(y), bits(expected))
    assert_statistics(found, statistics)
    assert not found.amax.isfinite()


def test_agrees_with_the_gradient_scaler():
    for special in (None, math.inf, math.nan):
        x = sample(1000)
        if special is not None:
            x[3] = special
        theirs, found_inf = x.clone(), torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([theirs], found_inf, inverse(65536.0))
        (y,), (found,) = unscale_gradients([x], inverse(65536.0), output=torch.float32)
        assert torch.equal(bits(y), bits(theirs))
        assert float(found.found_inf) == float(found_inf)


def test_a_cast_that_overflows_is_found():
    x = torch.tensor([1.0, 70000.0])
    (y,), (found,) = unscale_gradients([x], inverse(1.0), output=torch.float16)
    assert float(found.found_inf) == 1.0 and y[1] == math.inf
    assert float(found.amax) == 70000.0 and int(found.histogram[255]) == 0
    assert float(unscale_gradients([x], inverse(1.0), output=torch.bfloat16)[1][0].found_inf) == 0.0


def test_an_infinite_factor_is_found():
    (y,), (found,) = unscale_gradients([torch.tensor([1.0, 0.0])], torch.tensor(math.inf), output=torch.float32)
    assert float(found.found_inf) == 1.0 and y[0] == math.inf and y[1].isnan()
    assert int(found.histogram[255]) == 2 and int(found.histogram.sum()) == 2


def test_histogram_bins_by_the_definition():
    values = [0.0, -0.0, 1e-40, 2.0**-126, -1.0, 1.9999, 2.0, -3.9, 3e38, math.inf, math.nan]
    _, (found,) = unscale_gradients([torch.tensor(values)], inverse(1.0))
    expected = torch.zeros(BINS, dtype=torch.int32)
    for value in values:
        if value != value or abs(value) == math.inf:
            index = 255
        elif abs(value) < 2.0**-126:
            index = 0
        else:
            index = 127 + math.frexp(value)[1] - 1
        expected[index] += 1
    assert torch.equal(found.histogram, expected)


def test_lists_share_found_inf_and_keep_the_rest_apart():
    gradients = [sample(40).reshape(4, 10), sample(7, torch.bfloat16), torch.empty(0), sample(129, torch.float16)]
    gradients[1][2] = math.inf
    outputs, found = unscale_gradients(gradients, inverse(2.0), output=torch.bfloat16)
    assert [o.shape for o in outputs] == [g.shape for g in gradients]
    assert all(float(f.found_inf) == 1.0 for f in found)
    for gradient, output, statistics in zip(gradients, outputs, found, strict=True):
        expected, reference = gradients_reference(gradient, inverse(2.0), torch.bfloat16)
        assert torch.equal(bits(output), bits(expected))
        assert torch.equal(statistics.histogram, reference.histogram)
        assert torch.equal(statistics.amax, reference.amax)
    assert unscale_gradients([], inverse(2.0)) == ([], [])


def test_in_place_keeps_tensors_and_strides():
    wide = sample(200).reshape(10, 20)
    plain, strided = wide.clone(), wide.clone().T[::2]
    expected = [t.clone() * 0.25 for t in (plain, strided)]
    outputs, _ = unscale_gradients([plain, strided], inverse(4.0), in_place=True)
    assert outputs[0] is plain and outputs[1] is strided
    assert torch.equal(plain, expected[0]) and torch.equal(strided, expected[1])


def test_many_programs_and_a_stride_give_the_same():
    x = sample(4000, torch.bfloat16)[::3]
    expected, reference = gradients_reference(x, inverse(32.0), torch.float32)
    y = torch.empty(x.shape, dtype=torch.float32)
    statistics = GradientStatistics(
        found_inf=torch.zeros(()), histogram=torch.zeros(BINS, dtype=torch.int32), amax=torch.zeros(())
    )
    gradients_call(x, y, inverse(32.0), statistics, config=Config(blocks={"BLOCK": 128})).run()
    assert torch.equal(y, expected)
    assert_statistics(statistics, reference)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200))
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "int8"])
def test_flush_and_overflow_bound_what_rounding_does(name, values):
    x = torch.tensor(values, dtype=torch.float32)
    _, (found,) = unscale_gradients([x], inverse(1.0))
    loss = flush_and_overflow(found.histogram, name)
    counted = x[x.abs() >= 2.0**-126]
    total = max(1, counted.numel())
    rounded = round_to(counted, name, saturate=True)
    flushed = int((rounded == 0).sum())
    beyond = int((counted.abs() > FORMATS[name].max).sum())
    least = FORMATS[name].smallest_subnormal
    half = int((counted.abs() == least / 2).sum())
    # int formats round everything below a half to zero, and just above it nothing
    assert loss.flushed * total <= flushed + 1e-9 and flushed <= round(loss.flushed * total) + half
    assert loss.overflowed * total <= beyond + 1e-9
    assert beyond <= (loss.overflowed + loss.top) * total + 1e-9
    subnormal = int(((counted.abs() < FORMATS[name].smallest_normal) & (counted.abs() >= least / 2)).sum())
    assert round(loss.subnormal * total) == subnormal


def offline_cases():
    """(target, input dtype, output dtype)."""
    return [
        (isa, i, o) for isa in TARGETS for i, o in ((DTYPES[0], DTYPES[1]), (DTYPES[1], DTYPES[0]), (DTYPES[2],) * 2)
    ]


def check_offline(isa, dtype, output):
    size, target = 1 << 20, TARGETS[isa]
    statistics = GradientStatistics(
        found_inf=meta(dtype=torch.float32), histogram=meta(BINS, dtype=torch.int32), amax=meta(dtype=torch.float32)
    )
    configs = gradients_configs(size, target)
    call = gradients_call(
        meta(size, dtype=dtype), meta(size, dtype=output), meta(dtype=torch.float32), statistics, config=configs[0]
    )
    compiled = compile_call(call, target)
    assert compiled.code.spills == 0
    assert compiled.shared_bytes <= target.shared_bytes
    assert compiled.code.registers <= 128


@pytest.mark.parametrize("case", [offline_cases()[0], ("gfx942", torch.bfloat16, torch.float32)])
def test_compiles_without_spills(case):
    check_offline(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", offline_cases(), ids=str)
def test_every_target(case):
    check_offline(*case)
