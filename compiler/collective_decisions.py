"""What every collective of a rank's graph sends, and how long that takes.

Without being asked for a format, a collective takes the narrowest that loses nothing: that in which the value is stored
before it is sent, or in which every product that reads what was gathered wants it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..codegen.collective_nodes import Collective
from ..codegen.sending import sent_bytes, why_as_written
from ..errors import InvalidOptionError
from ..hardware_db.cluster import Cluster
from ..passes.cast_motion import operand_storage
from ..passes.cost import format_of
from ..passes.graph import numel_of, root, shape_of
from ..passes.keys import key_of
from ..passes.mesh_plan import CollectiveDecision
from ..passes.plan import Decision
from ..passes.plan_fields import GEMM_CLASSES, Reason
from ..passes.wire_formats import FP32, WireFormat, parse_wire
from .rank_graph import RankGraph

LEAST_VALUES = 1024
"""Collectives of fewer values take a message's latency, whatever their format."""


def is_worth_encoding(c: Collective) -> bool:
    """Whether a collective is large enough to matter, and no loss or statistic (one value per row)."""
    return numel_of(c.value) >= LEAST_VALUES and shape_of(c.value)[-1] > 1


def wires_by_dim(wire: str | Mapping[str, str] | None, dims: Sequence[str]) -> dict[str, WireFormat]:
    """The formats that are asked for, one for all or by mesh dimension, by dimension; nothing for None.

    Raises InvalidOptionError for a dimension that the mesh lacks, UnknownWireFormatError and InvalidWireFormatError.
    """
    if wire is None:
        return {}
    by_dim = dict(wire) if isinstance(wire, Mapping) else dict.fromkeys(dims, parse_wire(wire))
    if any(dim not in dims for dim in by_dim):
        raise InvalidOptionError("wire", wire, f"a format, or formats by mesh dimension ({', '.join(dims)})")
    return {dim: parse_wire(text) for dim, text in by_dim.items()}


class CollectiveDecider:
    """Decides the collectives of one rank's graph. `asked` has formats by mesh dimension, `chosen` those that a budget
    pays for by key, `decisions` those of the other nodes by key; `storage` is the device's storage format."""

    def __init__(
        self,
        rank: RankGraph,
        decisions: Mapping[str, Decision],
        storage: str,
        cluster: Cluster,
        mesh: Mapping[str, int],
        asked: Mapping[str, WireFormat],
        chosen: Mapping[str, WireFormat] | None = None,
    ) -> None:
        self.rank, self.decisions, self.storage = rank, decisions, storage
        self.cluster, self.mesh, self.asked, self.chosen = cluster, mesh, asked, chosen or {}

    def decide(self) -> list[tuple[Collective, CollectiveDecision]]:
        """One decision for each collective of the graph, whatever it stands for. Raises ClusterError."""
        return [(c, self._decision(c)) for c in self.rank.collectives]

    def _decision(self, c: Collective) -> CollectiveDecision:
        dim = self.rank.dim(c)
        wire, reason = self._wire(c)
        return CollectiveDecision(
            key=str(key_of(c.start)), dim=dim, kind=c.kind, shape=list(shape_of(c.value)), wire=str(wire),
            bytes_as_written=c.sent_bytes, bytes=_sends(c, wire), time_us=self.time_us(c, wire),
            hidden=self.rank.is_hidden(c), reason=reason,
        )  # fmt: skip

    def time_us(self, c: Collective, wire: WireFormat) -> float:
        """Predicted microseconds of a collective in a format. Raises ClusterError."""
        whole = numel_of(c.value) * c.value.dtype.itemsize * (c.ranks if c.kind == "all_gather" else 1)
        layout = self.cluster.layout(self.mesh, self.rank.dim(c))
        share = _sends(c, wire) / max(c.sent_bytes, 1.0)
        return round(1e6 * self.cluster.collective_time(c.kind, whole * share, layout), 3)

    def _wire(self, c: Collective) -> tuple[WireFormat, Reason]:
        if not is_worth_encoding(c):
            return FP32, Reason(code="small", text=f"a statistic, or fewer than {LEAST_VALUES} values: sent as traced")
        if (paid := self.chosen.get(str(key_of(c.start)))) is not None:
            return paid, Reason(code="budget", text=f"{paid} on the wire is within the budget")
        asked = self.asked.get(self.rank.dim(c))
        wire, text = (asked, f"asked for over {self.rank.dim(c)}") if asked is not None else self._lossless(c)
        refused = why_as_written(c, wire)
        if wire == FP32 or refused:
            text = text if wire == FP32 else f"stays as written: {refused}"
            return FP32, Reason(code="as-traced" if asked is None else "wire", text=text)
        return wire, Reason(code="stored" if asked is None else "wire", text=text)

    def _lossless(self, c: Collective) -> tuple[WireFormat, str]:
        source = self.decisions.get(str(key_of(root(c.source))))
        if source is not None and source.output in ("bf16", "fp16") and source.output != source.traced:
            return parse_wire(source.output), f"stored in {source.output} before it is sent"
        if c.kind == "all_to_all" and all(self._reads_eight_bits(r) for r in self.rank.readers(c)):
            return parse_wire("fp8"), "only products of fp8, scaled 1x128, read it"
        if c.kind in ("all_gather", "all_to_all"):
            wanted = {self._reads_in(r, c) for r in self.rank.readers(c)}
            one = wanted.pop() if len(wanted) == 1 else None
            if one in ("bf16", "fp16"):
                return parse_wire(one), f"only products read it, in {one} or narrower"
        return FP32, "as traced: fewer bits would lose some"

    def _reads_eight_bits(self, reader: fx.Node) -> bool:
        """Whether a product quantises rows to fp8 in blocks as a payload does."""
        decision = self.decisions.get(str(key_of(reader)))
        return decision is not None and decision.compute == "fp8_e4m3" and decision.recipe.startswith("1x128")

    def _reads_in(self, reader: fx.Node, c: Collective) -> str | None:
        """The format in which a product wants its operands stored; None for other nodes."""
        decision = self.decisions.get(str(key_of(reader)))
        if decision is None or decision.op not in GEMM_CLASSES:
            return None
        return operand_storage(self.storage, format_of(c.value.dtype) or "fp32", decision.compute)


def _sends(c: Collective, wire: WireFormat) -> float:
    """Bytes that a rank sends for a collective in a format, fp32 being as written."""
    return c.sent_bytes if wire == FP32 else sent_bytes(c, wire)
