"""Retention times of peptides in liquid chromatography (DeepLC 4.5's multitask network of dilated convolutions).

Weights, feature encoder and measured peptides from the wheel deeplc. The network predicts for 6,543 laboratory set-ups
at once; the one that fits 300 of the measured peptides best is kept, with a straight line to minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from deeplc._features import encode_peptidoform
from deeplc._model_ops import load_model
from deeplc.core import _feature_kwargs_from_spec
from torch import Tensor, nn

from bench.tasks.sources import package_file
from bench.tasks.task import Batch, Task, predict, split

_BATCH = 50
_FIT = 300
_TEST = 600
_HELD_OUT = 200
_CALIBRATION = 200
_FEATURES = ("matrix", "matrix_global", "matrix_hc")


class RetentionTimes(nn.Module):
    """Retention times float[B, 6543], without the input that this architecture ignores.

    Inputs: atoms per position float[B, 60, 6], features of the whole peptide float[B, F], one-hot residues
    float[B, 60, 20].
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, atoms: Tensor, whole: Tensor, residues: Tensor) -> Tensor:
        out: Tensor = self.network(atoms, None, whole, residues)
        return out


def load() -> Task:
    """Mean and median absolute error in minutes and correlation on 600 peptides."""
    network = load_model(package_file("deeplc", "package_data/models/multitask_flexcnn_model.pt"), device="cpu")
    model = RetentionTimes(network).eval()
    features, minutes = _peptides(_FIT + _TEST + _CALIBRATION, _feature_kwargs_from_spec(network.feature_spec))
    fit, test, seen = zip(*(t.split([_FIT, _TEST, _CALIBRATION]) for t in features), strict=True)
    setup, slope, offset = _best_setup(predict(model, fit, _BATCH).numpy(), minutes[:_FIT])
    measured = minutes[_FIT : _FIT + _TEST]

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        predicted = predict(call, test, _BATCH)[:, setup].numpy() * slope + offset
        error = np.abs(predicted - measured)
        return {
            "mean error (min)": float(error.mean()),
            "median error (min)": float(np.median(error)),
            "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
        }

    return Task(
        name="deeplc",
        model=model,
        calibration=split(seen, _BATCH),
        held_out=split(tuple(t[:_HELD_OUT] for t in test), _BATCH),
        drift="l2",
        logits=False,
        evaluate=evaluate,
    )


def _peptides(count: int, encoding: dict[str, Any]) -> tuple[Batch, np.ndarray]:
    """Features and measured retention times (minutes) of confidently identified peptides, drawn at random."""
    table = pd.read_csv(package_file("deeplc", "package_data/examples/example_psms.tsv.gz"), sep="\t")
    confident = table[~table.is_decoy.astype(bool) & (table.qvalue < 0.01)].drop_duplicates("peptidoform")
    drawn = confident.sample(count, random_state=0)
    with warnings.catch_warnings():
        # the encoder leaves out the few modifications of which only the mass is known
        warnings.filterwarnings("ignore", "Skipping modification")
        encoded = [encode_peptidoform(peptide, **encoding) for peptide in drawn.peptidoform]
    features = tuple(torch.tensor(np.stack([e[name] for e in encoded]), dtype=torch.float32) for name in _FEATURES)
    return features, drawn.retention_time.to_numpy()


def _best_setup(predicted: np.ndarray, minutes: np.ndarray) -> tuple[int, float, float]:
    """The column of float[N, set-ups] that correlates best with the measurements, and its regression line."""
    centred = (predicted - predicted.mean(0)) / (predicted.std(0) + 1e-9)
    setup = int((centred * (minutes - minutes.mean())[:, None]).mean(0).argmax())
    slope, offset = np.polyfit(predicted[:, setup], minutes, 1)
    return setup, float(slope), float(offset)
