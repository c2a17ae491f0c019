"""What a graph that was traced from another takes over from it: names, descriptors, sequence numbers and keys."""

from __future__ import annotations

import torch
from torch import fx

from .graph import output_node, placeholders
from .keys import hand_on_key

aten = torch.ops.aten


def hand_on_identity(joint: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Give every node the sequence number of the node it comes from (tracing has numbered them anew), and to the one
    that does its work its key, so that decisions made for the whole model find their nodes."""
    joint_nodes = {n.name: n for n in joint.graph.nodes}
    workers: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        node.meta.pop("seq_nr", None)
        sources = node.meta.get("from_node")
        source = joint_nodes.get(sources[-1].name) if sources else None
        if source is None:
            continue
        if "seq_nr" in source.meta:
            node.meta["seq_nr"] = source.meta["seq_nr"]
        if node.target is source.target:
            workers[source] = node
    for source, node in workers.items():
        hand_on_key(source, node)


def take_over(joint: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Give the new graph the names and descriptors of the joint graph's placeholders and outputs."""
    for old, new in zip(placeholders(joint), placeholders(gm), strict=True):
        new.target = old.target
        new.name = str(old.target)
        new.meta = {**old.meta, "val": new.meta.get("val")}
    output_node(gm).meta["desc"] = output_node(joint).meta["desc"]
    for node in gm.graph.nodes:
        if node.target is aten.convolution_backward.default:
            read = {user.args[1] for user in node.users}
            node.args = (*node.args[:-1], [i in read for i in range(3)])
    gm.graph.eliminate_dead_code()
    gm.recompile()
