"""scale_rows_relu: scale_rows_kernel for one configuration.

Target: sm_90.
Configuration: BLOCK_M = 32, BLOCK_N = 64, num_warps = 4, num_stages = 1.
Nodes (1): fc/fprop.
Error: 2.1e-3 of the norm
"""

# ruff: noqa
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(32)
BLOCK_N = tl.constexpr(64)


@triton.jit
def _rows_block_m(pid):
    return pid * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _rows_block_n(pid):
    return pid * BLOCK_N + tl.arange(0, BLOCK_N)


# Compiled in: SLOPE = 0.25.
@triton.jit
def _activated(x):
    """x, or max(x, SLOPE x)."""
    # a leak of 0 is the plain one
    x = tl.maximum(x, x * 0.25)
    return x


@triton.jit
def scale_rows_relu(x_ptr, bias_ptr, out_ptr, M, N, stride_m):
    """out[m, n] = activation(x[m, n] * scale[m] + bias[n]).

    Grid: (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))
    """
    rows = _rows_block_m(tl.program_id(0))  # of this program
    columns = _rows_block_n(tl.program_id(1))
    inside = (rows < M)[:, None] & (columns < N)[None, :]

    # offsets of large tensors do not fit in 32 bits
    offsets = rows[:, None].to(tl.int64) * stride_m + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    bias = tl.full((BLOCK_N,), 0.0, tl.float32)
    bias = tl.load(bias_ptr + columns, mask=columns < N)
    # added in fp32
    x += bias[None, :]
    tl.store(out_ptr + offsets, _activated(x).to(tl.float32), mask=inside)


def launch(x_ptr: torch.Tensor, bias_ptr: torch.Tensor, out_ptr: torch.Tensor, M: int, N: int, stride_m: int) -> None:
    """Run the kernel. x_ptr: float32, bias_ptr: float32, out_ptr: float32."""
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 64))
    scale_rows_relu[grid](x_ptr, bias_ptr, out_ptr, M, N, stride_m, num_warps=4, num_stages=1)
