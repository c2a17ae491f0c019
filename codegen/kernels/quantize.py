"""Quantisation with block scales, bit-equal to `passes.rounding.quantize`: per 1 x 128 or (MX) 1 x 32 block along rows
and columns in one read, and per 128 x 128 tile.

Inputs are fp32, bf16 or fp16, of rank 2 and any strides; `scales.py` has the rules of scales, rounding, NaN and inf.
One kernel does what one read of a tile gives: `quantize_rows` serves the product forward (blocks along the last axis)
and the weight gradient's (blocks along the first one) from the same tile, whose second result may be written
transposed. All are bound by memory: tiles are chosen to fit registers. The reference is `passes.rounding.quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_call import Config, KernelCall
from ..running import running_target
from ..targets import Target
from .scales import (
    QUANTIZED_DTYPES,
    block_scale,
    format_constants,
    magnitude_bits,
    narrow_scaled,
    native_cast,
    storage,
    stored_scale,
)
from .tiles import interpreter_config, load_tile, store_tile, strides, tile_configs, tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedBlocks:
    """What `quantize_rows` was asked for; the rest is None.

    rows, columns: [M, N], values of blocks along the last and the first axis (columns may have the strides of a
    transposed copy: `columns.T` is then contiguous). row_scale: [M, ceil(N / G)], column_scale: [ceil(M / G), N],
    fp32, or uint8 of E8M0.
    """

    rows: Tensor | None
    row_scale: Tensor | None
    columns: Tensor | None
    column_scale: Tensor | None


@triton.jit
def store_rows(
    x: tl.tensor,
    values_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    g: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    scale_stride_m: tl.tensor,
    scale_stride_n: tl.tensor,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    E8M0: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Quantise a tile, fp32 x [BLOCK_M, BLOCK_N], in groups of GROUP along its last axis; m, n: its rows and columns,
    g: its groups of columns, int64. What is outside of [M, N] is 0 in x."""
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    grouped = tl.reshape(x, (BLOCK_M, GROUPS, GROUP))
    amax = tl.max(magnitude_bits(grouped), axis=2)
    scale = block_scale(amax, MAX, POWER_OF_TWO)
    values = narrow_scaled(grouped, scale[:, :, None], FORMAT, MAX, POWER_OF_TWO, NATIVE_CAST, INTERPRETED)
    store_tile(values_ptr, tl.reshape(values, (BLOCK_M, BLOCK_N)), m, n, M, N, stride_m, stride_n)
    written = stored_scale(scale, amax, FORMAT, E8M0)
    store_tile(scale_ptr, written, m, g, M, (N + GROUP - 1) // GROUP, scale_stride_m, scale_stride_n)


@triton.jit
def store_columns(
    x: tl.tensor,
    values_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    g: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    scale_stride_m: tl.tensor,
    scale_stride_n: tl.tensor,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    E8M0: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """As `store_rows`, in groups of GROUP along the first axis; g: groups of rows."""
    GROUPS: tl.constexpr = BLOCK_M // GROUP
    grouped = tl.reshape(x, (GROUPS, GROUP, BLOCK_N))
    amax = tl.max(magnitude_bits(grouped), axis=1)
    scale = block_scale(amax, MAX, POWER_OF_TWO)
    values = narrow_scaled(grouped, scale[:, None, :], FORMAT, MAX, POWER_OF_TWO, NATIVE_CAST, INTERPRETED)
    store_tile(values_ptr, tl.reshape(values, (BLOCK_M, BLOCK_N)), m, n, M, N, stride_m, stride_n)
    written = stored_scale(scale, amax, FORMAT, E8M0)
    store_tile(scale_ptr, written, g, n, (M + GROUP - 1) // GROUP, N, scale_stride_m, scale_stride_n)


@triton.jit
def quantize_rows_kernel(
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    column_scale_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    x_stride_m: tl.tensor,
    x_stride_n: tl.tensor,
    rows_stride_m: tl.tensor,
    rows_stride_n: tl.tensor,
    row_scale_stride_m: tl.tensor,
    row_scale_stride_n: tl.tensor,
    columns_stride_m: tl.tensor,
    columns_stride_n: tl.tensor,
    column_scale_stride_m: tl.tensor,
    column_scale_stride_n: tl.tensor,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    E8M0: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of x, quantised in blocks along rows (rows_ptr) and along columns (columns_ptr), either may be None."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = pid // tiles_n
    pid_n = pid % tiles_n
    m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, m, n, M, N, x_stride_m, x_stride_n, INTERPRETED)
    if rows_ptr is not None:
        g = pid_n.to(tl.int64) * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
        store_rows(
            x, rows_ptr, row_scale_ptr, m, n, g, M, N, rows_stride_m, rows_stride_n, row_scale_stride_m,
            row_scale_stride_n, FORMAT, MAX, POWER_OF_TWO, E8M0, GROUP, BLOCK_M, BLOCK_N, NATIVE_CAST, INTERPRETED,
        )  # fmt: skip
    if columns_ptr is not None:
        h = pid_m.to(tl.int64) * (BLOCK_M // GROUP) + tl.arange(0, BLOCK_M // GROUP)
        store_columns(
            x, columns_ptr, column_scale_ptr, m, n, h, M, N, columns_stride_m, columns_stride_n,
            column_scale_stride_m, column_scale_stride_n, FORMAT, MAX, POWER_OF_TWO, E8M0, GROUP, BLOCK_M, BLOCK_N,
            NATIVE_CAST, INTERPRETED,
        )  # fmt: skip


@triton.jit
def quantize_tiles_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    x_stride_m: tl.tensor,
    x_stride_n: tl.tensor,
    values_stride_m: tl.tensor,
    values_stride_n: tl.tensor,
    scale_stride_m: tl.tensor,
    scale_stride_n: tl.tensor,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of x with one scale."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = (pid // tiles_n).to(tl.int64)
    pid_n = (pid % tiles_n).to(tl.int64)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, m, n, M, N, x_stride_m, x_stride_n, INTERPRETED)
    amax = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    scale = block_scale(amax, MAX, POWER_OF_TWO)
    values = narrow_scaled(x, scale, FORMAT, MAX, POWER_OF_TWO, NATIVE_CAST, INTERPRETED)
    store_tile(values_ptr, values, m, n, M, N, values_stride_m, values_stride_n)
    tl.store(scale_ptr + pid_m * scale_stride_m + pid_n * scale_stride_n, stored_scale(scale, amax, FORMAT, False))


def quantize_rows_call(
    x: Tensor,
    rows: Tensor | None,
    row_scale: Tensor | None,
    columns: Tensor | None,
    column_scale: Tensor | None,
    *,
    format: str,
    group: int = 128,
    power_of_two: bool = False,
    config: Config,
) -> KernelCall:
    """Quantise x [M, N] in blocks of `group` (a power of two; blocks of the tile are multiples of it).

    rows, columns: [M, N] in QUANTIZED_DTYPES[format], any strides, or None; row_scale [M, ceil(N / group)] and
    column_scale [ceil(M / group), N]: fp32, or uint8 for E8M0 (power_of_two only).
    """
    scales = [s for s in (row_scale, column_scale) if s is not None]
    arguments: dict[str, Any] = {"x_ptr": x, "M": x.shape[0], "N": x.shape[1], **strides("x", x)}
    for name, tensor in (
        ("rows", rows),
        ("row_scale", row_scale),
        ("columns", columns),
        ("column_scale", column_scale),
    ):
        arguments |= {f"{name}_ptr": None if tensor is None else storage(tensor), **strides(name, tensor)}
    constants = {
        **format_constants(format, power_of_two),
        "E8M0": any(s.element_size() == 1 for s in scales),
        "GROUP": group,
        **config.blocks,
    }
    return KernelCall(
        name=f"quantize_rows_{group}_{format}",
        kernel=quantize_rows_kernel,
        arguments=arguments,
        constants=constants,
        grid=(tiles(x, config),),
        config=config,
    )


def quantize_tiles_call(x: Tensor, values: Tensor, scale: Tensor, *, format: str, config: Config) -> KernelCall:
    """Quantise x [M, N] in tiles of the configuration's size; values [M, N], scale [tiles along M, along N] fp32."""
    return KernelCall(
        name=f"quantize_tiles_{format}",
        kernel=quantize_tiles_kernel,
        arguments={
            "x_ptr": x,
            "values_ptr": storage(values),
            "scale_ptr": scale,
            "M": x.shape[0],
            "N": x.shape[1],
            **strides("x", x),
            **strides("values", values),
            **strides("scale", scale),
        },
        constants={**format_constants(format), **config.blocks},
        grid=(tiles(x, config),),
        config=config,
    )


def quantize_rows_configs(
    M: int, N: int, format: str, target: Target, *, group: int = 128, rows: bool = True, columns: bool = False
) -> list[Config]:
    """Tiles for blocks along rows, columns or both. Both of them are multiples of `group` where its axis is blocked."""
    sizes = [(m, n) for m in (32, 64, 16, 8) for n in (128, 256)]
    if columns:
        sizes = [(max(m, group), max(n, group if rows else 1)) for m in (64, 128) for n in (64, 128)]
    else:
        sizes = [(m, max(n, group)) for m, n in sizes]
    found = tile_configs(list(dict.fromkeys(sizes)), format, target)
    if rows and columns and target.backend == "cuda" and group >= 128:
        # 512 threads may have 128 registers each, which is a few too few here; 256 threads may have 255
        blocks = {"BLOCK_M": group, "BLOCK_N": group, "NATIVE_CAST": int(native_cast(format, target))}
        found.insert(0, Config(blocks=blocks, num_warps=8, num_stages=1))
    return found


def reads_once(M: int, N: int) -> bool:
    """Whether a GPU quantises rows and columns of [M, N] in one launch: rows that do not start at multiples of 16 take
    so many registers for addresses that the tile does not fit, and two launches are faster than spills."""
    return M % 16 == 0 and N % 16 == 0


def quantize_tiles_configs(M: int, N: int, format: str, target: Target) -> list[Config]:
    """Tiles are of 128 x 128; the number of warps varies."""
    return tile_configs([(128, 128)], format, target)


def quantize_rows(
    x: Tensor,
    format: str,
    *,
    rows: bool = True,
    columns: bool = False,
    transposed: bool = False,
    group: int = 128,
    power_of_two: bool = False,
    e8m0: bool = False,
) -> QuantizedBlocks:
    """x [M, N] quantised in blocks of `group` along the last axis (rows), the first one (columns), or both.

    transposed: the values of columns are written as a contiguous [N, M] copy, whose transposed view is `columns`.
    e8m0: scales as bytes (recipe mx32 is group=32, power_of_two=True).
    """
    M, N = x.shape
    if rows and columns and x.device.type != "cpu" and not reads_once(M, N):
        shared: dict[str, Any] = {"group": group, "power_of_two": power_of_two, "e8m0": e8m0}
        only_rows = quantize_rows(x, format, **shared)
        only_columns = quantize_rows(x, format, rows=False, columns=True, transposed=transposed, **shared)
        return replace(only_rows, columns=only_columns.columns, column_scale=only_columns.column_scale)
    result = allocate_blocks(x, format, rows=rows, columns=columns, transposed=transposed, group=group, e8m0=e8m0)
    if not rows and not columns:
        return result
    if x.device.type == "cpu":
        config = interpreter_config(x, group)
    else:
        config = quantize_rows_configs(M, N, format, running_target(), group=group, rows=rows, columns=columns)[0]
    quantize_rows_call(
        x,
        result.rows,
        result.row_scale,
        result.columns,
        result.column_scale,
        format=format,
        group=group,
        power_of_two=power_of_two,
        config=config,
    ).run()
    return result


def allocate_blocks(
    x: Tensor,
    format: str,
    *,
    rows: bool = True,
    columns: bool = False,
    transposed: bool = False,
    group: int = 128,
    e8m0: bool = False,
) -> QuantizedBlocks:
    """Outputs of `quantize_rows` and of what is fused with it, not yet written."""
    M, N = x.shape
    dtype, scale_dtype = QUANTIZED_DTYPES[format], torch.uint8 if e8m0 else torch.float32
    return QuantizedBlocks(
        rows=x.new_empty(M, N, dtype=dtype) if rows else None,
        row_scale=x.new_empty(M, -(-N // group), dtype=scale_dtype) if rows else None,
        columns=(x.new_empty(N, M, dtype=dtype).T if transposed else x.new_empty(M, N, dtype=dtype))
        if columns
        else None,
        column_scale=x.new_empty(-(-M // group), N, dtype=scale_dtype) if columns else None,
    )


def quantize_tiles(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Values [M, N] of x [M, N] in 128 x 128 tiles and their scales [ceil(M / 128), ceil(N / 128)]."""
    M, N = x.shape
    values = x.new_empty(M, N, dtype=QUANTIZED_DTYPES[format])
    scale = x.new_empty(-(-M // 128), -(-N // 128), dtype=torch.float32)
    if x.device.type == "cpu":
        config = Config(blocks={"BLOCK_M": 128, "BLOCK_N": 128, "NATIVE_CAST": 0})
    else:
        config = quantize_tiles_configs(M, N, format, running_target())[0]
    quantize_tiles_call(x, values, scale, format=format, config=config).run()
    return values, scale
