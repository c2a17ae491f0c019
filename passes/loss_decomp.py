"""The classification loss in operators that shard along the vocabulary.

DTensor's own rules for `nll_loss` and its `scatter` backward gather the logits or choose illegal layouts. Written as a
comparison of the target with the class numbers, products and sums, the loss of logits that are sharded by class
needs only sums of one number a token over the ranks: its maximum, its normaliser and its picked logit.

A target outside [0, C) that is not `ignore_index` picks nothing, where torch's own kernel stops with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_MEAN = 1
_NONE = 0


def nll_loss_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Loss and total weight of log-probabilities float[N, C, ...] (or [C]) and targets int64[N, ...] (or scalar).

    `reduction` is 0 (none), 1 (mean) or 2 (sum). The mean divides by the total weight of targets that count.
    """
    dim = _class_dim(self)
    hit = _hit(self, target, ignore_index)
    weighted = self if weight is None else self * _broadcast(weight, self)
    losses = -torch.where(hit, weighted, 0.0).sum(dim)
    if weight is None:
        total = (target != ignore_index).to(self.dtype).sum()
    else:
        total = torch.where(hit, _broadcast(weight, self), 0.0).sum().to(self.dtype)
    if reduction == _NONE:
        return losses, self.new_zeros(())
    loss = losses.sum()
    return (loss / total if reduction == _MEAN else loss), total


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Gradient of `nll_loss_forward` with respect to `self`, of its shape and dtype."""
    scale = -grad_output
    if reduction == _MEAN:
        scale = scale / total_weight
    if reduction == _NONE:
        scale = scale.unsqueeze(_class_dim(self))
    # lies as the log-probabilities lie, and so does what is chosen between it and scale
    nothing = torch.zeros_like(self)
    picked = torch.where(_hit(self, target, ignore_index), scale, nothing)
    return picked if weight is None else picked * _broadcast(weight, self)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`aten._log_softmax` in fp32 or wider inside, with sums over `dim` that a rank can do in part."""
    wide = _wide(x)
    shifted = wide - wide.amax(dim, keepdim=True)
    out = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return out if half_to_float else out.to(x.dtype)


def log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """`aten._log_softmax_backward_data`: grad - exp(output) * sum(grad)."""
    grad, out = _wide(grad_output), _wide(output)
    return (grad - out.exp() * grad.sum(dim, keepdim=True)).to(input_dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _class_dim(x: Tensor) -> int:
    return 0 if x.dim() == 1 else 1


def _broadcast(weight: Tensor, x: Tensor) -> Tensor:
    """A value of each class, float[C], shaped so that it multiplies x along its class dimension."""
    shape = [1] * x.dim()
    shape[_class_dim(x)] = -1
    return weight.view(shape)


def _hit(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """bool of x's shape: where the class is the target's, and the target counts."""
    dim = _class_dim(x)
    classes = torch.arange(x.shape[dim], device=x.device)
    counted = torch.where(target == ignore_index, -1, target)
    return _broadcast(classes, x) == counted.unsqueeze(dim)


def loss_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """The table that capture for sharding adds: operator overload -> its decomposition."""
    return {
        aten.nll_loss_forward.default: nll_loss_forward,
        aten.nll_loss2d_forward.default: nll_loss_forward,
        aten.nll_loss_backward.default: nll_loss_backward,
        aten.nll_loss2d_backward.default: nll_loss_backward,
        aten._log_softmax.default: log_softmax,
        aten._log_softmax_backward_data.default: log_softmax_backward,
    }
