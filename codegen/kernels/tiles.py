"""Tiles of tensors of rank 2 in kernels that are bound by memory: loads, stores and how tiles are chosen."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..kernel_call import Config
from ..targets import Target
from .dot import widen
from .scales import native_cast

# 64 bytes of a 16-bit format are loads enough in flight; a wave of 64 lanes takes scalar registers for its masks
_VALUES_PER_THREAD = {"cuda": (32, 16, 8), "hip": (16, 8, 4)}
_LIVE_REGISTERS = 4  # per value: itself, its quotient, its pattern, the next one's division
_OTHER_REGISTERS = 32


@triton.jit
def load_tile(
    x_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """fp32 values of rows m and columns n (int64) of a [M, N] tensor; 0 outside of it."""
    inside = (m[:, None] < M) & (n[None, :] < N)
    return widen(tl.load(x_ptr + m[:, None] * stride_m + n[None, :] * stride_n, mask=inside, other=0.0), INTERPRETED)


@triton.jit
def store_tile(
    ptr: tl.tensor,
    values: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
) -> None:
    """Store values at rows m and columns n (int64) of a [M, N] tensor, as far as they are inside."""
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(ptr + m[:, None] * stride_m + n[None, :] * stride_n, values, mask=inside)


def tile_configs(sizes: list[tuple[int, int]], format: str, target: Target) -> list[Config]:
    """Every size with the numbers of warps that leave a thread few values, in the order of `sizes`."""
    native = int(native_cast(format, target))
    most = min(target.max_registers, 256)
    found = []
    for values in _VALUES_PER_THREAD[target.backend]:
        for m, n in sizes:
            warps = m * n // (values * target.warp_size)
            if 1 <= warps <= 1024 // target.warp_size and values * _LIVE_REGISTERS + _OTHER_REGISTERS <= most:
                blocks = {"BLOCK_M": m, "BLOCK_N": n, "NATIVE_CAST": native}
                found.append(Config(blocks=blocks, num_warps=warps, num_stages=1))
    assert found, f"no tile of {sizes} fits {target.isa}"
    return found


def interpreter_config(x: Tensor, group: int = 128) -> Config:
    """One tile if it has at most 256 x 512 elements, else tiles of this size: the interpreter's cost is per program."""
    m, n = (max(group, min(most, triton.next_power_of_2(size))) for size, most in zip(x.shape, (256, 512), strict=True))
    return Config(blocks={"BLOCK_M": m, "BLOCK_N": n, "NATIVE_CAST": 0})


def tiles(x: Tensor, config: Config) -> int:
    """The number of tiles of a [M, N] tensor."""
    return -(-x.shape[0] // config.blocks["BLOCK_M"]) * -(-x.shape[1] // config.blocks["BLOCK_N"])


def strides(name: str, tensor: Tensor | None) -> dict[str, int]:
    """The strides of a tensor of rank 2 as a kernel's arguments; 0 for one that is not there."""
    m, n = tensor.stride() if tensor is not None else (0, 0)
    return {f"{name}_stride_m": m, f"{name}_stride_n": n}
