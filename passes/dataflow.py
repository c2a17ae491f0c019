"""Where numbers come from and where they go, looking through views, slices and tuple accesses."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from .graph import is_getitem, root
from .op_rules import Policy, rule_of


def source_of(value: fx.Node) -> fx.Node:
    """The call or placeholder that computed the numbers of `value`; of an item of a tuple the call that made it."""
    source = root(value)
    return source.all_input_nodes[0] if is_getitem(source) else source


def readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(value, user) pairs of everything that reads a node's numbers; the graph's output counts as a user."""
    pending = [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            if is_getitem(user) or (user.op == "call_function" and rule_of(user).policy is Policy.VIEW):
                pending.append(user)
            else:
                yield value, user
