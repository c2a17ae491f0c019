"""Quantisation with one scale per vector or per tensor, bit-equal to `passes.rounding.quantize` ("row", "tensor").

A tensor's scale takes two launches: programs write the largest magnitudes of what they saw, then every program of the
second launch reduces these and quantises its tile. With a given (delayed) scale it is one launch, which also finds the
largest magnitude, from which the caller derives the next scale. Maxima are of integers (`scales`), so that no result
depends on an order. Inputs are fp32, bf16 or fp16, of rank 2 and any strides.
"""

from __future__ import annotations

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
    storage,
    stored_scale,
)
from .tiles import interpreter_config, load_tile, store_tile, strides, tile_configs, tiles

MAX_PARTIALS = 1024
"""The most programs that search a tensor for its largest magnitude."""


@triton.jit
def quantize_vectors_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    x_stride_m: tl.tensor,
    x_stride_n: tl.tensor,
    values_stride_m: tl.tensor,
    values_stride_n: tl.tensor,
    scale_stride: tl.tensor,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """BLOCK_M rows of x with a scale each. Rows of up to BLOCK_N elements (ONE_CHUNK) are read once, others twice."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)
    x = load_tile(x_ptr, m, columns, M, N, x_stride_m, x_stride_n, INTERPRETED)
    amax = tl.max(magnitude_bits(x), axis=1)
    if not ONE_CHUNK:
        for start in range(BLOCK_N, N, BLOCK_N):
            x = load_tile(x_ptr, m, start + columns, M, N, x_stride_m, x_stride_n, INTERPRETED)
            amax = tl.maximum(amax, tl.max(magnitude_bits(x), axis=1))
    scale = block_scale(amax, MAX, POWER_OF_TWO)
    tl.store(scale_ptr + m * scale_stride, stored_scale(scale, amax, FORMAT, False), mask=m < M)
    if ONE_CHUNK:
        values = narrow_scaled(x, scale[:, None], FORMAT, MAX, POWER_OF_TWO, NATIVE_CAST, INTERPRETED)
        store_tile(values_ptr, values, m, columns, M, N, values_stride_m, values_stride_n)
    else:
        for start in range(0, N, BLOCK_N):
            x = load_tile(x_ptr, m, start + columns, M, N, x_stride_m, x_stride_n, INTERPRETED)
            values = narrow_scaled(x, scale[:, None], FORMAT, MAX, POWER_OF_TWO, NATIVE_CAST, INTERPRETED)
            store_tile(values_ptr, values, m, start + columns, M, N, values_stride_m, values_stride_n)


@triton.jit
def amax_kernel(
    x_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    x_stride_m: tl.tensor,
    x_stride_n: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """The largest magnitude (its pattern) of the tiles p, p + programs, p + 2 programs, ... of program p."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    amax = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, tl.num_programs(0)):
        m = (tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = (tile % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = load_tile(x_ptr, m, n, M, N, x_stride_m, x_stride_n, INTERPRETED)
        amax = tl.maximum(amax, magnitude_bits(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(amax, axis=1), axis=0))


@triton.jit
def quantize_tensor_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partials: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    x_stride_m: tl.tensor,
    x_stride_n: tl.tensor,
    values_stride_m: tl.tensor,
    values_stride_n: tl.tensor,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of x. Without partial_ptr the scale is given, and amax_ptr (int32, 0 before) gets the largest magnitude;
    else both are written."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    m = (pid // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, m, n, M, N, x_stride_m, x_stride_n, INTERPRETED)
    if partial_ptr is None:
        scale = tl.load(scale_ptr)
        tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude_bits(x), axis=1), axis=0))
        # a given scale is any number, its inverse need not be one
        values = narrow_scaled(x, scale, FORMAT, MAX, False, NATIVE_CAST, INTERPRETED)
    else:
        index = tl.arange(0, PARTIALS)
        amax = tl.max(tl.load(partial_ptr + index, mask=index < partials, other=0), axis=0)
        scale = block_scale(amax, MAX, POWER_OF_TWO)
        if pid == 0:
            tl.store(scale_ptr, stored_scale(scale, amax, FORMAT, False))
            tl.store(amax_ptr, amax)
        values = narrow_scaled(x, scale, FORMAT, MAX, POWER_OF_TWO, NATIVE_CAST, INTERPRETED)
    store_tile(values_ptr, values, m, n, M, N, values_stride_m, values_stride_n)


def quantize_vectors_call(x: Tensor, values: Tensor, scale: Tensor, *, format: str, config: Config) -> KernelCall:
    """Quantise each row of x [M, N] with one scale; values [M, N], scale [M] fp32. Columns: pass transposed views."""
    M, N = x.shape
    return KernelCall(
        name=f"quantize_vectors_{format}",
        kernel=quantize_vectors_kernel,
        arguments={
            "x_ptr": x,
            "values_ptr": storage(values),
            "scale_ptr": scale,
            "M": M,
            "N": N,
            "scale_stride": scale.stride(0),
            **strides("x", x),
            **strides("values", values),
        },
        constants={**format_constants(format), "ONE_CHUNK": config.blocks["BLOCK_N"] >= N, **config.blocks},
        grid=(-(-M // config.blocks["BLOCK_M"]),),
        config=config,
    )


def amax_call(x: Tensor, partial: Tensor, *, config: Config) -> KernelCall:
    """The largest magnitudes of x [M, N] by program into partial [programs], int32 patterns of fp32."""
    blocks = {name: size for name, size in config.blocks.items() if name != "NATIVE_CAST"}
    return KernelCall(
        name="amax",
        kernel=amax_kernel,
        arguments={"x_ptr": x, "partial_ptr": partial, "M": x.shape[0], "N": x.shape[1], **strides("x", x)},
        constants=blocks,
        grid=(partial.shape[0],),
        config=config,
    )


def quantize_tensor_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    amax: Tensor,
    partial: Tensor | None,
    *,
    format: str,
    power_of_two: bool = False,
    config: Config,
) -> KernelCall:
    """Quantise x [M, N] with one scale, from `amax_call`'s partial maxima or, where these are None, the given one.

    values: [M, N]; scale: fp32 scalar, written from partial; amax: fp32 scalar, written, and to be 0 before where the
    scale is given.
    """
    partials = 0 if partial is None else partial.shape[0]
    return KernelCall(
        name=f"quantize_tensor_{format}",
        kernel=quantize_tensor_kernel,
        arguments={
            "x_ptr": x,
            "values_ptr": storage(values),
            "scale_ptr": scale,
            "amax_ptr": amax.view(torch.int32),
            "partial_ptr": partial,
            "partials": partials,
            "M": x.shape[0],
            "N": x.shape[1],
            **strides("x", x),
            **strides("values", values),
        },
        constants={
            **format_constants(format, power_of_two),
            "PARTIALS": triton.next_power_of_2(max(partials, 1)),
            **config.blocks,
        },
        grid=(tiles(x, config),),
        config=config,
    )


def quantize_vectors_configs(M: int, N: int, format: str, target: Target, *, axis: int = 1) -> list[Config]:
    """Few long rows a program if a row is contiguous (axis 1), else as many as make whole memory sectors (axis 0)."""
    if axis == 0:
        return tile_configs([(64, 64), (128, 32), (64, 128), (32, 128)], format, target)
    n = max(128, min(4096, triton.next_power_of_2(N)))
    sizes = [(max(1, 4096 // n), n), (1, min(4 * n, 16384)), (max(1, 8192 // n), n), (16, 256)]
    return tile_configs(sizes, format, target)


def quantize_tensor_configs(M: int, N: int, format: str, target: Target) -> list[Config]:
    """Tiles of the search for the largest magnitude and of the quantisation."""
    return tile_configs([(16, 256), (32, 128), (32, 256), (64, 64), (8, 1024)], format, target)


def quantize_vectors(x: Tensor, format: str, *, axis: int = 1) -> tuple[Tensor, Tensor]:
    """Values [M, N] of x [M, N] with a scale per vector along `axis` (0 or 1), and the scales: [M, 1], or [1, N]."""
    values = x.new_empty(x.shape, dtype=QUANTIZED_DTYPES[format])
    if x.numel() == 0:
        # as the simulator: no scale where there is nothing to scale
        return values, x.new_empty(*(min(n, 1) if d == axis else n for d, n in enumerate(x.shape)), dtype=torch.float32)
    along, out = (x, values) if axis == 1 else (x.T, values.T)
    scale = x.new_empty(along.shape[0], dtype=torch.float32)
    if x.device.type == "cpu":
        config = interpreter_config(along)
    else:
        M, N = along.shape
        config = quantize_vectors_configs(M, N, format, running_target(), axis=axis)[0]
    quantize_vectors_call(along, out, scale, format=format, config=config).run()
    return values, scale.unsqueeze(axis)


def quantize_tensor(
    x: Tensor, format: str, *, scale: Tensor | None = None, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(values [M, N], scale, largest magnitude) of x [M, N]; fp32 scalars, NaN if x has one.

    scale: a given one (fp32 scalar; delayed scaling): finite values beyond it saturate, inf and NaN stay as far as the
    format has them, and the largest magnitude tells.
    """
    values = x.new_empty(x.shape, dtype=QUANTIZED_DTYPES[format])
    amax = x.new_zeros((), dtype=torch.float32)
    if x.device.type == "cpu":
        config = interpreter_config(x)
    else:
        M, N = x.shape
        config = quantize_tensor_configs(M, N, format, running_target())[0]
    if scale is not None:
        quantize_tensor_call(x, values, scale, amax, None, format=format, config=config).run()
        return values, scale, amax
    scale = x.new_ones((), dtype=torch.float32)
    if x.numel():
        partial = x.new_empty(min(tiles(x, config), MAX_PARTIALS), dtype=torch.int32)
        amax_call(x, partial, config=config).run()
        quantize_tensor_call(
            x, values, scale, amax, partial, format=format, power_of_two=power_of_two, config=config
        ).run()
    return values, scale, amax
