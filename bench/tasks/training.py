"""Models trained here: once, from a fixed seed, and then read from the cache."""

from __future__ import annotations

import io
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bench.tasks.cache import cached_file

_Model = TypeVar("_Model", bound=nn.Module)


def trained(name: str, build: Callable[[], _Model], train: Callable[[_Model], None], recipe: str) -> _Model:
    """`build()` with trained weights, in eval mode.

    The weights lie in the cache under the task's name and a checksum of `recipe` (everything that decides how training
    goes) and of the parameters' names and shapes, so that a changed recipe never meets old weights. The seed is 0 and
    the caller's random state stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    shapes = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    identity = zlib.crc32(f"{recipe} {shapes}".encode())

    def train_anew() -> bytes:
        started = time.perf_counter()
        train(model.train())
        print(f"trained {name} in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        content = io.BytesIO()
        torch.save(model.state_dict(), content)
        return content.getvalue()

    file = cached_file(f"{name}-{identity:08x}.pt", train_anew)
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return model.eval()


def descend(
    losses: Iterable[Tensor],
    optimizer: Optimizer,
    schedule: LRScheduler | None = None,
    clip: float | None = None,
) -> None:
    """One optimizer step for each loss that `losses` yields; gradients clipped to the norm `clip`."""
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
