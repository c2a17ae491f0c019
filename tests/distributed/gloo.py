"""Run a function in several real processes that form a gloo group over the loopback interface."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dsmp.hardware_db import detect
from dsmp.hardware_db.matching import Properties

_GRACE_SECONDS = 15


class RankFailed(AssertionError):
    """A process raised (its traceback is the message), died or did not answer in time."""


class Crashed(RankFailed):
    """A process died of a signal: the message says where its threads stood."""


class Ranks:
    """`ranks` processes, started at the first call and kept for the next; started anew if one does not answer.

    `run(function, *args)` calls a function of a module's top level in all of them, where `torch.distributed` is
    initialised, and returns what each returned, in the order of ranks. Arguments and results are pickled.
    """

    def __init__(self, ranks: int, *, seconds: float = 400) -> None:
        self.ranks, self.seconds = ranks, seconds
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = Path()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            return self._run(function, args)
        except Crashed as crash:  # in native code: once is reported and tried again, twice fails
            warnings.warn(f"{function.__name__}: {crash}", stacklevel=2)
            return self._run(function, args)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(sys.path))  # where the function's module is found
            pipe.send_bytes(pickle.dumps((function, args)))
        return self._answers()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = Path(tempfile.mkdtemp(prefix="dsmp-gloo-"))
        for rank in range(self.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._folder, rank, self.ranks), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _answers(self) -> list[Any]:
        end = time.monotonic() + self.seconds
        found: dict[int, Any] = {}
        failed = ""
        while len(found) < self.ranks and time.monotonic() < end:
            for rank, pipe in enumerate(self._pipes):
                if rank in found or not pipe.poll(0.02):
                    continue
                try:
                    error, found[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(2)
                    signal = -(self._processes[rank].exitcode or 0)
                    self.close()
                    kind = Crashed if signal > 0 else RankFailed
                    stood = (self._folder / f"crash-{rank}").read_text()
                    raise kind(f"rank {rank} of {self.ranks} died of signal {signal}. {failed}\n{stood}") from None
                if error is not None:
                    failed += f"rank {rank} of {self.ranks}:\n{error}\n"
                    end = min(end, time.monotonic() + _GRACE_SECONDS)  # the others may wait for it in a collective
        missing = [r for r in range(self.ranks) if r not in found]
        if missing:
            self.close()
            failed += f"no answer from ranks {missing}"
        if failed:
            raise RankFailed(failed)
        return [found[rank] for rank in range(self.ranks)]


def _serve(pipe: Connection, folder: Path, rank: int, ranks: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    _plan_in_fp32()
    with (folder / f"crash-{rank}").open("w") as crash:
        faulthandler.enable(crash)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
        _answer_calls(pipe, rank)
        dist.destroy_process_group()
        faulthandler.disable()


def _plan_in_fp32() -> None:
    """Let ranks take this CPU for one whose tier is fp32, whatever it is: their numbers are compared to 1e-5."""
    read = detect.read_cpu

    def without_bf16() -> Properties:
        found = read()
        return replace(found, flags=frozenset(f for f in found.flags if "bf16" not in f and "amx" not in f))

    detect.read_cpu = without_bf16


def _answer_calls(pipe: Connection, rank: int) -> None:
    while True:
        try:
            sys.path[:] = pickle.loads(pipe.recv_bytes())
            message = pipe.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(message)
            torch.manual_seed(rank)
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            answer = (None, function(*args))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send_bytes(pickle.dumps(answer))
