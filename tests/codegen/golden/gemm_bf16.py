"""gemm_bf16_bf16_bias_gelu: gemm_tiles for one configuration.

Target: sm_90.
Operands: bf16.
Configuration: BLOCK_M = 64, BLOCK_N = 128, BLOCK_K = 64, num_warps = 4, num_stages = 3.
Nodes (1): fc/fprop.
Error: 2.1e-3 of the norm
"""

# ruff: noqa
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(128)
BLOCK_K = tl.constexpr(64)


# Compiled in: GROUP = 8.
@triton.jit
def swizzle(pid, tiles_m, tiles_n):
    """Tile (m, n) of a program: GROUP rows of tiles are walked column by column, so that programs that run at the same
    time read few distinct tiles of both operands and find them in L2."""
    per_group = 8 * tiles_n
    first = pid // per_group * 8
    rows = tl.minimum(tiles_m - first, 8)
    return first + pid % per_group % rows, pid % per_group // rows


# Compiled in: PRECISION = "ieee", PROMOTE = None.
@triton.jit
def dot(a, b, acc):
    """acc + a @ b, a: [M, K], b: [K, N], acc: [M, N] fp32, or int32 for int8 operands.

    PRECISION: of fp32 operands, "ieee" or "tf32" (operands then are `round_tf32`'s). PROMOTE: on sm_90, whose matrix
    units add fp8 products with about 14 bits, the contraction length after which partial sums are added up in fp32;
    it counts when it is at most K. None: never.
    """
    acc = tl.dot(a, b, acc, input_precision="ieee", max_num_imprecise_acc=None, out_dtype=tl.float32)
    return acc


# Compiled in: PRECISION = "ieee".
@triton.jit
def _multiply(x, y, acc):
    """acc + x @ y; fp32 operands are rounded first where PRECISION is "tf32"."""
    return dot(x, y, acc)


@triton.jit
def widen(x):
    """x, of any format up to 32 bits, in fp32: exact (int32 is rounded beyond 2^24)."""
    result = x.to(tl.float32)
    return result


@triton.jit
def activate(x):
    """An activation of fp32 x by name: none, relu, gelu (erf), gelu_tanh, silu. NaN stays NaN.

    tanh(u) = 2 sigmoid(2u) - 1, hence x (1 + tanh u) / 2 = x sigmoid(2u); gelu_tanh has u = sqrt(2/pi) (x + 0.044715
    x^3) (Hendrycks and Gimpel, arXiv:1606.08415).
    """
    x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


# Compiled in: DTYPE = bf16, SATURATE = False.
@triton.jit
def narrow(x):
    """fp32 x rounded to nearest even in DTYPE: fp32, bf16, fp16, fp8 of any flavour, int8 (-127 ... 127).

    SATURATE clamps magnitudes beyond the format's largest value, inf too, to it; else they become inf, or NaN in
    formats without (as `passes.rounding.round_to`). NaN stays NaN. int8 always saturates and takes NaN for 0.
    """
    clamped = x
    result = clamped.to(tl.bfloat16)
    return result


@triton.jit
def _store(acc, out, bias, alpha, batch, rows, columns, m, n, stride_out_batch, stride_out_m):
    """Scale, add, activate, narrow and store. Scales are multiplied in one after the other: their product may
    underflow where the result does not."""
    row_there = rows < m
    column_there = columns < n
    there = row_there[:, None] & column_there[None, :]
    result = acc.to(tl.float32)
    result *= alpha
    result += widen(tl.load(bias + columns, mask=column_there, other=0.0))[None, :]
    result = activate(result)
    offsets = batch * stride_out_batch + rows[:, None] * stride_out_m + columns[None, :]
    tl.store(out + offsets, narrow(result), mask=there)


@triton.jit
def _finish(acc, out, bias, alpha, batch, tile_m, tile_n, m, n, stride_out_batch, stride_out_m):
    """Finish a tile: as a whole, or half by half where it is so large that what the epilogue reads takes more
    registers than there are."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    _store(acc, out, bias, alpha, batch, rows, columns, m, n, stride_out_batch, stride_out_m)


# Compiled in: EVEN_K = True, WIDE = False.
@triton.jit
def gemm_bf16_bf16_bias_gelu(
    a,
    b,
    out,
    bias,
    alpha,
    m,
    n,
    k,
    stride_a_batch,
    stride_a_m,
    stride_b_batch,
    stride_b_k,
    stride_out_batch,
    stride_out_m,
):
    """One tile of out per program, of any strides. EVEN_K: k is a multiple of BLOCK_K. WIDE: offsets pass 2^31."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = swizzle(pid % (tiles_m * tiles_n), tiles_m, tiles_n)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    step_k = BLOCK_K
    # rows beyond the edge read some row that there is, and are not stored: the loop needs no mask for them
    a_tile = a + batch * stride_a_batch + (rows % m)[:, None] * stride_a_m + depth[None, :]
    b_tile = b + batch * stride_b_batch + depth[:, None] * stride_b_k + (columns % n)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        x = tl.load(a_tile)
        y = tl.load(b_tile)
        acc = _multiply(x, y, acc)
        a_tile += step_k
        b_tile += step_k * stride_b_k
    _finish(acc, out, bias, alpha, batch, tile_m, tile_n, m, n, stride_out_batch, stride_out_m)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor,
    alpha: float,
    m: int,
    n: int,
    k: int,
    stride_a_batch: int,
    stride_a_m: int,
    stride_b_batch: int,
    stride_b_k: int,
    stride_out_batch: int,
    stride_out_m: int,
) -> None:
    """Run the kernel. a: bfloat16, b: bfloat16, out: bfloat16, bias: bfloat16."""
    grid = (triton.cdiv(m, 64) * triton.cdiv(n, 128),)
    gemm_bf16_bf16_bias_gelu[grid](
        a,
        b,
        out,
        bias,
        alpha,
        m,
        n,
        k,
        stride_a_batch,
        stride_a_m,
        stride_b_batch,
        stride_b_k,
        stride_out_batch,
        stride_out_m,
        num_warps=4,
        num_stages=3,
    )
