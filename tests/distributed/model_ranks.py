"""Models whose authors wrote their collectives themselves, and a training step of them in each rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_functions import Traffic, collective
from torch import nn

import dsmp


class Gather(torch.autograd.Function):
    """A whole weight from the ranks' rows of it; its gradient goes back as the mean of each rank's rows."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        return collective(shard, "all_gather")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return collective(grad.contiguous(), "reduce_scatter", "avg")


class Mean(torch.autograd.Function):
    """A weight that every rank has whole; its gradient is averaged."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return collective(grad, "all_reduce", "avg")


class Layer(nn.Module):
    def __init__(self, width: int, placed: str) -> None:
        super().__init__()
        self.placed = placed
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.placed == "sharded":
            return F.linear(x, Gather.apply(self.weight)) * Gather.apply(self.scale)
        if self.placed == "replicated":
            return F.linear(x, Mean.apply(self.weight)) * Mean.apply(self.scale)
        return F.linear(x, self.weight) * self.scale


class Stack(nn.Module):
    def __init__(self, placed: str, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, placed) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


class SumOverRanks(torch.autograd.Function):
    """Partial results added up, as at the end of a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return collective(x, "all_reduce")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class SumOfGradients(torch.autograd.Function):
    """The input of a column-parallel layer, whose gradient is the sum of the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return collective(grad, "all_reduce")


def stack(placed: str) -> Stack:
    torch.manual_seed(0)
    return Stack(placed)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))


def reference() -> dict[str, torch.Tensor]:
    model, ranks = stack("whole"), dist.get_world_size()
    (sum(model(batch(r)).square().mean() for r in range(ranks)) / ranks).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def train(placed: str, wire: Any, executor: str = "eager") -> dict[str, Any]:
    """One step: the largest relative error of a gradient, the bytes measured and planned, and what was reported."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = stack(placed)
    if placed == "sharded":
        for p in model.parameters():
            p.data = p.data.chunk(ranks)[rank].clone()
    warnings: list[str] = []
    logging.getLogger("dsmp").warning = lambda text, *args: warnings.append(text % args)
    # products in fp32 whatever the tier of the running CPU says
    options = {"executor": executor, "rules": {"*|linear|*": "fp32"}, **({} if wire is None else {"wire": wire})}
    compiled = torch.compile(model, backend="dsmp", options=options, fullgraph=True)

    def step() -> None:
        model.zero_grad()
        compiled(batch(rank)).square().mean().backward()

    step()
    with Traffic() as traffic:
        step()
    wanted = reference()
    errors = []
    for n, p in model.named_parameters():
        exact = wanted[n].chunk(ranks)[rank] if placed == "sharded" else wanted[n]
        errors.append(float((p.grad - exact).norm() / exact.norm()))
    collectives = {d.key: d.reason.text for d in dsmp.plan_of(compiled) if starts(d.key)}
    ran = {e.key: (e.implementation, e.reason) for e in dsmp.audit(compiled) if starts(e.key)}
    return {
        "error": max(errors), "sent": copy.copy(traffic.sent), "planned": collectives, "ran": ran, "warnings": warnings,
        "gradients": {n: p.grad.clone() for n, p in model.named_parameters()},
    }  # fmt: skip


def starts(key: str) -> bool:
    """Whether a key is that of a collective that a wire format can be asked for."""
    return key.split("|")[2] in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def tensor_parallel(wire: str | None) -> list[float]:
    """Errors of an MLP that is split by columns, then by rows, and of its input's gradient, for batches of several
    sizes, compiled with symbolic sizes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    up, down = (torch.randn(shape, generator=generator) / 8 for shape in ((96, 64), (48, 96)))
    mine = up.chunk(ranks)[rank].clone().requires_grad_(), down.chunk(ranks, dim=1)[rank].clone().requires_grad_()

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return SumOverRanks.apply(F.linear(F.gelu(F.linear(SumOfGradients.apply(x), mine[0])), mine[1])).tanh()

    options = {"executor": "eager", **({} if wire is None else {"wire": wire})}
    compiled: Callable[..., torch.Tensor] = torch.compile(mlp, backend="dsmp", options=options, dynamic=True)
    errors = []
    for rows in (5, 16, 33):
        x = torch.randn(rows, 64, generator=generator)
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        found, exact = compiled(ours), F.linear(F.gelu(F.linear(theirs, up)), down).tanh()
        found.square().sum().backward()
        exact.square().sum().backward()
        errors += [float((a - b).norm() / b.norm()) for a, b in ((found, exact), (ours.grad, theirs.grad))]
    return errors
