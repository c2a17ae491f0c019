"""Voice activity detection on streams (Silero VAD v6, convolutions and an LSTM cell): spoken prompts in music.

Weights from the wheel silero-vad, sound from the Debian packages asterisk-core-sounds-{en,it}-wav and
asterisk-moh-opsound-wav. The model is stateful: its outputs h and c are inputs of the next frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.tasks.audio import RATE, Signal, music_pieces, spoken_prompts
from bench.tasks.metrics import roc_auc
from bench.tasks.sources import package_file
from bench.tasks.task import Batch, Task

_VOICES = ("en_US_f_Allison", "it_IT_m_Carlo")
_SCENES = 8
_SCENE_SAMPLES = 20 * RATE
_FRAME = 512
_CONTEXT = 64
_STATE = 128
_BINS = 129
_CALIBRATION_BATCHES = 24
_HELD_OUT_BATCHES = 16

_LOUDNESS = 0.06  # root mean square of speech and, before attenuation, of music
_MUSIC_DECIBEL = -5.0
_NOISE = 2e-4
_VOICED = 0.01


class SileroVad(nn.Module):
    """Probability of speech float[B, 1] in a frame of 32 ms, and the LSTM's new state h, c, each float[B, 128].

    The input is float[B, 576] at 16 kHz: 64 samples of the frame before, 512 of this one. The first convolution is a
    short-time Fourier transform: 129 real parts, then 129 imaginary parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * _BINS, 256, 128, bias=False)
        self.conv1 = nn.Conv1d(_BINS, 128, 3, 1, 1)
        self.conv2 = nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3 = nn.Conv1d(64, 64, 3, 2, 1)
        self.conv4 = nn.Conv1d(64, 128, 3, 1, 1)
        self.lstm_cell = nn.LSTMCell(128, _STATE)
        self.final_conv = nn.Conv1d(_STATE, 1, 1)

    def forward(self, sound: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spectrum = self.stft_conv(F.pad(sound.unsqueeze(1), (0, 64), "reflect"))
        x = torch.sqrt(spectrum[:, :_BINS] ** 2 + spectrum[:, _BINS:] ** 2)
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(conv(x))
        h, c = self.lstm_cell(x.squeeze(-1), (h, c))
        return torch.sigmoid(self.final_conv(F.relu(h).unsqueeze(-1))).squeeze(1), h, c


def load() -> Task:
    """ROC AUC and accuracy over the frames of eight scenes of 20 s in two voices."""
    model = SileroVad()
    model.load_state_dict(load_file(package_file("silero_vad", "data/silero_vad_16k.safetensors")))
    model.eval()
    sound, spoken = _scenes(seed=0)
    other_sound, _ = _scenes(seed=100)

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        probability, _ = _stream(call, sound)
        return {"frame AUC": roc_auc(spoken, probability), "accuracy": float(((probability > 0.5) == spoken).mean())}

    return Task(
        name="silero",
        model=model,
        calibration=_spread(_stream(model, other_sound)[1], _CALIBRATION_BATCHES),
        held_out=_spread(_stream(model, sound)[1], _HELD_OUT_BATCHES),
        drift="l2",
        logits=False,
        evaluate=evaluate,
    )


def _stream(model: Callable[..., Any], sound: Tensor) -> tuple[NDArray[np.float32], list[Batch]]:
    """Run all scenes in step: probabilities float32[scenes, frames], and the inputs of every frame."""
    h = c = torch.zeros(len(sound), _STATE)
    padded = F.pad(sound, (_CONTEXT, 0))
    probabilities: list[Tensor] = []
    inputs: list[Batch] = []
    with torch.no_grad():
        for start in range(0, sound.shape[1] - _FRAME + 1, _FRAME):
            inputs.append((padded[:, start : start + _CONTEXT + _FRAME].contiguous(), h, c))
            probability, h, c = model(*inputs[-1])
            probabilities.append(probability.float())
    return torch.cat(probabilities, 1).numpy(), inputs


def _spread(batches: list[Batch], count: int) -> list[Batch]:
    """`count` batches, evenly spaced, as far from each other as the scenes allow."""
    return [batches[i * len(batches) // count] for i in range(count)]


def _scenes(seed: int) -> tuple[Tensor, NDArray[np.bool_]]:
    """Sound float32[8, samples] and, for each whole frame, whether most of it is speech, bool[8, frames].

    Prompts with pauses between them, over music in three of four scenes and over faint noise in the fourth.
    """
    random = np.random.default_rng(seed)
    prompts = [p for voice in _VOICES for p in spoken_prompts(voice, 1.2, 5)]
    pieces = music_pieces(3)
    sounds, labels = [], []
    for scene in range(_SCENES):
        sound, spoken = _speech(prompts, random)
        if scene % 4:
            piece = pieces[scene % 3]
            start = random.integers(0, len(piece) - _SCENE_SAMPLES)
            sound = sound + _levelled(piece[start : start + _SCENE_SAMPLES]) * 10 ** (_MUSIC_DECIBEL / 20)
        else:
            sound = sound + random.normal(0, _NOISE, _SCENE_SAMPLES).astype(np.float32)
        sounds.append(sound)
        labels.append(spoken[: _SCENE_SAMPLES // _FRAME * _FRAME].reshape(-1, _FRAME).mean(1) > 0.5)
    return torch.tensor(np.stack(sounds), dtype=torch.float32), np.stack(labels)


def _speech(prompts: list[Signal], random: np.random.Generator) -> tuple[Signal, NDArray[np.bool_]]:
    """One scene of prompts on silence and, for each sample, whether the speaker is heard within 50 ms around it."""
    sound = np.zeros(_SCENE_SAMPLES, np.float32)
    spoken = np.zeros(_SCENE_SAMPLES, bool)
    start = RATE
    while True:
        prompt = _levelled(prompts[random.integers(len(prompts))])
        end = start + len(prompt)
        if end > _SCENE_SAMPLES - RATE // 2:
            return sound, spoken
        sound[start:end] = prompt
        window = RATE // 10
        spoken[start:end] = np.sqrt(np.convolve(prompt**2, np.ones(window) / window, "same")) > _VOICED
        start = end + int(random.uniform(0.6, 2.0) * RATE)


def _levelled(signal: Signal) -> Signal:
    levelled: Signal = signal / (np.sqrt((signal**2).mean()) + 1e-9) * _LOUDNESS
    return levelled
