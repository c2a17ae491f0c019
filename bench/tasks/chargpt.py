"""A character-level GPT, trained here on the King James New Testament (Debian package sword-text-kjv)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks.task import Task, predict, split
from bench.tasks.text import KING_JAMES, new_testament
from bench.tasks.training import descend, trained
from bench.tasks.transformer import Block

_CONTEXT = 128
_BATCH = 8
_CALIBRATION = 32
_HELD_OUT = 104
_STEPS = 250
_TRAINING_BATCH = 16
_PEAK_RATE = 4e-3
_TRAINING_SHARE = 0.95
_STRIDE = 9973  # prime, so that calibration windows start at all places within a verse


class CharacterGpt(nn.Module):
    """Next-character logits float[B, T, vocabulary] of ids int64[B, T], T at most 128."""

    def __init__(self, vocabulary: int, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(_CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def load() -> Task:
    """Bits per character and share of characters guessed, on windows of the last 5 % of the text."""
    text = "\n".join(verse for verse in new_testament(KING_JAMES) if verse)
    vocabulary = {character: i for i, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([vocabulary[character] for character in text])
    training, test = ids.tensor_split([int(len(ids) * _TRAINING_SHARE)])
    model = trained(
        "chargpt",
        lambda: CharacterGpt(len(vocabulary)),
        lambda m: _train(m, training),
        f"{_STEPS} steps of {_TRAINING_BATCH}, {_PEAK_RATE}",
    )
    apart = (len(test) - _CONTEXT - 1) // _HELD_OUT
    windows = torch.stack([test[i * apart : i * apart + _CONTEXT + 1] for i in range(_HELD_OUT)])
    inputs, targets = windows[:, :-1], windows[:, 1:]
    seen = torch.stack([training[i * _STRIDE : i * _STRIDE + _CONTEXT] for i in range(_CALIBRATION)])

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        logits = predict(call, (inputs,), _BATCH)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        return {
            "bits per character": nats / math.log(2),
            "guessed": (logits.argmax(-1) == targets).float().mean().item(),
        }

    return Task(
        name="chargpt",
        model=model,
        calibration=split((seen,), _BATCH),
        held_out=split((inputs,), _BATCH),
        drift="kl",
        logits=True,
        evaluate=evaluate,
    )


def _train(model: CharacterGpt, text: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)

    def losses() -> Iterator[Tensor]:
        for _ in range(_STEPS):
            starts = torch.randint(0, len(text) - _CONTEXT - 1, (_TRAINING_BATCH,), generator=generator)
            windows = torch.stack([text[start : start + _CONTEXT + 1] for start in starts])
            yield F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    descend(losses(), optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_RATE, _STEPS), clip=1.0)
