"""What a calibrated plan was chosen from: every candidate of every node with its time, drift and memory, the casts
that nodes share, ties and data flow. Stored in the plan, so that it can be solved again for another budget, and asked
why, without the model.

Times are microseconds on the planned hardware, drifts are in the unit of `Drift` (additive over nodes), memory is bytes
kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .assignment import Assignment, AssignmentProblem, SharedCast, Totals, totals_of
from .plan_fields import FormatName, KeyText, PlanModel, Reason, RecipeName, StaticRange, StoredName

DriftKind = Literal["kl", "bernoulli", "l2", "gradients"]
Cost = Literal["roofline", "bits"]


def drift_limit(kind: DriftKind, amount: float, loss: float | None) -> float:
    """A budget, a share of 1, as a drift of its kind; see `Program.limit`."""
    if kind == "l2":
        return amount * amount
    return amount if kind == "gradients" else amount * (loss or 0.0)


class Candidate(PlanModel):
    """One way to compute and store a node. `label` is the same text wherever the same way is meant.

    `drift` is None where nothing was measured (the candidate is then blocked), `measured` tells a drift that was
    measured with the format's own rounding from one that was estimated from gradients and step sizes. `static_range` is
    what static steps of the activations reach over. `blocked` says why the candidate may not be chosen.
    """

    label: str
    compute: FormatName
    recipe: RecipeName = "none"
    accumulate: FormatName
    output: StoredName
    bytes: int = Field(default=0, ge=0)
    time_us: float = Field(ge=0)
    drift: float | None = Field(default=None, ge=0)
    measured: bool = False
    saved_bytes: int = Field(default=0, ge=0)
    static_range: StaticRange = None
    blocked: Reason | None = None


class Copy(PlanModel):
    """A converted copy of a value that several nodes read: `value` is the key of the node that computes it, or the name
    of an input. `time_us` is the time of making it by the label of that node (by `""` for an input). `readers` lists,
    per node, the labels under which it reads the copy. Under the labels in `barred` the value is stored too narrow for
    the copy: their time is a penalty, no prediction."""

    value: str
    format: FormatName
    recipe: RecipeName = "none"
    time_us: dict[str, Annotated[float, Field(ge=0)]]
    readers: dict[KeyText, list[str]]
    barred: list[str] = Field(default_factory=list)


class Program(PlanModel):
    """The program of a plan: candidates by node key, shared copies, ties, and which nodes each node reads.

    `reads` holds views too, which have no candidates: a view's first entry is what it is a view of. `loss` is the loss
    that the model was calibrated with, in nats: the mean entropy of its own outputs, or what the user's loss said.
    `default` holds the labels that the device's tier decides without calibration, of the nodes that it does not leave
    as traced; None where that is not known.
    """

    cost: Cost
    drift: DriftKind
    loss: float | None = Field(default=None, ge=0)
    candidates: dict[KeyText, list[Candidate]]
    copies: list[Copy] = Field(default_factory=list)
    ties: list[list[KeyText]] = Field(default_factory=list)
    reads: dict[KeyText, list[KeyText]] = Field(default_factory=dict)
    default: dict[KeyText, str] | None = None

    @model_validator(mode="after")
    def _refers_to_its_own_nodes(self) -> Self:
        for key, found in self.candidates.items():
            if not found:
                raise ValueError(f"{key} has no candidate")
            if all(c.blocked for c in found):
                raise ValueError(f"{key} has no candidate that is not blocked")
            if len({c.label for c in found}) < len(found):
                raise ValueError(f"{key} has two candidates of one label")
        named = [*(k for c in self.copies for k in c.readers), *(k for group in self.ties for k in group)]
        stray = next((k for k in named if k not in self.candidates), None)
        if stray is not None:
            raise ValueError(f"{stray} is read or tied, but has no candidates")
        return self

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Node keys in the order of the graph."""
        return tuple(self.candidates)

    @cached_property
    def allowed(self) -> Mapping[str, Sequence[Candidate]]:
        """The candidates of each node that may be chosen, in their order in the plan."""
        return {key: [c for c in found if c.blocked is None] for key, found in self.candidates.items()}

    def limit(self, amount: float) -> float:
        """A budget, a share of 1, as a drift: relative change of the loss (kl, bernoulli: a share of `loss`, in nats),
        relative root mean square error of the outputs (l2, where drift is its square), relative loss of progress in a
        training step (gradients: the relative squared error itself, see `drift.py`)."""
        return drift_limit(self.drift, amount, self.loss)

    def amount(self, drift: float) -> float:
        """The inverse of `limit`; infinite for a loss of zero."""
        if self.drift == "l2":
            return math.sqrt(drift)
        if self.drift == "gradients":
            return drift
        return drift / self.loss if self.loss else math.inf

    def problem(self, *, drift: float = math.inf, saved_bytes: float = math.inf) -> AssignmentProblem:
        """The program as numbers, with budgets on the sum of drifts and on saved bytes."""
        index = {key: i for i, key in enumerate(self.keys)}
        names = [{c.label: i for i, c in enumerate(self.allowed[key])} for key in self.keys]
        casts = []
        for copy in self.copies:
            source = index.get(copy.value)
            cost = (
                tuple(copy.time_us.get(label, 0.0) for label in names[source])
                if source is not None
                else (copy.time_us.get("", 0.0),)
            )
            readers = []
            for key, labels in copy.readers.items():
                wanted = frozenset(names[index[key]][label] for label in labels if label in names[index[key]])
                if wanted:
                    readers.append((index[key], wanted))
            if readers and any(cost):
                casts.append(SharedCast(source=source, cost=cost, readers=tuple(readers)))
        allowed = [self.allowed[key] for key in self.keys]
        return AssignmentProblem(
            labels=tuple(tuple(c.label for c in found) for found in allowed),
            time=tuple(np.array([c.time_us for c in found]) for found in allowed),
            error=tuple(np.array([c.drift or 0.0 for c in found]) for found in allowed),
            memory=tuple(np.array([float(c.saved_bytes) for c in found]) for found in allowed),
            casts=tuple(casts),
            ties=tuple(tuple(index[key] for key in group) for group in self.ties),
            error_budget=drift,
            memory_budget=saved_bytes,
            names=self.keys,
        )

    def chosen(self, assignment: Assignment) -> dict[str, Candidate]:
        """The candidate that an assignment takes for each node."""
        return {key: self.allowed[key][i] for key, i in zip(self.keys, assignment.choice, strict=True)}

    def totals(self, labels: Mapping[str, str]) -> Totals:
        """What a choice costs; `labels` holds one label per key. Raises KeyError for a label that is not allowed."""
        choice = []
        for key in self.keys:
            by_label = {c.label: i for i, c in enumerate(self.allowed[key])}
            choice.append(by_label[labels[key]])
        return totals_of(self.problem(), choice)


class Solution(PlanModel):
    """How good the chosen plan is within its program, and what a test run of it showed.

    `limit` is the budget as a drift, `bound_us` a proven lower bound on the time of any plan within the budgets, `gap`
    the part of the time that could at most be saved. Prices are microseconds per unit of drift and per byte at the
    optimum; `binding` names the budgets that hold the plan back. `measured` is the mean drift of a simulated run of the
    plan, `ratio` the root of measured over predicted, `p95` the 95th percentile over samples, `runs` the simulated
    runs that were made.
    """

    limit: float | None = Field(default=None, ge=0)
    memory_limit: int | None = Field(default=None, ge=0)
    time_us: float = Field(ge=0)
    cast_us: float = Field(ge=0)
    drift: float = Field(ge=0)
    saved_bytes: int = Field(ge=0)
    bound_us: float = Field(ge=0)
    gap: float = Field(ge=0)
    price_us_per_drift: float = Field(default=0.0, ge=0)
    price_us_per_byte: float = Field(default=0.0, ge=0)
    binding: list[str] = Field(default_factory=list)
    measured: float | None = Field(default=None, ge=0)
    ratio: float | None = Field(default=None, ge=0)
    p95: float | None = Field(default=None, ge=0)
    samples: int = Field(default=0, ge=0)
    runs: int = Field(default=0, ge=0)
