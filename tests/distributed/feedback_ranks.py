"""What the tests of error feedback run in each rank."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from dsmp.codegen.feedback import compress_gradients


class Net(nn.Module):
    """Two layers, one of a length that no two ranks can halve."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(33, 65)
        self.down = nn.Linear(65, 31, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(16, 33, generator=torch.Generator().manual_seed(100 + rank))


def exact() -> dict[str, torch.Tensor]:
    """The mean gradients over all ranks, in one process."""
    model, ranks = net(), dist.get_world_size()
    (sum(model(batch(r)).square().mean() for r in range(ranks)) / ranks).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def errors_of_means(wire: str, steps: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Relative error of the mean gradient after 1 ... `steps` steps on one batch; last gradients; the state."""
    model = compress_gradients(net(), wire=wire)
    call: Any = model
    if options is not None:
        call = torch.compile(model, backend="dsmp", options=options, fullgraph=True)
    wanted = exact()
    total = {n: torch.zeros_like(g) for n, g in wanted.items()}
    errors = []
    for step in range(1, steps + 1):
        model.zero_grad()
        call(batch(dist.get_rank())).square().mean().backward()
        for n, p in model.named_parameters():
            total[n] += p.grad
        wrong = sum(float((total[n] / step - g).square().sum()) for n, g in wanted.items())
        errors.append(math.sqrt(wrong / sum(float(g.square().sum()) for g in wanted.values())))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    return {"errors": errors, "gradients": gradients, "state": copy.deepcopy(model.state_dict())}


def resumed(steps: int) -> list[bool]:
    """Whether a model that was saved and loaded half way gives the same gradients as one that went on."""

    def advance(model: nn.Module, count: int) -> None:
        for _ in range(count):
            model.zero_grad()
            model(batch(dist.get_rank())).square().mean().backward()

    first = compress_gradients(net())
    advance(first, steps)
    second = compress_gradients(net())
    second.load_state_dict(first.state_dict())
    twin = copy.deepcopy(first)
    for model in (first, second, twin):
        advance(model, steps)
    others = [dict(m.named_parameters()) for m in (second, twin)]
    return [torch.equal(p.grad, o[n].grad) for n, p in first.named_parameters() for o in others]


def after_a_nan() -> tuple[bool, bool, float]:
    """A step in which one rank's input is NaN: whether the gradients show it and the residuals are finite, and the
    error of the next step."""
    model = compress_gradients(net(), wire="int8")
    x = batch(dist.get_rank())
    broken = x.clone()
    if dist.get_rank() == 1:
        broken[0, 0] = math.nan
    model(broken).square().mean().backward()
    seen = all(not p.grad.isfinite().all() for p in model.parameters())
    clean = all(b.isfinite().all() for b in model.buffers())
    model.zero_grad()
    model(x).square().mean().backward()
    wanted = exact()
    worst = max(float((p.grad - wanted[n]).norm() / wanted[n].norm()) for n, p in model.named_parameters())
    return seen, bool(clean), worst


def mistakes() -> list[str]:
    """The messages of what cannot be set up."""
    found = []
    done = compress_gradients(net())
    frozen = net().requires_grad_(False)
    sharded = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded.down.weight = nn.Parameter(distribute_tensor(sharded.down.weight.data, mesh, [Replicate()]))
    for module in (done, frozen, nn.parallel.DistributedDataParallel(net()), sharded):
        try:
            compress_gradients(module)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
