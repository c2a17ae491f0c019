"""Small kernels for tests of what turns kernels into text: every construct that is specialised occurs in one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsmp.codegen.kernel_call import Config, KernelCall

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _activated(x, KIND: tl.constexpr, SLOPE: tl.constexpr = 0.0):
    """x, or max(x, SLOPE x)."""
    if KIND == "relu":
        # a leak of 0 is the plain one
        x = tl.maximum(x, x * SLOPE) if SLOPE != 0.0 else tl.maximum(x, 0.0)
    elif KIND == "exp":
        x = tl.exp2(x * LOG2E)
    else:
        tl.static_assert(KIND == "none")
    return x


@triton.jit
def _rows(pid, BLOCK: tl.constexpr):
    return pid * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def scale_rows_kernel(
    x_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    stride_m,
    stride_n,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[m, n] = activation(x[m, n] * scale[m] + bias[n]).

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))
    """
    tl.static_assert(BLOCK_M >= 1)
    rows = _rows(tl.program_id(0), BLOCK_M)  # of this program
    columns = _rows(tl.program_id(1), BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]

    # offsets of large tensors do not fit in 32 bits
    offsets = rows[:, None].to(tl.int64) * stride_m + columns[None, :] * stride_n
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    if scale_ptr is not None:  # one per row
        x *= tl.load(scale_ptr + rows, mask=rows < M)[:, None]
    bias = tl.full((BLOCK_N,), 0.0, tl.float32)
    if HAS_BIAS and bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < N)
    if HAS_BIAS:
        # added in fp32
        x += bias[None, :]
    tl.store(
        out_ptr + offsets,
        _activated(x, KIND, SLOPE=0.25 if HAS_BIAS else 0.0).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = act(a @ b), a: [M, K], b: [K, N], out: [SPLIT_K, M, N] contiguous."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = _rows(pid // tiles_n, BLOCK_M)
    columns = _rows(pid % tiles_n, BLOCK_N)
    HALF: tl.constexpr = BLOCK_K // 2
    if HALF < 8:  # noqa: SIM108
        inner = tl.arange(0, 2 * HALF)
    else:
        inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(split * BLOCK_K, K, SPLIT_K * BLOCK_K):
        k = start + inner
        a_mask = rows[:, None] < M
        b_mask = columns[None, :] < N
        if not EVEN_K:  # the last step may stick out
            a_mask = a_mask & (k[None, :] < K)
            b_mask = b_mask & (k[:, None] < K)
        a = tl.load(a_ptr + rows[:, None] * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * stride_bk + columns[None, :] * stride_bn, mask=b_mask, other=0.0)
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc) if INTERPRETED else tl.dot(a, b, acc)
    acc = _activated(acc, "relu" if SPLIT_K == 1 else "none")
    acc = _activated(acc, KIND="exp" if SPLIT_K == 1 else "none")
    offsets = split * M * N + rows[:, None] * N + columns[None, :]
    tl.store(out_ptr + offsets, acc, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _scaled(x, factor, FUNCTION: tl.constexpr, TIMES: tl.constexpr):
    for _ in tl.static_range(TIMES):
        x = FUNCTION(x, factor)
    return x


@triton.jit
def _product(x, factor):
    return x * factor


@triton.jit
def row_max_kernel(x_ptr, out_ptr, M, N, unused, factor, TIMES: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[m] = max over n of x[m, n], times factor^TIMES; x: [M, N] contiguous."""
    row = tl.program_id(0)
    best = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    x_ptr += row * N
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        best = _larger(best, tl.load(x_ptr + columns, mask=columns < N, other=-float("inf")))
    result = tl.reduce(best, 0, _larger)
    skipped = tl.load(x_ptr + unused)
    if TIMES > 2:
        result += skipped
    tl.store(out_ptr + row, _scaled(result, factor, _product, TIMES))


def scale_rows_call(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    kind: str,
    block: int = 32,
) -> KernelCall:
    m, n = x.shape
    return KernelCall(
        name=f"scale_rows_{kind}",
        kernel=scale_rows_kernel,
        arguments={"x_ptr": x, "scale_ptr": scale, "bias_ptr": bias, "out_ptr": out, "M": m, "N": n,
                   "stride_m": x.stride(0), "stride_n": x.stride(1)},
        constants={"KIND": kind, "HAS_BIAS": bias is not None, "BLOCK_M": block, "BLOCK_N": 2 * block},
        grid=(triton.cdiv(m, block), triton.cdiv(n, 2 * block)),
        config=Config(blocks={"BLOCK_M": block, "BLOCK_N": 2 * block}, num_warps=4, num_stages=1),
    )  # fmt: skip


def matmul_call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, split: int = 1, **options: Any) -> KernelCall:
    (m, k), n = a.shape, b.shape[1]
    blocks = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}
    return KernelCall(
        name="matmul_sample",
        kernel=matmul_kernel,
        arguments={"a_ptr": a, "b_ptr": b, "out_ptr": out, "M": m, "N": n, "K": k, "stride_am": a.stride(0),
                   "stride_ak": a.stride(1), "stride_bk": b.stride(0), "stride_bn": b.stride(1)},
        constants={"EVEN_K": k % 32 == 0, "SPLIT_K": split, **blocks},
        grid=(triton.cdiv(m, 32) * triton.cdiv(n, 64), split),
        config=Config(blocks=blocks, num_warps=4, num_stages=2, options=options),
        operand_format="fp32",
    )  # fmt: skip


def row_max_call(x: torch.Tensor, out: torch.Tensor, factor: float, times: int) -> KernelCall:
    m, n = x.shape
    return KernelCall(
        name="row_max",
        kernel=row_max_kernel,
        arguments={"x_ptr": x, "out_ptr": out, "M": m, "N": n, "unused": 3, "factor": factor},
        constants={"TIMES": times, "BLOCK_N": 64},
        grid=(m,),
        config=Config(blocks={"BLOCK_N": 64}, num_warps=2, num_stages=1),
    )
