from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from dsmp.passes.loss_decomp import log_softmax, log_softmax_backward, loss_decompositions

SHAPES = {"flat": (6, 11), "image": (2, 5, 3, 4), "single": (7,)}


def problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator).to(dtype)
    classes = shape[0] if len(shape) == 1 else shape[1]
    target = torch.randint(0, classes, () if len(shape) == 1 else (shape[0], *shape[2:]), generator=generator)
    if target.dim():
        target.view(-1)[0] = 3  # the class that some cases ignore
    return logits, target


def loss_and_gradient(logits, target, **options):
    def run(x, y):
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, y, **options)
        weight = torch.linspace(1, 2, loss.numel()).view(loss.shape)
        (grad,) = torch.autograd.grad((loss * weight).sum(), x)
        return loss, grad

    graph = make_fx(run, decomposition_table=dict(loss_decompositions()))(logits, target)
    names = {str(n.target) for n in graph.graph.nodes}
    assert not {n for n in names if "nll_loss" in n or "log_softmax" in n}
    return graph(logits, target), run(logits, target)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [-100, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_and_its_gradient_are_torchs(shape, reduction, ignore, weighted):
    logits, target = problem(shape)
    classes = shape[0] if len(shape) == 1 else shape[1]
    weight = torch.linspace(0.5, 2, classes) if weighted else None
    if len(shape) == 1 and int(target) == ignore and reduction == "mean":
        target = target + 1  # else 0 / 0
    found, wanted = loss_and_gradient(logits, target, reduction=reduction, ignore_index=ignore, weight=weight)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=2e-6, atol=2e-7)


def test_no_target_that_counts_gives_nan_as_in_torch():
    logits, _ = problem((4, 5))
    target = torch.full((4,), -100)
    (loss, _), (wanted, _) = loss_and_gradient(logits, target)
    assert loss.isnan() and wanted.isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_log_softmax_sums_in_fp32_or_wider(dtype):
    x, _ = problem((5, 3000), dtype)
    exact = torch.log_softmax(x.double(), 1)
    out = log_softmax(x, 1, False)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    grad = torch.ones_like(x)
    wanted = grad.double() - out.double().exp() * x.shape[1]
    found = log_softmax_backward(grad, out, 1, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)
