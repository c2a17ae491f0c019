"""Latency and bandwidth of collectives among the processes that torchrun started.

Every operation is timed over a range of sizes, the slowest process counting, and

    seconds = latency + bytes / bandwidth

is fitted by least squares of the relative errors, both terms non-negative. `bytes` is the tensor that a rank holds in
full: the result of all_gather, the input of reduce_scatter and all_to_all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...hardware_db.measurement import CollectiveOp, CollectivePoint
from .gemm import significant

OPERATIONS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)

_LEAST_BYTES = 2**12
_MOST_BYTES = {"cpu": 2**24}
_MOST_BYTES_DEFAULT = 2**28
_STEP = 8
_SAMPLES = 7
_CALLS_BYTES = 2**22
_MOST_CALLS = 16
_LEAST_SECONDS = 1e-9
_LARGEST_RATE = 1e14


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """The group of the processes that torchrun started, for the device of this one; yields its rank, 0 without
    torchrun."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield 0
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    dist.init_process_group(dist.get_default_backend_for_device(_device()))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def measure_collectives(progress: Callable[[str], None]) -> list[CollectivePoint]:
    """One point for each operation that the group's backend has; none without a group or in a group of one."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return []
    found = []
    for op in OPERATIONS:
        progress(op)
        try:
            samples = [(size, _seconds(op, size)) for size in _sizes()]
        except (RuntimeError, ValueError):
            continue  # every rank is refused alike: the backend lacks it
        latency, rate = fit_line(samples)
        found.append(
            CollectivePoint(
                op=op, backend=dist.get_backend(), ranks=dist.get_world_size(),
                latency_s=significant(latency), bytes_per_s=significant(rate),
            )
        )  # fmt: skip
    return found


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency in seconds and rate in bytes/s of (bytes, seconds) samples, at least two."""
    sizes, seconds = np.array(samples, dtype=float).T
    terms = np.stack([1 / seconds, sizes / seconds], axis=1)
    found = np.linalg.lstsq(terms, np.ones_like(sizes), rcond=None)[0]
    if found.min() < 0:  # of two terms one is positive, and the best fit is that one's alone
        alone = terms.sum(axis=0) / (terms**2).sum(axis=0)
        found = np.where(found < 0, 0.0, alone)
    latency, per_byte = map(float, found)
    return max(latency, _LEAST_SECONDS), 1 / max(per_byte, 1 / _LARGEST_RATE)


def _seconds(op: CollectiveOp, size: int) -> float:
    """Seconds of one operation on the slowest rank. All ranks make the same calls, so their number is fixed."""
    call = _operation(op, size)
    calls = max(1, min(_CALLS_BYTES // size, _MOST_CALLS))
    samples = []
    for _ in range(1 + _SAMPLES):
        dist.barrier()
        _wait()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        _wait()
        samples.append((time.perf_counter() - started) / calls)
    slowest = torch.tensor(sorted(samples[1:]), device=_device(), dtype=torch.float32)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[_SAMPLES // 4])


def _operation(op: CollectiveOp, size: int) -> Callable[[], object]:
    """A call of the operation on a tensor of `size` bytes."""
    ranks = dist.get_world_size()
    share = max(1, size // 4 // ranks)
    whole, part = (torch.zeros(n, device=_device()) for n in (share * ranks, share))
    # newer versions of torch have other names for the same
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[CollectiveOp, Callable[[Tensor, Tensor], object]] = {
        "all_reduce": lambda w, _: dist.all_reduce(w),
        "all_gather": lambda w, p: gather(w, p),
        "reduce_scatter": lambda w, p: scatter(p, w),
        "all_to_all": lambda w, _: dist.all_to_all_single(torch.empty_like(w), w),
        "broadcast": lambda w, _: dist.broadcast(w, src=0),
    }
    call = calls[op]
    return lambda: call(whole, part)


def _sizes() -> list[int]:
    most = _MOST_BYTES.get(_device().type, _MOST_BYTES_DEFAULT)
    sizes = [_LEAST_BYTES]
    while sizes[-1] * _STEP <= most:
        sizes.append(sizes[-1] * _STEP)
    return sizes


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
