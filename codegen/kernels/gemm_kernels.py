"""The two GEMM kernels, and what both do with a finished tile.

Names: a [batch, m, k], b [batch, k, n], out and residual [batch, m, n], bias [n]; scale_a [batch, m] and scale_b
[batch, n] or single values, out_scale a single value, all fp32. A pointer that is None is left out of the code.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from .dot import activate, dot, narrow, round_tf32, swizzle, widen

SPLIT_FROM = tl.constexpr(16384)  # elements of a tile from which on it is finished half by half


@triton.jit
def gemm_tiles(
    a,
    b,
    out,
    bias,
    residual,
    scale_a,
    scale_b,
    out_scale,
    alpha,
    m,
    n,
    k,
    stride_a_batch,
    stride_a_m,
    stride_a_k,
    stride_b_batch,
    stride_b_k,
    stride_b_n,
    stride_out_batch,
    stride_out_m,
    stride_out_n,
    stride_res_batch,
    stride_res_m,
    stride_res_n,
    stride_bias,
    stride_sa_batch,
    stride_sa_m,
    stride_sb_batch,
    stride_sb_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PROMOTE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROW_A: tl.constexpr,
    ROW_B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SATURATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of out per program, of any strides. EVEN_K: k is a multiple of BLOCK_K. WIDE: offsets pass 2^31."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = swizzle(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    step_k = BLOCK_K
    if WIDE:
        rows, columns, depth = rows.to(tl.int64), columns.to(tl.int64), depth.to(tl.int64)
        step_k = tl.full((), BLOCK_K, tl.int64)
    # rows beyond the edge read some row that there is, and are not stored: the loop needs no mask for them
    a_tile = a + batch * stride_a_batch + (rows % m)[:, None] * stride_a_m + depth[None, :] * stride_a_k
    b_tile = b + batch * stride_b_batch + depth[:, None] * stride_b_k + (columns % n)[None, :] * stride_b_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
    for step in range(tl.cdiv(k, BLOCK_K)):
        if EVEN_K:
            x = tl.load(a_tile)
            y = tl.load(b_tile)
        else:
            left = k - step * BLOCK_K
            x = tl.load(a_tile, mask=depth[None, :] < left, other=0.0)
            y = tl.load(b_tile, mask=depth[:, None] < left, other=0.0)
        acc = _multiply(x, y, acc, PRECISION, PROMOTE, INTERPRETED)
        a_tile += step_k * stride_a_k
        b_tile += step_k * stride_b_k
    _finish(
        acc, out, bias, residual, scale_a, scale_b, out_scale, alpha, batch, tile_m, tile_n, m, n,
        stride_out_batch, stride_out_m, stride_out_n, stride_res_batch, stride_res_m, stride_res_n, stride_bias,
        stride_sa_batch, stride_sa_m, stride_sb_batch, stride_sb_n,
        BLOCK_M, BLOCK_N, WIDE, ROW_A, ROW_B, ACTIVATION, SATURATE, INTERPRETED,
    )  # fmt: skip


@triton.jit
def gemm_persistent(
    a,
    b,
    out,
    bias,
    residual,
    scale_a,
    scale_b,
    out_scale,
    alpha,
    m,
    n,
    k,
    stride_out_m,
    stride_out_n,
    stride_res_m,
    stride_res_n,
    stride_bias,
    stride_sa_m,
    stride_sb_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMN_MAJOR_A: tl.constexpr,
    COLUMN_MAJOR_B: tl.constexpr,
    PRECISION: tl.constexpr,
    PROMOTE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROW_A: tl.constexpr,
    ROW_B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SATURATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """As many programs as the device has units, each of which walks over tiles; no batch.

    a and b are tensor descriptors, of the transposed operand where it is column-major: the copy engine (TMA) fetches
    their tiles and fills what is beyond the edges with zeros.
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
        for step in range(tl.cdiv(k, BLOCK_K)):
            if COLUMN_MAJOR_A:
                x = a.load([step * BLOCK_K, tile_m * BLOCK_M]).T
            else:
                x = a.load([tile_m * BLOCK_M, step * BLOCK_K])
            if COLUMN_MAJOR_B:
                y = b.load([tile_n * BLOCK_N, step * BLOCK_K]).T
            else:
                y = b.load([step * BLOCK_K, tile_n * BLOCK_N])
            acc = _multiply(x, y, acc, PRECISION, PROMOTE, INTERPRETED)
        _finish(
            acc, out, bias, residual, scale_a, scale_b, out_scale, alpha, 0, tile_m, tile_n, m, n,
            0, stride_out_m, stride_out_n, 0, stride_res_m, stride_res_n, stride_bias, 0, stride_sa_m, 0, stride_sb_n,
            BLOCK_M, BLOCK_N, WIDE, ROW_A, ROW_B, ACTIVATION, SATURATE, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _multiply(x, y, acc, PRECISION: tl.constexpr, PROMOTE: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x @ y; fp32 operands are rounded first where PRECISION is "tf32"."""
    if PRECISION == "tf32":
        x = round_tf32(x)
        y = round_tf32(y)
    return dot(x, y, acc, INTERPRETED, PRECISION, PROMOTE)


@triton.jit
def _finish(
    acc, out, bias, residual, scale_a, scale_b, out_scale, alpha, batch, tile_m, tile_n, m, n,
    stride_out_batch, stride_out_m, stride_out_n, stride_res_batch, stride_res_m, stride_res_n, stride_bias,
    stride_sa_batch, stride_sa_m, stride_sb_batch, stride_sb_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, ROW_A: tl.constexpr, ROW_B: tl.constexpr,
    ACTIVATION: tl.constexpr, SATURATE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Finish a tile: as a whole, or half by half where it is so large that what the epilogue reads takes more
    registers than there are."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if BLOCK_M * BLOCK_N < SPLIT_FROM or INTERPRETED:
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        _store(
            acc, out, bias, residual, scale_a, scale_b, out_scale, alpha, batch, rows, columns, m, n,
            stride_out_batch, stride_out_m, stride_out_n, stride_res_batch, stride_res_m, stride_res_n, stride_bias,
            stride_sa_batch, stride_sa_m, stride_sb_batch, stride_sb_n,
            WIDE, ROW_A, ROW_B, ACTIVATION, SATURATE, INTERPRETED,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        columns = tile_n * BLOCK_N + tl.arange(0, HALF)
        _store(
            left, out, bias, residual, scale_a, scale_b, out_scale, alpha, batch, rows, columns, m, n,
            stride_out_batch, stride_out_m, stride_out_n, stride_res_batch, stride_res_m, stride_res_n, stride_bias,
            stride_sa_batch, stride_sa_m, stride_sb_batch, stride_sb_n,
            WIDE, ROW_A, ROW_B, ACTIVATION, SATURATE, INTERPRETED,
        )  # fmt: skip
        _store(
            right, out, bias, residual, scale_a, scale_b, out_scale, alpha, batch, rows, columns + HALF, m, n,
            stride_out_batch, stride_out_m, stride_out_n, stride_res_batch, stride_res_m, stride_res_n, stride_bias,
            stride_sa_batch, stride_sa_m, stride_sb_batch, stride_sb_n,
            WIDE, ROW_A, ROW_B, ACTIVATION, SATURATE, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _store(
    acc, out, bias, residual, scale_a, scale_b, out_scale, alpha, batch, rows, columns, m, n,
    stride_out_batch, stride_out_m, stride_out_n, stride_res_batch, stride_res_m, stride_res_n, stride_bias,
    stride_sa_batch, stride_sa_m, stride_sb_batch, stride_sb_n,
    WIDE: tl.constexpr, ROW_A: tl.constexpr, ROW_B: tl.constexpr,
    ACTIVATION: tl.constexpr, SATURATE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Scale, add, activate, narrow and store. Scales are multiplied in one after the other: their product may
    underflow where the result does not."""
    if WIDE:
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    row_there = rows < m
    column_there = columns < n
    there = row_there[:, None] & column_there[None, :]
    result = acc.to(tl.float32)
    if scale_a is not None:
        if ROW_A:
            factors = tl.load(scale_a + batch * stride_sa_batch + rows * stride_sa_m, mask=row_there, other=0.0)
            result *= factors[:, None]
        else:
            result *= tl.load(scale_a)
    if scale_b is not None:
        if ROW_B:
            factors = tl.load(scale_b + batch * stride_sb_batch + columns * stride_sb_n, mask=column_there, other=0.0)
            result *= factors[None, :]
        else:
            result *= tl.load(scale_b)
    result *= alpha
    if bias is not None:
        result += widen(tl.load(bias + columns * stride_bias, mask=column_there, other=0.0), INTERPRETED)[None, :]
    result = activate(result, ACTIVATION)
    if residual is not None:
        offsets = batch * stride_res_batch + rows[:, None] * stride_res_m + columns[None, :] * stride_res_n
        result += widen(tl.load(residual + offsets, mask=there, other=0.0), INTERPRETED)
    if out_scale is not None:
        result = tl.div_rn(result, tl.load(out_scale))
    offsets = batch * stride_out_batch + rows[:, None] * stride_out_m + columns[None, :] * stride_out_n
    tl.store(out + offsets, narrow(result, out.dtype.element_ty, SATURATE, INTERPRETED), mask=there)
