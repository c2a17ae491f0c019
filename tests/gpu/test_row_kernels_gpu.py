"""Kernels over rows and kernels that quantise, on the GPU: bits of the simulator, fp64, and torch's autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import cross_entropy as losses
from kernel_checks import norm as norms
from kernel_checks import softmax as softmaxes
from kernel_checks.products import TRIED
from kernel_checks.quantisers import (
    check_gated_quantize,
    check_gradients,
    check_norm_quantize,
    check_quantize,
    check_quantize_configs,
    check_transpose,
)
from kernel_checks.quantize import FORMAT_NAMES
from row_kernels import DTYPES

from dsmp.codegen.kernels.cross_entropy import cross_entropy, cross_entropy_configs, cross_entropy_reference
from dsmp.codegen.kernels.norm import layer_norm, layer_norm_reference, norm_configs, rms_norm, rms_norm_reference
from dsmp.codegen.kernels.norm_backward import norm_backward_configs
from dsmp.codegen.kernels.softmax import softmax, softmax_configs, softmax_reference

pytestmark = pytest.mark.gpu

AWKWARD = [(1, 1), (2, 17), (127, 128), (128, 129), (300, 2), (130, 300)]
LARGE = (1000, 4096)
SIZES = [1, 17, 128, 129, 300, 4096, 16384, 128256]


@pytest.mark.parametrize("shape", [*AWKWARD, LARGE], ids=str)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_quantising(shape, format, device):
    check_quantize(shape, format, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_quantising_16_bits(format, dtype, device):
    check_quantize((130, 300), format, device=device, dtype=dtype)


@pytest.mark.parametrize("shape", [(130, 300), LARGE], ids=str)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_quantising_in_every_configuration(shape, format, device, target):
    check_quantize_configs(shape, format, device=device, target=target)


@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (5, 128), LARGE, (7, 20000)], ids=str)
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_norm_and_quantise(shape, layer, format, device, target):
    check_norm_quantize(shape, format, layer, device=device)
    check_norm_quantize(shape, format, layer, device=device, target=target)


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), LARGE], ids=str)
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_gate_and_quantise(shape, format, device, target):
    check_gated_quantize(shape, format, device=device)
    check_gated_quantize(shape, format, device=device, target=target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (127, 300), LARGE], ids=str)
def test_transposition(shape, dtype, device, target):
    check_transpose(shape, dtype, device=device)
    check_transpose(shape, dtype, device=device, target=target)


@pytest.mark.parametrize("size", [1, 17, 129, 5000, 3_000_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscaling_gradients(size, dtype, device, target):
    check_gradients(size, dtype, device=device)
    check_gradients(size, dtype, device=device, target=target)


def rows_of(size):
    return 5 if size > 20000 else 37


WAYS = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["entry", "all"])


@WAYS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(size, dtype, every, device, target):
    rows = rows_of(size)
    x, dy = norms.draw(rows, size, dtype).to(device), norms.draw(rows, size, dtype, seed=1).to(device)
    weight, bias = (norms.draw(1, size, seed=s)[0].to(device) for s in (2, 3))
    for config in norm_configs(size, target)[:TRIED] if every else [None]:
        norms.check_forward(x, weight, bias, config=config)
    for config in norm_backward_configs(size, target)[:TRIED] if every else [None]:
        norms.check_backward(dy, x, weight, bias, config=config)


@WAYS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(size, dtype, every, device, target):
    rows = rows_of(size)
    x, dy = softmaxes.draw(rows, size, dtype).to(device), softmaxes.draw(rows, size, seed=1).to(device)
    for config in softmax_configs(size, target)[:TRIED] if every else [None]:
        softmaxes.check(x, dy, dtype=torch.float32, config=config)


@WAYS
@pytest.mark.parametrize("classes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(classes, dtype, every, device, target):
    logits, labels = (t.to(device) for t in losses.draw(rows_of(classes), classes, dtype))
    for config in cross_entropy_configs(classes, target)[:TRIED] if every else [None]:
        losses.check(logits, labels, config=config, label_smoothing=0.1, z_weight=1e-3)


def error(got, exact):
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-30))


FLOOR = 2.0**-24
"""Errors below half a step of fp32 are equal."""


@pytest.mark.parametrize("size", [129, 4096, 16384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_are_no_worse_than_autocast(size, dtype, device):
    """Under autocast torch computes norms, softmax and losses of 16-bit tensors in fp32, as the kernels do."""
    x = norms.draw(64, size, dtype, mean=0.5).to(device)
    weight = norms.draw(1, size, seed=2)[0].to(device)
    labels = torch.arange(64, device=device) % size
    with torch.autocast(device, dtype):
        theirs = (
            F.layer_norm(x, (size,), weight),
            F.softmax(x, -1),
            F.cross_entropy(x, labels, reduction="none"),
        )
    ours = (
        layer_norm(x, weight, dtype=theirs[0].dtype)[0],
        softmax(x, dtype=theirs[1].dtype),
        cross_entropy(x, labels, reduction="none")[0],
    )
    exact = (
        layer_norm_reference(x, weight)[0],
        softmax_reference(x),
        cross_entropy_reference(x, labels)[0],
    )
    for name, found, other, reference in zip(("norm", "softmax", "loss"), ours, theirs, exact, strict=True):
        assert error(found, reference) <= 2 * error(other, reference) + 2 * FLOOR, name
    rms = rms_norm(x.float(), weight)[0], F.rms_norm(x.float(), (size,), weight)
    reference = rms_norm_reference(x.float(), weight)[0]
    assert error(rms[0], reference) <= 2 * error(rms[1], reference) + 2 * FLOOR


def test_special_values_stay(device):
    """NaN and inf reach their rows only, as interpreted."""
    x = norms.draw(4, 300).to(device)
    x[1, 7], x[2, 299] = torch.nan, torch.inf
    y, _, _ = layer_norm(x)
    assert y[[0, 3]].isfinite().all() and y[1].isnan().all() and y[2].isnan().any()
    p = softmax(x)
    assert p[[0, 3]].isfinite().all() and p[[1, 2]].isnan().all()
