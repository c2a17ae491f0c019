"""MX GEMM: interpreted numbers against fp64 and the simulator, and what it becomes on targets that have it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks.mx_gemm import DTYPES, FP4, mx, random

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.mx_gemm import (
    dequantize_mx,
    from_e8m0,
    mx_gemm,
    mx_gemm_available,
    mx_gemm_call,
    mx_gemm_configs,
    mx_gemm_reference,
    to_e8m0,
)
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS
from dsmp.passes.rounding import fake_quantize

SIZES = st.sampled_from([1, 2, 17, 127, 128, 129, 300])


@settings(deadline=None, max_examples=8)
@given(
    SIZES,
    SIZES,
    st.sampled_from([2, 32, 34, 128, 130, 300]),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(sorted(DTYPES)),
)
@example(300, 129, 300, "fp8_e4m3", "fp8_e4m3")
@example(17, 129, 130, "fp4_e2m1", "fp8_e5m2")
def test_numbers(m, n, k, first, second):
    x, w = random(m, k), random(n, k, seed=1)
    a, sa = mx(x, first)
    b, sb = mx(w, second)
    exact_x, exact_w = fake_quantize(x.double(), first, "mx32"), fake_quantize(w.double(), second, "mx32")
    assert torch.equal(dequantize_mx(a, sa), exact_x) and torch.equal(dequantize_mx(b, sb), exact_w)
    exact = exact_x @ exact_w.T
    torch.testing.assert_close(mx_gemm_reference(a, b, sa, sb), exact, rtol=1e-12, atol=1e-12)
    out = mx_gemm(a, b, sa, sb, dtype=torch.float32)
    assert ((out.double() - exact).abs() <= (k + 8) * 2.0**-24 * (exact_x.abs() @ exact_w.abs().T)).all()


@given(st.integers(-126, 127))
def test_scales_are_bytes_without_loss(exponent):
    scale = torch.tensor([2.0**exponent, 1.0])
    assert to_e8m0(scale).tolist() == [exponent + 127, 127]
    assert torch.equal(from_e8m0(to_e8m0(scale)), scale.double())


def test_every_byte_of_a_scale():
    every = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [math.nan], dtype=torch.float64)
    torch.testing.assert_close(from_e8m0(every), expected, rtol=0, atol=0, equal_nan=True)
    one = torch.zeros(256, 32, dtype=torch.float8_e4m3fn)
    one[:, 5] = 1.0
    unit = torch.full((1, 1), 127, dtype=torch.uint8)
    out = mx_gemm(one, one[:1], every[:, None], unit, dtype=torch.float32)
    torch.testing.assert_close(out[:, 0].double(), expected, rtol=0, atol=0, equal_nan=True)


def test_every_code_of_fp4():
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    codes[:, 1:] = 0
    scale = torch.full((256, 1), 127, dtype=torch.uint8)
    pick = torch.zeros(2, 32, dtype=torch.float8_e4m3fn)
    pick[0, 0], pick[1, 1] = 1.0, 1.0
    out = mx_gemm(codes, pick, scale, scale[:2], dtype=torch.float32)
    magnitudes = sorted(FP4, key=FP4.__getitem__)
    value = [magnitudes[c & 7] * (-1 if c & 8 else 1) for c in range(16)]
    assert out.tolist() == [[value[c & 15], value[c >> 4]] for c in range(256)]


def test_tiles_views_and_epilogue():
    a, sa = mx(random(140, 160), "fp8_e4m3")
    b, sb = mx(random(150, 160, seed=1), "fp8_e4m3")
    bias, residual = random(150), random(150, 140).t()
    tiled = torch.empty(150, 140).t()
    strided = [t.t().contiguous().t() for t in (a, b, sa, sb)]
    config = Config(blocks={"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128})
    epilogue = {"bias": bias, "residual": residual, "activation": "relu"}
    mx_gemm_call(*strided[:2], tiled, *strided[2:], **epilogue, config=config).run()
    out = mx_gemm(a, b, sa, sb, **epilogue, dtype=torch.float32)
    assert torch.equal(out, mx_gemm(*strided, **epilogue, dtype=torch.float32))
    x, w = dequantize_mx(a, sa), dequantize_mx(b, sb)
    expected = (x @ w.T + bias).clamp(min=0) + residual
    magnitude = x.abs() @ w.abs().T + bias.abs() + residual.abs()
    for result in (out, tiled):
        assert ((result.double() - expected).abs() <= 180 * 2.0**-24 * magnitude).all()
    assert torch.equal(mx_gemm(a, b, sa, sb, **epilogue), out.bfloat16())


@pytest.mark.parametrize("m, n, k", [(0, 17, 64), (17, 0, 64), (17, 20, 0)])
def test_empty(m, n, k):
    a, b = (torch.empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, n))
    sa, sb = (torch.empty(rows, k // 32, dtype=torch.uint8) for rows in (m, n))
    assert torch.equal(mx_gemm(a, b, sa, sb, dtype=torch.float32), torch.zeros(m, n))


def test_nan_stays_in_its_row():
    x = random(3, 64)
    x[1, 40] = math.nan
    a, sa = mx(x, "fp8_e4m3")
    b, sb = mx(random(17, 64, seed=1), "fp8_e4m3")
    out = mx_gemm(a, b, sa, sb)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_what_does_not_fit_is_refused():
    a, sa = mx(random(3, 64), "fp8_e4m3")
    b, sb = mx(random(5, 96), "fp8_e4m3")
    for wrong in ((a, b, sa, sb), (a, a, sa[:, :1], sa), (a.float(), a, sa, sa), (a, a, sa.float(), sa)):
        with pytest.raises(ValueError, match=r"contraction|MX|one per"):
            mx_gemm(*wrong)


def test_formats_of_targets():
    has = {d: {t for t in TARGETS if mx_gemm_available(d, TARGETS[t])} for d in DTYPES.values()}
    assert all(targets == {"sm_100", "sm_120", "gfx950"} for targets in has.values())
    assert "E8M0" in mx_gemm_available(torch.float8_e4m3fn, TARGETS["sm_90"]).reason
    assert not mx_gemm_available(torch.float8_e4m3fn, TARGETS["sm_120"], torch.uint8)
    assert not mx_gemm_available(torch.bfloat16, TARGETS["sm_100"])


def offline_cases():
    """(id, instruction set, call, what the name of its matrix instruction contains)."""
    kinds = {"sm_100": "tcgen05.mma.cta_group::1.kind::mx", "sm_120": "kind::mxf", "gfx950": "v_mfma_scale_f32"}
    m = n = k = 4096
    cases = []
    for isa, kind in kinds.items():
        for first, second in (("fp8_e4m3",) * 2, ("fp8_e5m2", "fp8_e4m3"), ("fp4_e2m1",) * 2, ("fp8_e4m3", "fp4_e2m1")):
            da, db = DTYPES[first], DTYPES[second]
            if not mx_gemm_available(da, TARGETS[isa], db):
                continue
            a, b = (meta(rows, k // (2 if d is torch.uint8 else 1), dtype=d) for rows, d in ((m, da), (n, db)))
            sa, sb = (meta(rows, k // 32, dtype=torch.uint8) for rows in (m, n))
            for index, config in enumerate(mx_gemm_configs(m, n, k, TARGETS[isa], dtype=da)):
                out = meta(m, n, dtype=torch.bfloat16)
                call = mx_gemm_call(a, b, out, sa, sb, config=config)
                cases.append((f"{isa}-{first}-{second}-{index}", isa, call, kind))
    return cases


CASES = [pytest.param(*case[1:], id=case[0]) for case in offline_cases()]


def check(isa, call, kind):
    kernel = compile_call(call, TARGETS[isa])
    assert kernel.code.spills == 0, kernel.code
    assert kernel.shared_bytes <= TARGETS[isa].shared_bytes
    assert all(kind in i for i in kernel.code.matrix_instructions) and kernel.code.matrix_instructions


@pytest.mark.parametrize(
    "isa, call, kind", [c for c in CASES if c.id.endswith("fp8_e4m3-fp8_e4m3-0") and "120" not in c.id]
)
def test_offline_sample(isa, call, kind):
    check(isa, call, kind)


@pytest.mark.slow
@pytest.mark.parametrize("isa, call, kind", CASES)
def test_offline(isa, call, kind):
    check(isa, call, kind)
