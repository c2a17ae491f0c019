"""How many rows an all-to-all with uneven parts brings: as many as are sent, in equal parts, as far as estimates go."""

from __future__ import annotations

from torch import fx

from .graph import calls, concrete, expect_size, node_op, value_of


def expect_even_splits(gm: fx.GraphModule) -> None:
    """Note the mean number of rows per rank for the parts of all-to-alls whose sizes only running tells.

    Nothing in the graph changes. Without it costs would take each part for one row, and the experts' products behind
    it for too small to gain from a narrow format.
    """
    for node in calls(gm):
        if node_op(node) != "_c10d_functional.all_to_all_single" or not isinstance(node.args[0], fx.Node):
            continue
        source, splits = value_of(node.args[0]), node.args[1:3]
        if source is None or not all(isinstance(s, (list, tuple)) and s for s in splits):
            continue
        for parts in splits:
            assert isinstance(parts, (list, tuple))
            for part in parts:
                if isinstance(part, fx.Node) and "val" in part.meta:
                    expect_size(part.meta["val"], max(1, concrete(source.shape[0]) // len(parts)))
