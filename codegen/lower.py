"""Replace legal nodes by what runs best, and keep the partitioner from moving what must not move: the last step
before a graph is handed to an executor.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..passes.gemm import written_gradients
from ..passes.graph import VIEW_OPS, aten, calls, is_backward, is_joint, node_op


def merge_backward(gm: fx.GraphModule) -> int:
    """Merge the two halves of a split fused backward node where both read the same tensors; returns how many were
    merged.

    Planning splits convolution backward into dgrad and wgrad. If both ended up in one precision, one call computes
    both.
    """
    halves: defaultdict[tuple[str, Any], list[fx.Node]] = defaultdict(list)
    for node in calls(gm):
        if "dsmp_split_of" in node.meta:
            halves[node.meta["dsmp_split_of"], node.target].append(node)
    count = 0
    for pair in halves.values():
        if len(pair) == 2 and _same_inputs(*pair):
            _merge(gm, *pair)
            count += 1
    if count:
        gm.recompile()
    return count


def _same_inputs(first: fx.Node, second: fx.Node) -> bool:
    return _without_mask(first) == _without_mask(second) and first.kwargs == second.kwargs


def _without_mask(node: fx.Node) -> tuple[Any, ...]:
    """The arguments without a convolution's output mask, which is what the halves differ in."""
    return node.args[:-1] if isinstance(node.args[-1], list) else node.args


def _merge(gm: fx.GraphModule, first: fx.Node, second: fx.Node) -> None:
    """Compute everything in one call, placed where the first of the two was."""
    dgrad = first if written_gradients(first)[0] else second
    wgrad = second if dgrad is first else first
    with gm.graph.inserting_before(first):
        args = list(first.args)
        if isinstance(args[-1], list):
            args[-1] = [a or b for a, b in zip(dgrad.args[-1], wgrad.args[-1], strict=True)]  # type: ignore[arg-type]
        both = gm.graph.create_node("call_function", first.target, tuple(args), dict(first.kwargs))
    both.meta = {k: v for k, v in dgrad.meta.items() if k not in ("dsmp_split_of", "dsmp_writes")}
    both.meta["val"] = tuple(
        d if d is not None and index == 0 else w
        for index, (d, w) in enumerate(zip(dgrad.meta["val"], wgrad.meta["val"], strict=True))
    )
    both.meta["dsmp_merged"] = (dgrad.meta.get("dsmp_key"), wgrad.meta.get("dsmp_key"))
    for half in (first, second):
        for item in list(half.users):
            assert item.target is operator.getitem
            item.replace_input_with(half, both)
        gm.graph.erase_node(half)
    # Readers of the first half may stand before the second half: tuple accesses move behind the merged call.
    for item in list(both.users):
        both.append(item)


def protect_mutated_inputs(gm: fx.GraphModule) -> int:
    """Keep the backward pass from reading an input that the forward pass has overwritten; returns how many there are.

    A buffer that is updated in place becomes a `copy_` into its placeholder at the end of the forward pass. The
    partitioner does not see that: to save memory it may recompute, in the backward pass, from the placeholder, which
    by then holds the new value. What is computed from such an input is therefore saved, and what the backward pass
    reads of the input itself is a copy.
    """
    if not is_joint(gm):
        return 0
    mutated = {n.args[0] for n in calls(gm) if n.target is aten.copy_.default and _is_placeholder(n.args[0])}
    for node in mutated:
        assert isinstance(node, fx.Node)
        late = []
        for reader, value in _readers(node):
            if is_backward(reader):
                late.append((reader, value))
            elif reader.op == "call_function" and reader.target is not aten.copy_.default:
                for part in (reader, *(u for u in reader.users if u.target is operator.getitem)):
                    part.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                    part.meta.setdefault("ac_graph_id", 0)
        for reader, value in late:
            reader.replace_input_with(value, _copy_of(gm, value))
    if mutated:
        gm.recompile()
    return len(mutated)


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder"


def _readers(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(reader, value read) of everything that reads a value's memory; views share it, copies do not."""
    found = []
    pending = [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            if node_op(user) in VIEW_OPS and user.target is not aten.clone.default and not is_backward(user):
                pending.append(user)
            else:
                found.append((user, value))
    return found


def _copy_of(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    """A copy taken in the forward pass, before anything is overwritten."""
    anchor = value if value.op != "placeholder" else [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    with gm.graph.inserting_after(anchor):
        copy = gm.graph.call_function(aten.clone.default, (value,))
    copy.meta = {
        "val": torch.empty_like(value.meta["val"]),
        "partitioner_tag": "is_forward",
        "recompute": CheckpointPolicy.MUST_SAVE,
        "ac_graph_id": 0,
    }
    return copy
