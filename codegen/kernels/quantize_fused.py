"""Quantisation of what was just computed: one read of the inputs, one write of the values.

LayerNorm or RMSNorm (`norm`), or an activation times a gate (act(gate) * up, Shazeer, arXiv:2002.05202), in fp32, then
blocks of `group` along rows, for the gated product along columns too. The unquantised result, which backward needs, can
be written beside it. `rounded` says what is quantised: the fp32 result (False), or what is written of it, in bf16 where
nothing is written (True), which is bit-equal to quantising that tensor. And plain transposition, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..kernel_call import Config, KernelCall
from ..running import running_target
from ..targets import Target
from .dot import activate, narrow, widen
from .norm import normalize_tile, row_statistics, scale_and_shift
from .quantize import QuantizedBlocks, allocate_blocks, quantize_rows_configs, store_columns, store_rows
from .row_blocks import is_wide, row_strides
from .scales import format_constants, native_cast, storage
from .tiles import interpreter_config, load_tile, store_tile, strides, tile_configs, tiles

_LONGEST = 16384  # elements of rows that are kept whole


@triton.jit
def norm_quantize_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, values: tl.tensor, scale: tl.tensor, y: tl.tensor,
    mean: tl.tensor, rstd: tl.tensor, rows: tl.tensor, size: tl.tensor, eps: tl.tensor,
    x_row: tl.tensor, x_column: tl.tensor, values_row: tl.tensor, values_column: tl.tensor,
    scale_row: tl.tensor, scale_column: tl.tensor, y_row: tl.tensor, y_column: tl.tensor,
    weight_stride: tl.tensor, bias_stride: tl.tensor,
    MEAN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, ROUNDED: tl.constexpr, FORMAT: tl.constexpr,
    MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows of x; whole ones (WHOLE) are read once, longer ones are walked in blocks, twice or thrice."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_inside = (row < rows)[:, None]
    x += row[:, None] * x_row
    columns = tl.arange(0, BLOCK)[None, :]
    if not WHOLE:
        row_mean, error, row_rstd = row_statistics(
            x, row_inside, size, x_column, eps, MEAN, ROWS, BLOCK, WIDE, INTERPRETED
        )
    for start in range(0, BLOCK if WHOLE else size, BLOCK):
        block = start + columns
        column_inside = block < size
        inside = row_inside & column_inside
        block = block.to(tl.int64)
        n = widen(tl.load(x + block * x_column, mask=inside, other=0.0), INTERPRETED)
        if WHOLE:
            n, row_mean, row_rstd = normalize_tile(n, inside, size, eps, MEAN)
        else:
            n = ((n - row_mean[:, None]) - error[:, None]) * row_rstd[:, None]
        n = scale_and_shift(n, weight, bias, block, column_inside, weight_stride, bias_stride, INTERPRETED)
        n = tl.where(inside, n, 0.0)
        offsets = start + tl.arange(0, BLOCK).to(tl.int64)
        if y is not None:
            written = narrow(n, y.dtype.element_ty, False, INTERPRETED)
            store_tile(y, written, row, offsets, rows, size, y_row, y_column)
            if ROUNDED:
                n = widen(written, INTERPRETED)
        elif ROUNDED:
            n = widen(narrow(n, tl.bfloat16, False, INTERPRETED), INTERPRETED)
        store_rows(
            n, values, scale, row, offsets, start // GROUP + tl.arange(0, GROUPS).to(tl.int64), rows, size, values_row,
            values_column, scale_row, scale_column, FORMAT, MAX, POWER_OF_TWO, E8M0, GROUP, ROWS, BLOCK, NATIVE_CAST,
            INTERPRETED,
        )  # fmt: skip
        if WHOLE:
            if mean is not None:
                tl.store(mean + row, row_mean, mask=row < rows)
            if rstd is not None:
                tl.store(rstd + row, row_rstd, mask=row < rows)
    if not WHOLE:
        if mean is not None:
            tl.store(mean + row, row_mean + error, mask=row < rows)
        if rstd is not None:
            tl.store(rstd + row, row_rstd, mask=row < rows)


@triton.jit
def gated_quantize_kernel(
    gate: tl.tensor, up: tl.tensor, y: tl.tensor, rows: tl.tensor, row_scale: tl.tensor, columns: tl.tensor,
    column_scale: tl.tensor, M: tl.tensor, N: tl.tensor, gate_stride_m: tl.tensor, gate_stride_n: tl.tensor,
    up_stride_m: tl.tensor, up_stride_n: tl.tensor, y_stride_m: tl.tensor, y_stride_n: tl.tensor,
    rows_stride_m: tl.tensor, rows_stride_n: tl.tensor, row_scale_stride_m: tl.tensor, row_scale_stride_n: tl.tensor,
    columns_stride_m: tl.tensor, columns_stride_n: tl.tensor, column_scale_stride_m: tl.tensor,
    column_scale_stride_n: tl.tensor,
    ACTIVATION: tl.constexpr, ROUNDED: tl.constexpr, FORMAT: tl.constexpr, MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NATIVE_CAST: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of act(gate) * up, quantised along rows and columns, as far as their pointers are not None."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = (pid // tiles_n).to(tl.int64)
    pid_n = (pid % tiles_n).to(tl.int64)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    h = activate(load_tile(gate, m, n, M, N, gate_stride_m, gate_stride_n, INTERPRETED), ACTIVATION)
    h *= load_tile(up, m, n, M, N, up_stride_m, up_stride_n, INTERPRETED)
    if y is not None:
        written = narrow(h, y.dtype.element_ty, False, INTERPRETED)
        store_tile(y, written, m, n, M, N, y_stride_m, y_stride_n)
        if ROUNDED:
            h = widen(written, INTERPRETED)
    elif ROUNDED:
        h = widen(narrow(h, tl.bfloat16, False, INTERPRETED), INTERPRETED)
    if rows is not None:
        g = pid_n * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
        store_rows(
            h, rows, row_scale, m, n, g, M, N, rows_stride_m, rows_stride_n, row_scale_stride_m, row_scale_stride_n,
            FORMAT, MAX, POWER_OF_TWO, E8M0, GROUP, BLOCK_M, BLOCK_N, NATIVE_CAST, INTERPRETED,
        )  # fmt: skip
    if columns is not None:
        k = pid_m * (BLOCK_M // GROUP) + tl.arange(0, BLOCK_M // GROUP)
        store_columns(
            h, columns, column_scale, m, n, k, M, N, columns_stride_m, columns_stride_n, column_scale_stride_m,
            column_scale_stride_n, FORMAT, MAX, POWER_OF_TWO, E8M0, GROUP, BLOCK_M, BLOCK_N, NATIVE_CAST, INTERPRETED,
        )  # fmt: skip


@triton.jit
def copy_kernel(
    x: tl.tensor, y: tl.tensor, M: tl.tensor, N: tl.tensor, x_stride_m: tl.tensor, x_stride_n: tl.tensor,
    y_stride_m: tl.tensor, y_stride_n: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of x to y, of the same type and other strides: loads and stores are both in their own order."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (pid // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    values = tl.load(x + m[:, None] * x_stride_m + n[None, :] * x_stride_n, mask=inside)
    tl.store(y + m[:, None] * y_stride_m + n[None, :] * y_stride_n, values, mask=inside)


def norm_quantize_call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    values: Tensor,
    scale: Tensor,
    y: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    *,
    layer_norm: bool,
    eps: float,
    format: str,
    group: int = 128,
    power_of_two: bool = False,
    rounded: bool = False,
    config: Config,
) -> KernelCall:
    """LayerNorm (layer_norm) or RMSNorm of x [M, N], then blocks of `group` along rows.

    x, y: [M, N]; weight, bias: [N]; values: [M, N] and scale: [M, ceil(N / group)] as in `quantize_rows_call`; mean and
    rstd: [M] contiguous, fp32. None: not there, not wanted.
    """
    M, N = x.shape
    there = {"x": x, "values": values, "scale": scale, **({} if y is None else {"y": y})}
    return KernelCall(
        name=f"{'layer' if layer_norm else 'rms'}_norm_quantize_{format}",
        kernel=norm_quantize_kernel,
        arguments={
            "x": x,
            "weight": weight,
            "bias": bias,
            "values": storage(values),
            "scale": scale,
            "y": y,
            "mean": mean,
            "rstd": rstd,
            "rows": M,
            "size": N,
            "eps": float(eps),
            "y_row": 0,
            "y_column": 0,
            **row_strides(**there),
            "weight_stride": 0 if weight is None else weight.stride(0),
            "bias_stride": 0 if bias is None else bias.stride(0),
        },
        constants={
            **format_constants(format, power_of_two),
            "MEAN": layer_norm,
            "WHOLE": config.blocks["BLOCK"] >= N,
            "WIDE": is_wide(x),
            "ROUNDED": rounded,
            "E8M0": scale.element_size() == 1,
            "GROUP": group,
            **config.blocks,
        },
        grid=(-(-M // config.blocks["ROWS"]),),
        config=config,
    )


def gated_quantize_call(
    gate: Tensor,
    up: Tensor,
    y: Tensor | None,
    blocks: QuantizedBlocks,
    *,
    format: str,
    activation: str = "silu",
    group: int = 128,
    power_of_two: bool = False,
    rounded: bool = False,
    config: Config,
) -> KernelCall:
    """act(gate) * up, both [M, N], into y (None: not wanted) and quantised into what there is of `blocks`."""
    outputs = {name: getattr(blocks, name) for name in ("rows", "row_scale", "columns", "column_scale")}
    scale = blocks.row_scale if blocks.row_scale is not None else blocks.column_scale
    arguments: dict[str, Any] = {"gate": gate, "up": up, "y": y, "M": gate.shape[0], "N": gate.shape[1]}
    for name, tensor in outputs.items():
        arguments[name] = None if tensor is None else storage(tensor)
    for name, tensor in {"gate": gate, "up": up, "y": y, **outputs}.items():
        arguments |= strides(name, tensor)
    return KernelCall(
        name=f"{activation}_gated_quantize_{format}",
        kernel=gated_quantize_kernel,
        arguments=arguments,
        constants={
            **format_constants(format, power_of_two),
            "ACTIVATION": activation,
            "ROUNDED": rounded,
            "GROUP": group,
            **config.blocks,
            "E8M0": scale is not None and scale.element_size() == 1,
        },
        grid=(tiles(gate, config),),
        config=config,
    )


def copy_call(x: Tensor, y: Tensor, *, config: Config) -> KernelCall:
    """x [M, N] into y [M, N] of the same dtype and any strides; the transposed one for `transpose`."""
    return KernelCall(
        name="copy",
        kernel=copy_kernel,
        arguments={
            "x": storage(x),
            "y": storage(y),
            "M": x.shape[0],
            "N": x.shape[1],
            **strides("x", x),
            **strides("y", y),
        },
        constants={name: size for name, size in config.blocks.items() if name != "NATIVE_CAST"},
        grid=(tiles(x, config),),
        config=config,
    )


def norm_quantize_configs(N: int, format: str, target: Target, *, group: int = 128) -> list[Config]:
    """Whole rows up to 16384 elements, else blocks of 4096, 8192 or 2048."""
    whole = max(group, triton.next_power_of_2(N))
    if whole > _LONGEST:
        sizes = [(1, 4096), (1, 8192), (1, 2048)]
    else:
        sizes = [(max(1, 2048 // whole), whole), (max(1, 4096 // whole), whole), (max(1, 1024 // whole), whole)]
    return [
        Config(
            blocks={"ROWS": m, "BLOCK": n, "NATIVE_CAST": int(native_cast(format, target))},
            num_warps=c.num_warps,
            num_stages=1,
        )
        for m, n in dict.fromkeys(sizes)
        for c in tile_configs([(m, n)], format, target)
    ]


def gated_quantize_configs(
    M: int, N: int, format: str, target: Target, *, group: int = 128, rows: bool = True, columns: bool = False
) -> list[Config]:
    """As the quantisation's."""
    return quantize_rows_configs(M, N, format, target, group=group, rows=rows, columns=columns)


def copy_configs(M: int, N: int, target: Target) -> list[Config]:
    """Tiles that are as wide as a memory transaction both ways."""
    return tile_configs([(64, 64), (128, 64), (64, 128), (32, 64)], "fp16", target)


def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    layer_norm: bool,
    eps: float,
    format: str,
    group: int = 128,
    power_of_two: bool = False,
    output: torch.dtype | None = None,
    rounded: bool = False,
) -> tuple[QuantizedBlocks, Tensor | None]:
    """LayerNorm or RMSNorm of x [M, N], quantised in blocks along rows; and the result itself in `output`, if given."""
    M, N = x.shape
    blocks = allocate_blocks(x, format, group=group)
    y = None if output is None else x.new_empty(M, N, dtype=output)
    if x.device.type == "cpu":
        block = max(group, min(triton.next_power_of_2(max(N, 1)), _LONGEST))
        config = Config(blocks={"ROWS": max(1, min(128, (1 << 17) // block)), "BLOCK": block, "NATIVE_CAST": 0})
    else:
        config = norm_quantize_configs(N, format, running_target(), group=group)[0]
    assert blocks.rows is not None and blocks.row_scale is not None
    if x.numel():
        norm_quantize_call(
            *(x, weight, bias, blocks.rows, blocks.row_scale, y),
            layer_norm=layer_norm,
            eps=eps,
            format=format,
            group=group,
            power_of_two=power_of_two,
            rounded=rounded,
            config=config,
        ).run()
    return blocks, y


def gated_quantize(
    gate: Tensor,
    up: Tensor,
    *,
    format: str,
    activation: str = "silu",
    rows: bool = True,
    columns: bool = False,
    transposed: bool = False,
    group: int = 128,
    power_of_two: bool = False,
    output: torch.dtype | None = None,
    rounded: bool = False,
) -> tuple[QuantizedBlocks, Tensor | None]:
    """act(gate) * up, both [M, N], quantised as `quantize_rows`; and the product itself in `output`, if given."""
    M, N = gate.shape
    blocks = allocate_blocks(gate, format, rows=rows, columns=columns, transposed=transposed, group=group)
    y = None if output is None else gate.new_empty(M, N, dtype=output)
    if gate.device.type == "cpu":
        config = interpreter_config(gate, group)
    else:
        target = running_target()
        config = gated_quantize_configs(M, N, format, target, group=group, rows=rows, columns=columns)[0]
    gated_quantize_call(
        *(gate, up, y, blocks),
        format=format,
        activation=activation,
        group=group,
        power_of_two=power_of_two,
        rounded=rounded,
        config=config,
    ).run()
    return blocks, y


def transpose(x: Tensor) -> Tensor:
    """A contiguous copy [N, M] of x [M, N], of any dtype."""
    M, N = x.shape
    y = x.new_empty(N, M)
    config = interpreter_config(x) if x.device.type == "cpu" else copy_configs(M, N, running_target())[0]
    copy_call(x, y.T, config=config).run()
    return y


def norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, layer_norm: bool, eps: float) -> Tensor:
    """The norm of x in fp64."""
    w, b = (None if t is None else t.double() for t in (weight, bias))
    if layer_norm:
        return functional.layer_norm(x.double(), x.shape[-1:], w, b, eps)
    return functional.rms_norm(x.double(), x.shape[-1:], w, eps)


def gated_reference(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up in fp64."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "relu": torch.relu,
        "none": torch.clone,
    }
    return functions[activation](gate.double()) * up.double()
