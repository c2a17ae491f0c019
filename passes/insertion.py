"""New nodes with everything that later passes, the partitioner and Inductor expect of a node."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from .graph import is_backward

_OWN_META = frozenset({"val", "tensor_meta", "dsmp_key", "eager_input_vals", "unbacked_bindings"})


def insert_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    like: fx.Node,
    joint: bool,
    after: fx.Node | None = None,
    before: fx.Node | None = None,
) -> fx.Node:
    """A call next to `after` or `before`, with the provenance of `like`, its own fake value and, in a joint graph, the
    part of the step (forward or backward) that `like` belongs to."""
    context = graph.inserting_after(after) if after is not None else graph.inserting_before(before)
    with context:
        node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in _OWN_META}
    if joint:
        node.meta["partitioner_tag"] = "is_backward" if is_backward(like) else "is_forward"
    node.meta["val"] = fake_result(target, args, kwargs)
    return node


def fake_result(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call returns on the fake values of its arguments."""
    fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    if target is operator.getitem:
        return fake_args[0][fake_args[1]]
    modes = [t.fake_mode for t in tree_leaves((fake_args, fake_kwargs)) if isinstance(t, FakeTensor)]
    if not modes:
        return target(*fake_args, **fake_kwargs)
    with modes[0], torch.no_grad():
        return target(*fake_args, **fake_kwargs)
