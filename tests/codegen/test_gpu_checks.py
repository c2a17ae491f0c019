"""What runs on a GPU when one is at hand is sound: the same checks on the CPU, with configurations of a target."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import models, products, quantisers

from dsmp.codegen.targets import TARGETS
from dsmp.hardware_db.detect import resolve_hardware

SM_80, SM_90 = TARGETS["sm_80"], TARGETS["sm_90"]
# interpreted kernels know no conversion of PTX
PLAIN = SM_80
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("format", ["tf32", "bf16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("target", [None, SM_90], ids=["entry", "configurations"])
def test_gemm(format, target):
    products.check_gemm(17, 33, 130, format, device="cpu", target=target)
    products.check_gemm(5, 16, 64, format, device="cpu", target=target, column_major=True)


def test_gemm_epilogue():
    products.check_gemm_epilogue("fp8_e5m2", device="cpu", m=17, n=20, k=40)


@pytest.mark.parametrize("target", [None, SM_90], ids=["entry", "configurations"])
def test_scaled_products(target):
    products.check_block_gemm(17, 130, 257, "fprop", ("fp8_e5m2", "fp8_e4m3"), device="cpu", target=target)
    products.check_block_gemm(40, 17, 130, "wgrad", ("int8", "int8"), device="cpu", target=target)


@pytest.mark.parametrize("target", [None, TARGETS["sm_100"]], ids=["entry", "configurations"])
@pytest.mark.parametrize("formats", [("fp8_e4m3", "fp8_e5m2"), ("fp4_e2m1", "fp8_e4m3")])
def test_mx(formats, target):
    products.check_mx_gemm(17, 20, 96, *formats, device="cpu", target=target)


@pytest.mark.parametrize("target", [None, SM_90], ids=["entry", "configurations"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_grouped(dtype, target):
    products.check_grouped_rows([3, 0, 40], 20, 130, dtype, device="cpu", target=target)
    products.check_grouped_columns([3, 0, 40], 20, 33, dtype, device="cpu", target=target)


@pytest.mark.parametrize("target", [None, SM_90], ids=["entry", "configurations"])
@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only(bits, target):
    products.check_weight_only(2, 20, 130, bits, 64, torch.bfloat16, device="cpu", target=target)


def test_sums_that_are_off_are_found():
    """The bound of a few wrong elements, and that of many small errors."""
    exact = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 32
    magnitude = torch.full((64, 64), 650.0, dtype=torch.float64)
    products.assert_sums(exact.float(), exact, magnitude, 1024)
    wrong = exact.clone()
    wrong[3, 5] += 0.06
    with pytest.raises(AssertionError, match="element"):
        products.assert_sums(wrong.float(), exact, magnitude, 1024)
    biased = exact + 40 * 2.0**-24 * magnitude
    with pytest.raises(AssertionError, match="typical"):
        products.assert_sums(biased.float(), exact, magnitude, 1024)
    with pytest.raises(AssertionError, match="element"):
        products.assert_sums(exact.float().fill_(torch.nan), exact, magnitude, 1024)


def test_accumulators_that_keep_fewer_bits_have_a_coarser_unit():
    h200, h100, a100 = (resolve_hardware(name) for name in ("h200", "h100", "a100"))
    assert products.unit_of(h200, "fp8_e4m3") == products.unit_of(h100, "fp8_e4m3") == 2.0**-13
    assert products.unit_of(a100, "bf16") == products.unit_of(h200, "bf16") == products.FP32_UNIT


@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "fp16"])
def test_quantising(format):
    quantisers.check_quantize((30, 140), format, device="cpu")
    quantisers.check_quantize((3, 140), format, device="cpu", dtype=torch.bfloat16)
    quantisers.check_quantize_configs((30, 140), format, device="cpu", target=PLAIN)


@pytest.mark.parametrize("target", [None, PLAIN], ids=["entry", "configurations"])
def test_fused_quantising(target):
    quantisers.check_norm_quantize((3, 140), "fp8_e4m3", True, device="cpu", target=target)
    quantisers.check_gated_quantize((3, 140), "int8", device="cpu", target=target)
    quantisers.check_transpose((3, 70), torch.bfloat16, device="cpu", target=target)
    quantisers.check_gradients(3000, torch.float16, device="cpu", target=target)


def test_training_steps_are_compared_with_fp64():
    model, batch = models.small_gpt("cpu", layers=1, width=128, context=16), models.batch_of("cpu", batch=2, context=16)
    exact = models.exact_step(model, batch)
    fp32 = models.distance(models.step(model, model, batch), exact)
    bf16 = models.distance(models.autocast_step(model, batch), exact)
    assert 0 < fp32[1] < 1e-5 < 1e-4 < bf16[1] < 0.05
    assert all(p.dtype is torch.float32 for p in model.parameters())
