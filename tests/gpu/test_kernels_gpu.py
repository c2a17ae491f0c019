"""Kernels that multiply, on the GPU: against fp64 in every format that it has, and no worse than torch's autocast.

Bounds are those of the interpreted tests; where the device's accumulator keeps fewer bits than fp32, its unit counts.
"""

from __future__ import annotations

import pytest
import torch
from kernel_checks.gemm import FORMATS_TAKEN
from kernel_checks.products import (
    check_block_gemm,
    check_gemm,
    check_gemm_epilogue,
    check_grouped_columns,
    check_grouped_rows,
    check_mx_gemm,
    check_weight_only,
    unit_of,
)

from dsmp.codegen.kernels.block_gemm import FORMAT_OF, block_gemm_available
from dsmp.codegen.kernels.gemm import gemm
from dsmp.codegen.kernels.gemm_configs import has_gemm
from dsmp.codegen.kernels.grouped_gemm import grouped_gemm, grouped_gemm_available
from dsmp.codegen.kernels.mx_gemm import mx_gemm_available
from dsmp.codegen.kernels.weight_only import has_weight_only

pytestmark = pytest.mark.gpu

AWKWARD = [(1, 1, 1), (2, 300, 17), (17, 127, 300), (129, 2, 128), (300, 129, 127), (128, 128, 0)]
ALIGNED = (256, 384, 512)
LARGE = [(1024, 2048, 4096), (16, 4096, 4096)]
PHASES = ("fprop", "dgrad", "wgrad")
BLOCK_PAIRS = [
    ("fp8_e4m3", "fp8_e4m3"),
    ("fp8_e5m2", "fp8_e4m3"),
    ("fp8_e4m3fnuz", "fp8_e4m3fnuz"),
    ("fp8_e5m2fnuz", "fp8_e4m3fnuz"),
    ("int8", "int8"),
]
MX_PAIRS = [("fp8_e4m3",) * 2, ("fp8_e5m2", "fp8_e4m3"), ("fp4_e2m1",) * 2, ("fp8_e4m3", "fp4_e2m1")]
MX_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "fp4_e2m1": torch.uint8}
GROUPED_DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
RAGGED = [0, 17, 0, 200, 1, 129]


def need(verdict):
    """Skip what the running device does not have."""
    if not verdict:
        pytest.skip(verdict.reason)


def need_blocks(target, formats):
    dtypes = {name: dtype for dtype, name in FORMAT_OF.items()}
    for name in formats:
        need(block_gemm_available(dtypes[name], target))


def block_unit(hardware, formats):
    return max(unit_of(hardware, name) for name in formats)


@pytest.mark.parametrize("shape", [*AWKWARD, ALIGNED, *LARGE], ids=str)
@pytest.mark.parametrize("format", FORMATS_TAKEN)
def test_gemm(shape, format, device, target, hardware):
    need(has_gemm(format, target))
    check_gemm(*shape, format, device=device, unit=unit_of(hardware, format))
    check_gemm(*shape, format, device=device, unit=unit_of(hardware, format), column_major=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(129, 300, 130), *LARGE], ids=str)
@pytest.mark.parametrize("format", FORMATS_TAKEN)
def test_gemm_configurations(shape, format, device, target, hardware):
    need(has_gemm(format, target))
    check_gemm(*shape, format, device=device, target=target, unit=unit_of(hardware, format))


@pytest.mark.parametrize("format", FORMATS_TAKEN)
def test_gemm_epilogue(format, device, target, hardware):
    need(has_gemm(format, target))
    check_gemm_epilogue(format, device=device, unit=unit_of(hardware, format))


@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 129, 130), (300, 129, 257), LARGE[0]], ids=str)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("formats", BLOCK_PAIRS, ids="-".join)
def test_block_gemm(shape, phase, formats, device, target, hardware):
    need_blocks(target, formats)
    check_block_gemm(*shape, phase, formats, device=device, unit=block_unit(hardware, formats))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(130, 257, 300), LARGE[0]], ids=str)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("formats", BLOCK_PAIRS, ids="-".join)
def test_block_gemm_configurations(shape, phase, formats, device, target, hardware):
    need_blocks(target, formats)
    check_block_gemm(*shape, phase, formats, device=device, target=target, unit=block_unit(hardware, formats))


@pytest.mark.parametrize("shape", [(1, 1, 32), (17, 129, 130), (300, 129, 256), (512, 256, 1024)], ids=str)
@pytest.mark.parametrize("formats", MX_PAIRS, ids="-".join)
def test_mx_gemm(shape, formats, device, target):
    need(mx_gemm_available(MX_DTYPES[formats[0]], target, MX_DTYPES[formats[1]]))
    check_mx_gemm(*shape, *formats, device=device)
    check_mx_gemm(*shape, *formats, device=device, target=target)


@pytest.mark.parametrize("sizes", [[1], RAGGED, [300, 500, 0, 224]], ids=str)
@pytest.mark.parametrize("dtype", GROUPED_DTYPES, ids=str)
def test_grouped_gemm(sizes, dtype, device, target, hardware):
    need(grouped_gemm_available(dtype, target))
    unit = unit_of(hardware, FORMAT_OF.get(dtype, "bf16"))
    for n, k in ((150, 150), (256, 512)):
        check_grouped_rows(sizes, n, k, dtype, device=device, unit=unit)
        check_grouped_columns(sizes, n, k, dtype, device=device, unit=unit)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", GROUPED_DTYPES, ids=str)
def test_grouped_gemm_configurations(dtype, device, target, hardware):
    need(grouped_gemm_available(dtype, target))
    unit = unit_of(hardware, FORMAT_OF.get(dtype, "bf16"))
    check_grouped_rows(RAGGED, 256, 512, dtype, device=device, target=target, unit=unit)
    check_grouped_columns(RAGGED, 256, 512, dtype, device=device, target=target, unit=unit)


@pytest.mark.parametrize("shape", [(1, 33, 70), (3, 129, 300), (40, 128, 127), (1, 4096, 4096), (64, 4096, 4096)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weight_only(shape, bits, dtype, device, target, hardware):
    need(has_weight_only(dtype, target))
    for group in (32, 128, shape[2]):
        check_weight_only(*shape, bits, group, dtype, device=device)
    check_weight_only(*shape, bits, 64, dtype, device=device, target=target, units=hardware.units)


def relative_error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(129, 300, 127), ALIGNED, *LARGE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gemm_is_no_worse_than_autocast(shape, dtype, device):
    """What autocast would call, torch's product of the same 16-bit operands: both round one fp32 sum."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator).to(device) for s in ((m, k), (n, k)))
    with torch.autocast(device, dtype):
        theirs = torch.nn.functional.linear(x, w)
    a, b = x.to(dtype), w.to(dtype).t()
    exact = a.double() @ b.double()
    ours = relative_error(gemm(a, b, out_dtype=dtype), exact)
    assert ours <= 1.05 * relative_error(theirs, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_grouped_gemm_is_no_worse_than_autocast(dtype, device):
    sizes = [300, 0, 129, 83]
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator).to(device) for s in ((sum(sizes), 256), (4, 192, 256)))
    with torch.autocast(device, dtype):
        theirs = torch.cat([torch.nn.functional.linear(a, b) for a, b in zip(x.split(sizes), w, strict=True)])
    a, b = x.to(dtype), w.to(dtype)
    exact = torch.cat([u.double() @ v.double().T for u, v in zip(a.split(sizes), b, strict=True)])
    offsets = torch.tensor(sizes).cumsum(0).int().to(device)
    ours = relative_error(grouped_gemm(a, b, offsets, dtype=dtype), exact)
    assert ours <= 1.05 * relative_error(theirs, exact)


def test_offsets_beyond_32_bits(device, target):
    """The last row of an operand of more than 2^31 elements."""
    rows, k = 2**20 + 1, 2176
    need_bytes = 2 * rows * k + 2 * rows * 16
    if torch.cuda.mem_get_info()[0] < 1.5 * need_bytes:
        pytest.skip("the operand needs more memory than is free")
    a = torch.zeros(rows, k, dtype=torch.bfloat16, device=device)
    a[-1] = 1.0
    b = torch.ones(k, 16, dtype=torch.bfloat16, device=device)
    got = gemm(a, b, out_dtype=torch.float32)
    assert (got[-1] == k).all() and not got[:-1].any()
