"""What measuring sensitivity costs: time and memory against plain forward and backward passes over the same batches.

    python -m bench.scoring_cost [--task NAME ...] [--json FILE]

`estimates` scores every format from gradients and step sizes, `four formats` also measures e4m3 (per tensor, row and
block) and int8 with their own rounding (emulated on the CPU); one cotangent for each sample. Times are the least of
three runs. Memory is the growth of a fresh process's peak over what it held when the model and data were loaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.table import Row, show
from bench.tasks import TASKS, load
from dsmp.compiler.batches import read_batches
from dsmp.compiler.recording import record_calls
from dsmp.compiler.scoring import measure

FOUR = frozenset({"fp8_e4m3:tensor/tensor", "fp8_e4m3:row/row", "fp8_e4m3:1x128/128x128", "int8:row/row"})
WORK: dict[str, frozenset[str] | None] = {"plain": None, "estimates": frozenset(), "four formats": FOUR}


def measured(task: str, work: str) -> tuple[float, float]:
    """(seconds, growth of the peak in bytes) of one kind of work on a task, in this process."""
    loaded = load(task)
    batches = list(read_batches(loaded.calibration, with_target=False))
    calls = list(record_calls(loaded.model, batches, None))
    labels = WORK[work]
    run: Callable[[], Any] = lambda: measure(calls, source=task, drift=loaded.drift, labels=labels, draws=1)  # noqa: E731
    if labels is None:
        run = lambda: plain_pass(loaded.model, loaded.calibration)  # noqa: E731
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return min(seconds), 1024.0 * growth


def plain_pass(model: torch.nn.Module, batches: Sequence[Sequence[Any]]) -> None:
    """Forward and backward passes over batches, with gradients of all weights."""
    with torch.enable_grad():
        for batch in batches:
            leaves = torch.utils._pytree.tree_leaves(model(*batch))
            outputs = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            model.zero_grad()


def row_of(task: str) -> Row:
    """The three kinds of work on a task, each in a fresh process."""
    found = {}
    for work in WORK:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[work] = pool.submit(measured, task, work).result()
    plain, plain_bytes = found["plain"]
    return {
        "task": task,
        "plain s": plain,
        "estimates / plain": found["estimates"][0] / plain,
        "four formats / plain": found["four formats"][0] / plain,
        "plain MB": plain_bytes / 1e6,
        "estimates MB": found["estimates"][1] / 1e6,
        "four formats MB": found["four formats"][1] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="only these tasks")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args()
    names = arguments.task or [name for name in TASKS if name != "crnn"]
    show("What scoring costs", [row_of(name) for name in names], arguments.json)


if __name__ == "__main__":
    main()
