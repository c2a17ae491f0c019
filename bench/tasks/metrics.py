"""Metrics that several tasks, or none of the usual libraries, have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata


def roc_auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve, from the Mann-Whitney U statistic; ties count half."""
    positive = np.asarray(labels, dtype=bool).ravel()
    ranks = rankdata(np.asarray(scores, dtype=np.float64).ravel())
    hits = int(positive.sum())
    misses = positive.size - hits
    return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


def edit_distance(a: Sequence[object], b: Sequence[object]) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]
