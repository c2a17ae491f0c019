"""What the ranks of a test run; module-level, so that they can be started in processes of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from llama import Llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dsmp.codegen.collective_nodes import find_collectives
from dsmp.compiler.parallelize import parallelize
from dsmp.errors import InputSpecError, RanksDisagreeError
from dsmp.passes.sharding import ShardingPlan, ShardingRule

BATCH, LENGTH, VOCABULARY = 4, 16, 64


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """ids and targets of a global batch; some targets do not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    targets[0, :5] = -100
    return ids, targets


def model(tied: bool = False) -> Llama:
    torch.manual_seed(0)
    found = Llama(layers=1, vocabulary=VOCABULARY, length=LENGTH)
    if tied:
        found.head.weight = found.embed.weight
    return found


def step(module: nn.Module, *args: Any) -> dict[str, Any]:
    """Loss and gradients (whole) of one call."""
    loss = module(*args)
    loss.backward()
    found = {"loss": loss.detach().numpy()}
    for name, p in module.named_parameters():
        grad: Any = p.grad
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).numpy()
    return found


def train(cases: dict[str, tuple[dict[str, int], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One step of the model (of the tied one in cases called so), sharded by "auto", for every case: name -> (mesh,
    options of parallelize)."""
    found = {}
    for name, (sizes, options) in cases.items():
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        sharded = parallelize(model(tied=name == "tied"), mesh, inputs=tokens(), **options)
        args, _ = sharded.shard_inputs(*tokens())
        found[name] = step(sharded, *args)
    return found


def everything(cases: dict[str, tuple[dict[str, int], dict[str, Any]]]) -> dict[str, Any]:
    """All that a test asks of two ranks, in one start of them."""
    return {"train": train(cases), "disagree": disagree(), "uses": uses()}


def wires(cases: dict[str, tuple[dict[str, int], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """`train`, and what the collectives of each case send: (bytes as written, bytes)."""
    found = {}
    for name, (sizes, options) in cases.items():
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        sharded = parallelize(model(), mesh, inputs=tokens(), **options)
        args, _ = sharded.shard_inputs(*tokens())
        sent = (sum(s.bytes_as_written for s in sharded.sent), sum(s.bytes for s in sharded.sent))
        found[name] = {"step": step(sharded, *args), "sent": sent, "reasons": [s.reason for s in sharded.sent]}
    return found


def twice() -> list[float]:
    """Losses on two meshes of equal layout, one after the other; their groups have names of their own."""
    found = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharded = parallelize(model(), mesh, inputs=tokens(), zero=3)
        groups = {c.group for c in find_collectives(sharded.graph.gm)}
        assert groups == {mesh.get_group(dim).group_name for dim in ("dp", "tp")}
        found.append(float(sharded(*sharded.shard_inputs(*tokens())[0])))
    return found


def disagree() -> list[str]:
    """What happens where the ranks of a mesh hold different plans, then different models."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    pattern = ("layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight")[rank]
    rule = ShardingRule(pattern=pattern, placements={"tp": "replicate"})
    other = [torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))][rank]
    rows = ShardingPlan(
        mesh={"dp": 1, "tp": 2}, parameters=(ShardingRule(pattern="*weight", placements={"tp": "shard(1)"}),)
    )
    found = []
    for attempt in (
        lambda: parallelize(model(), mesh, inputs=tokens(), rules=[rule]),
        lambda: parallelize(other, mesh, rows, inputs=(torch.zeros(4, 8),)),
    ):
        try:
            attempt()
        except RanksDisagreeError as error:
            found.append(str(error))
    return found


def uses() -> dict[str, Any]:
    """What a user does with a sharded module: names, state, optimizer steps, wrong inputs, results that are divided."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found: dict[str, Any] = {}
    whole = model()
    sharded = parallelize(whole, mesh, inputs=tokens(), zero=3)
    found["names"] = list(sharded.state_dict()) == list(whole.state_dict())
    found["local"] = tuple(sharded.head.weight.to_local().shape)
    found["state"] = all(torch.equal(v.full_tensor(), whole.state_dict()[n]) for n, v in sharded.state_dict().items())
    args, _ = sharded.shard_inputs(*tokens())
    try:
        sharded(*tokens())
    except InputSpecError as error:
        found["refused"] = str(error)
    found["step"] = step(sharded, *args)
    for module, inputs in ((sharded, args), (whole, tokens())):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = module(*inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found["sharded" if module is sharded else "whole"] = losses
    norm = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    twin = parallelize(norm, mesh, inputs=(inputs,))
    result = twin(*twin.shard_inputs(inputs)[0])
    found["result"] = (result.full_tensor() - norm(inputs)).abs().max().item()
    running = twin.get_buffer("1.running_mean").full_tensor() - norm.get_buffer("1.running_mean")
    found["buffer"] = running.abs().max().item()
    return found
