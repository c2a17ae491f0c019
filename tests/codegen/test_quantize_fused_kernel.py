"""What is fused with quantisation is right to fp32, and quantised as the simulator quantises it, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_checks.quantize_fused import assert_close, assert_quantized

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.quantize import allocate_blocks
from dsmp.codegen.kernels.quantize_fused import (
    copy_call,
    copy_configs,
    gated_quantize,
    gated_quantize_call,
    gated_quantize_configs,
    gated_reference,
    norm_quantize,
    norm_quantize_call,
    norm_quantize_configs,
    norm_reference,
    transpose,
)
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS
from dsmp.passes.rounding import round_to

KINDS = ["rms", "layer"]


def sample(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 127), (5, 128), (4, 129), (130, 300), (2, 20000)], ids=str)
def test_norms(kind, shape):
    layer = kind == "layer"
    x, weight = sample(*shape) * 3.0 + 0.5, sample(shape[1], seed=1)
    bias = sample(shape[1], seed=2) if layer else None
    blocks, y = norm_quantize(x, weight, bias, layer_norm=layer, eps=1e-5, format="fp8_e4m3", output=torch.float32)
    assert_close(y, norm_reference(x, weight, bias, layer_norm=layer, eps=1e-5))
    assert_quantized(blocks, y, "fp8_e4m3")


def test_the_references_by_their_formulas():
    x, weight, bias = sample(3, 10).double(), sample(10, seed=1).double(), sample(10, seed=2).double()
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(norm_reference(x, weight, None, layer_norm=False, eps=1e-3), rms)
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias
    torch.testing.assert_close(norm_reference(x, weight, bias, layer_norm=True, eps=1e-3), normal)
    torch.testing.assert_close(gated_reference(x, x + 1), x / (1 + (-x).exp()) * (x + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_without_weight_walked_rows_and_statistics(kind):
    layer = kind == "layer"
    x = sample(5, 700) + 2.0
    for block in (256, 1024):
        blocks, y = allocate_blocks(x, "int8"), torch.empty_like(x)
        mean, rstd = torch.empty(5), torch.empty(5)
        norm_quantize_call(
            *(x, None, None, blocks.rows, blocks.row_scale, y, mean if layer else None, rstd),
            layer_norm=layer,
            eps=1e-6,
            format="int8",
            config=Config(blocks={"ROWS": 2, "BLOCK": block, "NATIVE_CAST": 0}),
        ).run()
        assert_close(y, norm_reference(x, None, None, layer_norm=layer, eps=1e-6))
        assert_quantized(blocks, y, "int8")
        wide = x.double()
        if layer:
            torch.testing.assert_close(mean.double(), wide.mean(-1), rtol=1e-6, atol=1e-7)
            wide = wide - wide.mean(-1, keepdim=True)
        torch.testing.assert_close(rstd.double(), (wide.square().mean(-1) + 1e-6).rsqrt(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_quantises_what_is_written(dtype):
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    x, weight = sample(6, 300, dtype=dtype).T.contiguous().T, sample(300, seed=1, dtype=dtype)
    common = {"layer_norm": False, "eps": 1e-5, "format": "fp8_e4m3"}
    plain, wide = norm_quantize(x, weight, output=torch.float32, **common)
    blocks, y = norm_quantize(x, weight, output=dtype, rounded=True, **common)
    assert y.dtype is dtype and torch.equal(y.float(), round_to(wide, name))
    assert_quantized(blocks, y, "fp8_e4m3")
    blocks, same = norm_quantize(x, weight, output=dtype, **common)
    assert torch.equal(same, y) and torch.equal(blocks.rows.float(), plain.rows.float())
    blocks, none = norm_quantize(x, weight, **common)
    assert none is None and torch.equal(blocks.rows.float(), plain.rows.float())

    up = sample(6, 300, seed=3, dtype=dtype)
    blocks, y = gated_quantize(x, up, format="fp8_e5m2", columns=True, output=dtype, rounded=True)
    assert_quantized(blocks, y, "fp8_e5m2")
    blocks, wide = gated_quantize(x, up, format="fp8_e5m2", columns=True, output=torch.float32)
    assert torch.equal(y.float(), round_to(wide, name))
    assert_quantized(blocks, wide, "fp8_e5m2")


@pytest.mark.parametrize("shape", [(1, 1), (17, 2), (127, 129), (300, 128)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_products(shape, activation):
    gate, up = sample(*shape) * 4.0, sample(*shape, seed=1)
    blocks, y = gated_quantize(
        gate, up, format="fp8_e4m3", activation=activation, columns=True, transposed=True, output=torch.float32
    )
    # the activation is good to ulps of the gate
    bound = 2.0**-20 * (gate.double().abs() * up.double().abs() + 1e-6)
    assert bool(((y - gated_reference(gate, up, activation)).abs() <= bound).all())
    assert_quantized(blocks, y, "fp8_e4m3")
    assert blocks.columns.T.is_contiguous()


def test_mx_blocks():
    gate, up = sample(40, 100), sample(40, 100, seed=1)
    blocks, y = gated_quantize(
        gate, up, format="fp8_e4m3", group=32, power_of_two=True, columns=True, output=torch.float32
    )
    assert_quantized(blocks, y, "fp8_e4m3", "mx32")
    blocks, y = norm_quantize(
        gate, None, layer_norm=True, eps=1e-5, format="fp8_e5m2", group=32, power_of_two=True, output=torch.float32
    )
    assert_quantized(blocks, y, "fp8_e5m2", "mx32")


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_value_spoils_its_row_only(kind):
    x = sample(4, 300)
    x[1, 7], x[2, 299] = math.nan, math.inf
    for block in (128, 512):
        blocks = allocate_blocks(x, "fp8_e4m3")
        norm_quantize_call(
            *(x, None, None, blocks.rows, blocks.row_scale),
            layer_norm=kind == "layer",
            eps=1e-5,
            format="fp8_e4m3",
            config=Config(blocks={"ROWS": 4, "BLOCK": block, "NATIVE_CAST": 0}),
        ).run()
        found = blocks.rows.float()
        assert bool(found[[0, 3]].isfinite().all()) and bool(blocks.row_scale.isfinite().all())
        assert bool(found[1].isnan().all()) and bool(found[2, 299].isnan())


def test_empty_and_zero_rows():
    for shape in ((0, 5), (5, 0)):
        x = torch.empty(shape)
        blocks, y = norm_quantize(x, None, layer_norm=True, eps=1e-5, format="int8", output=torch.float32)
        assert blocks.rows.shape == x.shape and y.shape == x.shape
        blocks, y = gated_quantize(x, x, format="int8", columns=True, output=torch.float32)
        assert blocks.columns.shape == x.shape and y.shape == x.shape
        assert transpose(x).shape == x.T.shape
    blocks, _ = norm_quantize(torch.zeros(3, 200), None, layer_norm=True, eps=1e-5, format="fp8_e4m3")
    assert bool((blocks.row_scale == 1.0).all()) and bool((blocks.rows.float() == 0.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1), (127, 300), (2, 17)], ids=str)
def test_transposition(dtype, shape):
    x = (sample(*shape) * 50.0).to(dtype)
    found = transpose(x)
    assert found.is_contiguous() and found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), x.T.contiguous().view(torch.uint8))


def offline_calls(isa, format):
    target, M = TARGETS[isa], 4096
    calls = {}
    for N in (1024, 16384, 40000):
        x, weight = meta(M, N, dtype=torch.bfloat16), meta(N, dtype=torch.bfloat16)
        blocks, rstd = allocate_blocks(x, format), meta(M, dtype=torch.float32)
        for kind in KINDS:
            layer = kind == "layer"
            calls[f"{kind} {N}"] = norm_quantize_call(
                *(
                    x,
                    weight,
                    weight if layer else None,
                    blocks.rows,
                    blocks.row_scale,
                    x,
                    rstd if layer else None,
                    rstd,
                ),
                layer_norm=layer,
                eps=1e-5,
                format=format,
                config=norm_quantize_configs(N, format, target)[0],
            )
    x = meta(M, M, dtype=torch.bfloat16)
    calls["gated both"] = gated_quantize_call(
        *(x, x, x, allocate_blocks(x, format, columns=True, transposed=True)),
        format=format,
        config=gated_quantize_configs(M, M, format, target, columns=True)[0],
    )
    calls["gated rows"] = gated_quantize_call(
        x, x, None, allocate_blocks(x, format), format=format, config=gated_quantize_configs(M, M, format, target)[0]
    )
    calls["copy"] = copy_call(x, meta(M, M, dtype=torch.bfloat16).T, config=copy_configs(M, M, target)[0])
    return calls


def offline_cases():
    """(target, kernel): every kernel where targets differ, else those that take most registers."""
    everything = list(offline_calls("sm_80", "fp8_e4m3"))
    differ = ("sm_80", "sm_90", "gfx942", "gfx1100")
    return [(isa, name) for isa in differ for name in everything] + [
        (isa, name) for isa in TARGETS if isa not in differ for name in ("layer 16384", "gated both")
    ]


def check_offline(isa, name):
    target = TARGETS[isa]
    compiled = compile_call(offline_calls(isa, "fp8_e4m3")[name], target)
    assert compiled.code.spills == 0
    assert compiled.shared_bytes <= target.shared_bytes


@pytest.mark.parametrize("case", [("sm_90", "layer 1024"), ("gfx942", "gated rows")], ids=str)
def test_compiles_without_spills(case):
    check_offline(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", offline_cases(), ids=str)
def test_every_target(case):
    check_offline(*case)
