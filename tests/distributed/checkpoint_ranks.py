"""What the tests of checkpoints run in each rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rank_programs import model, step, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from dsmp.compiler.parallelize import parallelize
from dsmp.compiler.sharded_module import ShardedModule
from dsmp.errors import EmptyStateError

LEARNING_RATE = 1e-2


def other_weights(module: nn.Module) -> nn.Module:
    """The module with weights that no seed of the tests gives."""
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.25)
    return module


def shard(sizes: dict[str, int], options: dict[str, Any], *, tied: bool = False, meta: bool = False) -> ShardedModule:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with torch.device("meta" if meta else "cpu"):
        whole = model(tied=tied)
    return parallelize(whole, mesh, inputs=tokens(), **options)


def load_and_save(
    sizes: dict[str, int], options: dict[str, Any], source: Path, target: Path, tied: bool, meta: bool
) -> dict[str, Any]:
    """A checkpoint of the whole model into a sharded module, one step of it, and the module as a checkpoint."""
    sharded = shard(sizes, options, tied=tied, meta=meta)
    if meta:
        with contextlib.suppress(EmptyStateError):
            sharded(*sharded.shard_inputs(*tokens())[0])
            raise AssertionError("a module without values was run")
        sharded.to_empty(device="cpu")
    assert (sharded.embed.weight is sharded.head.weight) == tied
    state = sharded.state_dict()
    dcp.load(state, checkpoint_id=source)
    sharded.load_state_dict(state)
    args, _ = sharded.shard_inputs(*tokens())
    found = step(sharded, *args)
    dcp.save(sharded.state_dict(), checkpoint_id=target)
    return found


def train(module: nn.Module, args: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def stop_and_go_on(first: dict[str, int], second: dict[str, int], folder: Path) -> list[float]:
    """Losses of two steps on one mesh and, from its checkpoint, two on another, AdamW's state included."""
    losses = []
    for sizes in (first, second):
        sharded = shard(sizes, {"zero": 3} if "dp" in sizes else {})
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE)
        if sizes is second:
            other_weights(sharded)
            weights, moments = get_state_dict(sharded, optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
            set_state_dict(sharded, optimizer, model_state_dict=weights, optim_state_dict=moments)
        losses += train(sharded, sharded.shard_inputs(*tokens())[0], optimizer, 2)
        if sizes is first:
            weights, moments = get_state_dict(sharded, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return losses
