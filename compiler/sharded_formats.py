"""Formats in a sharded graph: those of a plan, or those that a device's tier decides for local shapes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ..codegen.audit import Audit
from ..codegen.lower_products import Lowering
from ..hardware_db.capability import Device
from ..passes.plan import Decision, PrecisionPlan
from ..passes.select_default import select_default
from ..passes.shard_graph import ShardedGraph
from .execution import apply_decisions
from .pipeline import report_undecided
from .rank_graph import parameters_of

log = logging.getLogger("dsmp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """What decides the formats of a sharded graph: a plan, or the tier of `device` where there is none. `running` is
    the device that the ranks run on; on another one formats are simulated."""

    device: Device
    running: Device
    plan: PrecisionPlan | None = None

    @property
    def digest(self) -> str:
        """A text that is equal on ranks that decide alike."""
        return f"{self.device.id} {self.running.id} {self.plan.digest if self.plan is not None else ''}"

    def apply(self, graph: ShardedGraph) -> Audit:
        """Legalise and lower the graph in place; what runs for every planned node of it."""
        parameters = parameters_of(graph.gm)
        same = self.device.id == self.running.id
        applied = apply_decisions(
            graph.gm,
            self._decisions(graph.gm, parameters),
            storage=self.device.storage,
            same_device=same,
            parameters=parameters,
            lowering=Lowering(device=self.device, native=same),
        )
        if self.plan is not None:
            report_undecided(applied.report.undecided, self.plan, strict=False)
        assert applied.audit is not None
        return applied.audit

    def _decisions(self, gm: fx.GraphModule, parameters: frozenset[fx.Node]) -> Mapping[str, Decision]:
        if self.plan is not None:
            return self.plan.by_key
        return {d.key: d for d in select_default(gm, self.device, parameters=parameters).decisions}
