"""Who reads a node's result: what may be stored narrow depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .dataflow import readers
from .gemm import gemm_op, operand_nodes
from .graph import is_getitem, node_op, operands

RANKING_OPS = frozenset(
    {
        "aten.topk", "aten.kthvalue", "aten.multinomial", "aten.sort", "aten.msort", "aten.argsort", "aten.argmax",
        "aten.argmin",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Who reads a node's result: the model's output, a ranking operator, nobody but GEMMs."""

    output: bool
    ranked: bool
    gemms: frozenset[fx.Node]
    only_gemms: bool


def use_of(node: fx.Node) -> Use:
    """Who reads a node's result; of a fused attention only the product counts, not its statistics."""
    op = gemm_op(node)
    products = op.results if op is not None else None
    heads = [node]
    if products is not None:
        heads = [u for u in node.users if is_getitem(u) and u.args[1] in products] or heads
    pairs = [pair for head in heads for pair in readers(head)]
    gemms = frozenset(
        user
        for value, user in pairs
        if gemm_op(user) is not None and operand_nodes(user).count(value) == operands(user).count(value)
    )
    users = {user for _, user in pairs}
    return Use(
        output=any(user.op == "output" for user in users),
        ranked=any(node_op(user) in RANKING_OPS for user in users),
        gemms=gemms,
        only_gemms=bool(users) and users == gemms,
    )
