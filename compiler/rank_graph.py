"""One rank's graph as planning sees it: parameters, named collectives, and how often each node occurs in the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput

from ..codegen.collective_nodes import Collective, find_collectives, find_exchanges, name_collectives
from ..passes.graph import CAST_OPS, SLICE_OPS, VIEW_OPS, is_backward, is_getitem, node_op, placeholders, root
from ..passes.keys import ModuleNames, NodeKey, key_of
from ..passes.shard_graph import ShardedGraph
from .block_folding import Repeats

_WAITS = frozenset({"_c10d_functional.wait_tensor", "aten.cat"})
_SCALES = frozenset({"aten.div", "aten.mul"})


class RankGraph:
    """A sharded graph in which repeated blocks may stand once. `dims` names process groups by mesh dimension."""

    def __init__(self, graph: ShardedGraph, dims: Mapping[str, str], repeats: Repeats) -> None:
        self.gm, self.dims, self.repeats = graph.gm, dims, repeats
        self.parameters = parameters_of(graph.gm)
        self.collectives = [c for c in (*find_collectives(graph.gm), *find_exchanges(graph.gm)) if c.group in dims]
        self._names, self._owners = ModuleNames(), dict[fx.Node, str]()
        for node in self.gm.graph.nodes:
            self._owners[node] = self._owner(node)
        name_collectives(self.collectives, dims, self._owners)

    def dim(self, c: Collective) -> str:
        """The mesh dimension that a collective runs over."""
        return self.dims[c.group]

    def occurrences(self, node: fx.Node) -> int:
        """How often a node occurs in the whole model."""
        return self.repeats.count(self._owners[node])

    def _owner(self, node: fx.Node) -> str:
        """The path of the module that a node belongs to. Gradients are added up, and reduced, outside of modules: such
        a node belongs to the last module that its operands do."""
        path = self._names.of(node)
        if path or not is_backward(node):
            return path
        return next((found for n in reversed(node.all_input_nodes) if (found := self._owners[n])), "")

    def keys(self, c: Collective) -> list[str]:
        """The keys of a collective in the whole model."""
        key = key_of(c.start)
        assert key is not None
        return [str(NodeKey(path, key.phase, key.op, key.ordinal)) for path in self.repeats.paths(key.fqn)]

    def is_hidden(self, c: Collective) -> bool:
        """Whether a collective needs nothing but parameters, or nothing but the step's outputs waits for it."""
        return root(c.source, through_casts=True) in self.parameters or (
            is_backward(c.start) and self._only_returned(c.start)
        )

    def _only_returned(self, node: fx.Node) -> bool:
        follows = [user for user in node.users if user.op != "output"]
        return all((_carries(user) or node_op(user) in _SCALES) and self._only_returned(user) for user in follows)

    def readers(self, c: Collective) -> list[fx.Node]:
        """The nodes that compute with what a collective gives."""
        found: list[fx.Node] = []
        follows = list(c.start.users)
        while follows:
            user = follows.pop()
            if _carries(user):
                follows += user.users
            else:
                found.append(user)
        return found


def parameters_of(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The placeholders that hold parameters and buffers."""
    return frozenset(n for n in placeholders(gm) if isinstance(n.meta.get("desc"), (ParamAOTInput, BufferAOTInput)))


def _carries(node: fx.Node) -> bool:
    """Whether a node hands on the numbers that it reads."""
    return node_op(node) in VIEW_OPS | SLICE_OPS | CAST_OPS | _WAITS or is_getitem(node)
