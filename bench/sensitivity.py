"""Are the scores true? Each GEMM of the tasks rounded alone on held-back samples, against its score from calibration.

    python -m bench.sensitivity [--task NAME ...] [--nodes N] [--json FILE]

For every task: scores from one backward pass over the calibration batches (all formats measured), and the truth, the
drift on held-back samples when one node is rounded and nothing else. Columns: Spearman's rank correlation over all
formats together and within e4m3 per row, the median and quartiles of the root of predicted over true drift for the
8-bit formats, and what scoring cost in plain forward and backward passes over the same batches.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import fx

from bench.table import Row, show
from bench.tasks import TASKS, Task, load
from dsmp.compiler.batches import read_batches
from dsmp.compiler.recording import RecordedCall, record_calls
from dsmp.compiler.scoring import Measurement, measure
from dsmp.passes.differentiable import run
from dsmp.passes.drift import Metric
from dsmp.passes.gemm import gemm_op, takes_recipe
from dsmp.passes.graph import calls
from dsmp.passes.keys import key_of
from dsmp.passes.labels import gemm_label
from dsmp.passes.sensitivity import round_operands, weight_operands

FORMATS = (
    ("bf16", "none"),
    ("fp16", "none"),
    ("fp8_e4m3", "tensor/tensor"),
    ("fp8_e4m3", "row/row"),
    ("fp8_e4m3", "1x128/128x128"),
    ("int8", "row/row"),
)
EIGHT_BIT = tuple(gemm_label(f, r) for f, r in FORMATS if f not in ("bf16", "fp16"))


def score(task: Task, draws: int) -> tuple[Measurement, float, float]:
    """Scores of a task; seconds of scoring, and of plain forward and backward passes over the same batches."""
    batches = list(read_batches(task.calibration, with_target=False))
    recorded = list(record_calls(task.model, batches, None))
    labels = {gemm_label(f, r) for f, r in FORMATS}
    plain = _plain_seconds(task)
    started = time.perf_counter()
    found = measure(recorded, source=task.name, drift=task.drift, labels=labels, draws=draws)
    return found, time.perf_counter() - started, plain


def _plain_seconds(task: Task) -> float:
    """Seconds of one forward and backward pass over the calibration batches, with gradients of all weights."""

    def step(batch: Sequence[Any]) -> None:
        leaves = torch.utils._pytree.tree_leaves(task.model(*batch))
        outputs = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        task.model.zero_grad()

    with torch.enable_grad():
        step(task.calibration[0])
        started = time.perf_counter()
        for batch in task.calibration:
            step(batch)
        return time.perf_counter() - started


def truths(
    task: Task, metric: Metric, formats: Sequence[tuple[str, str]], nodes: int
) -> tuple[dict[tuple[str, str], float], int]:
    """(key, label) -> drift on held-back samples with that node alone rounded; and how many samples."""
    held = list(record_calls(task.model, read_batches(task.held_out, with_target=False), None))
    reference = [_run(call, {}) for call in held]
    keys = [str(key_of(n)) for n in calls(held[0].graph.gm) if gemm_op(n) is not None]
    step = max(1, len(keys) // nodes) if nodes else 1
    found: dict[tuple[str, str], float] = {}
    samples = 0
    for key in keys[::step]:
        for compute, recipe in formats:
            drifts = []
            for call, exact in zip(held, reference, strict=True):
                outputs = _run(call, {key: (compute, recipe)})
                if outputs is None:
                    break
                drifts.append(metric.per_sample(exact, outputs))
            if drifts:
                joined = torch.cat(drifts)
                samples = joined.numel()
                found[key, gemm_label(compute, recipe)] = float(joined.mean())
    return found, samples


def _run(call: RecordedCall, rounded: Mapping[str, tuple[str, str]]) -> Any:
    """Outputs of a recorded call with some nodes' operands rounded; None where a node does not take the recipe."""
    refused = []

    def tap(node: fx.Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        choice = rounded.get(str(key_of(node)))
        if choice is not None:
            if not takes_recipe(node, choice[1]):
                refused.append(node)
            else:
                args = round_operands(node, args, *choice, weight_operands(node, call.graph.parameters))
        return function(*args, **kwargs)

    with torch.no_grad():
        outputs = run(call.graph.gm, call.inputs, tap, order=0)
    return None if refused else outputs


def row_of(task: Task, nodes: int, draws: int) -> Row:
    """Score one task and compare with the truth."""
    found, seconds, plain = score(task, draws)
    true, samples = truths(task, found.metric, FORMATS, nodes)
    pairs = [(label, found.scores.of(key, label), drift) for (key, label), drift in true.items()]
    known = [(label, s.drift, drift) for label, s, drift in pairs if s is not None and drift > 0]
    ratios = np.array([np.sqrt(p / t) for label, p, t in known if label in EIGHT_BIT])
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    e4r = [(p, t) for label, p, t in known if label == gemm_label("fp8_e4m3", "row/row")]
    return {
        "task": task.name, "drift": found.metric.kind, "GEMMs": len({k for k, _ in true}),
        "calibration": found.scores.samples, "held back": samples,
        "rank, all": _rank([(p, t) for _, p, t in known]), "rank, e4m3 row": _rank(e4r),
        "ratio q25": float(low), "ratio": float(middle), "ratio q75": float(high),
        "min": float(ratios.min()), "max": float(ratios.max()),
        "scoring / plain": seconds / plain,
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip


def _rank(pairs: Sequence[tuple[float, float]]) -> float:
    if len(pairs) < 3:
        return float("nan")
    return float(spearmanr([p for p, _ in pairs], [t for _, t in pairs]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="only these tasks")
    parser.add_argument("--nodes", type=int, default=0, help="at most about this many GEMMs of a task; 0: all")
    parser.add_argument("--draws", type=int, default=2, help="cotangents per sample")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args()
    rows = [row_of(load(name), arguments.nodes, arguments.draws) for name in arguments.task or TASKS]
    show("Score against truth, each node rounded alone", rows, arguments.json)


if __name__ == "__main__":
    main()
