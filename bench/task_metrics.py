"""The nine accuracy tasks in fp32: headline metrics and side values, the reference for every plan.

    python -m bench.task_metrics [--task NAME] [--json FILE]

Every low-precision figure is to be compared with the fp32 figure of the same process, not with a recorded one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench.table import Row, show
from bench.tasks import TASKS, Task, TaskDataError, load


def row(task: Task, load_seconds: float) -> Row:
    """One line of the table."""
    started = time.perf_counter()
    (headline, value), *side = task.evaluate(task.model).items()
    seconds = time.perf_counter() - started
    return {
        "task": task.name,
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "calibration": sum(len(b[0]) for b in task.calibration),
        "held out": sum(len(b[0]) for b in task.held_out),
        "drift": task.drift,
        "metric": headline,
        "value": value,
        "side values": ", ".join(f"{n} {v:.5g}" for n, v in side),
        "load s": load_seconds,
        "evaluate s": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), help="only this one")
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in [arguments.task] if arguments.task else TASKS:
        started = time.perf_counter()
        try:
            task = load(name)
        except TaskDataError as error:
            parser.exit(1, f"{name}: {error}\n")
        rows.append(row(task, time.perf_counter() - started))
    show("tasks in fp32", rows, arguments.json_file)


if __name__ == "__main__":
    main()
