"""What the tests of FSDP2 (`fully_shard`) run in each rank."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.distributed as dist
from feedback_ranks import batch, net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dsmp
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch
from dsmp.passes.plan_fields import GEMM_CLASSES

EAGER = {"executor": "eager"}


def gpt() -> SmallGpt:
    torch.manual_seed(0)
    return SmallGpt(SmallGptConfig(layers=2, context=32))


def products(compiled: Any) -> dict[str, tuple[str, str, str]]:
    return {d.key: (d.traced, d.compute, d.output) for d in dsmp.plan_of(compiled) if d.op in GEMM_CLASSES}


def warnings() -> list[str]:
    """What dsmp warns of from now on."""
    found: list[str] = []
    logging.getLogger("dsmp").warning = lambda text, *args: found.append(text % args)
    return found


def train(gather: str, reduce: str, hardware: str | None) -> dict[str, Any]:
    """A step of the small GPT with sharded, compiled blocks against one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    inputs = small_gpt_batch(batch=2 * ranks, context=32)
    whole, model = gpt(), gpt()
    loss = whole(*inputs)
    loss.backward()
    options = {**EAGER, **({"hardware": hardware} if hardware else {})}
    plain = copy.deepcopy(model.blocks[0])
    plain.compile(backend="dsmp", options=options)
    plain(torch.randn(2, 32, 128)).sum().backward()
    torch._dynamo.reset()
    policy = dsmp.fsdp_policy(gather, reduce=reduce)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
        block.compile(backend="dsmp", options=options)
    fully_shard(model, mesh=mesh)  # head and loss as they are written
    mine = [x.chunk(ranks)[rank] for x in inputs]
    sharded = model(*mine)
    sharded.backward()
    mean = sharded.detach().float()
    dist.all_reduce(mean)
    exact = dict(whole.named_parameters())
    errors = [
        float((p.grad.full_tensor() - exact[n].grad).norm() / exact[n].grad.norm()) for n, p in model.named_parameters()
    ]
    found = products(model.blocks[0])
    return {
        "loss": abs(float(mean) / ranks / float(loss) - 1),
        "errors": errors,
        "keys": list(products(plain)) == list(found),
        "formats": set(found.values()),
        "names": sorted(found),
    }


def whole_model() -> dict[str, Any]:
    """The whole model compiled around sharded blocks: names of what is planned, and what is said of the rest."""
    model, said = gpt(), warnings()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    call = torch.compile(model, backend="dsmp", options=EAGER)
    call(*small_gpt_batch(batch=1, context=32)).backward()
    return {"keys": set(products(call)), "warnings": said}


class Bare(nn.Module):
    """Linear layers that are sharded themselves, with code of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)) * 2)


def bare_layers() -> dict[str, Any]:
    """Models whose linear layers are wrapped themselves: what plan_of says."""
    said = warnings()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, model in (
        ("own", Bare()),
        ("sequential", nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))),
    ):
        torch._dynamo.reset()
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        call = torch.compile(model, backend="dsmp", options=EAGER)
        call(torch.randn(4, 16)).sum().backward()
        try:
            found[name] = {d.key for d in dsmp.plan_of(call) if d.op in GEMM_CLASSES}
        except dsmp.DsmpError as error:
            found[name] = str(error)
    return {**found, "warnings": said}


def wire_without_collectives(how: str, strict: bool) -> tuple[list[str], str]:
    """What the option `wire` says of a module whose collectives stand in no graph: (warnings, error)."""
    said, options = warnings(), {**EAGER, "wire": "int8", "strict": strict}
    call: Any
    if how == "around DDP":
        call = torch.compile(DistributedDataParallel(net()), backend="dsmp", options=options)
    elif how == "inside DDP":
        call = DistributedDataParallel(torch.compile(net(), backend="dsmp", options=options))
    elif how == "FSDP":
        call = net()
        call.scale = nn.Parameter(torch.ones(1))  # it takes no scalars
        fully_shard(call, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        call = torch.compile(call, backend="dsmp", options=options)
    else:
        call = torch.compile(net(), backend="dsmp", options=options)
    try:
        call(batch(0)).sum().backward()
    except Exception as error:
        return said, f"{type(error).__name__}: {error}"
    return said, ""
