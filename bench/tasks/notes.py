"""Single notes of recorded instruments with their exact pitch: a SoundFont played by fluidsynth."""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.tasks.audio import Signal, read_wav
from bench.tasks.cache import cached_file
from bench.tasks.sources import debian_file, missing_debian

# General MIDI: piano, guitar, violin, cello, choir, trumpet, saxophone, oboe, clarinet, flute
_PROGRAMS = (0, 24, 40, 42, 52, 56, 65, 68, 71, 73)
_KEYS = (52, 77)
_TICKS = 480  # to a beat, which lasts one second
_NOTE, _PAUSE = 240, 48


def played_notes(seed: int, count: int) -> tuple[Signal, NDArray[np.float64]]:
    """`count` notes of 0.5 s, 0.1 s apart, the instruments taking turns and the keys drawn at random.

    Returns the audio, float32[samples] at 16 kHz, and float64[count, 3]: start and end in seconds and frequency in Hz.
    Rendered once and cached.

    Raises TaskDataError when fluidsynth or the SoundFont is not installed.
    """
    keys = np.random.default_rng(seed).integers(*_KEYS, size=count)
    start = np.arange(count) * (_NOTE + _PAUSE) / _TICKS
    notes = np.stack([start, start + _NOTE / _TICKS, 440 * 2 ** ((keys - 69) / 12)], axis=1)

    def render() -> bytes:
        content = io.BytesIO()
        np.save(content, _rendered(_midi_file([int(k) for k in keys])))
        return content.getvalue()

    return np.load(cached_file(f"notes-{seed}-{count}.npy", render)), notes


def _rendered(midi: bytes) -> Signal:
    soundfont = debian_file("/usr/share/sounds/sf2/TimGM6mb.sf2", "timgm6mb-soundfont")
    program = shutil.which("fluidsynth")
    if program is None:
        raise missing_debian("the program fluidsynth", "fluidsynth")
    with tempfile.TemporaryDirectory() as folder:
        score, recording = Path(folder) / "notes.mid", Path(folder) / "notes.wav"
        score.write_bytes(midi)
        # no reverb, no chorus: what sounds is the recorded instrument
        options = ["-ni", "-R", "0", "-C", "0", "-g", "0.6", "-r", "48000", "-F", str(recording)]
        subprocess.run([program, *options, str(soundfont), str(score)], check=True, capture_output=True)
        return read_wav(recording)


def _midi_file(keys: list[int]) -> bytes:
    """A standard MIDI file of format 0: one track, one note after the other."""
    track = io.BytesIO()
    track.write(_varint(0) + b"\xff\x51\x03" + (1_000_000).to_bytes(3, "big"))
    for i, key in enumerate(keys):
        track.write(_varint(_PAUSE if i else 0) + bytes([0xC0, _PROGRAMS[i % len(_PROGRAMS)]]))
        track.write(_varint(0) + bytes([0x90, key, 100]) + _varint(_NOTE) + bytes([0x80, key, 0]))
    track.write(_varint(_TICKS) + b"\xff\x2f\x00")
    events = track.getvalue()
    header = b"MThd" + (6).to_bytes(4, "big") + b"".join(n.to_bytes(2, "big") for n in (0, 1, _TICKS))
    return header + b"MTrk" + len(events).to_bytes(4, "big") + events


def _varint(value: int) -> bytes:
    """MIDI's variable-length quantity: seven bits a byte, the most significant first."""
    out = bytes([value & 0x7F])
    while value := value >> 7:
        out = bytes([0x80 | value & 0x7F]) + out
    return out
