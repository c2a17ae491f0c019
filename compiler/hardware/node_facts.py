"""Everything that is known of one node, as plain data: what `dsmp hardware show` prints as text or as JSON.

Names carry units, as in facts.py. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...hardware_db.catalog import Catalog
from ...hardware_db.device_row import Confidence
from ...hardware_db.topology import Node
from .facts import Value


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Everything that is known of a node. `collectives`: latency, bus bandwidth and predicted seconds for a
    tensor of 10^6 and 10^9 bytes, by operation."""

    id: str
    name: str
    aliases: tuple[str, ...]
    device: str
    count: int
    topology: str
    links: dict[str, Value]
    fabric: dict[str, Value] | None
    collectives: dict[str, dict[str, float]]
    confidence: Confidence
    sources: tuple[str, ...]
    note: str


def node_facts(catalog: Catalog, node: Node) -> NodeFacts:
    """Everything that is known of a node."""
    link = catalog.links[node.link]
    fabric: dict[str, Value] | None = None
    if node.fabric is not None:
        fabric = {
            "fabric": node.fabric,
            "one_way_bytes_per_s_per_device": node.fabric_bytes_per_s_per_device,
            "latency_s": catalog.links[node.fabric].latency_s,
        }
    return NodeFacts(
        id=node.id,
        name=node.name,
        aliases=node.aliases,
        device=node.device,
        count=node.count,
        topology=node.topology,
        links={
            "link": node.link,
            "links_per_device": node.links_per_device,
            "both_ways_bytes_per_s_per_link": link.bidirectional_bytes_per_s,
            "one_way_bytes_per_s_per_device": node.links_per_device * link.bidirectional_bytes_per_s / 2,
            "latency_s": link.latency_s,
        },
        fabric=fabric,
        collectives={
            op: {
                "latency_s": cost.latency_s,
                "bus_bytes_per_s": cost.bus_bytes_per_s,
                "megabyte_s": node.collective_time(op, 1e6),
                "gigabyte_s": node.collective_time(op, 1e9),
            }
            for op, cost in node.collectives.items()
        },
        confidence=node.confidence,
        sources=node.source,
        note=node.note,
    )
