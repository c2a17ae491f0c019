"""How long choosing takes, how far from the optimum it can be, and how much memory it needs.

    python -m bench.planning [--json FILE]

The graphs are random, in blocks of 79 nodes like a transformer's: chains with three nodes that read one value (q, k,
v), pairs of them (gate, up), residual skips, and copies of every value for every label, shared by its readers. A third
of the nodes is heavy (GEMMs). `ties` says how blocks repeat: `none` (all numbers differ), `noisy` (errors differ by
5 %), `exact` (equal numbers, each block chosen for itself), `groups` (tied: one choice for all blocks). `cast share` is
the casts' part of the chosen time. The budget is half the least error that leaves no node in fp32.

`seconds` is `select_optimal` as a whole, the least disturbed of REPEATS runs in a process of its own; `MB` is that
process's peak memory, what it imports included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.table import Row, show
from dsmp.passes.assignment import AssignmentProblem, SharedCast
from dsmp.passes.select_optimal import select_optimal

REPEATS = 3
BLOCK = 79
# labels with their speed-up over the first, and how much error they make, both to within a random factor per node
LABELS = ("fp32", "bf16", "fp8_e4m3", "int8")
TIME = (1.0, 0.5, 0.27, 0.25)
ERROR = (0.0, 1e-3, 0.3, 0.1)
# who reads what inside a block, where it is not the node before: three and two readers of one value, joins, skips
READS = {
    11: (10,),
    12: (10,),
    13: (10,),
    14: (11, 12),
    15: (13, 14),
    30: (0, 29),
    41: (40,),
    42: (40,),
    43: (41, 42),
    60: (30, 59),
}
# (nodes, labels, ties, factor on the casts)
CASES = (
    (10_000, 2, "none", 1.0),
    (10_000, 2, "exact", 1.0),
    (10_000, 4, "none", 1.0),
    (10_000, 4, "none", 8.0),
    (10_000, 4, "exact", 1.0),
    (10_000, 4, "groups", 1.0),
    (36_390, 2, "none", 1.0),
    (36_390, 2, "none", 8.0),
    (36_390, 2, "noisy", 1.0),
    (36_390, 2, "exact", 1.0),
    (36_390, 2, "exact", 8.0),
    (36_390, 2, "groups", 1.0),
    (36_390, 4, "none", 1.0),
)


def random_problem(nodes: int, labels: int, ties: str = "none", casts: float = 1.0, seed: int = 0) -> AssignmentProblem:
    """A random graph as the module describes; times in microseconds, casts multiplied by a factor, no memory."""
    rng = np.random.default_rng(seed)
    place = np.arange(nodes) % BLOCK

    def drawn(spread: float, width: int = 1) -> NDArray[np.float64]:
        """(nodes, width) factors, the same in every block unless nothing is tied."""
        if ties == "none":
            return rng.lognormal(0.0, spread, (nodes, width))
        return rng.lognormal(0.0, spread, (BLOCK, width))[place]

    heavy = (rng.random(BLOCK) < 0.35)[place][:, None]
    speed, loss = np.array(TIME[:labels]), np.array(ERROR[:labels])
    time = np.where(heavy, 90.0, 4.5) * speed * drawn(0.9) * drawn(0.2, labels)
    error = np.where(heavy, 1e-6, 2e-7) * loss * drawn(1.5) * drawn(0.8, labels)
    if ties == "noisy":
        error = error * rng.lognormal(0.0, 0.05, (nodes, 1))
    copy = casts * 3.0 * drawn(0.7)[:, 0]
    readers: list[list[int]] = [[] for _ in range(nodes)]
    for v in range(1, nodes):
        start = v - v % BLOCK
        for read in READS.get(v % BLOCK, (v % BLOCK - 1,)):
            readers[start + read].append(v)
    return AssignmentProblem(
        labels=(LABELS[:labels],) * nodes,
        time=tuple(time),
        error=tuple(error),
        memory=(np.zeros(labels),) * nodes,
        casts=tuple(
            SharedCast(
                source=v,
                cost=tuple(0.0 if other == label else float(copy[v]) for other in range(labels)),
                readers=tuple((reader, frozenset([label])) for reader in reading),
            )
            for v, reading in enumerate(readers)
            if reading
            for label in range(labels)
        ),
        ties=tuple(tuple(range(first, nodes, BLOCK)) for first in range(BLOCK)) if ties == "groups" else (),
        error_budget=0.5 * float(error[:, 1:].min(axis=1).sum()),
    )


def measured(problem: AssignmentProblem) -> Row:
    """What solving takes in this process."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        answer = select_optimal(problem)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cast share": answer.totals.cast_time / answer.totals.time if answer.totals.time else 0.0,
        "seconds": min(seconds),
        "gap": answer.gap,
        # kilobytes on Linux, bytes on macOS
        "MB": peak / (1e6 if sys.platform == "darwin" else 1e3),
    }


def rows_of(problem: AssignmentProblem, name: str) -> Row:
    """The table's row of a problem, solved in a fresh process."""
    counts = [len(labels) for labels in problem.labels]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(measured, problem).result()
    return {
        "graph": name,
        "nodes": len(problem),
        "labels": max(counts, default=0),
        "casts": len(problem.casts),
        "tied groups": len(problem.ties),
        **result,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    rows = [
        rows_of(random_problem(nodes, labels, ties, casts), f"random, ties {ties}, casts x{casts:g}")
        for nodes, labels, ties, casts in CASES
    ]
    show("choosing labels", rows, arguments.json_file)


if __name__ == "__main__":
    main()
