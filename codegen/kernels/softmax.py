"""Softmax and log-softmax over the last axis, forward and backward: narrow inputs and outputs, fp32 inside.

With m = max x and s = sum e^(x - m): softmax y = e^(x - m) / s, log-softmax y = x - m - log s. Backward, from the
output: dx = y (dy - sum(y dy)), of log-softmax dx = dy - e^y sum(dy).

Rows that do not fit in registers are read twice: `sum_exp_rows` finds m and s in one pass (Milakov and Gimelshein,
arXiv:1805.02867), each column of the tile keeping a maximum and a sum of its own until the end.
As in torch, -inf has weight 0, and a row of nothing but -inf, or with an inf or a NaN, is all NaN.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_call import Config, KernelCall
from ..targets import TRITON_TYPES, Target
from .dot import narrow, widen
from .row_blocks import as_rows, exp, is_whole, is_wide, pick_config, row_configs, row_strides, tiles

_LIVE = 2  # forward keeps x and its exponential, backward y and dy


@triton.jit
def add_exp(x, largest, total):
    """The maximum and the sum of e^(x - maximum) of a running pair, elementwise, after one more x.

    Only one exponential: of the smaller of both less the larger. Start with (-inf, 0).
    """
    gap = x - largest
    factor = exp(-tl.abs(gap))
    added = tl.where(gap > 0.0, total * factor + 1.0, total + factor)
    # -inf adds nothing, to -inf neither, where the gap is NaN
    return tl.maximum(largest, x), tl.where(x == float("-inf"), total, added)


@triton.jit
def merge_exp(largest, total):
    """Pairs of `add_exp`, [ROWS, BLOCK], as one per row: [ROWS], [ROWS]."""
    row_largest = tl.max(largest, 1)
    factor = tl.where(largest == float("-inf"), 0.0, exp(largest - row_largest[:, None]))
    return row_largest, tl.sum(total * factor, 1)


@triton.jit
def sum_exp_rows(
    x, row_inside, size, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """max x and sum e^(x - max) of rows that are walked; x: pointers to their beginnings, [ROWS, 1]."""
    largest = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        inside = row_inside & (columns < size)
        offsets = (columns.to(tl.int64) if WIDE else columns) * stride
        values = widen(tl.load(x + offsets, mask=inside, other=float("-inf")), INTERPRETED)
        largest, total = add_exp(values, largest, total)
    return merge_exp(largest, total)


@triton.jit
def softmax_tile(x, LOG: tl.constexpr):
    """(Log-)softmax of whole rows, fp32 [ROWS, BLOCK]; outside a row x is -inf."""
    shifted = x - tl.max(x, 1)[:, None]
    weights = exp(shifted)
    total = tl.sum(weights, 1)[:, None]
    return shifted - tl.log(total) if LOG else weights * (1.0 / total)


@triton.jit
def _softmax_forward(
    x, y, rows, size, x_row, x_column, y_row, y_column,
    LOG: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    row_inside = row < rows
    x += row * x_row
    y += row * y_row
    columns = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        inside = row_inside & (columns < size)
        columns = columns.to(tl.int64) if WIDE else columns
        # rows outside are zero, not -inf: no NaN is computed in vain
        values = widen(tl.load(x + columns * x_column, mask=inside, other=0.0), INTERPRETED)
        values = tl.where(inside | ((row >= rows) & (columns < size)), values, float("-inf"))
        result = softmax_tile(values, LOG)
        tl.store(y + columns * y_column, narrow(result, y.dtype.element_ty, False, INTERPRETED), mask=inside)
    else:
        largest, total = sum_exp_rows(x, row_inside, size, x_column, ROWS, BLOCK, WIDE, INTERPRETED)
        log_total = tl.log(total)[:, None]
        inverse = (1.0 / total)[:, None]
        for start in range(0, size, BLOCK):
            block = start + columns
            inside = row_inside & (block < size)
            block = block.to(tl.int64) if WIDE else block
            values = widen(tl.load(x + block * x_column, mask=inside, other=0.0), INTERPRETED)
            shifted = values - largest[:, None]
            result = shifted - log_total if LOG else exp(shifted) * inverse
            tl.store(y + block * y_column, narrow(result, y.dtype.element_ty, False, INTERPRETED), mask=inside)


@triton.jit
def _softmax_backward(
    dy, y, dx, rows, size, dy_row, dy_column, y_row, y_column,
    dx_row, dx_column,
    LOG: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    row_inside = row < rows
    dy += row * dy_row
    y += row * y_row
    dx += row * dx_row
    columns = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        inside = row_inside & (columns < size)
        columns = columns.to(tl.int64) if WIDE else columns
        gradient = widen(tl.load(dy + columns * dy_column, mask=inside, other=0.0), INTERPRETED)
        output = widen(tl.load(y + columns * y_column, mask=inside, other=0.0), INTERPRETED)
        total = tl.sum(gradient if LOG else output * gradient, 1)[:, None]
        result = gradient - exp(output) * total if LOG else output * (gradient - total)
        tl.store(dx + columns * dx_column, narrow(result, dx.dtype.element_ty, False, INTERPRETED), mask=inside)
    else:
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            block = start + columns
            inside = row_inside & (block < size)
            block = block.to(tl.int64) if WIDE else block
            gradient = widen(tl.load(dy + block * dy_column, mask=inside, other=0.0), INTERPRETED)
            if not LOG:
                gradient *= widen(tl.load(y + block * y_column, mask=inside, other=0.0), INTERPRETED)
            sums += gradient
        total = tl.sum(sums, 1)[:, None]
        for start in range(0, size, BLOCK):
            block = start + columns
            inside = row_inside & (block < size)
            block = block.to(tl.int64) if WIDE else block
            gradient = widen(tl.load(dy + block * dy_column, mask=inside, other=0.0), INTERPRETED)
            output = widen(tl.load(y + block * y_column, mask=inside, other=0.0), INTERPRETED)
            result = gradient - exp(output) * total if LOG else output * (gradient - total)
            tl.store(dx + block * dx_column, narrow(result, dx.dtype.element_ty, False, INTERPRETED), mask=inside)


def softmax_configs(size: int, target: Target) -> list[Config]:
    """Ways to cut rows of `size` elements, best guess first, forward and backward."""
    return row_configs(size, target, _LIVE)


def softmax_call(x: Tensor, y: Tensor, *, log: bool = False, config: Config) -> KernelCall:
    """y = softmax(x) or log-softmax(x); x, y: [M, N], fp32, bf16 or fp16 each, any strides."""
    rows, size = x.shape
    return KernelCall(
        name=f"{'log_' if log else ''}softmax_{TRITON_TYPES[x.dtype]}_{TRITON_TYPES[y.dtype]}",
        kernel=_softmax_forward,
        arguments={"x": x, "y": y, "rows": rows, "size": size, **row_strides(x=x, y=y)},
        constants={"LOG": log, "WHOLE": is_whole(size, config), "WIDE": is_wide(x, y), **config.blocks},
        grid=(tiles(rows, config),),
        config=config,
    )


def softmax_backward_call(dy: Tensor, y: Tensor, dx: Tensor, *, log: bool = False, config: Config) -> KernelCall:
    """dx from dy and the output y of (log-)softmax, all [M, N], fp32, bf16 or fp16 each, any strides."""
    rows, size = y.shape
    return KernelCall(
        name=f"{'log_' if log else ''}softmax_backward_{TRITON_TYPES[dy.dtype]}_{TRITON_TYPES[dx.dtype]}",
        kernel=_softmax_backward,
        arguments={"dy": dy, "y": y, "dx": dx, "rows": rows, "size": size, **row_strides(dy=dy, y=y, dx=dx)},
        constants={"LOG": log, "WHOLE": is_whole(size, config), "WIDE": is_wide(dy, y, dx), **config.blocks},
        grid=(tiles(rows, config),),
        config=config,
    )


def softmax(x: Tensor, *, log: bool = False, dtype: torch.dtype | None = None, config: Config | None = None) -> Tensor:
    """(Log-)softmax of x [..., N] over its last axis, in `dtype` (default: that of x)."""
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if y.numel():
        config = config or pick_config(x.shape[-1], x.device, _LIVE)
        softmax_call(as_rows(x), as_rows(y), log=log, config=config).run()
    return y


def softmax_backward(
    dy: Tensor, y: Tensor, *, log: bool = False, dtype: torch.dtype | None = None, config: Config | None = None
) -> Tensor:
    """The gradient of x from that of y and the output y, all [..., N], in `dtype` (default: that of y)."""
    dx = torch.empty(y.shape, dtype=dtype or y.dtype, device=y.device)
    if dx.numel():
        config = config or pick_config(y.shape[-1], y.device, _LIVE)
        softmax_backward_call(as_rows(dy), as_rows(y), as_rows(dx), log=log, config=config).run()
    return dx


def softmax_reference(x: Tensor, *, log: bool = False) -> Tensor:
    """What `softmax` computes, in fp64 and not rounded."""
    shifted = x.double() - x.double().amax(-1, keepdim=True)
    total = shifted.exp().sum(-1, keepdim=True)
    return shifted - total.log() if log else shifted.exp() / total


def softmax_backward_reference(dy: Tensor, y: Tensor, *, log: bool = False) -> Tensor:
    """What `softmax_backward` computes, in fp64 and not rounded."""
    dy, y = dy.double(), y.double()
    return dy - y.exp() * dy.sum(-1, keepdim=True) if log else y * (dy - (y * dy).sum(-1, keepdim=True))
