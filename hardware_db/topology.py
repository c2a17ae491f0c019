"""How devices are connected: links by generation, and nodes of several devices with what their collectives cost.

    seconds = latency + steps(op, ranks) * bytes / bus_bandwidth

`bytes` is the size of the tensor that one rank holds in full, `bus_bandwidth` is what the links of one rank carry one
way, and steps is the share of the tensor that crosses them: 2 (n-1)/n for all_reduce, (n-1)/n for all_gather,
reduce_scatter and all_to_all, 1 for broadcast (NVIDIA, nccl-tests, doc/PERFORMANCE.md). Behind a switch a rank uses
all its links whatever the number of ranks; in a full mesh only those to the ranks that take part.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from .device_row import Confidence
from .measurement import CollectiveOp
from .schema import STRICT, Text

Topology = Literal["switch", "full-mesh", "ring", "hybrid-cube-mesh", "pcie-tree"]


class Link(BaseModel):
    """One generation of a link. `bidirectional_bytes_per_s` is of one link (x16 for PCIe, one port for fabrics), both
    ways together."""

    model_config = STRICT

    kind: Text
    scope: Literal["intra-node", "inter-node"]
    aliases: tuple[Text, ...] = ()
    bidirectional_bytes_per_s: Annotated[float, Field(ge=1e8, le=1e13)]
    latency_s: Annotated[float, Field(gt=0, le=1e-3)]
    source: Annotated[tuple[Text, ...], Field(min_length=1)]
    confidence: Confidence
    note: str = ""


class CollectiveCost(BaseModel):
    """`latency_s` of an empty collective among all devices of the node; `bus_bytes_per_s` as the module says."""

    model_config = STRICT

    latency_s: Annotated[float, Field(gt=0, le=1e-2)]
    bus_bytes_per_s: Annotated[float, Field(ge=1e8, le=1e13)]


class Node(BaseModel):
    """A machine of `count` logical devices. `fabric_bytes_per_s_per_device` is a device's share, one way, of the
    network between nodes."""

    model_config = STRICT

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    name: Text
    aliases: tuple[Text, ...] = ()
    device: str
    count: Annotated[int, Field(ge=2, le=1024)]
    topology: Topology
    link: str
    links_per_device: Annotated[int, Field(ge=1, le=64)]
    fabric: str | None = None
    fabric_bytes_per_s_per_device: Annotated[float, Field(ge=1e8, le=1e12)] | None = None
    collectives: dict[CollectiveOp, CollectiveCost]
    source: Annotated[tuple[Text, ...], Field(min_length=1)]
    confidence: Confidence
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Node:
        if (self.fabric is None) != (self.fabric_bytes_per_s_per_device is None):
            raise ValueError("fabric and fabric_bytes_per_s_per_device go together")
        if "all_reduce" not in self.collectives:
            raise ValueError("collectives.all_reduce is missing")
        return self

    def collective_time(self, op: CollectiveOp, size_bytes: float, ranks: int | None = None) -> float:
        """Seconds of a collective over a tensor of `size_bytes` among `ranks` devices of this node (default: all).

        Raises ValueError for more ranks than devices and KeyError for a collective that the node says nothing of.
        """
        n = self.count if ranks is None else ranks
        if not 1 <= n <= self.count:
            raise ValueError(f"{self.id} has {self.count} devices, not {n}")
        if n == 1:
            return 0.0
        cost = self.collectives[op]
        share = (n - 1) / (self.count - 1) if self.topology == "full-mesh" else 1.0
        return cost.latency_s + steps(op, n) * size_bytes / (cost.bus_bytes_per_s * share)


def steps(op: CollectiveOp, ranks: int) -> float:
    """The share of a tensor that crosses each link in a collective, as above."""
    if op == "broadcast":
        return 1.0
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
