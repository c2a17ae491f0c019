"""Users' own DTensor code, compiled, in each rank: tensor parallel layers and SimpleFSDP-style parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from feedback_ranks import batch as feedback_batch
from feedback_ranks import net
from model_ranks import starts
from rank_functions import Traffic
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dsmp
from dsmp.codegen.feedback import compress_gradients

WIDTH = 64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank))


def gathered(name: str) -> property:
    """A parameter that is stored in shards and read whole; its gradient is the mean of the ranks'."""

    def get(self: nn.Module) -> torch.Tensor:
        shards: DTensor = self._parameters[name]
        return shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    return property(get)


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards in place of parameters and properties that gather them, as SimpleFSDP (arXiv 2411.00284) has them."""
    for module in list(model.modules()):
        names = list(module._parameters)
        for name in names:
            shards = distribute_tensor(module._parameters[name].data, mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(shards)
        if names:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {n: gathered(n) for n in names})
    return model


def tensor_parallel(model: Stack, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


STYLES: dict[str, Callable[..., nn.Module]] = {"tensor parallel": tensor_parallel, "SimpleFSDP": simple_fsdp}


def train(style: str, wire: str | None, executor: str = "eager") -> dict[str, Any]:
    """One step: errors of gradients and result, bytes measured and planned, keys of products."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    whole, model = stack(), STYLES[style](stack(), mesh)
    replicated = style == "tensor parallel"
    inputs = [batch(0)] if replicated else [batch(r) for r in range(ranks)]
    (sum(whole(x).square().mean() for x in inputs) / len(inputs)).backward()
    options = {"executor": executor, **({} if wire is None else {"wire": wire})}
    call = torch.compile(model, backend="dsmp", options=options, fullgraph=True)
    x = inputs[0 if replicated else rank]

    def step() -> torch.Tensor:
        model.zero_grad()
        result = call(x)
        result.square().mean().backward()
        return result.detach()

    step()
    with Traffic() as traffic:
        result = step()
    exact, wanted = dict(whole.named_parameters()), whole(x).detach()
    errors = [
        float((p.grad.full_tensor() - exact[n].grad).norm() / exact[n].grad.norm()) for n, p in model.named_parameters()
    ]
    keys = sorted(d.key for d in dsmp.plan_of(call) if d.op in ("linear", "matmul"))
    plain = dsmp.capture(stack(), (x,))
    return {
        "errors": [*errors, float((result - wanted).norm() / wanted.norm())],
        "sent": copy.copy(traffic.sent),
        "planned": {d.key: d.reason.text for d in dsmp.plan_of(call) if starts(d.key)},
        "ran": {e.key: e.implementation for e in dsmp.audit(call) if starts(e.key)},
        "keys": keys,
        "plain": sorted(k for g in plain for k in g.key_texts() if k.split("|")[2] in ("linear", "matmul")),
    }


def two_encodings(own: str, wire: str | None) -> tuple[dict[str, float], dict[str, torch.Tensor], list[str]]:
    """Bytes and gradients where compress_gradients sends in `own` and the backend is asked for `wire`, and what the
    audit says of collectives."""
    model = compress_gradients(net(), wire=own)
    options = {"executor": "eager", **({} if wire is None else {"wire": wire})}
    call = torch.compile(model, backend="dsmp", options=options, fullgraph=True)
    with Traffic() as traffic:
        call(feedback_batch(dist.get_rank())).square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    return dict(traffic.sent), gradients, [e.implementation for e in dsmp.audit(call) if starts(e.key)]
