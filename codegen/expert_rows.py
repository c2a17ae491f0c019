"""Tokens sorted by expert, sent to the ranks that hold their experts, and summed up again where they came from.

Every rank has its own tokens and holds n = experts / ranks experts, rank r those from r * n on. A token that its router
sends to k experts is k rows. The rows are sorted by expert; how many go where is exchanged first, then the rows, which
the local experts turn into as many results, then the results. The router's weights stay with the token.

How many rows come is known only when they come: sizes are unbacked symbols of a compiled graph, which stays one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .row_exchange import exchange_counts, exchange_rows

Compute = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Among whom experts are divided and how rows travel: to the experts in `dispatch`, back in `combine`, their
    gradients in `gradients`.

    The group is held by name: a process group could not be copied.
    """

    group: str
    ranks: int
    experts: int
    dispatch: str
    combine: str
    gradients: str


def route(compute: Compute, x: Tensor, index: Tensor, weights: Tensor, exchange: Exchange) -> Tensor:
    """sum over j of weights[t, j] * (what expert index[t, j] makes of x[t]), [tokens, columns], in x's dtype.

    x: [tokens, columns]; index: int64 [tokens, k]; weights: [tokens, k]. compute(rows, experts) applies local expert
    experts[i] (int64 [rows], from 0) to rows[i]; there may be no rows. All ranks of the group call it together.
    """
    ranks, k = exchange.ranks, index.shape[1]
    own = exchange.experts // ranks
    chosen = index.reshape(-1)
    with torch.no_grad():
        order = torch.argsort(chosen, stable=True)
        # a sum, since bincount's size depends on its data
        counts = chosen.new_zeros(exchange.experts).index_add(0, chosen, torch.ones_like(chosen))
        coming = exchange_counts(counts, ranks, exchange.group)
        splits = torch.stack([counts, coming]).view(2 * ranks, own).sum(1).tolist()
        for rows in splits:
            torch._check(rows >= 0)
        sent, received = splits[:ranks], splits[ranks:]
        torch._check(sum(sent) == chosen.shape[0])
        local = torch.arange(own, device=chosen.device).repeat(ranks)
        experts = torch.repeat_interleave(local, coming, output_size=sum(received))
    there = (sent, received, exchange.group, exchange.dispatch, exchange.gradients)
    back = (received, sent, exchange.group, exchange.combine, exchange.gradients)
    results = exchange_rows(compute(exchange_rows(x[order // k], *there), experts), *back)
    found = torch.zeros_like(results).index_copy(0, order, results)
    weighted = found.view(*index.shape, found.shape[1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(x.dtype)


class _Shared(torch.autograd.Function):
    """A weight that all ranks' tokens meet on one rank: its gradient counts 1 / ranks in that of the mean loss."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


def _apply(weight: Tensor, ranks: int) -> Tensor:
    shared: Tensor = _Shared.apply(weight, ranks)
    return shared


shared_weight: Callable[[Tensor, int], Tensor]
# for the sake of backward nodes, as in row_exchange.py
shared_weight = torch._dynamo.allow_in_graph(_apply)  # type: ignore[no-untyped-call]
"""shared_weight(weight, ranks): the weight, whose gradient is divided by the number of ranks."""


def connected(results: Tensor, sources: list[Tensor]) -> Tensor:
    """The results, made to depend on their sources where they do not: loops over experts leave a rank without tokens
    out of the backward pass, for which the other ranks would wait for ever.
    """
    wanting = [s for s in sources if s.requires_grad]
    if results.requires_grad or not wanting or not torch.is_grad_enabled():
        return results
    for source in wanting:
        results = results + source.reshape(-1)[:0].sum().to(results.dtype)
    return results
