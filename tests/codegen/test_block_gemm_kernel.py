"""Block-scaled GEMM: interpreted numbers against fp64, and what it becomes on every target."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks.block_gemm import DTYPES, bound, dequantized, operands, quantized

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.block_gemm import (
    INTERPRETER_CONFIG,
    block_gemm,
    block_gemm_available,
    block_gemm_call,
    block_gemm_configs,
    block_gemm_reference,
)
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS
from dsmp.passes.rounding import fake_quantize

PAIRS = [("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3fnuz", "fp8_e5m2fnuz"), ("int8", "int8")]
SIZES = [1, 2, 17, 127, 128, 129, 300]
OUTPUTS = [torch.float32, torch.bfloat16, torch.float16]
TILED = Config(blocks={"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128})


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(["fprop", "dgrad", "wgrad"]),
    st.tuples(*[st.sampled_from(SIZES)] * 3),
    st.sampled_from(
        [("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3fnuz", "fp8_e5m2fnuz"), ("int8",) * 2]
    ),
    st.sampled_from(OUTPUTS),
)
@example("fprop", (300, 300, 300), ("fp8_e4m3", "fp8_e4m3"), torch.float32)
@example("dgrad", (129, 300, 129), ("fp8_e5m2", "fp8_e4m3"), torch.bfloat16)
@example("wgrad", (300, 129, 257), ("int8", "int8"), torch.float32)
def test_numbers(phase, sizes, formats, dtype):
    a, b, sa, sb = operands(phase, *sizes, *formats)
    out = block_gemm(a, b, sa, sb, dtype=dtype)
    exact = dequantized(a, sa) @ dequantized(b, sb).T
    assert out.dtype is dtype and out.shape == exact.shape
    torch.testing.assert_close(block_gemm_reference(a, b, sa, sb), exact, rtol=1e-12, atol=1e-12)
    inside = exact.abs() < torch.finfo(dtype).max / 2
    assert ((out.double() - exact).abs() <= bound(a, b, sa, sb, dtype))[inside].all()


def exact_tensor(rows, k, generator):
    """Small integers times a power of two per block of 128, each block with one 448 of it: scales are powers of two."""
    x = torch.randint(-4, 5, (rows, k), generator=generator).float()
    exponent = torch.randint(-2, 3, (-(-rows // 128), -(-k // 128)), generator=generator)
    x *= torch.exp2(exponent.float()).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    for r in range(rows):
        for j in range(exponent.size(1)):
            width = min(128, k - 128 * j)
            x[r, 128 * j + (7 * r) % width] = 448 * 2.0 ** int(exponent[r // 128, j])
    return x


@pytest.mark.parametrize("config", [INTERPRETER_CONFIG, TILED], ids=["one_tile", "tiles"])
def test_exact_sums_have_the_bits_of_the_simulator(config):
    generator = torch.Generator().manual_seed(1)
    x, w = exact_tensor(130, 300, generator), exact_tensor(140, 300, generator)
    a, sa = quantized(x, "fp8_e4m3", "1x128")
    b, sb = quantized(w, "fp8_e4m3", "128x128")
    out = torch.empty(130, 140)
    block_gemm_call(a, b, out, sa, sb, config=config).run()
    simulated = fake_quantize(x, "fp8_e4m3", "1x128").double() @ fake_quantize(w, "fp8_e4m3", "128x128").double().T
    assert torch.equal(out.double(), simulated)


def test_tiles_of_both_operands_and_rows_of_the_second():
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(200, 260, generator=generator) for _ in range(2))
    for first, second in (("128x128", "128x128"), ("128x128", "1x128"), ("1x128", "1x128")):
        a, sa = quantized(x, "fp8_e4m3", first)
        b, sb = quantized(w, "fp8_e4m3", second)
        out = torch.empty(200, 200)
        block_gemm_call(a, b, out, sa, sb, config=TILED).run()
        assert (
            (out.double() - dequantized(a, sa) @ dequantized(b, sb).T).abs() <= bound(a, b, sa, sb, out.dtype)
        ).all()


@pytest.mark.parametrize("phase", ["dgrad", "wgrad"])
def test_views_and_copies_give_the_same_bits(phase):
    views = operands(phase, 129, 130, 257)
    copies = [t.clone(memory_format=torch.contiguous_format) for t in views]
    assert any(v.stride() != c.stride() for v, c in zip(views, copies, strict=True))
    assert torch.equal(block_gemm(*views, dtype=torch.float32), block_gemm(*copies, dtype=torch.float32))


def test_strides_beyond_32_bits_in_a_tile():
    a, b, sa, sb = operands("fprop", 2, 17, 128)
    wide = torch.empty(2**22, dtype=a.dtype).as_strided(a.shape, (2**21, 1)).copy_(a)
    out = torch.empty(2, 17)
    call = block_gemm_call(wide, b, out, sa, sb, config=INTERPRETER_CONFIG)
    call.run()
    assert call.constants["WIDE"] and torch.equal(out, block_gemm(a, b, sa, sb, dtype=torch.float32))


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
def test_epilogue(activation):
    a, b, sa, sb = operands("fprop", 17, 129, 130)
    generator = torch.Generator().manual_seed(3)
    bias, residual = torch.randn(129, generator=generator).bfloat16(), torch.randn(129, 17, generator=generator).t()
    epilogue = {"bias": bias, "residual": residual, "activation": activation}
    out = block_gemm(a, b, sa, sb, **epilogue, dtype=torch.float32)
    torch.testing.assert_close(out.double(), block_gemm_reference(a, b, sa, sb, **epilogue), rtol=1e-5, atol=1e-4)
    assert torch.equal(block_gemm(a, b, sa, sb, **epilogue), out.bfloat16())


def test_batches():
    parts = [operands("fprop", 17, 129, 130, seed=s) for s in range(3)]
    a, b, sa, sb = (torch.stack(t) for t in zip(*parts, strict=True))
    out = block_gemm(a, b, sa, sb, dtype=torch.float32)
    assert torch.equal(out, torch.stack([block_gemm(*p, dtype=torch.float32) for p in parts]))
    shared = block_gemm(a, b[0], sa, sb[0], dtype=torch.float32)
    assert torch.equal(shared[2], block_gemm(a[2], b[0], sa[2], sb[0], dtype=torch.float32))


@pytest.mark.parametrize("m, n, k", [(0, 17, 128), (17, 0, 128), (17, 129, 0), (0, 0, 0)])
def test_empty(m, n, k):
    a, b = torch.empty(m, k, dtype=torch.float8_e4m3fn), torch.empty(n, k, dtype=torch.float8_e4m3fn)
    sa, sb = torch.empty(m, -(-k // 128)), torch.empty(-(-n // 128), -(-k // 128))
    bias = torch.arange(n).float()
    assert torch.equal(block_gemm(a, b, sa, sb, bias=bias, dtype=torch.float32), bias.expand(m, n))


@pytest.mark.parametrize(
    "name, values", [("fp8_e4m3", [math.nan]), ("fp8_e5m2", [math.nan, math.inf]), ("fp8_e5m2fnuz", [math.nan])]
)
def test_what_is_not_finite_shows_and_stays_in_its_row(name, values):
    for value in values:
        x = torch.ones(3, 130)
        x[1, 129] = value
        x[2] = 0.0
        a, sa = quantized(x, name, "1x128")
        b, sb = quantized(torch.ones(17, 130), name, "128x128")
        out = block_gemm(a, b, sa, sb, dtype=torch.float32)
        expected = torch.tensor([[130.0], [value], [0.0]]).expand(3, 17)
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_what_does_not_fit_is_refused():
    a, b, sa, sb = operands("fprop", 17, 129, 130)
    for wrong in (
        (a, b[:, :129], sa, sb),
        (a, b, sa[:5], sb),
        (a, b, sa[:, :1], sb),
        (a, b, sa.double(), sb),
        (a.float(), b, sa, sb),
    ):
        with pytest.raises(ValueError, match=r"contraction|scale"):
            block_gemm(*wrong)


@given(st.sampled_from(sorted(TARGETS)), st.integers(1, 20000), st.integers(1, 20000))
def test_configurations_fit(isa, m, n):
    target = TARGETS[isa]
    configs = block_gemm_configs(m, n, 4096, target)
    assert configs
    for config in configs:
        assert config.blocks["BLOCK_K"] == 128, "promotion is per 128"
        assert (config.blocks["BLOCK_M"] + config.blocks["BLOCK_N"]) * 128 * config.num_stages <= target.shared_bytes
    if m <= 16 and isa not in ("sm_90", "sm_100"):
        assert configs[0].blocks["BLOCK_M"] == 16


def test_formats_of_targets():
    has = {d: {t for t in TARGETS if block_gemm_available(d, TARGETS[t])} for d in DTYPES.values()}
    assert has[torch.float8_e4m3fn] == {"sm_89", "sm_90", "sm_100", "sm_120", "gfx950", "gfx1200"}
    assert has[torch.float8_e4m3fnuz] == {"gfx942"} and has[torch.int8] == set(TARGETS)
    assert "no fp8" in block_gemm_available(torch.float8_e4m3fn, TARGETS["gfx90a"]).reason
    assert "other flavour" in block_gemm_available(torch.float8_e4m3fn, TARGETS["gfx942"]).reason


def described(isa, phase, m, first, second, config=None, n=4096, k=4096):
    """A call on meta tensors laid out as a layer's are."""
    f32 = torch.float32
    a = meta(k, m, dtype=first).t() if phase == "wgrad" else meta(m, k, dtype=first)
    sa = meta(k // 128, m, dtype=f32).t() if phase == "wgrad" else meta(m, k // 128, dtype=f32)
    b = meta(n, k, dtype=second) if phase == "fprop" else meta(k, n, dtype=second).t()
    sb = {
        "fprop": meta(n // 128, k // 128, dtype=f32),
        "dgrad": meta(k // 128, n // 128, dtype=f32).t(),
        "wgrad": meta(k // 128, n, dtype=f32).t(),
    }[phase]
    config = config or block_gemm_configs(m, n, k, TARGETS[isa])[0]
    return block_gemm_call(a, b, meta(m, n, dtype=torch.bfloat16), sa, sb, config=config)


def offline_cases():
    """(id, instruction set, call, pattern of its matrix instruction, None for that of the call's format)."""
    cases = []
    for isa in ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1200"):
        nuz = isa == "gfx942"
        e4, e5 = (DTYPES["fp8_e4m3fnuz"], DTYPES["fp8_e5m2fnuz"]) if nuz else (DTYPES["fp8_e4m3"], DTYPES["fp8_e5m2"])
        for phase in ("fprop", "dgrad", "wgrad"):
            cases.append((f"{isa}-{phase}", isa, described(isa, phase, 4096, e4, e4), None))
        mixed = r"e5m2\.e4m3|f8f6f4|bf8_fp8|fp8_bf8"  # AMD's operands are swapped
        cases.append((f"{isa}-dgrad-e5m2", isa, described(isa, "dgrad", 4096, e5, e4), mixed))
        for m in (1, 64):
            cases.append((f"{isa}-{m}_rows", isa, described(isa, "fprop", m, e4, e4), None))
    for isa in ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx1100"):
        cases.append((f"{isa}-int8", isa, described(isa, "fprop", 4096, torch.int8, torch.int8), None))
    return cases


def check(isa, call, pattern):
    target = TARGETS[isa]
    kernel = compile_call(call, target)
    assert kernel.code.spills == 0, kernel.code
    assert kernel.shared_bytes <= target.shared_bytes
    found = kernel.code.matrix_instructions
    planned = any(re.search(pattern, i) for i in found) if pattern else kernel.code.multiplies(call.operand_format)
    assert planned, found
    return kernel


@pytest.mark.parametrize("phase", ["fprop", "wgrad"])
def test_partial_sums_are_promoted_on_sm_90(phase):
    """Four wgmma of 32 make 128 of the contraction. The first of them starts from zero, so that no sum lives on in
    the matrix unit, and every element of the tile is added to its fp32 sum by an FFMA of the vector units."""
    call = described("sm_90", phase, 4096, torch.float8_e4m3fn, torch.float8_e4m3fn)
    ptx = check("sm_90", call, None).assembly["ptx"]
    from_zero = [m == "0" for m in re.findall(r"wgmma\.mma_async[^;]*\}, %rd\d+, %rd\d+, (0|%p\d+), 1, 1", ptx)]
    assert from_zero == [True, False, False, False]
    elements = call.config.blocks["BLOCK_M"] * call.config.blocks["BLOCK_N"] // (32 * call.config.num_warps)
    assert len(re.findall(r"\bfma\.rn\.f32", ptx)) >= elements


def test_offline_on_an_amd_target():
    check("gfx942", described("gfx942", "fprop", 4096, DTYPES["fp8_e4m3fnuz"], DTYPES["fp8_e4m3fnuz"]), None)


@pytest.mark.slow
@pytest.mark.parametrize("isa, call, pattern", [pytest.param(*c[1:], id=c[0]) for c in offline_cases()])
def test_offline(isa, call, pattern):
    check(isa, call, pattern)
