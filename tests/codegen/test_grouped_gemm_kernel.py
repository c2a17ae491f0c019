"""Grouped GEMM: every group against fp64 on its own, ragged and empty ones too, and what it becomes on every target."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks.grouped_gemm import E4M3, close, ends, fp8, random, scattered, slices

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.grouped_gemm import (
    grouped_columns_call,
    grouped_gemm,
    grouped_gemm_available,
    grouped_gemm_columns,
    grouped_gemm_columns_reference,
    grouped_gemm_configs,
    grouped_gemm_reference,
    grouped_rows_call,
    scale_row,
)
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS

GROUPS = st.lists(st.sampled_from([0, 0, 1, 17, 127, 128, 129, 200]), min_size=1, max_size=4)
SIZES = st.sampled_from([1, 17, 128, 150])


@settings(deadline=None, max_examples=5)
@given(GROUPS, st.integers(0, 3), SIZES, SIZES, st.booleans())
@example([0, 17, 0, 200, 1], 2, 150, 150, True)
def test_rows(sizes, behind, n, k, transposed):
    m = sum(sizes) + behind
    a, sa, wide_a = fp8(random(m, k), "1x128")
    if transposed:  # dgrad: tiles of w, which is contracted over its first dimension
        b, sb, wide_b = (t.mT for t in fp8(random(len(sizes), k, n), "128x128", -2))
    else:
        b, sb, wide_b = fp8(random(len(sizes), n, k), "128x128")
    out = grouped_gemm(a, b, ends(sizes), sa, sb, dtype=torch.float32)
    assert out.shape == (m, n)
    for e, rows in slices(sizes):
        magnitude = wide_a[rows].abs() @ wide_b[e].abs().T
        assert close(out[rows], wide_a[rows] @ wide_b[e].T, magnitude, k)
    assert torch.equal(out[m - behind :], torch.zeros(behind, n))
    reference = grouped_gemm_reference(a, b, ends(sizes), sa, sb)
    for e, rows in slices(sizes):
        torch.testing.assert_close(reference[rows], wide_a[rows] @ wide_b[e].T, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=5)
@given(GROUPS, st.integers(0, 3), SIZES, SIZES)
@example([0, 17, 0, 200, 1, 129], 0, 150, 150)
def test_columns(sizes, behind, n, k):
    m = sum(sizes) + behind
    dy, sdy, wide_dy = scattered(random(m, n), sizes)
    x, sx, wide_x = scattered(random(m, k, seed=1), sizes)
    out = grouped_gemm_columns(dy, x, ends(sizes), sdy, sx, dtype=torch.float32)
    assert out.shape == (len(sizes), n, k)
    exact = torch.zeros(out.shape, dtype=torch.float64)
    for e, rows in slices(sizes):
        exact[e] = wide_dy[rows].T @ wide_x[rows]
        assert close(out[e], exact[e], wide_dy[rows].abs().T @ wide_x[rows].abs(), m)
    assert all(torch.equal(out[e], torch.zeros(n, k)) for e, size in enumerate(sizes) if not size)
    reference = grouped_gemm_columns_reference(dy, x, ends(sizes), sdy, sx)
    torch.testing.assert_close(reference, exact, rtol=1e-12, atol=1e-12)


@given(GROUPS, st.integers(0, 3))
def test_rows_of_scales(sizes, behind):
    """The formula of the documentation, and that no two blocks share a row."""
    m = sum(sizes) + behind
    where = scale_row(ends(sizes), m)
    expected = [rows.start // 128 + e + i // 128 for e, rows in slices(sizes) for i in range(rows.stop - rows.start)]
    assert where[: m - behind].tolist() == expected
    assert len(set(expected)) == sum(-(-size // 128) for size in sizes)
    assert max(expected, default=0) < m // 128 + len(sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("small", [False, True])
def test_plain_values_and_epilogue(dtype, small):
    sizes, n, k = [3, 0, 60, 40], 70, 96
    a, b = random(110, k).to(dtype), random(4, n, k).to(dtype)
    bias, residual = random(4, n), random(n, 110).t().to(dtype)
    config = Config(
        blocks={"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 64}
        if small
        else dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), 128)
    )
    out = torch.empty(110, n)
    epilogue = {"bias": bias, "residual": residual, "activation": "silu"}
    grouped_rows_call(a, b, out, ends(sizes), **epilogue, config=config).run()
    for e, rows in slices(sizes):
        product = a[rows].double() @ b[e].double().T + bias[e]
        expected = product * torch.sigmoid(product) + residual[rows]
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-4)
        reference = grouped_gemm_reference(a, b, ends(sizes), **epilogue)[rows]
        torch.testing.assert_close(reference, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(out[103:], torch.zeros(7, n))
    gradient = torch.empty(4, k, n)
    grouped_columns_call(a, residual, gradient, ends(sizes), config=config).run()
    torch.testing.assert_close(
        gradient.double(), grouped_gemm_columns_reference(a, residual, ends(sizes)), rtol=1e-5, atol=1e-4
    )


def test_as_torch_has_it():
    """torch._grouped_mm where it takes the shapes: groups of multiples of 16 bytes."""
    sizes = [16, 0, 32, 48]
    a, b = random(96, 64).bfloat16(), random(4, 32, 64).bfloat16()
    out = grouped_gemm(a, b, ends(sizes))
    theirs = torch._grouped_mm(a, b.mT, offs=ends(sizes))
    torch.testing.assert_close(out, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("m, n, k, experts", [(0, 17, 64, 3), (17, 0, 64, 3), (17, 20, 0, 3), (0, 17, 64, 0)])
def test_empty(m, n, k, experts):
    offsets = torch.full((experts,), m, dtype=torch.int32)
    a, b = random(m, k).bfloat16(), random(experts, n, k).bfloat16()
    assert torch.equal(grouped_gemm(a, b, offsets), torch.zeros(m, n, dtype=torch.bfloat16))
    y = random(m, n).bfloat16()
    out = grouped_gemm_columns(y, a, offsets, dtype=torch.float32)
    torch.testing.assert_close(out.double(), grouped_gemm_columns_reference(y, a, offsets), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    a, b, offsets = random(9, 64).bfloat16(), random(2, 5, 64).bfloat16(), torch.tensor([4, 9], dtype=torch.int32)
    for wrong in (
        (a[:, :32], b, offsets),
        (a, b, offsets.long()),
        (a, b, offsets[:1]),
        (a.to(E4M3), b.to(E4M3), offsets),
    ):
        with pytest.raises(ValueError, match=r"contraction|offsets|scales"):
            grouped_gemm(*wrong)
    with pytest.raises(ValueError, match="scales"):
        grouped_gemm(a, b, offsets, torch.ones(9, 1), torch.ones(2, 1, 1))


def offline_cases():
    """(id, instruction set, call): the three GEMMs of 16 experts, in fp8 with scales and in bf16."""
    m, n, k, experts, f32 = 8192, 4096, 2048, 16, torch.float32
    cases = []
    for isa, target in TARGETS.items():
        for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16):
            if not grouped_gemm_available(dtype, target):
                continue
            scaled = dtype is not torch.bfloat16
            offsets, w = meta(experts, dtype=torch.int32), meta(experts, n, k, dtype=dtype)
            x, dy = meta(m, k, dtype=dtype), meta(m, n, dtype=dtype)
            sw = meta(experts, n // 128, k // 128, dtype=f32)
            rows = grouped_gemm_configs(m // experts, n, target, dtype=dtype)[0]
            columns = grouped_gemm_configs(n, k, target, dtype=dtype)[0]
            outputs = meta(m, n, dtype=torch.bfloat16), meta(m, k, dtype=torch.bfloat16), meta(experts, n, k, dtype=f32)
            fprop = (meta(m, k // 128, dtype=f32), sw) if scaled else ()
            dgrad = (meta(m, n // 128, dtype=f32), sw.mT) if scaled else ()
            wgrad = (meta(m // 128 + experts, n, dtype=f32), meta(m // 128 + experts, k, dtype=f32)) if scaled else ()
            name = f"{isa}-{str(dtype).removeprefix('torch.')}"
            cases += [
                (f"{name}-fprop", isa, grouped_rows_call(x, w, outputs[0], offsets, *fprop, config=rows)),
                (f"{name}-dgrad", isa, grouped_rows_call(dy, w.mT, outputs[1], offsets, *dgrad, config=rows)),
                (f"{name}-wgrad", isa, grouped_columns_call(dy, x, outputs[2], offsets, *wgrad, config=columns)),
            ]
    return cases


CASES = [pytest.param(*case[1:], id=case[0]) for case in offline_cases()]


def check(isa, call):
    kernel = compile_call(call, TARGETS[isa])
    assert kernel.code.spills == 0, kernel.code
    assert kernel.shared_bytes <= TARGETS[isa].shared_bytes
    assert kernel.code.multiplies(call.operand_format), kernel.code.matrix_instructions


@pytest.mark.parametrize(
    "isa, call", [c for c in CASES if c.id in ("sm_90-float8_e4m3fn-fprop", "gfx90a-bfloat16-wgrad")]
)
def test_offline_sample(isa, call):
    check(isa, call)


@pytest.mark.slow
@pytest.mark.parametrize("isa, call", CASES)
def test_offline(isa, call):
    check(isa, call)
