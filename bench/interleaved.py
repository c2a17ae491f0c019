"""Interleaved repeats: every variant lives in a process of its own, and they are called in turn, in rotated order.

A process per variant keeps Dynamo's caches, packed weights and peaks of memory apart. A turn is one untimed call and as
many timed ones as fill `TURN_S`; what counts is their median. Variants far slower than the baseline take few turns.
Processes that wait for their turn sleep.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import seconds

TURN_S = 0.1
"""Seconds of timed calls in a turn, about."""
MOST_CALLS = 20
SLOW, SLOW_ROUNDS = 4.0, 3
"""Variants that take SLOW times as long as the baseline take part in SLOW_ROUNDS rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to call a variant: what it returned, what compiling took (s), what weights take (MB), and a hash of the
    code that Inductor made, "" for none."""

    call: Callable[[], object]
    output: Tensor
    compile_s: float
    weights_mb: float
    code: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A variant, ready to be called: cases by title, and the process's resident MB before the model was made."""

    cases: Mapping[str, Case]
    base_mb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures of one case of one variant: medians of turns in seconds, in order, and what `Case` says of it."""

    times: Sequence[float]
    output: Tensor
    compile_s: float
    weights_mb: float
    peak_mb: float
    code: str = ""

    @property
    def median(self) -> float:
        """Seconds a call."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """The range of the middle half of the turns over the median; 0 for a single turn."""
        if len(self.times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return (high - low) / self.median

    def times_as_fast_as(self, other: Measured) -> float:
        """The median over rounds of the other's time over this one's."""
        return statistics.median(b / a for a, b in zip(self.times, other.times, strict=False))


class VariantError(Exception):
    """A variant's process could not make it or call it."""


class Worker:
    """A process that makes a variant by calling `build`, which must be picklable, with a number of threads."""

    def __init__(self, build: Callable[[], Subject], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, build, threads), daemon=True)
        self._process.start()
        other.close()
        self.made: dict[str, tuple[Any, float, float, str]] = self._answer()
        """By case: output (float32 array), compile seconds, MB of weights, hash of the code."""

    def turn(self, case: str, calls: int) -> list[float]:
        """Seconds of `calls` calls, after one that is not timed."""
        self._connection.send((case, calls))
        times: list[float] = self._answer()
        return times

    def close(self) -> float:
        """End the process; its peak of resident memory during the turns, in MB over what it held without a model."""
        self._connection.send(None)
        peak: float = self._answer()
        self._process.join()
        return peak

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise VariantError(f"the process ended with {self._process.exitcode}") from None
        if isinstance(answer, VariantError):
            self._process.join()
            raise answer
        return answer


def _serve(connection: Connection, build: Callable[[], Subject], threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            subject = build()
            cases = subject.cases
            _forget_peak()
            connection.send(
                {t: (c.output.float().numpy(), c.compile_s, c.weights_mb, c.code) for t, c in cases.items()}
            )
            while (wanted := connection.recv()) is not None:
                case, calls = wanted
                call = cases[case].call
                call()
                connection.send([seconds(call) for _ in range(calls)])
        connection.send(_peak_mb() - subject.base_mb)
    except Exception as error:  # whatever a library raises: the other variants go on
        traceback.print_exc()
        what = " ".join(str(error).split())[:200]
        connection.send(VariantError(f"{type(error).__name__}: {what}"))


def measure(
    workers: Mapping[str, Worker], case: str, *, baseline: str, rounds: int
) -> dict[str, list[float]]:  # fmt: skip
    """Medians of turns of every variant, in seconds, by round."""
    once = {name: min(worker.turn(case, 2)) for name, worker in workers.items()}
    names = list(workers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn >= SLOW_ROUNDS and once[name] > SLOW * once[baseline]:
                continue
            calls = max(1, min(MOST_CALLS, round(TURN_S / once[name])))
            times[name].append(statistics.median(workers[name].turn(case, calls)))
    return times


def resident_mb() -> float:
    """Resident memory of this process, in MB; its peak where the system does not say."""
    found = _status("VmRSS")
    return _peak_mb() if found is None else found


def _peak_mb() -> float:
    found = _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 if found is None else found


def _forget_peak() -> None:
    """Let the peak of resident memory begin again (proc_pid_clear_refs(5)); without it, it counts from the start."""
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


def _status(name: str) -> float | None:
    file = Path("/proc/self/status")
    if not file.exists():
        return None
    line = next((t for t in file.read_text().splitlines() if t.startswith(f"{name}:")), None)
    return None if line is None else int(line.split()[1]) / 1e3
