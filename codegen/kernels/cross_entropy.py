"""Cross-entropy of logits [N, C] and class indices, forward and backward, in one kernel or two; fp32 inside.

With m = max z, s = sum e^(z - m) of a row z, L = m + log s, t its target and a the label smoothing:

    loss = (1 - a) (L - z_t) + a (L - mean z) + z_weight L^2
    dloss / dz_i = p_i (1 + 2 z_weight L) - a / C - (1 - a) [i = t],    p_i = e^(z_i - m) / s

as torch's `cross_entropy` has it, and the z-loss of Chowdhery et al. (PaLM, arXiv:2204.02311, section 5). Differences
are taken before anything large is added: L - z_t is log s + (m - z_t).

Rows with target `ignore_index` have loss and gradient 0. A target out of range, for which torch raises an error (on
GPUs an assertion that ends the process), gives NaN as loss and gradient, and nothing is read for it.

Rows that do not fit in registers are read once for the loss (the maximum and the sum in one pass, see softmax.py) and
once for the gradient.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_call import Config, KernelCall
from ..targets import TRITON_TYPES, Target
from .dot import narrow, widen
from .row_blocks import exp, is_whole, is_wide, pick_config, row_configs, row_strides, tiles
from .softmax import add_exp, merge_exp

Reduction = Literal["none", "sum", "mean"]
_LIVE = 2  # logits and their exponentials


@triton.jit
def _derivative(
    logits, columns, target, ignored, gradient, largest, total, classes,
    smoothing, z_weight, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """gradient * dloss / dlogits, fp32 [ROWS, BLOCK]; what belongs to a row is [ROWS]."""
    valid = (target >= 0) & (target < classes)
    factor = 1.0 / total
    if Z_LOSS:
        factor *= 1.0 + 2.0 * z_weight * (largest + tl.log(total))
    factor = tl.where(valid, factor, float("nan"))
    hot = tl.where(valid, target, -1).to(tl.int32)
    result = exp(logits - largest[:, None]) * factor[:, None] - smoothing / classes
    result -= tl.where(columns == hot[:, None], 1.0 - smoothing, 0.0)
    return tl.where(ignored[:, None], 0.0, result * gradient[:, None])


@triton.jit
def _cross_entropy_forward(
    logits, target, gradient, loss, statistics, dlogits, rows, classes,
    ignore_index, smoothing, z_weight, logits_row, logits_column, dlogits_row,
    dlogits_column, target_stride, gradient_stride,
    SMOOTH: tl.constexpr, Z_LOSS: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_inside = row < rows
    labels = tl.load(target + row * target_stride, mask=row_inside, other=0)
    ignored = labels == ignore_index
    valid = row_inside & (labels >= 0) & (labels < classes) & (labels != ignore_index)
    at_target = logits + row * logits_row + labels * logits_column
    chosen = widen(tl.load(at_target, mask=valid, other=0.0), INTERPRETED)
    # logits are summed as differences from one that is at hand, or the mean would lose what the loss is made of
    origin = tl.where(tl.abs(chosen) < float("inf"), chosen, 0.0)
    logits += row[:, None] * logits_row
    if dlogits is not None:
        dlogits += row[:, None] * dlogits_row
        upstream = tl.load(gradient + row * gradient_stride, mask=row_inside, other=0.0).to(tl.float32)
    columns = tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        column_inside = columns < classes
        inside = row_inside[:, None] & column_inside
        offsets = columns.to(tl.int64) if WIDE else columns
        values = widen(tl.load(logits + offsets * logits_column, mask=inside, other=0.0), INTERPRETED)
        masked = tl.where(column_inside, values, float("-inf"))
        largest = tl.max(masked, 1)
        total = tl.sum(exp(masked - largest[:, None]), 1)
        if SMOOTH:
            spread = tl.sum(tl.where(column_inside, values - origin[:, None], 0.0), 1)
        if dlogits is not None:
            tl.debug_barrier()  # dlogits may be where other threads have yet to read logits
            result = _derivative(
                values, columns, labels, ignored, upstream, largest, total, classes, smoothing, z_weight, Z_LOSS
            )
            result = narrow(result, dlogits.dtype.element_ty, False, INTERPRETED)
            tl.store(dlogits + offsets * dlogits_column, result, mask=inside)
    else:
        maxima = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        differences = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, classes, BLOCK):
            block = start + columns
            inside = row_inside[:, None] & (block < classes)
            offsets = block.to(tl.int64) if WIDE else block
            values = tl.load(logits + offsets * logits_column, mask=inside, other=float("-inf"))
            values = widen(values, INTERPRETED)
            maxima, sums = add_exp(values, maxima, sums)
            if SMOOTH:
                differences += tl.where(inside, values - origin[:, None], 0.0)
        largest, total = merge_exp(maxima, sums)
        if SMOOTH:
            spread = tl.sum(differences, 1)
        if dlogits is not None:
            tl.debug_barrier()
            for start in range(0, classes, BLOCK):
                block = start + columns
                inside = row_inside[:, None] & (block < classes)
                offsets = block.to(tl.int64) if WIDE else block
                values = widen(tl.load(logits + offsets * logits_column, mask=inside, other=0.0), INTERPRETED)
                result = _derivative(
                    values, block, labels, ignored, upstream, largest, total, classes, smoothing, z_weight, Z_LOSS
                )
                result = narrow(result, dlogits.dtype.element_ty, False, INTERPRETED)
                tl.store(dlogits + offsets * dlogits_column, result, mask=inside)
    log_total = tl.log(total)
    result = log_total + (largest - chosen)
    if SMOOTH:
        flat = log_total + (largest - origin) - spread / classes
        result = (1.0 - smoothing) * result + smoothing * flat
    if Z_LOSS:
        lse = largest + log_total
        result += z_weight * lse * lse
    result = tl.where(ignored, 0.0, tl.where(valid, result, float("nan")))
    tl.store(loss + row, result, mask=row_inside)
    tl.store(statistics + row * 2, largest, mask=row_inside)
    tl.store(statistics + row * 2 + 1, total, mask=row_inside)


@triton.jit
def _cross_entropy_backward(
    logits, target, gradient, statistics, dlogits, rows, classes,
    ignore_index, smoothing, z_weight, logits_row, logits_column, dlogits_row,
    dlogits_column, target_stride, gradient_stride,
    Z_LOSS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile per program: nothing has to be summed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_inside = row < rows
    labels = tl.load(target + row * target_stride, mask=row_inside, other=0)
    upstream = tl.load(gradient + row * gradient_stride, mask=row_inside, other=0.0).to(tl.float32)
    largest = tl.load(statistics + row * 2, mask=row_inside, other=0.0)
    total = tl.load(statistics + row * 2 + 1, mask=row_inside, other=1.0)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = row_inside[:, None] & (columns < classes)
    offsets = columns.to(tl.int64) if WIDE else columns
    logits += row[:, None] * logits_row
    values = widen(tl.load(logits + offsets * logits_column, mask=inside, other=0.0), INTERPRETED)
    ignored = labels == ignore_index
    result = _derivative(
        values, columns, labels, ignored, upstream, largest, total, classes, smoothing, z_weight, Z_LOSS
    )
    result = narrow(result, dlogits.dtype.element_ty, False, INTERPRETED)
    tl.store(dlogits + row[:, None] * dlogits_row + offsets * dlogits_column, result, mask=inside)


def cross_entropy_configs(classes: int, target: Target) -> list[Config]:
    """Ways to cut rows of `classes` logits, best guess first, forward and backward."""
    return row_configs(classes, target, _LIVE)


def cross_entropy_call(
    logits: Tensor,
    target: Tensor,
    gradient: Tensor | None,
    loss: Tensor,
    statistics: Tensor,
    dlogits: Tensor | None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_weight: float = 0.0,
    config: Config,
) -> KernelCall:
    """Losses of rows, and their gradients where `dlogits` is not None (which may be `logits` itself).

    logits, dlogits: [N, C], fp32, bf16 or fp16, any strides; target: int64 [N]; loss: [N] contiguous, fp32; statistics:
    [N, 2] contiguous, fp32: m and s of the module docstring. gradient: [N] or [], any float dtype: what each row's
    gradient is multiplied by; wanted with `dlogits` only.
    """
    return KernelCall(
        name=f"cross_entropy_{TRITON_TYPES[logits.dtype]}{'' if dlogits is None else '_and_gradient'}",
        kernel=_cross_entropy_forward,
        arguments={
            **_arguments(logits, target, gradient, dlogits, ignore_index, label_smoothing, z_weight),
            "loss": loss,
            "statistics": statistics,
        },
        constants={
            "SMOOTH": label_smoothing != 0,
            "Z_LOSS": z_weight != 0,
            "WHOLE": is_whole(logits.shape[1], config),
            "WIDE": is_wide(logits, dlogits),
            **config.blocks,
        },
        grid=(tiles(logits.shape[0], config),),
        config=config,
    )


def cross_entropy_backward_call(
    logits: Tensor,
    target: Tensor,
    gradient: Tensor,
    statistics: Tensor,
    dlogits: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_weight: float = 0.0,
    config: Config,
) -> KernelCall:
    """The gradient of logits alone, from the `statistics` of `cross_entropy_call`; tensors as there."""
    return KernelCall(
        name=f"cross_entropy_backward_{TRITON_TYPES[logits.dtype]}",
        kernel=_cross_entropy_backward,
        arguments={
            **_arguments(logits, target, gradient, dlogits, ignore_index, label_smoothing, z_weight),
            "statistics": statistics,
        },
        constants={"Z_LOSS": z_weight != 0, "WIDE": is_wide(logits, dlogits), **config.blocks},
        grid=(tiles(logits.shape[0], config), -(-logits.shape[1] // config.blocks["BLOCK"])),
        config=config,
    )


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_weight: float = 0.0,
    reduction: Reduction = "mean",
    gradient: bool = False,
    dtype: torch.dtype = torch.float32,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss in `dtype`, [N] or [] by `reduction`, the statistics [N, 2] for `cross_entropy_backward`, and where
    `gradient` is wanted that of the logits in their dtype, for an upstream gradient of 1, of the same pass.

    logits: [N, C], fp32, bf16 or fp16; target: int64 [N]. The mean is over the rows that are not ignored.
    """
    rows, classes = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    statistics = logits.new_empty((rows, 2), dtype=torch.float32)
    dlogits = logits.new_empty((rows, classes)) if gradient else None
    one = logits.new_ones((), dtype=torch.float32)
    if rows:
        cross_entropy_call(
            logits,
            target,
            _row_gradient(one, target, ignore_index, reduction) if gradient else None,
            losses,
            statistics,
            dlogits,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_weight=z_weight,
            config=config or pick_config(classes, logits.device, _LIVE),
        ).run()
    if reduction == "none":
        return losses.to(dtype), statistics, dlogits
    loss = losses.sum()
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss.to(dtype), statistics, dlogits


def cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_weight: float = 0.0,
    reduction: Reduction = "mean",
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """The gradient of logits in `dtype` (default: theirs), from dloss, that of the loss, and what `cross_entropy`
    returned and was given."""
    dlogits = torch.empty(logits.shape, dtype=dtype or logits.dtype, device=logits.device)
    if dlogits.numel():
        cross_entropy_backward_call(
            logits,
            target,
            _row_gradient(dloss, target, ignore_index, reduction),
            statistics.contiguous(),
            dlogits,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_weight=z_weight,
            config=config or pick_config(logits.shape[1], logits.device, _LIVE),
        ).run()
    return dlogits


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses [N] and their gradients [N, C] of each row, in fp64 and not rounded."""
    z = logits.double()
    classes = z.shape[1]
    lse = z.logsumexp(1, keepdim=True)
    ignored = (target == ignore_index)[:, None]
    valid = ((target >= 0) & (target < classes))[:, None]
    hot = target[:, None] == torch.arange(classes, device=target.device)
    at_target = torch.where(hot, z, 0).sum(1, keepdim=True)
    loss = (1 - label_smoothing) * (lse - at_target) + z_weight * lse.square()
    if label_smoothing:
        loss = loss + label_smoothing * (lse - z.mean(1, keepdim=True))
    gradient = (z - lse).exp() * (1 + 2 * z_weight * lse) - label_smoothing / classes - (1 - label_smoothing) * hot
    loss, gradient = (torch.where(ignored, 0, torch.where(valid, t, torch.nan)) for t in (loss, gradient))
    return loss[:, 0], gradient


def _row_gradient(dloss: Tensor, target: Tensor, ignore_index: int, reduction: Reduction) -> Tensor:
    """What the gradient of each row's loss is: [N], or [] where it is the same for all."""
    return dloss / (target != ignore_index).sum() if reduction == "mean" else dloss


def _arguments(
    logits: Tensor,
    target: Tensor,
    gradient: Tensor | None,
    dlogits: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_weight: float,
) -> dict[str, Any]:
    rows, classes = logits.shape
    return {
        "logits": logits,
        "target": target,
        "gradient": gradient,
        "dlogits": dlogits,
        "rows": rows,
        "classes": classes,
        "ignore_index": ignore_index,
        "smoothing": float(smoothing),
        "z_weight": float(z_weight),
        **row_strides(logits=logits, dlogits=logits if dlogits is None else dlogits),
        "target_stride": target.stride(0),
        "gradient_stride": 0 if gradient is None or not gradient.dim() else gradient.stride(0),
    }
