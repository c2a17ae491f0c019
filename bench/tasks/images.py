"""Real pictures: Tux Paint stamps of Debian, some with ImageNet labels, and the photographs in scikit-image's wheel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bench.tasks.sources import debian_file, package_file

Pixels = NDArray[np.uint8]

_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

_PHOTOGRAPHS = {
    "skimage": [
        *(f"data/{name}.png" for name in ("astronaut", "chelsea", "coffee")),
        "data/rocket.jpg",
        "data/motorcycle_left.png",
        "data/retina.jpg",
        "data/hubble_deep_field.jpg",
        *(f"data/{name}.png" for name in ("ihc", "camera", "coins", "grass", "gravel", "brick")),
    ],
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
}

# ImageNet's names that mean something else in a stamp's caption, and stamps that do not show what the caption names.
_AMBIGUOUS = frozenset(
    ("drake", "crane", "mouse", "baseball", "rule", "safe", "cricket", "cup", "bow", "christmas stocking", "stocking")
)
_MISLEADING = (
    *("speech_balloon", "thought_balloon", "scream_balloon", "menorah", "albino", "wheel_tractor", "australian"),
    *("symbols/", "cartoon", "pitcher", "slice"),
)


@dataclass(frozen=True, kw_only=True)
class Framing:
    """How a stamp is put on a square: side in units of its longer side, grey level around it, mirrored or not."""

    side: float
    grey: int
    mirrored: bool


def normalised(pixels: Pixels) -> Tensor:
    """uint8[height, width, 3] as float32[3, height, width], standardised as torchvision's ImageNet models expect."""
    return (torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255 - _MEAN) / _STD


def stamp_files() -> list[Path]:
    """All stamps that have a caption, by path."""
    folder = debian_file("/usr/share/tuxpaint/stamps", "tuxpaint-stamps-default")
    files = sorted(folder.glob("**/*.png"), key=str)
    return [f for f in files if "mirror" not in str(f) and f.with_suffix(".txt").exists()]


def labelled_stamps(categories: Sequence[str]) -> Mapping[Path, list[int]]:
    """The stamps whose caption names one of the categories, with the indices of all categories of that name."""
    indices: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        indices.setdefault(category.lower(), []).append(index)
    labels: dict[Path, list[int]] = {}
    for file in stamp_files():
        if any(part in str(file) for part in _MISLEADING):
            continue
        caption = file.with_suffix(".txt").read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].strip()
        words = f" {' '.join(re.sub('[^a-z]', ' ', caption.lower()).split())} "
        named = [c for c in indices if f" {c} " in words or f" {c}s " in words]
        longest = max(named, key=len, default="")
        if longest and longest not in _AMBIGUOUS:
            labels[file] = indices[longest]
    return labels


def framed_stamp(file: Path, size: int, framing: Framing) -> Pixels:
    """A stamp in the middle of a plain square, uint8[size, size, 3]."""
    stamp = Image.open(file).convert("RGBA")
    side = int(max(stamp.size) * framing.side)
    square = Image.new("RGBA", (side, side), (framing.grey, framing.grey, framing.grey, 255))
    square.alpha_composite(stamp, ((side - stamp.width) // 2, (side - stamp.height) // 2))
    pixels = np.asarray(square.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
    return pixels[:, ::-1] if framing.mirrored else pixels


def photograph_crops(count: int, size: int, seed: int) -> list[Pixels]:
    """Square crops of 45-100 % of the shorter side, the photographs taking turns, each uint8[size, size, 3]."""
    files = [package_file(package, path) for package, paths in _PHOTOGRAPHS.items() for path in paths]
    photographs = [np.asarray(Image.open(f).convert("RGB")) for f in files]
    random = np.random.default_rng(seed)
    crops = []
    for i in range(count):
        photograph = photographs[i % len(photographs)]
        height, width = photograph.shape[:2]
        side = int(min(height, width) * random.uniform(0.45, 1))
        top, left = random.integers(0, height - side + 1), random.integers(0, width - side + 1)
        crop = Image.fromarray(photograph[top : top + side, left : left + side])
        crops.append(np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR)))
    return crops
