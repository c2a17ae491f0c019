"""LayerNorm and RMSNorm over the last axis, forward: narrow inputs and outputs, fp32 inside.

LayerNorm (Ba et al., arXiv:1607.06450): y = n w + b, n = (x - mean) rstd, rstd = 1 / sqrt(var + eps).
RMSNorm (Zhang and Sennrich, arXiv:1910.07467): y = n w, n = x rstd, rstd = 1 / sqrt(mean(x^2) + eps).

A mean in fp32 is off by ulps of itself, which may be much of the deviation. So x is centred twice: d = mean(x - mean)
is the error of the mean, x - mean being nearly exact, and (x - mean) - d is right to ulps of the deviation.
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
from .row_blocks import as_rows, is_whole, is_wide, pick_config, row_configs, row_strides, tiles

_LIVE = 2  # forward keeps x and its square


@triton.jit
def centre(x, inside, mean, size):
    """x - mean without the error of `mean`, and that error: fp32 [ROWS, BLOCK] (0 outside), [ROWS]."""
    centred = tl.where(inside, x - mean[:, None], 0.0)
    error = tl.sum(centred, 1) / size
    return tl.where(inside, centred - error[:, None], 0.0), error


@triton.jit
def normalize_tile(x, inside, size, eps, MEAN: tl.constexpr):
    """Whole rows normalised: n of the module docstring [ROWS, BLOCK], mean [ROWS] and rstd [ROWS].

    x: fp32 [ROWS, BLOCK], 0 outside the rows; inside: where a row's `size` elements are; MEAN: LayerNorm, else RMSNorm
    (of which the mean is 0).
    """
    if MEAN:
        mean = tl.sum(x, 1) / size
        x, error = centre(x, inside, mean, size)
        mean += error
    else:
        mean = tl.zeros([x.shape[0]], tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    return x * rstd[:, None], mean, rstd


@triton.jit
def row_statistics(
    x, row_inside, size, stride, eps, MEAN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """mean, its error and rstd, each [ROWS], of rows that are walked: n = ((x - mean) - error) rstd.

    x: pointers to the beginnings of rows [ROWS, 1], `stride` apart elements; row_inside: [ROWS, 1]. The mean of squares
    is that of the deviations from the rounded mean less error^2, which is tiny beside it.
    """
    mean = tl.zeros([ROWS], tl.float32)
    error = tl.zeros([ROWS], tl.float32)
    if MEAN:
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]
            inside = row_inside & (columns < size)
            offsets = (columns.to(tl.int64) if WIDE else columns) * stride
            sums += widen(tl.load(x + offsets, mask=inside, other=0.0), INTERPRETED)
        mean = tl.sum(sums, 1) / size
    deviations = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        inside = row_inside & (columns < size)
        offsets = (columns.to(tl.int64) if WIDE else columns) * stride
        values = widen(tl.load(x + offsets, mask=inside, other=0.0), INTERPRETED)
        if MEAN:
            values = tl.where(inside, values - mean[:, None], 0.0)
            deviations += values
        squares += values * values
    variance = tl.sum(squares, 1) / size
    if MEAN:
        error = tl.sum(deviations, 1) / size
        variance -= error * error
        variance = tl.where(variance < 0.0, 0.0, variance)
    return mean, error, tl.rsqrt(variance + eps)


@triton.jit
def scale_and_shift(
    normalized, weight, bias, columns, inside, weight_stride, bias_stride,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """normalized * weight + bias in fp32, of whichever pointers are not None; columns [1, BLOCK], inside: of them."""
    if weight is not None:
        normalized *= widen(tl.load(weight + columns * weight_stride, mask=inside, other=0.0), INTERPRETED)
    if bias is not None:
        normalized += widen(tl.load(bias + columns * bias_stride, mask=inside, other=0.0), INTERPRETED)
    return normalized


@triton.jit
def _norm_forward(
    x, weight, bias, y, mean, rstd, rows, size, eps,
    x_row, x_column, y_row, y_column, weight_stride, bias_stride,
    MEAN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_inside = (row < rows)[:, None]
    x += row[:, None] * x_row
    y += row[:, None] * y_row
    columns = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        column_inside = columns < size
        inside = row_inside & column_inside
        columns = columns.to(tl.int64) if WIDE else columns
        values = widen(tl.load(x + columns * x_column, mask=inside, other=0.0), INTERPRETED)
        values, row_mean, row_rstd = normalize_tile(values, inside, size, eps, MEAN)
        values = scale_and_shift(values, weight, bias, columns, column_inside, weight_stride, bias_stride, INTERPRETED)
        tl.store(y + columns * y_column, narrow(values, y.dtype.element_ty, False, INTERPRETED), mask=inside)
    else:
        row_mean, error, row_rstd = row_statistics(
            x, row_inside, size, x_column, eps, MEAN, ROWS, BLOCK, WIDE, INTERPRETED
        )
        for start in range(0, size, BLOCK):
            block = start + columns
            column_inside = block < size
            inside = row_inside & column_inside
            block = block.to(tl.int64) if WIDE else block
            values = widen(tl.load(x + block * x_column, mask=inside, other=0.0), INTERPRETED)
            values = ((values - row_mean[:, None]) - error[:, None]) * row_rstd[:, None]
            values = scale_and_shift(
                values, weight, bias, block, column_inside, weight_stride, bias_stride, INTERPRETED
            )
            tl.store(y + block * y_column, narrow(values, y.dtype.element_ty, False, INTERPRETED), mask=inside)
        row_mean += error
    if MEAN:
        tl.store(mean + row, row_mean, mask=row < rows)
    tl.store(rstd + row, row_rstd, mask=row < rows)


def norm_configs(size: int, target: Target) -> list[Config]:
    """Ways to cut rows of `size` elements in the forward kernels, best guess first."""
    return row_configs(size, target, _LIVE)


def norm_call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    eps: float,
    config: Config,
) -> KernelCall:
    """LayerNorm, or RMSNorm where `mean` is None.

    x, y: [M, N], weight, bias: [N], fp32, bf16 or fp16 each, any strides; mean, rstd: [M] contiguous, fp32.
    """
    rows, size = x.shape
    return KernelCall(
        name=f"{norm_name(mean)}_{TRITON_TYPES[x.dtype]}_{TRITON_TYPES[y.dtype]}",
        kernel=_norm_forward,
        arguments={
            "x": x,
            "weight": weight,
            "bias": bias,
            "y": y,
            "mean": mean,
            "rstd": rstd,
            "rows": rows,
            "size": size,
            "eps": float(eps),
            **row_strides(x=x, y=y),
            "weight_stride": 0 if weight is None else weight.stride(0),
            "bias_stride": 0 if bias is None else bias.stride(0),
        },
        constants={
            "MEAN": mean is not None,
            "WHOLE": is_whole(size, config),
            "WIDE": is_wide(x, y, weight, bias),
            **config.blocks,
        },
        grid=(tiles(rows, config),),
        config=config,
    )


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., N] in `dtype` (default: that of x), and mean and rstd [...] in fp32; x [..., N], weight, bias: [N]."""
    mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    y, rstd = _norm(x, weight, bias, mean, eps, dtype, config)
    return y, mean, rstd


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """y [..., N] in `dtype` (default: that of x), and rstd [...] in fp32; eps: None is fp32's epsilon, as in torch."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _norm(x, weight, None, None, eps, dtype, config)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """What `layer_norm` computes, in fp64 and not rounded."""
    x = x.double()
    mean = x.mean(-1, keepdim=True)
    rstd = 1 / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()
    y = (x - mean) * rstd
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double(), mean[..., 0], rstd[..., 0]


def rms_norm_reference(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """What `rms_norm` computes, in fp64 and not rounded."""
    x = x.double()
    rstd = 1 / (x.square().mean(-1, keepdim=True) + (torch.finfo(torch.float32).eps if eps is None else eps)).sqrt()
    return x * rstd if weight is None else x * rstd * weight.double(), rstd[..., 0]


def norm_name(mean: Tensor | None) -> str:
    """What a norm with or without a mean is called in names of kernels."""
    return "rms_norm" if mean is None else "layer_norm"


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
    config: Config | None,
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.shape[-1] == 0:  # the mean of nothing
        for statistic in (mean, rstd):
            if statistic is not None:
                statistic.fill_(torch.nan)
    elif y.numel():
        config = config or pick_config(x.shape[-1], x.device, _LIVE)
        flat = None if mean is None else mean.view(-1)
        norm_call(as_rows(x), weight, bias, as_rows(y), flat, rstd.view(-1), eps=eps, config=config).run()
    return y, rstd
