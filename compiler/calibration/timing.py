"""How long a call takes on a device: many short blocks of calls are timed, and one of the fastest counts.

Other programs only ever slow a block, so the fast ones tell what the device can do. Blocks are short because a block
that is interrupted anywhere is lost. On a busy CPU, threads that wait for each other at the end of every operator lose
a time slice of the scheduler rather than a share of the time, and one thread alone may be faster than all; there, both
are timed.

On an accelerator a block lies between two events, and so much other work is queued before it that the device never
waits for the next call: short kernels are timed without the gaps that launching them leaves.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]

IDLE_LOAD = 0.5
"""Load per core from which a machine counts as busy."""

_ONE_THREAD_S = 0.5
_ENOUGH_BLOCKS, _MOST_BLOCKS = 10, 1000
_FAST = 20
_FILLER_BYTES = 2**28
_FILLS = 8


class Clock(Protocol):
    """Something that times a run; a block should last `block_s` seconds and hold at most `most_calls`."""

    block_s: float
    most_calls: int

    def seconds(self, run: Call) -> float:
        """Seconds that a run takes."""
        ...


class WallClock:
    """Wall time from an idle device to an idle device: what it takes to launch calls and to finish them."""

    most_calls = 10_000

    def __init__(self, device: torch.device, *, busy: bool = False) -> None:
        """`busy`: other programs run on the CPU that is timed."""
        self.busy = busy
        self._asynchronous = device.type != "cpu"
        self.block_s = 5e-3 if self._asynchronous else 5e-5  # waiting for a device takes some time of its own

    def seconds(self, run: Call) -> float:
        self._wait()
        started = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._asynchronous:
            torch.accelerator.synchronize()


class EventClock:
    """Time between two events on an accelerator that is kept busy until the first of them."""

    block_s = 2e-4
    most_calls = 32

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filler = torch.empty(_FILLER_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, run: Call) -> float:
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        for _ in range(_FILLS):
            self._filler.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def kernel_clock(device: torch.device) -> Clock:
    """The clock for what a device computes: wall time on a CPU, events on an accelerator."""
    return WallClock(device, busy=load_per_core() > IDLE_LOAD) if device.type == "cpu" else EventClock(device)


def load_per_core() -> float:
    """How many programs wanted to run on each core of this machine during the last minute; 0 where nobody counts."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def seconds_per_call(call: Call, clock: Clock, budget_s: float) -> float:
    """Seconds of one call: the 5 % quantile of blocks, in about `budget_s` seconds of measuring.

    Where that is too short for ten blocks, measuring may last three times as long; a call slower than the budget is
    timed once. The first call should be no operator's very first, which sets it up.
    """
    started = time.perf_counter()
    estimate = clock.seconds(call)
    if estimate >= budget_s:
        return estimate
    estimate = min(estimate, clock.seconds(call), clock.seconds(call))
    count = max(1, min(math.ceil(clock.block_s / max(estimate, 1e-9)), clock.most_calls))
    samples: list[float] = []
    while not samples or time.perf_counter() - started < _allowed_s(len(samples), budget_s):
        samples.append(clock.seconds(lambda: _repeat(call, count)) / count)
    return sorted(samples)[len(samples) // _FAST]


def kernel_seconds(call: Call, clock: Clock, budget_s: float) -> float:
    """As `seconds_per_call`; on a busy CPU with all threads or with one, whichever takes less.

    One thread is left out where a call could take more than half a second.
    """
    seconds = seconds_per_call(call, clock, budget_s)
    threads = torch.get_num_threads()
    if not (isinstance(clock, WallClock) and clock.busy) or threads == 1 or seconds * threads > _ONE_THREAD_S:
        return seconds
    torch.set_num_threads(1)
    try:
        return min(seconds, seconds_per_call(call, clock, budget_s))
    finally:
        torch.set_num_threads(threads)


def _allowed_s(blocks: int, budget_s: float) -> float:
    """For how long to go on after so many blocks."""
    if blocks >= _MOST_BLOCKS:
        return 0.0
    return budget_s if blocks >= _ENOUGH_BLOCKS else 3 * budget_s


def _repeat(call: Call, count: int) -> None:
    for _ in range(count):
        call()
