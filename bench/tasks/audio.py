"""Recorded speech and music from the Debian packages of the Asterisk telephone exchange, as mono at 16 kHz."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

from bench.tasks.sources import debian_file

RATE = 16000
Signal = NDArray[np.float32]

_VOICES = {"en_US_f_Allison": "asterisk-core-sounds-en-wav", "it_IT_m_Carlo": "asterisk-core-sounds-it-wav"}
_QUIET = 0.05


def read_wav(file: Path) -> Signal:
    """A 16-bit WAV file as float32[samples] in [-1, 1), channels averaged, resampled to 16 kHz."""
    with wave.open(str(file)) as recording:
        samples = np.frombuffer(recording.readframes(recording.getnframes()), "<i2").astype(np.float32) / 32768
        mono = samples.reshape(-1, recording.getnchannels()).mean(1)
        rate = recording.getframerate()
    common = math.gcd(rate, RATE)
    resampled: Signal = resample_poly(mono, RATE // common, rate // common).astype(np.float32)
    return resampled


def spoken_prompts(voice: str, shortest: float, longest: float) -> list[Signal]:
    """All prompts of one speaker between two lengths in seconds that are not nearly silent, by file name."""
    folder = debian_file(f"/usr/share/asterisk/sounds/{voice}", _VOICES[voice])
    prompts = []
    for file in sorted(folder.glob("*.wav")):
        signal = read_wav(file)
        if shortest <= len(signal) / RATE <= longest and np.abs(signal).max() > _QUIET:
            prompts.append(signal)
    return prompts


def music_pieces(count: int) -> list[Signal]:
    """The first `count` pieces of music on hold, by file name."""
    folder = debian_file("/usr/share/asterisk/moh", "asterisk-moh-opsound-wav")
    return [read_wav(file) for file in sorted(folder.glob("*.wav"))[:count]]
