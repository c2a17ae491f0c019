from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks.weight_only import close, problem

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.packed_weights import dequantize_weight, pack_nibbles, quantize_weight
from dsmp.codegen.kernels.weight_only import (
    has_weight_only,
    weight_only,
    weight_only_calls,
    weight_only_configs,
    weight_only_reference,
)
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS
from dsmp.hardware_db.formats import Recipe
from dsmp.passes.rounding import fake_quantize

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tiles(m: int, n: int, k: int, unroll: int = 1, split: int = 1) -> Config:
    return Config(blocks={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "UNROLL": unroll, "SPLIT_K": split})


@pytest.mark.parametrize("size", [1, 2, 17, 127, 128, 129, 300])
@pytest.mark.parametrize("bits", [4, 8])
def test_awkward_sizes(size, bits):
    for m, n, k in ((3, size, 70), (2, 33, size)):
        for group in (32, 128, k):
            x, packed, scale, zero = problem(m, n, k, bits, group, BF16, zeros=bits == 4)
            got = weight_only(x, packed, scale, group=group, zero=zero, out_dtype=FP32)
            close(got, weight_only_reference(x, packed, scale, group=group, zero=zero))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "config", [tiles(16, 32, 32), tiles(16, 32, 32, 2, 4), tiles(1, 32, 32), tiles(1, 64, 16, 2, 3)]
)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, 150), (8, 150)])
def test_every_way_of_cutting(dtype, config, bits, group):
    x, packed, scale, zero = problem(2, 40, 150, bits, group, dtype, zeros=bits == 4)
    bias = torch.randn(40)
    got = weight_only(
        x, packed, scale, group=group, zero=zero, bias=bias, activation="silu", config=config, out_dtype=FP32
    )
    expected = weight_only_reference(x, packed, scale, group=group, zero=zero, bias=bias, activation="silu")
    close(got, expected)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 200), st.sampled_from([4, 8]),
       st.sampled_from([32, 64, 128, 1000]), st.booleans(), st.sampled_from([BF16, FP16, FP32]), st.data())  # fmt: skip
def test_any_problem(m, n, k, bits, group, zeros, scale_dtype, data):
    x, packed, scale, zero = problem(m, n, k, bits, group, FP16, zeros and bits == 4, scale_dtype)
    config = data.draw(st.sampled_from([None, tiles(16, 64, 32, 2, 2), tiles(64, 64, 32)]))
    bias = data.draw(st.sampled_from([None, BF16, FP32]))
    bias = None if bias is None else torch.randn(n).to(bias)
    got = weight_only(x, packed, scale, group=group, zero=zero, bias=bias, config=config, out_dtype=FP32)
    close(got, weight_only_reference(x, packed, scale, group=group, zero=zero, bias=bias))


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("split", [1, 2])
def test_epilogues(activation, split):
    x, packed, scale, _ = problem(3, 20, 64, 8, 64, FP32)
    bias = torch.randn(20, dtype=BF16)
    got = weight_only(x, packed, scale, group=64, bias=bias, activation=activation, config=tiles(16, 32, 32, 1, split))
    close(got, weight_only_reference(x, packed, scale, group=64, bias=bias, activation=activation))


def test_splits_add_up_the_same_every_time():
    x, packed, scale, _ = problem(3, 20, 300, 4, 32, FP32)
    runs = [weight_only(x, packed, scale, group=32, config=tiles(16, 32, 32, 1, 4)) for _ in range(2)]
    assert torch.equal(*runs)


def test_output_is_rounded_once():
    x, packed, scale, _ = problem(5, 30, 100, 4, 32, BF16)
    wide = weight_only(x, packed, scale, group=32, out_dtype=FP32)
    for dtype in (BF16, FP16):
        assert torch.equal(weight_only(x, packed, scale, group=32, out_dtype=dtype), wide.to(dtype))
    assert weight_only(x, packed, scale, group=32).dtype is BF16


def test_strides_do_not_matter():
    x, packed, scale, zero = problem(5, 30, 100, 4, 32, FP32, zeros=True)
    expected = weight_only(x, packed, scale, group=32, zero=zero)
    wide = torch.randn(100, 10)
    wide[:, ::2] = x.t()
    packed_t, scale_t, zero_t = (t.t().contiguous().t() for t in (packed, scale, zero))
    assert torch.equal(weight_only(wide[:, ::2].t(), packed_t, scale_t, group=32, zero=zero_t), expected)
    out = torch.empty(30, 5).t()
    (call,) = weight_only_calls(x, packed, scale, out, group=32, zero=zero, config=tiles(16, 32, 32))
    call.run()
    close(out, weight_only_reference(x, packed, scale, group=32, zero=zero))


def test_leading_dimensions_and_empty_inputs():
    x, packed, scale, _ = problem(6, 30, 64, 8, 32, FP32)
    got = weight_only(x.reshape(2, 3, 64), packed, scale, group=32)
    assert torch.equal(got, weight_only(x, packed, scale, group=32).reshape(2, 3, 30))
    assert weight_only(x[:0], packed, scale, group=32).shape == (0, 30)
    assert weight_only(x, packed[:0], scale[:0], group=32).shape == (6, 0)
    bias = torch.randn(30)
    for split in (1, 2):
        for bits in (4, 8):
            empty, ones = quantize_weight(torch.empty(30, 0), bits, 32)
            got = weight_only(x[:, :0], empty, ones, group=32, bias=bias, config=tiles(16, 32, 32, 1, split))
            assert torch.equal(got, bias.expand(6, 30))


def test_nonfinite_activations_reach_their_rows_only():
    x, packed, scale, _ = problem(4, 30, 70, 4, 32, BF16)
    x[1, 3], x[2, 69] = float("nan"), float("inf")
    got = weight_only(x, packed, scale, group=32)
    assert got[1].isnan().all() and not got[2].isfinite().any()
    assert got[[0, 3]].isfinite().all()


def test_zero_weights_give_zeros():
    packed, scale = quantize_weight(torch.zeros(20, 64), 4, 32)
    assert torch.equal(weight_only(torch.randn(3, 64), packed, scale, group=32), torch.zeros(3, 20))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 100])
def test_quantized_weights_are_those_of_the_simulator(bits, group):
    w = torch.randn(20, 100) * torch.logspace(-3, 3, 20)[:, None]
    w[3, :32] = 0.0
    packed, scale = quantize_weight(w, bits, group)
    recipe = Recipe(name="group", block=(1, group), power_of_two=False)
    back = dequantize_weight(packed, scale, 100, group)
    assert torch.equal(back.float(), fake_quantize(w, f"int{bits}", recipe))
    error = (back - w).abs()
    assert (error <= 0.5001 * scale.double().repeat_interleave(group, 1)[:, :100]).all()


def test_scales_in_fp16_stay_finite_and_values_follow_them():
    w = torch.cat([torch.full((1, 32), 1e30), torch.full((1, 32), 1e-30), torch.randn(1, 32)])
    packed, scale = quantize_weight(w, 8, 32, scale_dtype=FP16)
    assert scale.isfinite().all() and (scale > 0).all()
    assert (packed[0] == 127).all() and (packed[1] == 0).all()
    assert ((dequantize_weight(packed, scale, 32, 32)[2] - w[2]).abs() <= 0.51 * scale[2].double()).all()


def test_nibbles_are_two_per_byte_low_first():
    packed = pack_nibbles(torch.tensor([[1, 15, 7]]))
    assert packed.tolist() == [[0xF1, 0x87]] and packed.dtype is torch.uint8
    zero = torch.tensor([[3]], dtype=torch.uint8)
    scale = torch.tensor([[2.0]])
    assert dequantize_weight(packed, scale, 3, 3, zero).tolist() == [[-4.0, 24.0, 8.0]]
    assert dequantize_weight(packed, scale, 3, 3).tolist() == [[-14.0, 14.0, -2.0]]


def test_what_does_not_fit_is_an_error():
    x, packed, scale, zero = problem(3, 20, 100, 4, 32, FP32, zeros=True)
    with pytest.raises(ValueError, match="fit together"):
        weight_only(x[:, :50], packed, scale, group=32)
    with pytest.raises(ValueError, match="divides it"):
        weight_only(x, packed, scale, group=32, config=tiles(16, 32, 64))
    with pytest.raises(ValueError, match="zero points"):
        weight_only(x, packed, scale, group=32, zero=zero.int())
    with pytest.raises(ValueError, match="bias"):
        weight_only(x, packed, scale, group=32, bias=torch.zeros(3))
    with pytest.raises(ValueError, match="inf or NaN"):
        quantize_weight(torch.full((2, 2), float("nan")), 4, 32)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        quantize_weight(torch.zeros(2, 2), 3, 32)
    assert not has_weight_only(torch.float64, TARGETS["sm_90"])


@pytest.mark.parametrize("isa", list(TARGETS))
def test_configurations_are_never_empty_and_fit(isa):
    for m in (1, 16, 17, 64, 1000):
        for n, k in ((1, 1), (4096, 4096), (128, 20000)):
            for group in (32, 128, k):
                for dtype in (BF16, FP32):
                    found = weight_only_configs(m, n, k, group, 4, dtype, TARGETS[isa])
                    assert found
                    for config in found:
                        assert group >= k or group % config.blocks["BLOCK_K"] == 0
    small = weight_only_configs(1, 128, 16384, 128, 4, BF16, TARGETS[isa])[0]
    large = weight_only_configs(1, 65536, 16384, 128, 4, BF16, TARGETS[isa])[0]
    assert small.blocks["SPLIT_K"] == 16 and large.blocks["SPLIT_K"] == 1


def offline_cases() -> list[tuple[str, int, torch.dtype, int, int]]:
    """(target, bits, dtype of x, m, group), group 4096 being all of K."""
    cases = []
    for number, isa in enumerate(TARGETS):
        cases += [(isa, 4, BF16, 1, 128), (isa, 4, FP16, 32 if number % 2 else 64, 32), (isa, 8, BF16, 64, 4096)]
        cases.append((isa, 8, FP32, 1, 4096) if number % 2 else (isa, 4, FP32, 64, 128))
    return cases


def check_offline(isa: str, bits: int, dtype: torch.dtype, m: int, group: int) -> None:
    target, n, k = TARGETS[isa], 4096, 4096
    config = weight_only_configs(m, n, k, group, bits, dtype, target)[0]
    packed = meta(n, k if bits == 8 else k // 2, dtype=torch.int8 if bits == 8 else torch.uint8)
    zero = meta(n, k // group, dtype=torch.uint8) if bits == 4 else None
    calls = weight_only_calls(meta(m, k, dtype=dtype), packed, meta(n, k // group, dtype=BF16), meta(m, n, dtype=dtype),
                              group=group, config=config, zero=zero, bias=meta(n, dtype=dtype))  # fmt: skip
    compiled = compile_call(calls[0], target)
    assert compiled.code.spills == 0 and compiled.shared_bytes <= target.shared_bytes
    vector = config.blocks["BLOCK_M"] == 1 or "vector units" in has_weight_only(dtype, target).reason
    assert vector == (dtype is FP32 and (m == 1 or target.isa[:4] not in ("gfx9",)))
    assert vector or compiled.code.multiplies(str(calls[0].operand_format))


@pytest.mark.parametrize(
    "case", [("sm_80", 4, BF16, 1, 128), ("sm_90", 8, BF16, 64, 4096), ("gfx942", 4, FP16, 64, 32)], ids=str
)
def test_code_of_some_targets(case):
    check_offline(*case)


def test_code_that_adds_splits():
    calls = weight_only_calls(meta(4, 512, dtype=BF16), meta(64, 512, dtype=torch.int8), meta(64, 1, dtype=FP32),
                              meta(4, 64, dtype=BF16), group=512, config=tiles(16, 64, 64, 1, 4))  # fmt: skip
    assert [c.name for c in calls] == ["weight_only_int8_bf16_split", "add_splits"]
    assert compile_call(calls[1], TARGETS["sm_80"]).code.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", offline_cases(), ids=str)
def test_code_of_every_target(case):
    check_offline(*case)
