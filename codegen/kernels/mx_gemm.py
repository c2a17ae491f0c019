"""GEMM of microscaled (MX) values: one E8M0 scale per 32 elements along the contraction, applied by the matrix units.

OCP Microscaling Formats Specification 1.0 (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-
final-pdf): values are fp8 (e4m3, e5m2) or fp4 (e2m1, two in a byte, the first one in the low bits), a scale is a byte s
of value 2^(s - 127), 255 is NaN. With c = a @ b^T:

    c[m, n] = sum over blocks g of 2^(sa[m, g] + sb[n, g] - 254) * (sum over k in block g of a[m, k] b[n, k])

The scales are those of the recipe mx32 of `passes.rounding.quantize`, powers of two within E8M0's range: `to_e8m0`
takes their exponents and loses nothing. Matrix units that scale are in sm_100 (tcgen05.mma kind mxf8f6f4), sm_120
(mma.sync kind mxf8f6f4) and gfx950 (v_mfma_scale_f32 ... f8f6f4); elsewhere Triton would convert to bf16, for which
there are better kernels.

Interpreted, operands are dequantised to fp32 before they are multiplied: a value times its scale has to be a normal
fp32 number.
"""

# Triton looks up the names of annotations and finds but its own; constexpr parameters are no constants to compare with
# ruff: noqa: ANN001, ANN201, ANN202, SIM108
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...hardware_db.capability import Verdict
from ..kernel_call import Config, KernelCall
from ..running import require_target
from ..targets import Target
from .block_product import finish, is_wide, stride_arguments, write_tile
from .dot import swizzle, widen

BLOCK = 32
"""Elements of the contraction that share a scale."""

INTERPRETER_CONFIG = Config(blocks={"BLOCK_M": 512, "BLOCK_N": 512, "BLOCK_K": 128})

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}
_NAMES = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "e2m1": "fp4_e2m1"}
_SCALING = frozenset({"sm_100", "sm_120", "gfx950"})
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@triton.jit
def mx_scaled_gemm(
    a, b, c, scale_a, scale_b, bias, residual, M, N, K, stride_am, stride_ak, stride_bn, stride_bk, stride_cm,
    stride_cn, stride_sam, stride_sak, stride_sbn, stride_sbk, stride_bias, stride_rm, stride_rn,
    FORMAT_A: tl.constexpr, FORMAT_B: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """c = activation(a @ b^T + bias) + residual; K counts elements, strides of packed operands bytes."""
    PER_BYTE_A: tl.constexpr = 2 if FORMAT_A == "e2m1" else 1
    PER_BYTE_B: tl.constexpr = 2 if FORMAT_B == "e2m1" else 1
    tile_m, tile_n = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    row = (tile_m * BLOCK_M).to(tl.int64)
    column = (tile_n * BLOCK_N).to(tl.int64)
    rows = M - tile_m * BLOCK_M
    columns = N - tile_n * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    ka = tl.arange(0, BLOCK_K // PER_BYTE_A)
    kb = tl.arange(0, BLOCK_K // PER_BYTE_B)
    g = tl.arange(0, BLOCK_K // 32)
    if WIDE:
        m, n, ka, kb, g = m.to(tl.int64), n.to(tl.int64), ka.to(tl.int64), kb.to(tl.int64), g.to(tl.int64)
    a += row * stride_am
    b += column * stride_bn
    scale_a += row * stride_sam
    scale_b += column * stride_sbn
    offsets_a = m[:, None] * stride_am + ka[None, :] * stride_ak
    offsets_b = n[:, None] * stride_bn + kb[None, :] * stride_bk
    offsets_sa = m[:, None] * stride_sam + g[None, :] * stride_sak
    offsets_sb = n[:, None] * stride_sbn + g[None, :] * stride_sbk
    step_a = tl.full((), BLOCK_K // PER_BYTE_A, tl.int64) * stride_ak
    step_b = tl.full((), BLOCK_K // PER_BYTE_B, tl.int64) * stride_bk
    step_sa = tl.full((), BLOCK_K // 32, tl.int64) * stride_sak
    step_sb = tl.full((), BLOCK_K // 32, tl.int64) * stride_sbk
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        left = K - start
        in_m = m[:, None] < rows
        in_n = n[:, None] < columns
        x = tl.load(a + offsets_a, mask=in_m & (ka[None, :] * PER_BYTE_A < left), other=0.0)
        y = tl.load(b + offsets_b, mask=in_n & (kb[None, :] * PER_BYTE_B < left), other=0.0)
        sx = tl.load(scale_a + offsets_sa, mask=in_m & (g[None, :] * 32 < left), other=0)
        sy = tl.load(scale_b + offsets_sb, mask=in_n & (g[None, :] * 32 < left), other=0)
        if INTERPRETED:
            x = _dequantized(x, sx, FORMAT_A, BLOCK_M, BLOCK_K)
            y = _dequantized(y, sy, FORMAT_B, BLOCK_N, BLOCK_K)
            acc = tl.dot(x, tl.trans(y), acc)
        else:
            acc = tl.dot_scaled(x, sx, FORMAT_A, tl.trans(y), sy, FORMAT_B, acc)
        a += step_a
        b += step_b
        scale_a += step_sa
        scale_b += step_sb
    write_tile(
        acc, c, bias, residual, row, column, rows, columns, stride_cm, stride_cn, stride_bias, stride_rm, stride_rn,
        ACTIVATION, WIDE, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _dequantized(x, scale, FORMAT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr):
    """What the interpreter multiplies: values [ROWS, K] times their scales [ROWS, K / 32], in fp32."""
    if FORMAT == "e2m1":
        value = tl.interleave(_e2m1(x & 15), _e2m1(x >> 4))
    else:
        value = widen(x, True)
    bits = scale.to(tl.int32)
    # 2^-127 is subnormal: half of the smallest normal number
    factor = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    factor = tl.where(bits == 255, float("nan"), factor)
    return tl.reshape(tl.reshape(value, (ROWS, K // 32, 32)) * factor[:, :, None], (ROWS, K))


@triton.jit
def _e2m1(code):
    """fp32 of a 4-bit code (sign, exponent e, mantissa bit f): 2^(e - 1) (1 + f / 2), or f / 2 where e = 0."""
    code = code.to(tl.int32)
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    normal = ((exponent + 126) << 23).to(tl.float32, bitcast=True) * (1.0 + 0.5 * mantissa)
    value = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where(code >= 8, -value, value)


def mx_gemm_available(dtype: torch.dtype, target: Target, other: torch.dtype | None = None) -> Verdict:
    """Whether a target's matrix units apply E8M0 scales to values of this dtype (uint8 for packed fp4).

    other: the second operand's dtype, if it is not the same.
    """
    other = other or dtype
    if dtype not in _FORMATS or other not in _FORMATS:
        return Verdict(False, f"{dtype} and {other} are not both MX formats, which are {', '.join(_NAMES.values())}")
    names = " and ".join(dict.fromkeys(_NAMES[_FORMATS[d]] for d in (dtype, other)))
    if target.isa not in _SCALING:
        return Verdict(False, f"{target.isa} has no matrix instruction with E8M0 scales that Triton emits")
    if target.isa == "sm_120" and (dtype is torch.uint8) != (other is torch.uint8):
        return Verdict(False, f"Triton emits no instruction of sm_120 that multiplies {names}")
    return Verdict(True, f"{target.isa} multiplies {names} with E8M0 scales")


def mx_gemm_configs(m: int, n: int, k: int, target: Target, *, dtype: torch.dtype) -> list[Config]:
    """The tiles to try for an [m, n] output of `dtype` values, best guess first; tcgen05 has 128 rows."""
    packed = dtype is torch.uint8
    if target.isa == "sm_100":
        tiles = [(128, 128, 8)] if packed else [(128, 128, 4), (128, 64, 4)]
    elif target.backend == "cuda":
        tiles = [(64, 64, 4)] if packed else [(128, 64, 8), (64, 64, 4)]
    else:
        tiles = [(128, 128, 8), (64, 64, 4), (32, 64, 4)]
    found = []
    for block_m, block_n, warps in tiles:
        stages = min(target.shared_bytes // ((block_m + block_n) * 128), 3 if target.backend == "cuda" else 2)
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 128}
        found.append(Config(blocks=blocks, num_warps=warps, num_stages=stages))
    return sorted(found, key=lambda c: math.ceil(m / c.blocks["BLOCK_M"]) * c.blocks["BLOCK_M"])


def to_e8m0(scale: Tensor) -> Tensor:
    """fp32 powers of two, 2^-126 ... 2^127 as `quantize(..., "mx32")` gives them, as bytes: their biased exponents."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def from_e8m0(scale: Tensor) -> Tensor:
    """The fp64 value 2^(s - 127) of every byte; NaN for 255."""
    value = torch.exp2(scale.double() - 127)
    return torch.where(scale == 255, math.nan, value)


def mx_gemm_call(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    config: Config,
) -> KernelCall:
    """The launch that writes `out` [M, N]; the other arguments are as in `mx_gemm`."""
    k = _check(a, b, scale_a, scale_b)
    m, n = out.shape
    tensors = {"a": a, "b": b, "c": out, "scale_a": scale_a, "scale_b": scale_b, "bias": bias, "residual": residual}
    dims = {"a": (a, "mk"), "b": (b, "nk"), "c": (out, "mn"), "sa": (scale_a, "mk"), "sb": (scale_b, "nk")}
    return KernelCall(
        name=f"mx_gemm_{_FORMATS[a.dtype]}_{str(out.dtype).removeprefix('torch.')}",
        kernel=mx_scaled_gemm,
        arguments={
            **tensors,
            "M": m,
            "N": n,
            "K": k,
            **stride_arguments(dims | {"r": (residual, "mn")}),
            "stride_bias": bias.stride(0) if bias is not None else 0,
        },
        constants={
            "FORMAT_A": _FORMATS[a.dtype],
            "FORMAT_B": _FORMATS[b.dtype],
            "ACTIVATION": activation,
            **config.blocks,
            "WIDE": is_wide(config, *tensors.values()),
        },
        grid=(math.ceil(m / config.blocks["BLOCK_M"]) * math.ceil(n / config.blocks["BLOCK_N"]),),
        config=config,
        operand_format=_NAMES[_FORMATS[a.dtype]],
    )


def mx_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """activation(dequantised a @ dequantised b^T + bias) + residual, [M, N] in `dtype`, accumulated in fp32.

    a: [M, K], b: [N, K], fp8 e4m3fn or e5m2, which may be mixed, or uint8 [.., K / 2] of packed fp4; any strides.
    scale_a: uint8 [M, ceil(K / 32)]; scale_b: uint8 [N, ceil(K / 32)]. bias: [N]; residual: [M, N].

    Raises ValueError for shapes that do not fit, KernelUnavailableError where the device cannot multiply the values.
    """
    k = _check(a, b, scale_a, scale_b)
    out = torch.empty((a.size(0), b.size(0)), dtype=dtype, device=a.device)
    config = INTERPRETER_CONFIG
    if out.device.type != "cpu":
        target = require_target(functools.partial(mx_gemm_available, a.dtype, other=b.dtype))
        config = mx_gemm_configs(out.size(0), out.size(1), k, target, dtype=a.dtype)[0]
    mx_gemm_call(a, b, out, scale_a, scale_b, bias=bias, residual=residual, activation=activation, config=config).run()
    return out


def mx_gemm_reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`mx_gemm` in plain torch: dequantised and multiplied in fp64, then rounded to `dtype`."""
    product = dequantize_mx(a, scale_a) @ dequantize_mx(b, scale_b).T
    return finish(product, bias, residual, activation).to(dtype)


def dequantize_mx(values: Tensor, scale: Tensor) -> Tensor:
    """values [.., K] (packed fp4: [.., K / 2]) times their scales [.., ceil(K / 32)], in fp64."""
    if values.dtype is torch.uint8:
        codes = torch.stack([values & 15, values >> 4], -1).flatten(-2).long()
        magnitude = torch.tensor(_E2M1, dtype=torch.float64, device=values.device)[codes & 7]
        wide = torch.where(codes >= 8, -magnitude, magnitude)
    else:
        wide = values.double()
    return wide * from_e8m0(scale).repeat_interleave(BLOCK, -1)[..., : wide.size(-1)]


def _check(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> int:
    """The length of the contraction. Raises ValueError where shapes or dtypes do not fit."""
    lengths = []
    for name, values, scale in (("a", a, scale_a), ("b", b, scale_b)):
        if values.dtype not in _FORMATS or scale.dtype is not torch.uint8:
            raise ValueError(f"{name} has {values.dtype} values and {scale.dtype} scales, which is no MX format")
        lengths.append(values.size(-1) * (2 if values.dtype is torch.uint8 else 1))
        if scale.shape != (values.size(0), -(-lengths[-1] // BLOCK)):
            raise ValueError(f"{name} is {list(values.shape)}, its scales {list(scale.shape)}: not one per {BLOCK}")
    if lengths[0] != lengths[1]:
        raise ValueError(f"the contractions differ: {lengths[0]} elements of a, {lengths[1]} of b")
    return lengths[0]
