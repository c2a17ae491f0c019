"""What kernels over rows share: how rows are cut into tiles, the rows of any tensor, an exponential good to fp32.

A tile is [ROWS, BLOCK]. Where BLOCK holds a whole row, a program reads its rows once and keeps them in registers; a
longer row is walked block by block, once per pass.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_call import Config
from ..running import running_target
from ..targets import Target

_THREADS = 512  # the most per program: with 65536 registers to a unit, each thread may then have 128
_LIVE = 64  # registers of a thread that values of the tile may fill; addresses, masks and temporaries need as many
_SMALL = 1024  # elements below which a program takes several rows
_LONG = 8  # elements per thread where a row is walked: one vector of 16 bytes of a 16-bit format


@triton.jit
def exp(x):
    """e^x of fp32 x < 88 to about two ulps; e^-inf = 0, NaN stays NaN.

    exp2(x * log2 e), which `tl.exp` is, is off by |x| ulps, as it rounds the product. Here x = n ln 2 + r with
    |r| <= ln 2 / 2, and ln 2 in two parts, n times the first of which is exact (Cody and Waite, Software Manual for the
    Elementary Functions, 1980, chapter 6): e^x = exp2(n) * exp2(r * log2 e).
    """
    x = tl.where(x < -104.0, -104.0, x)  # e^-104 < 2^-150, which is 0
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) - n * -2.1219444005469058e-4
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(n)


def is_whole(size: int, config: Config) -> bool:
    """Whether a tile of the configuration holds whole rows of that many elements."""
    return config.blocks["BLOCK"] >= size


def tiles(rows: int, config: Config) -> int:
    """Tiles that so many rows are cut into."""
    return -(-rows // config.blocks["ROWS"])


def row_configs(size: int, target: Target, live: int) -> list[Config]:
    """Ways to cut rows of `size` elements, best guess first.

    live: fp32 values that a thread keeps per element of its tile. Whole rows are kept as long as those of 512 threads
    fit in the registers; else tiles are 512 threads wide.
    """
    most_warps = _THREADS // target.warp_size
    whole = triton.next_power_of_2(max(size, 1))
    per_thread_limit = 1 << (_LIVE // live).bit_length() - 1
    longest = _THREADS * per_thread_limit
    walks = [_THREADS * _LONG, _THREADS * min(2 * _LONG, per_thread_limit), _THREADS * _LONG // 2]
    walked = [_config(1, block, most_warps) for block in walks if block < whole]
    if whole > longest:
        return _distinct(walked)
    rows = max(1, _SMALL // whole)
    kept = [
        _config(r, whole, warps)
        for r in (rows, 2 * rows, max(1, rows // 2))
        for per_thread in (8, 4, 16, 32)
        if (warps := max(1, min(most_warps, r * whole // (target.warp_size * per_thread))))
        and r * whole <= warps * target.warp_size * per_thread_limit
    ]
    return _distinct(kept + walked)


def interpreter_config(size: int) -> Config:
    """Big tiles: the interpreter takes its time per tile, not per element."""
    block = min(triton.next_power_of_2(max(size, 1)), 1 << 17)
    return _config(max(1, min(128, (1 << 17) // block)), block, 4)


def pick_config(size: int, device: torch.device, live: int) -> Config:
    """The configuration that a kernel runs with where nobody has tuned it."""
    if device.type == "cpu":
        return interpreter_config(size)
    return row_configs(size, running_target(), live)[0]


def as_rows(x: Tensor) -> Tensor:
    """x [..., N] as [M, N]: a view where one stride leads from row to row, else a copy."""
    size = x.shape[-1]
    return x.reshape(x.numel() // size if size else 0, size)


def row_strides(**tensors: Tensor) -> dict[str, int]:
    """Run-time arguments `<name>_row` and `<name>_column` of [M, N] tensors by name."""
    return {f"{n}_{axis}": t.stride(d) for n, t in tensors.items() for d, axis in enumerate(("row", "column"))}


def is_wide(*tensors: Tensor | None) -> bool:
    """Whether an offset along a row (the last axis) of one of the tensors passes 2^31."""
    return any(t is not None and (t.shape[-1] + (1 << 17)) * abs(t.stride(-1)) >= 1 << 31 for t in tensors)


def _config(rows: int, block: int, warps: int) -> Config:
    return Config(blocks={"ROWS": rows, "BLOCK": block}, num_warps=warps, num_stages=1)


def _distinct(configs: Sequence[Config]) -> list[Config]:
    return [c for i, c in enumerate(configs) if c not in configs[:i]]
