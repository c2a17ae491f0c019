"""Many devices: nodes joined by a network, and what collectives among some of them cost.

Ranks are numbered along the last mesh dimension first and fill node after node, so that the ranks of one mesh dimension
lie `per_node` to a node on `nodes` nodes. A ring of n ranks carries steps(op, n) * bytes over every link of it: within
a node over the links of a device, between nodes over as many network ports as ranks of the ring lie in a node. An
all-to-all sends what leaves the node over each rank's own port.

    seconds = latency + hops(op) log2(nodes) link latency + max(within, between)
    within    steps(op, n) bytes / bus_bandwidth                  all-to-all: bytes (per_node - 1) / n / bus_bandwidth
    between   steps(op, n) bytes / (per_node port_bandwidth)      all-to-all: bytes (n - per_node) / n / port_bandwidth

`bytes` is the size of the tensor that one rank holds in full (topology.py). Latency grows with the logarithm of the
number of nodes, as for NCCL's trees and PAT algorithm (https://developer.nvidia.com/blog/
understanding-nccl-tuning-to-accelerate-gpu-to-gpu-communication).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ClusterError
from .catalog import Catalog
from .measurement import CollectiveOp
from .topology import Node, steps


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """Where the ranks of one mesh dimension lie: `per_node` on each of `nodes` nodes."""

    ranks: int
    per_node: int
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """As many nodes of a kind as are needed. `link_latency_s` is that of the network between them."""

    node: Node
    link_latency_s: float

    def layout(self, mesh: Mapping[str, int], dim: str) -> GroupLayout:
        """Where the ranks of a mesh dimension lie; `mesh` gives ranks by dimension, outermost first."""
        names = list(mesh)
        stride = math.prod(mesh[d] for d in names[names.index(dim) + 1 :])
        ranks, count = mesh[dim], self.node.count
        per_node = max(1, min(ranks, count // stride))
        nodes = math.ceil(ranks / per_node)
        span = stride * ranks
        if per_node > 1 and span % count and count % span:
            nodes += 1  # nodes end inside some of the groups
        return GroupLayout(ranks=ranks, per_node=per_node, nodes=nodes)

    def collective_time(self, op: CollectiveOp, size_bytes: float, layout: GroupLayout) -> float:
        """Seconds of a collective of a tensor of `size_bytes` among the ranks of a group.

        Raises ClusterError for a group of several nodes where the data know no network between them.
        """
        n, per_node = layout.ranks, layout.per_node
        if n == 1:
            return 0.0
        cost = self.node.collectives.get(op, self.node.collectives["all_reduce"])
        bus = cost.bus_bytes_per_s
        if self.node.topology == "full-mesh":
            bus *= max(1, per_node - 1) / (self.node.count - 1)
        shares = op == "all_to_all"
        within = size_bytes * ((per_node - 1) / n if shares else steps(op, n)) / bus if per_node > 1 else 0.0
        latency = cost.latency_s if per_node > 1 else 0.0
        if layout.nodes == 1:
            return latency + within
        port = self._port_bytes_per_s(n)
        carried = (n - per_node) / n if shares else steps(op, n) / per_node
        hops = (2 if op == "all_reduce" else 1) * math.ceil(math.log2(layout.nodes))
        return latency + hops * self.link_latency_s + max(within, size_bytes * carried / port)

    def _port_bytes_per_s(self, ranks: int) -> float:
        if self.node.fabric_bytes_per_s_per_device is None:
            raise ClusterError(
                f"the data know no network between nodes {self.node.id!r} of {self.node.count} devices, and a mesh "
                f"dimension of {ranks} ranks needs one. Name another node (`dsmp hardware list --nodes`), describe "
                "yours in a file for --hardware-file, or take a smaller mesh."
            )
        return self.node.fabric_bytes_per_s_per_device


def cluster_of(catalog: Catalog, device: str, node: str | None = None) -> Cluster:
    """The cluster of a node by name, or of the node that a device (by id) is known to stand in.

    Raises UnknownNodeError, and ClusterError where no node, or several, hold the device, or the node holds another.
    """
    if node is not None:
        found = catalog.resolve_node(node)
        if found.device != device:
            raise ClusterError(
                f"node {found.id!r} holds {found.device}, and the plan is for {device}. Name a node of {device} "
                f"({_listed(catalog, device) or 'the data have none'}), or plan for {found.device}."
            )
    else:
        holding = [n for n in catalog.nodes.values() if n.device == device]
        if len(holding) != 1:
            known = ", ".join(n.id for n in (holding or catalog.nodes.values()))
            raise ClusterError(
                f"{device} stands in {'several nodes' if holding else 'no node'} of the hardware data, and a mesh "
                f"needs one for its links. Name one of {known}, or describe yours in a file for --hardware-file."
            )
        (found,) = holding
    latency = catalog.links[found.fabric].latency_s if found.fabric is not None else 0.0
    return Cluster(node=found, link_latency_s=latency)


def _listed(catalog: Catalog, device: str) -> str:
    return ", ".join(n.id for n in catalog.nodes.values() if n.device == device)
