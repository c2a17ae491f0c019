"""How long a why-not question takes, answered from a plan alone.

    python -m bench.explaining PLAN.json ... [--json FILE]

The plans are calibrated ones (`dsmp plan --calibrate`). For QUESTIONS nodes, evenly spread over the plan, every format
of FORMATS is asked for: the median and the worst answer, beside reading the plan and the slack of all nodes.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

from bench.table import Row, show
from bench.timing import timed
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.passes.critical_path import slacks
from dsmp.passes.explain import explain
from dsmp.passes.plan import load_plan

QUESTIONS = 20
FORMATS = (None, "fp32", "bf16", "fp8_e4m3", "int8")


def row_of(path: Path) -> Row:
    """The table's row of one plan."""
    plan, reading = timed(lambda: load_plan(path))
    device = resolve_hardware(plan.hardware)
    nodes = list(plan)
    asked = nodes[:: max(1, len(nodes) // QUESTIONS)]
    answers = [timed(partial(explain, plan, n, want=f, device=device))[1] for n in asked for f in FORMATS]
    return {
        "plan": path.name,
        "nodes": len(nodes),
        "read s": reading,
        "slacks s": timed(lambda: slacks(plan))[1],
        "questions": len(answers),
        "answer s (median)": statistics.median(answers),
        "answer s (worst)": max(answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN.json")
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    show("answering why not", [row_of(path) for path in arguments.plans], arguments.json_file)


if __name__ == "__main__":
    main()
