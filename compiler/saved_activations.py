"""How many bytes the forward pass keeps for the backward pass: asked of the partitioner that torch.compile uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from ..passes.graph import numel_of, output_node, placeholders, root, tensors_of
from .tracing import PARTITION_ARGUMENTS

SAVED_AS_TRACED = "dsmp_saved_as_traced"
"""Where a joint graph keeps its own bytes once they are known: they are the same for every device."""

GraphChange = Callable[[fx.GraphModule, frozenset[fx.Node]], None]


def lazily() -> AbstractContextManager[None]:
    """Within it, graphs are changed and partitioned without Python code being made of each, which nobody runs."""
    return _use_lazy_graph_module(True)


def saved_activation_bytes(
    joint: fx.GraphModule, parameters: frozenset[fx.Node], change: GraphChange | None = None
) -> int:
    """Partition a copy of a joint graph, after `change` was applied to it, and add up what the forward pass saves.

    Parameters and inputs are not counted, they live anyway; a tensor saved through several views is counted once.
    """
    if change is None and SAVED_AS_TRACED in joint.meta:
        return int(joint.meta[SAVED_AS_TRACED])
    saved = sum(saved_activations(joint, parameters, change).values())
    if change is None:
        joint.meta[SAVED_AS_TRACED] = saved
    return saved


def saved_activations(
    joint: fx.GraphModule, parameters: frozenset[fx.Node], change: GraphChange | None = None
) -> dict[fx.Node, int]:
    """As `saved_activation_bytes`: nodes of the partitioned forward graph, with the joint graph's `meta`, and bytes."""
    with lazily():
        gm, kept = copy_graph(joint, parameters)
        if change is not None:
            change(gm, kept)
        arguments = joint.meta[PARTITION_ARGUMENTS]
        inputs = [n.meta["val"] for n in placeholders(gm)]
        forward, _ = min_cut_rematerialization_partition(gm, inputs, **arguments)
    return saved_in_forward(forward, arguments["num_fwd_outputs"])


def saved_in_forward(forward: fx.GraphModule, num_outputs: int) -> dict[fx.Node, int]:
    """Bytes of the tensors that a partitioned forward graph returns beyond the model's own outputs, by the node that
    computed each."""
    outputs = output_node(forward).args[0]
    assert isinstance(outputs, (list, tuple))
    found: dict[fx.Node, int] = {}
    for node in outputs[num_outputs:]:
        if not isinstance(node, fx.Node):
            continue
        source = root(node)
        if source.op != "placeholder" and source not in found:
            found[source] = sum(numel_of(t) * t.element_size() for t in tensors_of(node))
    return found


def copy_graph(joint: fx.GraphModule, parameters: frozenset[fx.Node]) -> tuple[fx.GraphModule, frozenset[fx.Node]]:
    """A copy of a graph that shares its (fake) values, and the copies of the given nodes."""
    twins: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    returned = graph.graph_copy(joint.graph, twins)
    out = graph.output(returned)
    out.meta = dict(output_node(joint).meta)
    for node, twin in twins.items():
        twin.meta = dict(node.meta)
    gm = _make_graph_module(joint, graph)
    gm.meta = copy.copy(joint.meta)
    return gm, frozenset(twins[p] for p in parameters)
