"""Timed calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(make: Callable[[], T]) -> tuple[T, float]:
    """A result and the seconds that making it took."""
    started = time.perf_counter()
    made = make()
    return made, time.perf_counter() - started


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int, *, untimed: int = 0) -> dict[str, list[float]]:
    """`seconds` of every call in every round, in rotated order, after rounds that are not timed."""
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + untimed):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            took = seconds(calls[name])
            if turn >= untimed:
                taken[name].append(took)
    return taken


def seconds(run: Callable[[], object]) -> float:
    """What a call takes: the thread's processor time if torch has one thread, else wall time."""
    if torch.get_num_threads() > 1:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    started = time.thread_time()
    run()
    return time.thread_time() - started
