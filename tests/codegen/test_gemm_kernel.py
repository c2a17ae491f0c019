"""The GEMM kernels, interpreted: against fp64, against the simulator, and against each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks.gemm import FORMATS_TAKEN, FP8, assert_close, dtype_of, error_bound, explicit, integers, operand

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.gemm import (
    ACTIVATIONS,
    gemm,
    gemm_call,
    gemm_persistent_call,
    gemm_reference,
    tma_operands,
)
from dsmp.codegen.kernels.gemm_configs import (
    gemm_configs,
    has_gemm,
    interpreter_config,
    operand_bytes,
    predicted_time,
)
from dsmp.codegen.offline import meta
from dsmp.codegen.targets import TARGETS, get_target
from dsmp.errors import KernelUnavailableError
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.hardware_db.formats import FORMATS
from dsmp.passes.rounding import fake_quantize, quantize, round_to

SMALL = Config(blocks={"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64})

# NaN, inf and overflow are warnings of NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("format", FORMATS_TAKEN)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (2, 300, 17), (17, 127, 300), (129, 2, 128), (128, 129, 127)])
def test_awkward_sizes_agree_with_fp64(m, n, k, format):
    a, b = operand(m, k, format=format), operand(k, n, format=format, seed=1)
    got = gemm(a, b, out_dtype=torch.float32, **explicit(format))
    expected = gemm_reference(a, b, out_dtype=torch.float32, **explicit(format))
    bound = torch.zeros(m, n) if format == "int8" else error_bound(a, b, k)
    assert_close(got, expected, bound, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_every_output_format_over_several_tiles_and_steps(dtype):
    a, b = operand(40, 150, format="bf16"), operand(150, 30, format="bf16")
    got = gemm(a, b, out_dtype=dtype, config=SMALL)
    assert_close(got, gemm_reference(a, b, out_dtype=dtype), error_bound(a, b, 150), dtype)


def test_the_reference_is_the_product_of_dequantised_operands():
    a, b = operand(5, 7), operand(7, 3)
    sa, sb, bias, residual = operand(5).abs(), operand(3).abs(), operand(3), operand(5, 3)
    got = gemm_reference(
        a,
        b,
        out_dtype=torch.float32,
        scale_a=sa,
        scale_b=sb,
        bias=bias,
        residual=residual,
        alpha=0.5,
        activation="relu",
    )
    by_hand = torch.empty(5, 3, dtype=torch.float64)
    for i in range(5):
        for j in range(3):
            total = sum(float(a[i, s]) * float(sa[i]) * float(b[s, j]) * float(sb[j]) for s in range(7))
            by_hand[i, j] = max(0.5 * total + float(bias[j]), 0.0) + float(residual[i, j])
    torch.testing.assert_close(got, by_hand, rtol=2.0**-23, atol=1e-30)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_any_strides(transpose_a, transpose_b):
    whole_a, whole_b = operand(300, 200), operand(200, 300)
    a = whole_a[3:43, 1:181:3] if not transpose_a else whole_a[1:181:3, 3:43].t()
    b = whole_b[1:181:3, 5:65:2] if not transpose_b else whole_b[5:65:2, 1:181:3].t()
    out = torch.zeros(90, 80)[5:85:2, 10:70:2]
    gemm_call(a, b, out, config=SMALL).run()
    assert_close(out, gemm_reference(a, b, out_dtype=torch.float32), error_bound(a, b, 60), torch.float32)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [((3, 20, 40), (3, 40, 18)), ((1, 20, 40), (3, 40, 18)), ((20, 40), (3, 40, 18)), ((3, 20, 40), (40, 18))],
)
def test_batches_broadcast(shape_a, shape_b):
    a, b = operand(*shape_a, format="bf16"), operand(*shape_b, format="bf16", seed=1)
    got = gemm(a, b, out_dtype=torch.float32, config=SMALL)
    assert got.shape == (3, 20, 18)
    assert_close(got, gemm_reference(a, b, out_dtype=torch.float32), error_bound(a, b, 40), torch.float32)


def test_an_expanded_batch_is_read_and_scales_may_have_a_batch():
    a = operand(1, 20, 40).expand(2, 20, 40)
    b = operand(2, 40, 18)
    sa, sb = operand(2, 20, 1).abs(), operand(2, 1, 18).abs()
    got = gemm(a, b, scale_a=sa, scale_b=sb, config=SMALL)
    expected = gemm_reference(a, b, out_dtype=torch.float32, scale_a=sa, scale_b=sb)
    assert_close(got, expected, error_bound(a, b, 43) * sa.double() * sb.double(), torch.float32)


def test_no_contraction_gives_zeros_and_the_bias():
    a, b, bias = torch.empty(5, 0), torch.empty(0, 3), operand(3)
    assert torch.equal(gemm(a, b), torch.zeros(5, 3))
    assert torch.equal(gemm(a, b, bias=bias), bias.expand(5, 3))


@pytest.mark.parametrize(("shape_a", "shape_b"), [((0, 4), (4, 3)), ((4, 5), (5, 0)), ((0, 2, 4), (4, 3))])
def test_empty_operands_give_empty_results(shape_a, shape_b):
    assert (
        gemm(torch.ones(shape_a), torch.ones(shape_b)).shape
        == torch.matmul(torch.ones(shape_a), torch.ones(shape_b)).shape
    )


@pytest.mark.parametrize("format", ["fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz"])
def test_nan_and_inf_reach_their_rows_and_columns_only(format):
    a, b = integers(40, 70).to(dtype_of(format)), integers(70, 33).to(dtype_of(format))
    a[3, 69] = float("nan")
    b[0, 32] = float("nan")
    if format not in ("fp8_e4m3", "fp8_e4m3fnuz"):
        a[5, 1] = float("inf")
        b[1, :32] = 1.0
    got = gemm(a, b, out_dtype=torch.float32, config=SMALL, **explicit(format))
    expected = a.float() @ b.float()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert got.isnan().sum() == 33 + 40 - 1


def test_zero_operands_and_saturating_outliers():
    zero = torch.zeros(40, 70, dtype=torch.bfloat16)
    assert torch.equal(gemm(zero, zero.t()), torch.zeros(40, 40, dtype=torch.bfloat16))
    a, b = torch.full((2, 64), 448.0).to(torch.float8_e4m3fn), torch.full((64, 2), 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(gemm(a, b), torch.full((2, 2), 64 * 448.0**2))
    assert torch.equal(gemm(a, b, out_dtype=torch.float16), torch.full((2, 2), torch.inf, dtype=torch.float16))
    one = torch.ones(1)
    saturated = gemm(a, b, out_dtype=torch.float16, out_scale=one)
    assert torch.equal(saturated, torch.full((2, 2), 65504.0, dtype=torch.float16))


@pytest.mark.parametrize(("activation", "row"), [*((name, True) for name in ACTIVATIONS), ("none", False)])
def test_the_whole_epilogue(activation, row):
    m, n, k = 45, 30, 90
    a, b = operand(m, k, format="fp8_e4m3"), operand(k, n, format="fp8_e5m2")
    sa = operand(m if row else 1).abs() + 0.1
    sb = operand(n if row else 1, seed=1).abs() + 0.1
    epilogue = {
        "scale_a": sa,
        "scale_b": sb,
        "alpha": 0.25,
        "bias": operand(n, format="bf16"),
        "residual": operand(m, n, format="fp16"),
        "activation": activation,
    }
    got = gemm(a, b, out_dtype=torch.float32, config=SMALL, **epilogue)
    expected = gemm_reference(a, b, out_dtype=torch.float32, **epilogue)
    magnitude = error_bound(a, b, k) * 0.25 * (sa.double()[:, None] if row else sa) * sb.double()
    # activations stretch an error by at most 1.13, and add some units of their own
    assert_close(got, expected, 1.2 * magnitude + 2.0**-20 * (1 + expected.abs()), torch.float32)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "int8", "bf16", "fp16"])
def test_quantising_on_the_way_out_is_the_simulators(name):
    a, b = integers(33, 60), integers(60, 47)
    product = a @ b
    expected = quantize(product, name, "tensor")
    scale = expected.scale.reshape(()) / 2  # too small for the largest values, which then saturate
    got = gemm(a, b, out_dtype=dtype_of(name), out_scale=scale, config=SMALL)
    assert torch.equal(got.float(), round_to(product / scale, name, saturate=True))
    assert torch.equal(
        gemm(a, b, out_dtype=dtype_of(name), out_scale=expected.scale.reshape(())).float(), expected.values
    )


@pytest.mark.parametrize(
    ("format", "recipe"),
    [*((f, "row") for f in FP8), ("fp8_e4m3", "tensor"), ("fp16", "tensor"), ("int8", "tensor"), ("bf16", "none")],
)
def test_equal_to_the_simulator_bit_for_bit_where_sums_are_exact(format, recipe):
    """Operands of -1, 0, 1 and the format's largest value have the scale 1 (fp16: a power of two): their sums have no
    rounding in any order."""
    top = 4.0 if format in ("fp16", "bf16") else FORMATS[format].max
    a, b = integers(20, 48, low=-1, high=2), integers(48, 24, low=-1, high=2, seed=1)
    a[:, 0] = b[0] = top
    qa, qb = quantize(a, format, recipe), quantize(b, format, recipe, axis=0)
    simulated = fake_quantize(a, format, recipe) @ fake_quantize(b, format, recipe, axis=0)
    scales = {} if recipe == "none" else {"scale_a": qa.scale, "scale_b": qb.scale}
    x, y = qa.values.to(dtype_of(format)), qb.values.to(dtype_of(format))
    assert torch.equal(gemm(x, y, out_dtype=torch.float32, **scales), simulated)


def test_tf32_is_the_simulators_bit_for_bit():
    """Integers of 13 bits lose up to two bits in tf32; their sums with signs are exact in fp32."""
    a, b = integers(40, 64, low=-8191, high=8192), integers(64, 30, low=-1, high=2)
    got = gemm(a, b, format="tf32")
    assert torch.equal(got, round_to(a, "tf32") @ round_to(b, "tf32"))
    assert not torch.equal(got, a @ b)
    assert torch.equal(gemm(a, b), a @ b)


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("rr", "bf16"),
        ("rc", "bf16"),
        ("cr", "bf16"),
        ("cc", "bf16"),
        ("rc", "tf32"),
        ("rc", "fp8_e4m3"),
        ("rr", "int8"),
    ],
)
def test_the_persistent_kernel_equals_the_plain_one(layout, format):
    m, n, k = 80, 32, 80
    a = operand(m, k, format=format) if layout[0] == "r" else operand(k, m, format=format).t()
    b = operand(k, n, format=format) if layout[1] == "r" else operand(n, k, format=format).t()
    epilogue = {"bias": operand(n), "residual": operand(m, n), "activation": "relu", "scale_a": operand(m).abs()}
    epilogue |= explicit(format)
    assert tma_operands(a, b)
    plain, *walks = (torch.empty(m, n) for _ in range(3))
    gemm_call(a, b, plain, config=SMALL, **epilogue).run()
    for out, programs in zip(walks, (2, 132), strict=True):
        call = gemm_persistent_call(a, b, out, config=SMALL, programs=programs, **epilogue)
        assert call.grid == (min(programs, 3),)
        call.run()
        assert torch.equal(out, plain)


@pytest.mark.parametrize(
    ("a", "ok"),
    [
        (meta(64, 64, dtype=torch.bfloat16), True),
        (meta(64, 64, dtype=torch.bfloat16).t(), True),
        (meta(1, 64, 64, dtype=torch.bfloat16), True),
        (meta(2, 64, 64, dtype=torch.bfloat16), False),
        (meta(64, 60, dtype=torch.bfloat16), False),
        (meta(64, 72, dtype=torch.bfloat16)[:, 8:], True),
        (meta(64, 72, dtype=torch.bfloat16)[:, :64], True),
        (meta(64, 72, dtype=torch.bfloat16)[:, 1:65], False),
        (meta(64, 128, dtype=torch.bfloat16)[:, ::2], False),
        (meta(1, 64, dtype=torch.bfloat16).expand(64, 64), False),
        (meta(0, 64, dtype=torch.bfloat16), False),
    ],
)
def test_what_the_copy_engine_takes(a, ok):
    b = meta(64, 64, dtype=torch.bfloat16)
    assert tma_operands(a, b).ok is ok
    assert tma_operands(b, a).ok is ok
    if not ok and a.shape == (64, 64):
        with pytest.raises(KernelUnavailableError, match="gemm_bf16_fp32"):
            gemm_persistent_call(a, b, meta(64, 64, dtype=torch.float32), config=SMALL, programs=1)


def test_offsets_beyond_32_bits_are_computed_in_64():
    narrow, b = meta(64, 64, dtype=torch.int8), meta(64, 64, dtype=torch.int8)
    out = meta(64, 64, dtype=torch.float32)
    assert not gemm_call(narrow, b, out, config=SMALL).constants["WIDE"]
    assert gemm_call(narrow.as_strided((64, 64), (2**26, 1)), b, out, config=SMALL).constants["WIDE"]
    assert gemm_call(narrow, b.as_strided((64, 64), (1, 2**26)), out, config=SMALL).constants["WIDE"]
    assert gemm_call(narrow, b, out.as_strided((64, 64), (2**26, 1)), config=SMALL).constants["WIDE"]
    x, y, result = operand(40, 70), operand(70, 20), torch.empty(40, 20)
    call = gemm_call(x, y, result, config=SMALL)
    dataclasses.replace(call, constants={**call.constants, "WIDE": True}).run()
    assert torch.equal(result, gemm(x, y, config=SMALL))


@pytest.mark.parametrize(
    ("format", "epilogue", "name"),
    [
        ("tf32", {}, "gemm_tf32_fp32"),
        ("fp32", {}, "gemm_fp32_fp32"),
        ("fp8_e4m3", {"bias": meta(64, dtype=torch.float32), "activation": "gelu"}, "gemm_e4m3_fp32_bias_gelu"),
        ("int8", {"out_scale": meta(1, dtype=torch.float32)}, "gemm_int8_fp32_quantized"),
    ],
)
def test_names_tell_formats_and_epilogue(format, epilogue, name):
    a = meta(64, 64, dtype=dtype_of(format))
    call = gemm_call(a, a, meta(64, 64, dtype=torch.float32), config=SMALL, **epilogue, **explicit(format))
    assert call.name == name
    assert call.operand_format == format


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"b": torch.ones(5, 4)}, "is not out"),
        ({"b": torch.ones(4, 3, dtype=torch.bfloat16)}, "Cast them"),
        ({"format": "bf16"}, "cannot be multiplied as bf16"),
        ({"bias": torch.ones(4)}, "bias has shape"),
        ({"activation": "tanh"}, "no activation"),
        ({"scale_a": torch.ones(2)}, "a scale has shape"),
        ({"scale_b": torch.ones(1, dtype=torch.float64)}, "scales are fp32"),
        ({"out": torch.ones(5, 3, dtype=torch.float64)}, "out is torch.float64"),
    ],
)
def test_what_does_not_fit_together_is_said(change, match):
    arguments = {"a": torch.ones(5, 4), "b": torch.ones(4, 3), "out": torch.ones(5, 3), "config": SMALL}
    with pytest.raises(ValueError, match=match):
        gemm_call(**(arguments | change))


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(0, 9000)] * 3),
    batch=st.integers(1, 20),
    format=st.sampled_from(FORMATS_TAKEN),
    isa=st.sampled_from(list(TARGETS)),
)
def test_configurations_fit_and_are_ordered(sizes, batch, format, isa):
    target = get_target(isa)
    if not has_gemm(format, target):
        return
    found = gemm_configs(*sizes, format, target, batch=batch)
    device = resolve_hardware(isa)
    times = [predicted_time(c, *sizes, format, device, batch=batch) for c in found]
    assert times == sorted(times)
    assert found
    for config in found:
        assert operand_bytes(config, format) <= target.shared_bytes
        assert all(size & (size - 1) == 0 for size in config.blocks.values())


def test_few_rows_get_flat_tiles_and_large_products_big_ones():
    for isa in ("sm_80", "sm_90", "gfx942"):
        flat = gemm_configs(3, 4096, 4096, "bf16", get_target(isa))[0]
        large = gemm_configs(8192, 8192, 8192, "bf16", get_target(isa))[0]
        assert flat.blocks["BLOCK_M"] == 16
        assert large.blocks["BLOCK_M"] * large.blocks["BLOCK_N"] >= 128 * 128


def test_promotion_leaves_out_tiles_without_room_for_partial_sums():
    sm_90 = get_target("sm_90")
    sizes = [
        max(
            c.blocks["BLOCK_M"] * c.blocks["BLOCK_N"] for c in gemm_configs(8192, 8192, 8192, "fp8_e4m3", sm_90, **more)
        )
        for more in ({}, {"promoted": True})
    ]
    assert sizes == [128 * 256, 128 * 128]


@pytest.mark.parametrize(
    ("isa", "format", "ok"),
    [
        ("sm_80", "tf32", True),
        ("sm_80", "fp8_e4m3", False),
        ("sm_89", "fp8_e5m2", True),
        ("sm_90", "fp8_e4m3fnuz", False),
        ("gfx90a", "tf32", False),
        ("gfx942", "tf32", True),
        ("gfx942", "fp8_e4m3", False),
        ("gfx942", "fp8_e4m3fnuz", True),
        ("gfx950", "fp8_e4m3", True),
        ("gfx950", "tf32", False),
        ("gfx1100", "tf32", False),
        ("gfx1100", "fp8_e4m3", False),
        ("gfx1200", "fp8_e4m3", True),
        ("sm_90", "fp4_e2m1", False),
    ],
)
def test_which_targets_have_which_gemm(isa, format, ok):
    verdict = has_gemm(format, get_target(isa))
    assert verdict.ok is ok
    assert format in verdict.reason


def test_mixed_operands_and_fp32_are_explained():
    sm_90 = get_target("sm_90")
    assert has_gemm("fp8_e4m3", sm_90, "fp8_e5m2")
    assert not has_gemm("bf16", sm_90, "fp16")
    assert "vector units" in has_gemm("fp32", sm_90).reason
    assert "vector units" not in has_gemm("fp32", get_target("gfx90a")).reason


def test_the_interpreters_tiles_are_powers_of_two_and_no_larger_than_needed():
    assert interpreter_config(1, 100, 5000).blocks == {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 512}
