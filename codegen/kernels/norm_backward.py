"""LayerNorm and RMSNorm backward: narrow inputs and outputs, fp32 inside, deterministic gradients of weights.

With n and rstd of norm.py and g = dy w: dx = rstd (g - mean(g) - n mean(g n)), without mean(g) in RMSNorm;
dw = sum(dy n) and db = sum(dy) over all rows. As there, x is centred twice: the error of the stored mean is computed
anew, along with the sums.

Each program sums dw and db of its own rows in a row of `partial` [P, N]; torch then sums those in a fixed order.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_call import Config, KernelCall
from ..targets import TRITON_TYPES, Target
from .dot import narrow, widen
from .norm import centre, norm_name
from .row_blocks import as_rows, is_whole, is_wide, pick_config, row_configs, row_strides, tiles

_LIVE = 4  # x, dy and both partial sums
_PROGRAMS_PER_UNIT = 2
_INTERPRETED_PROGRAMS = 4


@triton.jit
def _norm_backward(
    dy, x, weight, mean, rstd, dx, partial_weight, partial_bias,
    rows, size, dy_row, dy_column, x_row, x_column, dx_row, dx_column,
    weight_stride,
    MEAN: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers; program p takes tiles p, p + P, ... of rows."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    column_inside = columns < size
    columns = columns.to(tl.int64) if WIDE else columns
    sums_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    sums_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    if weight is not None:
        scale = widen(tl.load(weight + columns * weight_stride, mask=column_inside, other=0.0), INTERPRETED)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        row_inside = row < rows
        inside = row_inside[:, None] & column_inside
        row_rstd = tl.load(rstd + row, mask=row_inside, other=0.0)[:, None]
        n = widen(tl.load(x + row[:, None] * x_row + columns * x_column, mask=inside, other=0.0), INTERPRETED)
        g = widen(tl.load(dy + row[:, None] * dy_row + columns * dy_column, mask=inside, other=0.0), INTERPRETED)
        if MEAN:
            n, _ = centre(n, inside, tl.load(mean + row, mask=row_inside, other=0.0), size)
        n *= row_rstd
        if partial_weight is not None:
            sums_weight += g * n
        if partial_bias is not None:
            sums_bias += g
        if weight is not None:
            g *= scale
        result = g - n * (tl.sum(g * n, 1) / size)[:, None]
        if MEAN:
            result -= (tl.sum(g, 1) / size)[:, None]
        result = narrow(result * row_rstd, dx.dtype.element_ty, False, INTERPRETED)
        tl.store(dx + row[:, None] * dx_row + columns * dx_column, result, mask=inside)
    columns = tl.arange(0, BLOCK)
    partial = program.to(tl.int64) * size + columns
    if partial_weight is not None:
        tl.store(partial_weight + partial, tl.sum(sums_weight, 0), mask=columns < size)
    if partial_bias is not None:
        tl.store(partial_bias + partial, tl.sum(sums_bias, 0), mask=columns < size)


@triton.jit
def _norm_backward_walk(
    dy, x, weight, mean, rstd, dx, partial_weight, partial_bias,
    rows, size, dy_row, dy_column, x_row, x_column, dx_row, dx_column,
    weight_stride,
    MEAN: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rows are walked twice, and partial sums are kept in memory, each by the one program that its row belongs to."""
    program = tl.program_id(0)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        row_inside = (row < rows)[:, None]
        row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        row_mean = tl.zeros([ROWS, 1], tl.float32)
        if MEAN:
            row_mean = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        x_start = x + row[:, None] * x_row
        dy_start = dy + row[:, None] * dy_row
        products = tl.zeros([ROWS, BLOCK], tl.float32)
        gradients = tl.zeros([ROWS, BLOCK], tl.float32)
        deviations = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]
            inside = row_inside & (columns < size)
            columns = columns.to(tl.int64) if WIDE else columns
            n = widen(tl.load(x_start + columns * x_column, mask=inside, other=0.0), INTERPRETED)
            g = widen(tl.load(dy_start + columns * dy_column, mask=inside, other=0.0), INTERPRETED)
            if weight is not None:
                g *= widen(tl.load(weight + columns * weight_stride, mask=inside, other=0.0), INTERPRETED)
            if MEAN:
                n = tl.where(inside, n - row_mean, 0.0)
                deviations += n
                gradients += g
            products += g * n
        error = (tl.sum(deviations, 1) / size)[:, None]
        gradient = tl.sum(gradients, 1)[:, None]
        product = (tl.sum(products, 1)[:, None] - error * gradient) / size * row_rstd
        gradient /= size
        for start in range(0, size, BLOCK):
            block = start + tl.arange(0, BLOCK)
            columns = block[None, :]
            inside = row_inside & (columns < size)
            columns = columns.to(tl.int64) if WIDE else columns
            n = widen(tl.load(x_start + columns * x_column, mask=inside, other=0.0), INTERPRETED)
            g = widen(tl.load(dy_start + columns * dy_column, mask=inside, other=0.0), INTERPRETED)
            n = tl.where(inside, (n - row_mean) - error, 0.0) * row_rstd
            partial = program.to(tl.int64) * size + block
            earlier = (block < size) & (tile != program)
            if partial_weight is not None:
                sums_weight = tl.load(partial_weight + partial, mask=earlier, other=0.0) + tl.sum(g * n, 0)
            if partial_bias is not None:
                sums_bias = tl.load(partial_bias + partial, mask=earlier, other=0.0) + tl.sum(g, 0)
            tl.debug_barrier()  # where several threads hold a sum, one stores it, after all have read
            if partial_weight is not None:
                tl.store(partial_weight + partial, sums_weight, mask=block < size)
            if partial_bias is not None:
                tl.store(partial_bias + partial, sums_bias, mask=block < size)
            if weight is not None:
                g *= widen(tl.load(weight + columns * weight_stride, mask=inside, other=0.0), INTERPRETED)
            result = (g - gradient - n * product) * row_rstd
            result = narrow(result, dx.dtype.element_ty, False, INTERPRETED)
            tl.store(dx + row[:, None] * dx_row + columns * dx_column, result, mask=inside)
        tl.debug_barrier()  # the next tile reads what other threads may have written of the partial sums


def norm_backward_configs(size: int, target: Target) -> list[Config]:
    """Ways to cut rows of `size` elements in the backward kernels, best guess first."""
    return row_configs(size, target, _LIVE)


def norm_backward_call(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    partial_weight: Tensor | None,
    partial_bias: Tensor | None,
    *,
    config: Config,
) -> KernelCall:
    """Backward of LayerNorm, or of RMSNorm where `mean` is None.

    dy, x, dx, weight, mean, rstd: as in `norm_call`; mean and rstd must be those of x. partial_weight, partial_bias:
    [P, N] contiguous, fp32, P at most the number of tiles of rows: P programs run, and each writes its sums over rows.
    """
    rows, size = x.shape
    partial = partial_weight if partial_weight is not None else partial_bias
    return KernelCall(
        name=f"{norm_name(mean)}_backward_{TRITON_TYPES[dy.dtype]}_{TRITON_TYPES[dx.dtype]}",
        kernel=_norm_backward if is_whole(size, config) else _norm_backward_walk,
        arguments={
            "dy": dy,
            "x": x,
            "weight": weight,
            "mean": mean,
            "rstd": rstd,
            "dx": dx,
            "partial_weight": partial_weight,
            "partial_bias": partial_bias,
            "rows": rows,
            "size": size,
            **row_strides(dy=dy, x=x, dx=dx),
            "weight_stride": 0 if weight is None else weight.stride(0),
        },
        constants={"MEAN": mean is not None, "WIDE": is_wide(dy, x, dx, weight), **config.blocks},
        grid=(tiles(rows, config) if partial is None else partial.shape[0],),
        config=config,
    )


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx in `dtype` (default: that of x), dweight and dbias in the dtypes of weight and bias, None where these are.

    dy, x: [..., N]; weight, bias: [N]; mean, rstd: what `layer_norm` returned.
    """
    return _backward(dy, x, mean, rstd, weight, bias, dtype, config)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dx in `dtype` (default: that of x), and dweight in the dtype of weight, None where that is."""
    dx, dweight, _ = _backward(dy, x, None, rstd, weight, None, dtype, config)
    return dx, dweight


def norm_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor | None = None, *, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias in fp64, not rounded; centred: of LayerNorm, else of RMSNorm."""
    dy, x = dy.double(), x.double()
    n = x - x.mean(-1, keepdim=True) if centred else x
    rstd = 1 / (n.square().mean(-1, keepdim=True) + eps).sqrt()
    n = n * rstd
    g = dy if weight is None else dy * weight.double()
    dx = g - n * (g * n).mean(-1, keepdim=True)
    dx = (dx - g.mean(-1, keepdim=True) if centred else dx) * rstd
    rows = tuple(range(x.dim() - 1))
    return dx, (dy * n).sum(rows), dy.sum(rows)


def _backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    config: Config | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dx = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if not dx.numel():
        return dx, _zeros(weight), _zeros(bias)
    size = x.shape[-1]
    config = config or pick_config(size, x.device, _LIVE)
    programs = min(tiles(x.numel() // size, config), _programs(x.device))
    partials = [None if t is None else x.new_empty(programs, size, dtype=torch.float32) for t in (weight, bias)]
    flat_mean = None if mean is None else mean.reshape(-1)
    norm_backward_call(
        as_rows(dy), as_rows(x), weight, flat_mean, rstd.reshape(-1), as_rows(dx), *partials, config=config
    ).run()
    dweight, dbias = (
        None if t is None or p is None else p.sum(0).to(t.dtype) for t, p in zip((weight, bias), partials, strict=True)
    )
    return dx, dweight, dbias


def _zeros(like: Tensor | None) -> Tensor | None:
    return None if like is None else torch.zeros_like(like)


def _programs(device: torch.device) -> int:
    """The most programs that sum gradients of weights: enough to fill the device, few rows to sum after them."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_UNIT
