"""Real tasks on the running CPU at a budget: the headline metric and the time of plans against fp32.

    python -m bench.cpu_tasks [--task NAME ...] [--budget 1%] [--inductor] [--json FILE]

Each model is planned from its task's calibration batches, compiled, and judged on held-out data in the same process as
its fp32 self. Times are processor time of one thread, medians over runs of eager fp32 and the plan in turns (and of
torch.compile in fp32 with `--inductor`, which compiles both with Inductor; else plans run op by op).
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import dsmp
from bench.table import Row, show
from bench.tasks import Task, TaskDataError, load
from bench.timing import in_turns

TASKS = ("minilm", "mobilenet", "crepe", "deeplc")
_RUNS = 15


def row(task: Task, budget: str, inductor: bool) -> Row:
    """One line of the table."""
    model, batch = task.model.eval(), task.held_out[0]
    plan = dsmp.plan(model, batch, calibration=task.calibration, budget=budget, training=False, hardware="cpu")
    options: dict[str, Any] = {"plan": plan, "executor": "inductor" if inductor else "eager"}
    with torch.no_grad():
        compiled = torch.compile(model, backend="dsmp", options=options)
        (headline, exact), *_ = task.evaluate(model).items()
        planned = task.evaluate(compiled)[headline]
        calls = {"eager": lambda: model(*batch), "plan": lambda: compiled(*batch)}
        if inductor:
            plain = torch.compile(model)
            calls["torch.compile"] = lambda: plain(*batch)
        # the first rounds compile, pack and warm caches
        taken = in_turns(calls, _RUNS, untimed=2)
        found = {name: 1e3 * statistics.median(values) for name, values in taken.items()}
    products = Counter(f"{d.compute} {d.recipe}" for d in plan if d.op in ("linear", "conv"))
    best = min(ms for name, ms in found.items() if name != "plan")
    return {
        "task": task.name,
        "budget": budget,
        "metric": headline,
        "fp32": exact,
        "plan": planned,
        "ms eager": found["eager"],
        "ms torch.compile": found.get("torch.compile", float("nan")),
        "ms plan": found["plan"],
        "x best fp32": best / found["plan"],
        "linears and convolutions": ", ".join(f"{n} {name}" for name, n in products.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, action="append", help="only these")
    parser.add_argument("--budget", default="1%")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in arguments.task or TASKS:
        try:
            rows.append(row(load(name), arguments.budget, arguments.inductor))
        except TaskDataError as error:
            parser.exit(1, f"{name}: {error}\n")
        torch._dynamo.reset()
    show(f"real tasks on the CPU, load {os.getloadavg()[0]:.1f}", rows, arguments.json_file)


if __name__ == "__main__":
    main()
