"""Sensitivity scores: how much each way to compute or store each node moves the model's outputs, as a file.

Scores belong to a model and its calibration data, not to a device or a budget, so one measurement serves many plans.
They are signed with the model's fingerprint: scores of another model are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ..errors import ScoresError
from .files import write_atomically
from .labels import split_label
from .plan_fields import KeyText, PlanModel
from .program import DriftKind
from .ranges import Range

SCORES_SCHEMA = 1


class Score(PlanModel):
    """A drift, and whether it was measured with the format's rounding or estimated from gradients and step sizes."""

    drift: float = Field(ge=0)
    measured: bool = False


class NodeScores(PlanModel):
    """What was measured at one node: drifts by label (labels.py), ranges by tensor (`lhs`, `rhs`, `out`)."""

    labels: dict[str, Score]
    ranges: dict[str, Range] = Field(default_factory=dict)

    def __repr__(self) -> str:
        measured = sum(s.measured for s in self.labels.values())
        return f"NodeScores({len(self.labels)} drifts, {measured} measured; ranges of {len(self.ranges)} tensors)"

    __str__ = __repr__


class Scores(PlanModel):
    """The scores of a model.

    `loss` is the loss on the calibration data in nats (kl, bernoulli: the mean entropy of the outputs, or what the
    user's loss said; None otherwise). `samples` counts samples, `draws` cotangents per sample.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    dsmp: str
    torch: str
    source: str
    fingerprint: str
    drift: DriftKind
    loss: float | None = Field(default=None, ge=0)
    samples: int = Field(ge=1)
    draws: int = Field(ge=1)
    nodes: dict[KeyText, NodeScores]

    model_config = PlanModel.model_config | {"populate_by_name": True}

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        return (
            f"Scores({self.source}: {len(self.nodes):,} nodes; drift {self.drift}{loss}; {self.samples:,} samples, "
            f"{self.draws} draws each)"
        )

    __str__ = __repr__

    def of(self, key: str, label: str) -> Score | None:
        """The score of a candidate's label: of its arithmetic plus that of storing the result; None if not scored.

        A node's traced format scores 0.
        """
        known: Mapping[str, Score] = self.nodes[key].labels if key in self.nodes else {}
        drift, measured = 0.0, True
        for part in split_label(label):
            if not part:
                continue
            score = known.get(part)
            if score is None:
                return None
            drift, measured = drift + score.drift, measured and score.measured
        return Score(drift=drift, measured=measured)

    def check(self, fingerprint: str) -> None:
        """Raise ScoresError for scores that were measured on a model of another fingerprint, or that hold nothing of
        which a budget is a share."""
        if self.fingerprint != fingerprint:
            raise ScoresError(
                f"the scores were measured on {self.source} (fingerprint {self.fingerprint}); this model's is "
                f"{fingerprint}. Measure again, with the same model, inputs and phase (training or inference)."
            )
        if not self.nodes:
            raise ScoresError("the scores hold no node. Measure again with --save-scores.")
        if self.drift in ("kl", "bernoulli") and self.loss is None:
            raise ScoresError(
                f"the scores hold no loss, of which a budget is a share for drift {self.drift!r}. Measure again with "
                "--save-scores."
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write as JSON, one node a line; the file is replaced in one step. Raises ScoresError."""
        data = self.model_dump(mode="json", by_alias=True)
        nodes = data.pop("nodes")
        head = json.dumps(data, indent=1, ensure_ascii=False)[:-2]
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(n, ensure_ascii=False)}" for k, n in nodes.items())
        return write_atomically(path, f'{head},\n "nodes": {{\n{lines}\n }}\n}}\n', ScoresError, "scores")


def load_scores(path: str | os.PathLike[str]) -> Scores:
    """Read a file of scores. Raises ScoresError naming the field and what it may hold."""
    try:
        return Scores.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ScoresError(f"scores {os.fspath(path)!r}: cannot be read ({error.strerror or error}).") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"]) or "(top)"
        raise ScoresError(
            f"scores {os.fspath(path)!r}: field {where}: {first['msg']}. Measure again with --save-scores."
        ) from None
