"""Try a plan out: run recorded calls with the chosen formats, simulated, and compare the outputs with those of fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..passes.differentiable import run
from ..passes.drift import Metric
from ..passes.plan import Decision
from ..passes.program import Candidate
from .execution import apply_decisions
from .recording import RecordedCall
from .saved_activations import copy_graph, lazily


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """Mean drift over samples, its 95th percentile, and how many samples there were."""

    drift: float
    p95: float
    samples: int


class Trial:
    """Runs of one model on its recorded calls; the fp32 outputs are kept between runs.

    `decisions` are those of a plan for the model: what a run does not choose stays as traced.
    """

    def __init__(
        self, calls: Sequence[RecordedCall], metric: Metric, decisions: Sequence[Decision], *, storage: str
    ) -> None:
        self.calls = calls
        self.metric = metric
        self.traced = {d.key: as_traced(d) for d in decisions}
        self.storage = storage
        self.runs = 0
        self._reference = [self._only_compared(self._outputs(call.graph.gm, call, n)) for n, call in enumerate(calls)]

    def run(self, chosen: Mapping[str, Candidate]) -> TrialResult:
        """Drift of the model with the chosen candidates (by key), all other nodes as traced."""
        self.runs += 1
        decisions = {k: decided(self.traced[k], c) for k, c in chosen.items() if k in self.traced}
        graphs: dict[fx.GraphModule, fx.GraphModule] = {}
        parts = []
        for number, call in enumerate(self.calls):
            gm = call.graph.gm
            if gm not in graphs:
                with lazily():
                    graphs[gm], parameters = copy_graph(gm, call.graph.parameters)
                    apply_decisions(
                        graphs[gm], {**self.traced, **decisions}, storage=self.storage, same_device=False,
                        parameters=parameters,
                    )  # fmt: skip
            outputs = self._only_compared(self._outputs(graphs[gm], call, number))
            parts.append(self.metric.per_sample(self._reference[number], outputs))
        drifts = torch.cat(parts)
        return TrialResult(drift=float(drifts.mean()), p95=float(drifts.quantile(0.95)), samples=int(drifts.numel()))

    def _outputs(self, gm: fx.GraphModule, call: RecordedCall, seed: int) -> list[Any]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            return run(gm, call.inputs, order=0)

    def _only_compared(self, outputs: list[Any]) -> list[Tensor | None]:
        wanted = set(self.metric.outputs)
        return [y if i in wanted else None for i, y in enumerate(outputs)]


def as_traced(decision: Decision) -> Decision:
    """A decision that leaves a node as the model was written."""
    return decision.model_copy(
        update={"compute": decision.traced, "recipe": "none", "output": decision.traced, "accumulate": decision.traced}
    )


def decided(decision: Decision, candidate: Candidate) -> Decision:
    """A decision with a candidate's formats."""
    return decision.model_copy(
        update={
            "compute": candidate.compute, "recipe": candidate.recipe, "accumulate": candidate.accumulate,
            "output": candidate.output, "static_range": candidate.static_range,
        }
    )  # fmt: skip
