"""Ranks of which one dies, or stops for ever, while the others are in a collective with it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rank_programs import model, tokens
from torch.distributed.device_mesh import init_device_mesh

from dsmp.compiler.parallelize import parallelize


def serve(
    pipe: Connection,
    store: str,
    rank: int,
    sizes: dict[str, int],
    options: dict[str, Any],
    half: str,
    victim: int,
    seconds: float,
) -> None:
    """One whole step; then the victim waits for its end, and the others send what the next `half` raises.

    Sends "ready", then (class, message, class of the cause, seconds, mesh dimensions) of the error, if there is one.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    ranks = torch.Size(sizes.values()).numel()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    sharded = parallelize(model(), mesh, inputs=tokens(), **options)
    args, _ = sharded.shard_inputs(*tokens())
    sharded(*args).backward()
    loss = sharded(*args) if half == "backward" else None
    for name in sizes:  # so that no rank notices the loss elsewhere than in the step; compiling took longer
        mesh.get_group(name)._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))
    dist.barrier()
    pipe.send("ready")
    if rank == victim:
        time.sleep(600)
    started = time.monotonic()
    try:
        if loss is None:
            sharded(*args)
        else:
            loss.backward()
    except Exception as error:
        cause = type(error.__cause__).__name__
        found = (type(error).__name__, str(error), cause, time.monotonic() - started, getattr(error, "dims", ()))
        pipe.send(found)
    else:
        pipe.send(None)
