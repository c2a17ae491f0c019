"""What two ranks do with a precision plan that was made for their mesh."""

from __future__ import annotations

from typing import Any

import torch
from llama import Llama
from rank_programs import step, tokens
from torch.distributed.device_mesh import init_device_mesh

import dsmp
from dsmp.errors import RanksDisagreeError


def wide_model() -> Llama:
    """Large enough for collectives that are worth encoding."""
    torch.manual_seed(0)
    return Llama(layers=3, width=64, hidden=128)


def follow(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """A step under the plan of a file: loss and gradients, what was sent, what ran."""
    plan = dsmp.load_plan(path)
    mesh = init_device_mesh("cpu", tuple(plan.mesh.mesh.values()), mesh_dim_names=tuple(plan.mesh.mesh))
    sharded = dsmp.parallelize(wide_model(), mesh, path, inputs=tokens(), **options)
    args, _ = sharded.shard_inputs(*tokens())
    found = step(sharded, *args)
    return {
        "step": found,
        "sent": {s.key: (s.wire, s.bytes) for s in sharded.sent},
        "ran": {e.key: (e.compute, e.ran.value) for e in sharded.audit},
    }


def differ(paths: list[str]) -> str:
    """Ranks that hold different plans."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        dsmp.parallelize(wide_model(), mesh, paths[mesh.get_local_rank()], inputs=tokens())
    except RanksDisagreeError as error:
        return str(error)
    return ""
