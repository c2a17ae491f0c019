"""GEMM of values with one scale per block of 128 along the contraction, partial sums promoted to fp32.

The scheme is that of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3): activations and gradients have one
fp32 scale per 128 elements of a row (1x128), weights one per 128x128 tile. Every 128 of the contraction are multiplied
in the narrow format from a fresh accumulator, and its partial sums are scaled and added up by fp32 instructions:

    c[m, n] = sum over kb of (sum over k in block kb of a[m, k] b[n, k]) * scale_a[m, kb] * scale_b[n, kb]

The second operand is written [N, K], rows along the output's columns, as a linear layer's weight. With values and
scales of any strides the same kernel computes all three GEMMs of a linear layer, x: [M, K], w: [N, K], dy: [M, N]:

    fprop  y  = block_gemm(x, w, sx, sw)                      sx [M, K/128], sw [N/128, K/128]
    dgrad  dx = block_gemm(dy, w.t(), sdy, sw.t())            sdy [M, N/128]; the same tiles of w, not quantised anew
    wgrad  dw = block_gemm(dy.t(), x.t(), sdy.t(), sx.t())    sdy [M/128, N], sx [M/128, K]: quantised along M

fp8 whose contraction is not its contiguous dimension is transposed in registers on sm_90, without prefetching: a copy
that the quantising kernel writes transposed is faster there. int8 values have int32 partial sums. The product of the
two scales has to be a normal fp32 number, else the result loses bits.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN201
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
from .block_product import block_product, finish, is_wide, stride_arguments, tile_configs, write_tile
from .dot import swizzle

BLOCK = 128
"""Elements of the contraction that share a scale; rows or columns of a tile of weights that do."""

FORMAT_OF: dict[torch.dtype, str] = {
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e5m2fnuz: "fp8_e5m2fnuz",
    torch.int8: "int8",
}
"""Formats of values that the kernel multiplies, by torch's dtypes."""

INTERPRETER_CONFIG = Config(blocks={"BLOCK_M": 512, "BLOCK_N": 512, "BLOCK_K": 128})

_OCP = frozenset({"sm_89", "sm_90", "sm_100", "sm_120", "gfx950", "gfx1200"})
_FNUZ = frozenset({"gfx942"})


@triton.jit
def block_scaled_gemm(
    a, b, c, scale_a, scale_b, bias, residual, M, N, K, stride_ab, stride_am, stride_ak, stride_bb, stride_bn,
    stride_bk, stride_cb, stride_cm, stride_cn, stride_sab, stride_sam, stride_sak, stride_sbb, stride_sbn,
    stride_sbk, stride_bias, stride_rb, stride_rm, stride_rn, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K:
    tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """c[batch] = activation(a[batch] @ b[batch]^T + bias) + residual[batch]; grid (tiles, batch)."""
    tile_m, tile_n = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    batch = tl.program_id(1).to(tl.int64)
    row = (tile_m * BLOCK_M).to(tl.int64)
    column = (tile_n * BLOCK_N).to(tl.int64)
    if residual is not None:
        residual += batch * stride_rb
    acc = block_product(
        a + batch * stride_ab + row * stride_am, b + batch * stride_bb + column * stride_bn, scale_a + batch *
        stride_sab + row // ROWS_A * stride_sam, scale_b + batch * stride_sbb + column // ROWS_B * stride_sbn, M -
        tile_m * BLOCK_M, N - tile_n * BLOCK_N, K, stride_am, stride_ak, stride_bn, stride_bk, stride_sam,
        stride_sak, stride_sbn, stride_sbk, ROWS_A, ROWS_B, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDE, INTERPRETED,
    )  # fmt: skip
    write_tile(
        acc, c + batch * stride_cb, bias, residual, row, column, M - tile_m * BLOCK_M, N - tile_n * BLOCK_N,
        stride_cm, stride_cn, stride_bias, stride_rm, stride_rn, ACTIVATION, WIDE, INTERPRETED,
    )  # fmt: skip


def block_gemm_available(dtype: torch.dtype, target: Target) -> Verdict:
    """Whether matrix instructions of a target multiply values of this dtype, as Triton compiles them."""
    if dtype not in FORMAT_OF:
        return Verdict(False, f"values of {dtype} have no block scales; there are {', '.join(FORMAT_OF.values())}")
    name = FORMAT_OF[dtype]
    if dtype is torch.int8:
        return Verdict(True, f"{target.isa} multiplies int8")
    there = target.isa in (_FNUZ if name.endswith("fnuz") else _OCP)
    flavour = next((other for other in (_OCP, _FNUZ) if target.isa in other), None)
    if there:
        return Verdict(True, f"{target.isa} multiplies {name}")
    has = "the other flavour of fp8" if flavour else "no fp8"
    return Verdict(False, f"{target.isa} has no matrix instruction for {name}: it has {has}")


def shared_rows(rows: int, scale_rows: int) -> int:
    """How many rows share a scale, 1 or 128, told from the number of scales. Raises ValueError where it is neither."""
    if scale_rows == rows:
        return 1
    if scale_rows == -(-rows // BLOCK):
        return BLOCK
    raise ValueError(f"{scale_rows} scales for {rows} rows: there is one per row or one per {BLOCK} rows")


def block_gemm_call(
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
    """The launch that writes `out`, [M, N] or [batch, M, N]; the other arguments are as in `block_gemm`."""
    _check(a, b, scale_a, scale_b)
    out = out if out.dim() == 3 else out.unsqueeze(0)
    batch, m, n = out.shape
    k = a.size(-1)
    a, b, scale_a, scale_b = (t.expand(batch, *t.shape[-2:]) for t in (a, b, scale_a, scale_b))
    residual = residual.expand(out.shape) if residual is not None else None
    tensors = {"a": a, "b": b, "c": out, "scale_a": scale_a, "scale_b": scale_b, "bias": bias, "residual": residual}
    dims = {
        "a": (a, "bmk"),
        "b": (b, "bnk"),
        "c": (out, "bmn"),
        "sa": (scale_a, "bmk"),
        "sb": (scale_b, "bnk"),
        "r": (residual, "bmn"),
    }
    return KernelCall(
        name=f"block_gemm_{FORMAT_OF[a.dtype]}_{str(out.dtype).removeprefix('torch.')}",
        kernel=block_scaled_gemm,
        arguments={
            **tensors,
            "M": m,
            "N": n,
            "K": k,
            **stride_arguments(dims),
            "stride_bias": bias.stride(0) if bias is not None else 0,
        },
        constants={
            "ROWS_A": shared_rows(m, scale_a.size(-2)),
            "ROWS_B": shared_rows(n, scale_b.size(-2)),
            "ACTIVATION": activation,
            **config.blocks,
            "EVEN_K": k % BLOCK == 0,
            "WIDE": is_wide(config, *tensors.values()),
        },
        grid=(math.ceil(m / config.blocks["BLOCK_M"]) * math.ceil(n / config.blocks["BLOCK_N"]), batch),
        config=config,
        operand_format=FORMAT_OF[a.dtype],
    )


def block_gemm_configs(m: int, n: int, k: int, target: Target) -> list[Config]:
    """The tiles to try for an [m, n] output, best guess first. BLOCK_K is 128 always: that is the promotion."""
    return tile_configs(m, n, target, block_k=BLOCK, element_size=1, accumulators=2)


def block_gemm(
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
    """activation(dequantised a @ dequantised b^T + bias) + residual, accumulated in fp32, in `dtype`.

    Args:
        a: [M, K] or [batch, M, K]; b: [N, K] or [batch, N, K]; any strides. fp8 (of one family, e4m3 and e5m2 may be
            mixed) or both int8.
        scale_a: fp32, [M, ceil(K / 128)] or, for tiles, [ceil(M / 128), ceil(K / 128)], with a's batch dimension.
        scale_b: fp32, [ceil(N / 128), ceil(K / 128)] or [N, ceil(K / 128)], with b's batch dimension.
        bias: [N]; residual: broadcasts to the output. Both fp32, bf16 or fp16.
        activation: none, relu, gelu, gelu_tanh or silu.
        dtype: of the output, fp32, bf16 or fp16.

    Raises:
        ValueError: shapes that do not fit.
        KernelUnavailableError: the running device has no matrix instruction for the values.
    """
    _check(a, b, scale_a, scale_b)
    batch = max(t.size(0) if t.dim() == 3 else 0 for t in (a, b))
    m, n = a.size(-2), b.size(-2)
    out = torch.empty((batch, m, n) if 3 in (a.dim(), b.dim()) else (m, n), dtype=dtype, device=a.device)
    config = INTERPRETER_CONFIG
    if out.device.type != "cpu":
        config = block_gemm_configs(m, n, a.size(-1), require_target(functools.partial(block_gemm_available, a.dtype)))[
            0
        ]
    block_gemm_call(
        a, b, out, scale_a, scale_b, bias=bias, residual=residual, activation=activation, config=config
    ).run()
    return out


def block_gemm_reference(
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
    """`block_gemm` in plain torch: dequantised and multiplied in fp64, then rounded to `dtype`."""
    product = dequantize_blocks(a, scale_a) @ dequantize_blocks(b, scale_b).mT
    return finish(product, bias, residual, activation).to(dtype)


def dequantize_blocks(values: Tensor, scale: Tensor) -> Tensor:
    """values [.., rows, K] times their scales [.., rows or ceil(rows / 128), ceil(K / 128)], in fp64."""
    rows, k = values.shape[-2:]
    whole = scale.double().repeat_interleave(BLOCK, -1)[..., :k]
    return values.double() * whole.repeat_interleave(shared_rows(rows, scale.size(-2)), -2)[..., :rows, :]


def _check(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    if a.size(-1) != b.size(-1):
        raise ValueError(f"the contractions differ: a is {list(a.shape)}, b is {list(b.shape)}")
    if (a.dtype is torch.int8) != (b.dtype is torch.int8):
        raise ValueError(f"{a.dtype} and {b.dtype} values are not multiplied with each other")
    for name, values, scale in (("a", a, scale_a), ("b", b, scale_b)):
        if values.dtype not in FORMAT_OF or scale.dtype is not torch.float32:
            raise ValueError(f"{name} has {values.dtype} values and {scale.dtype} scales; scales are fp32")
        shared_rows(values.size(-2), scale.size(-2))
        if scale.size(-1) != -(-values.size(-1) // BLOCK):
            raise ValueError(f"{name} is {list(values.shape)}, its scales {list(scale.shape)}: not one per {BLOCK}")
