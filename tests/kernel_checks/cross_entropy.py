"""Cross-entropy and its gradient against fp64."""

from __future__ import annotations

import torch
from row_kernels import ULP, assert_within

from dsmp.codegen.kernels.cross_entropy import cross_entropy, cross_entropy_backward, cross_entropy_reference


def draw(rows, classes, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * scale).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    target[rows // 2] = -100
    return logits, target


def slacks(logits, target, label_smoothing=0.0, z_weight=0.0):
    """What rounding in fp32 may add to losses [N] and to their gradients [N, C]."""
    z = logits.double()
    lse, top = z.logsumexp(1, keepdim=True), z.amax(1, keepdim=True)
    spread = top - z.amin(1, keepdim=True)
    loss = 1 + spread + (lse - top) + 2 * z_weight * lse.square()
    p = (z - lse).exp()
    gradient = p * (1 + (top - z)) * (1 + 2 * z_weight * lse.abs()) + label_smoothing / z.shape[1]
    gradient = gradient + (torch.arange(z.shape[1], device=z.device) == target[:, None])
    return 8 * ULP * loss[:, 0], 8 * ULP * gradient + 2.0**-126


def check(logits, target, *, config=None, **extras):
    """Losses and gradients of every reduction, the gradient of the same pass and that of the second kernel."""
    losses, gradients = cross_entropy_reference(logits, target, **extras)
    loss_slack, slack = slacks(logits, target, **extras)
    loss, statistics, dlogits = cross_entropy(logits, target, reduction="none", gradient=True, config=config, **extras)
    assert loss.dtype == torch.float32 and dlogits.dtype == logits.dtype
    assert_within(loss, losses, loss_slack)
    assert_within(dlogits, gradients, slack)
    mean, _, dlogits = cross_entropy(logits, target, gradient=True, config=config, **extras)
    count = (target != -100).sum()
    assert_within(mean, losses.sum() / count, (loss_slack.sum() + 4 * ULP * losses.abs().sum()) / count)
    assert_within(dlogits, gradients / count, 2 * slack / count)
    upstream = torch.linspace(-2, 3, len(target), device=logits.device)
    again = cross_entropy_backward(
        upstream, logits, target, statistics, reduction="none", dtype=torch.float32, config=config, **extras
    )
    assert_within(again, gradients * upstream[:, None], 2 * slack * upstream[:, None].abs())
