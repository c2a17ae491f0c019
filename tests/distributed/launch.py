"""Start a few processes of a test with a gloo process group between them, and collect what each returns."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

TIME_LIMIT = 240


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`function(*args)` on every rank of a gloo group on this machine; the results in rank order.

    `function` is module-level. An exception of a rank and a rank that takes longer than the time limit fail the test;
    processes that are left are ended.
    """
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    port = free_port()
    workers = [context.Process(target=_rank, args=(queue, function, r, ranks, port, args)) for r in range(ranks)]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < ranks:
            rank, result, failure = queue.get(timeout=TIME_LIMIT)
            assert failure is None, f"rank {rank} failed:\n{failure}"
            found[rank] = result
    except Empty:
        raise AssertionError(f"only ranks {sorted(found)} of {ranks} answered in {TIME_LIMIT} s") from None
    finally:
        for worker in workers:
            worker.join(timeout=5 if len(found) == ranks else 0)
            if worker.is_alive():
                worker.terminate()
                worker.join()
    return [found[r] for r in range(ranks)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank(queue: Any, function: Callable[..., Any], rank: int, ranks: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        queue.put((rank, function(*args), None))
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
