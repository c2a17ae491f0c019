"""matmul_sample: matmul_kernel for one configuration.

Target: sm_90.
Operands: fp32.
Configuration: BLOCK_M = 32, BLOCK_N = 64, BLOCK_K = 32, num_warps = 4, num_stages = 2.
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
BLOCK_K = tl.constexpr(32)


@triton.jit
def _rows_block_m(pid):
    return pid * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _rows_block_n(pid):
    return pid * BLOCK_N + tl.arange(0, BLOCK_N)


# Compiled in: SPLIT_K = 2.
@triton.jit
def matmul_sample(a_ptr, b_ptr, out_ptr, M, N, K, stride_am, stride_bk):
    """out = act(a @ b), a: [M, K], b: [K, N], out: [SPLIT_K, M, N] contiguous."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = _rows_block_m(pid // tiles_n)
    columns = _rows_block_n(pid % tiles_n)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(split * BLOCK_K, K, 2 * BLOCK_K):
        k = start + inner
        a_mask = rows[:, None] < M
        b_mask = columns[None, :] < N
        # the last step may stick out
        a_mask = a_mask & (k[None, :] < K)
        b_mask = b_mask & (k[:, None] < K)
        a = tl.load(a_ptr + rows[:, None] * stride_am + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * stride_bk + columns[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    offsets = split * M * N + rows[:, None] * N + columns[None, :]
    tl.store(out_ptr + offsets, acc, mask=(rows < M)[:, None] & (columns < N)[None, :])


def launch(
    a_ptr: torch.Tensor,
    b_ptr: torch.Tensor,
    out_ptr: torch.Tensor,
    M: int,
    N: int,
    K: int,
    stride_am: int,
    stride_bk: int,
) -> None:
    """Run the kernel. a_ptr: float32, b_ptr: float32, out_ptr: float32."""
    grid = (triton.cdiv(M, 32) * triton.cdiv(N, 64), 2)
    matmul_sample[grid](a_ptr, b_ptr, out_ptr, M, N, K, stride_am, stride_bk, num_warps=4, num_stages=2)
