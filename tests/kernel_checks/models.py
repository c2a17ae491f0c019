"""Training steps of the small GPT, compiled and not, against the same step in fp64."""

from __future__ import annotations

import copy

import torch

from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch


def small_gpt(device, *, layers=2, width=256, context=128):
    """A model with the same weights for the same sizes."""
    torch.manual_seed(0)
    return SmallGpt(SmallGptConfig(layers=layers, d_model=width, context=context)).to(device)


def batch_of(device, *, batch=8, context=128, seed=0):
    return small_gpt_batch(batch=batch, context=context, seed=seed, device=str(device))


def step(model, call, batch):
    """Loss and all gradients of `model` as one fp64 vector, after one call of it or of what it was compiled to."""
    model.zero_grad(set_to_none=True)
    loss = call(*batch)
    loss.backward()
    gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    return loss.detach().double().clone(), gradients


def exact_step(model, batch):
    """The step in fp64, eager."""
    wide = copy.deepcopy(model).double()
    return step(wide, wide, batch)


def autocast_step(model, batch, dtype=torch.bfloat16):
    """The step under eager autocast."""

    def call(*args):
        with torch.autocast(batch[0].device.type, dtype):
            return model(*args)

    return step(model, call, batch)


def distance(found, exact):
    """Relative errors of (loss, gradients)."""
    return tuple(float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True))
