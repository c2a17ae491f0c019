"""Choices at equal time are the best there are, baselines do what they say, and criteria say what the rows show."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bench import pareto
from bench.baselines import autocast, gradient_program, labels_of, rankings, shortest_prefix, uniform
from bench.equal_cost import (
    Costs,
    between,
    least_drift,
    least_time,
    low_arithmetics,
    starting_labels,
    with_candidates,
    with_low_format,
)
from bench.node_statistics import NodeStatistics, gather
from bench.pareto_criteria import HEURISTICS, METHODS, criteria
from bench.table import Row
from bench.tasks import Task
from dsmp.compiler.batches import read_batches
from dsmp.compiler.recording import record_calls
from dsmp.passes.drift import Metric
from dsmp.passes.labels import label
from dsmp.passes.program import Candidate, Copy, Program

FP8, INT8 = "fp8_e4m3:row/row", "int8:row/row"
_WAYS = (
    ("fp32", "none", "fp32", 2.0),
    ("bf16", "none", "fp32", 1.0),
    ("fp16", "none", "fp32", 1.0),
    ("fp8_e4m3", "row/row", "bf16", 0.5),
    ("int8", "row/row", "bf16", 0.5),
)


def key(number: int) -> str:
    return f"layers.{number}|fprop|linear|0"


def program_of(seed: int, nodes: int = 4, *, cast_us: float = 3.0, keys: Sequence[str] | None = None) -> Program:
    """Linear layers; each reads the one before it, pairs of them share a quantised copy."""
    random = np.random.default_rng(seed)
    keys = keys or [key(i) for i in range(nodes)]
    candidates = {}
    for name in keys:
        work, noise = float(random.uniform(5, 40)), float(random.lognormal(-12, 1.5))
        factor = {"fp32": 0.0, "bf16": 1e-2, "fp16": 1e-4, "fp8_e4m3": 1.0, "int8": float(random.uniform(0.1, 3))}
        candidates[name] = [
            Candidate(
                label=label(compute, recipe, output, "fp32"), compute=compute, recipe=recipe, output=output,
                accumulate="int32" if compute == "int8" else "fp32", time_us=work * speed,
                drift=noise * factor[compute],
            )
            for compute, recipe, output, speed in _WAYS
        ]  # fmt: skip
    copies = [
        Copy(value=f"x{first}", format=compute, recipe="row", time_us={"": cast_us},
             readers={k: [label(compute, "row/row", "bf16", "fp32")] for k in keys[first : first + 2]})
        for first in range(0, len(keys), 2)
        for compute in ("fp8_e4m3", "int8")
    ]  # fmt: skip
    return Program(cost="bits", drift="l2", candidates=candidates, copies=copies)


def every_choice(program: Program) -> list[dict[str, str]]:
    rows = [[c.label for c in program.allowed[k]] for k in program.keys]
    return [dict(zip(program.keys, found, strict=True)) for found in itertools.product(*rows)]


def target_of(program: Program, share: float) -> float:
    start = Costs(program).choice(starting_labels(program, program.keys)).time_us
    return start - share * (start - least_time(program))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.05, 1.0))
def test_the_least_drift_within_a_time_is_the_least_of_all(seed: int, share: float) -> None:
    program = between(program_of(seed), [key(i) for i in range(4)], widest=16)
    limit = target_of(program, share)
    costs = Costs(program)
    within = [c for c in map(costs.choice, every_choice(program)) if c.time_us <= limit * (1 + 1e-9)]
    found = least_drift(program, limit)
    assert found is not None
    assert found.time_us <= limit * (1 + 1e-9)
    assert found.drift == pytest.approx(min(c.drift for c in within), rel=3e-3)
    assert costs.choice(found.labels).time_us == pytest.approx(found.time_us)


def test_no_choice_is_faster_than_the_fastest() -> None:
    program = program_of(1)
    assert least_drift(program, 0.99 * least_time(program)) is None
    everything = least_drift(program, math.inf)
    assert everything is not None and everything.drift == 0.0


def test_a_copy_is_paid_once_and_only_if_it_is_quantised() -> None:
    program = program_of(0, 2)
    wide = Copy(value="x0", format="fp16", time_us={"": 50.0}, readers={key(0): ["fp16"], key(1): ["fp16"]})
    program = Program(cost="bits", drift="l2", candidates=program.candidates, copies=[*program.copies, wide])
    costs = Costs(program)
    alone = sum(program.candidates[key(i)][3].time_us for i in range(2))
    assert costs.choice(uniform(program, program.keys, {}, FP8)).time_us == pytest.approx(alone + 3.0)
    free = costs.choice({key(0): "fp16", key(1): "fp16"})
    assert free.time_us == pytest.approx(sum(program.candidates[key(i)][2].time_us for i in range(2)))
    assert program.totals(free.labels).time == pytest.approx(free.time_us + 50.0)


def test_restrictions_and_the_start() -> None:
    program = program_of(3)
    assert starting_labels(program, program.keys) == dict.fromkeys(program.keys, "fp32")
    narrow = between(program, program.keys, widest=16)
    assert starting_labels(narrow, narrow.keys) == dict.fromkeys(program.keys, "fp16")
    assert low_arithmetics(narrow, narrow.keys) == [FP8, INT8]
    only = with_low_format(narrow, narrow.keys, INT8)
    assert low_arithmetics(only, only.keys) == [INT8]
    assert autocast(narrow, narrow.keys, {}) == dict.fromkeys(program.keys, "bf16")
    assert labels_of(only, only.keys, FP8) == {}


def test_changed_candidates_are_what_is_solved_for() -> None:
    program = program_of(4)
    assert program.allowed  # what a program derives from its candidates is kept
    dearer = {
        k: [c.model_copy(update={"drift": 100 * (c.drift or 0.0)}) for c in found]
        for k, found in program.candidates.items()
    }
    changed = with_candidates(program, dearer)
    labels = uniform(program, program.keys, {}, INT8)
    assert changed.totals(labels).error == pytest.approx(100 * program.totals(labels).error)


def statistics_of(values: Mapping[str, tuple[float, float, float]]) -> dict[str, NodeStatistics]:
    """Of (peak, weight noise, output noise)."""
    found = {}
    for name, (peak, weight, output) in values.items():
        one = NodeStatistics(weight_signal=1.0, weight_noise=weight, output_signal=1.0, output_noise=output)
        one.amax[0], one.squares[0], one.counts[0] = peak, 1.0, 1
        found[name] = one
    return found


def test_rankings_put_the_least_sensitive_first() -> None:
    known = statistics_of({"a": (3, 0.1, 0.3), "b": (1, 0.2, 0.1), "c": (2, 0.3, 0.2), "d": (9, 0.4, 0.4)})
    orders = rankings(known, ["a", "b", "c", "d"])
    assert orders == {
        "ends": ["b", "c", "a", "d"],
        "range": ["b", "c", "a", "d"],
        "weight SQNR": ["a", "b", "c", "d"],
        "output SQNR": ["b", "c", "a", "d"],
    }


def test_a_prefix_is_the_shortest_that_meets_the_time() -> None:
    program = between(program_of(5), [key(i) for i in range(4)], widest=16)
    costs, start = Costs(program), starting_labels(program, program.keys)
    low, order = labels_of(program, program.keys, FP8), [key(2), key(0), key(3), key(1)]
    limit = target_of(program, 0.5)
    found = shortest_prefix(costs, start, order, low, limit)
    assert found is not None and found.time_us <= limit
    lowered = [k for k in order if found.labels[k] == low[k]]
    assert lowered == order[: len(lowered)]
    shorter = costs.choice({**start, **{k: low[k] for k in lowered[:-1]}})
    assert shorter.time_us > limit
    assert shortest_prefix(costs, start, order, low, 0.0) is None


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_gradient_program_knows_no_casts_and_meets_the_true_time(seed: int) -> None:
    keys = [key(0), key(1), "shared|fprop|linear|0", "shared|fprop|linear|1"]
    program = between(program_of(seed, keys=keys), keys, widest=16)
    costs, start = Costs(program), starting_labels(program, keys)
    random = np.random.default_rng(seed)
    scores = {k: NodeStatistics() for k in keys}
    for one in scores.values():
        one.gradient[FP8], one.gradient[INT8] = random.lognormal(0, 1, 2).tolist()
    limit = target_of(program, 0.6)
    found = gradient_program(costs, start, scores, [FP8, INT8], limit)
    assert found is not None and found.time_us <= limit * (1 + 1e-9)
    assert found.labels[keys[2]] == found.labels[keys[3]]  # one module, one format

    def figures(labels: Mapping[str, str]) -> tuple[float, float]:
        bits = sum(next(c.time_us for c in program.allowed[k] if c.label == labels[k]) for k in keys)
        return bits, sum(scores[k].gradient.get(labels[k].partition("->")[0], 0.0) for k in keys)

    bits, score = figures(found.labels)
    for labels in every_choice(program):
        if labels[keys[2]] == labels[keys[3]]:
            other_bits, other_score = figures(labels)
            assert other_bits > bits + 1e-9 or other_score >= score - 1e-9


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 128)
        self.third = nn.Linear(128, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.third(torch.relu(self.second(torch.relu(self.first(x))))))


def small_task() -> Task:
    torch.manual_seed(0)
    batches = [(torch.randn(64, 64),) for _ in range(4)]
    return Task(
        name="small", model=Small().eval(), calibration=batches[:2], held_out=batches[2:], drift="l2", logits=False,
        evaluate=lambda call: {},
    )  # fmt: skip


def test_statistics_are_those_of_the_operands() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    torch.manual_seed(1)
    x = torch.randn(8, 64)
    calls = list(record_calls(model, read_batches([(x,)], with_target=False), None))
    metric = Metric(kind="l2", outputs=(0,))
    names = ["0|fprop|linear|0", "2|fprop|linear|0"]
    found = gather(
        calls, metric, ranking=("int8", "row/row"), scored={names[1]: {("int8", "row/row")}}, draws=2, seed=0
    )
    assert set(found) == set(names)
    weight = model[0].weight.detach()
    peaks = [float(t.abs().max() / t.square().mean().sqrt()) for t in (x, weight)]
    assert found[names[0]].peak == pytest.approx(max(peaks), rel=1e-5)
    assert not found[names[0]].gradient

    def rounded(t: torch.Tensor) -> torch.Tensor:
        step = t.abs().amax(1, keepdim=True) / 127
        return (t / step).round() * step

    error = rounded(weight) - weight
    expected = float(weight.square().sum() / error.square().sum())
    assert found[names[0]].weight_sqnr == pytest.approx(expected, rel=1e-2)
    with torch.no_grad():
        hidden, last = torch.relu(model[0](x)), model[2]
        y = last(hidden)
        delta = rounded(hidden) @ rounded(last.weight).T - hidden @ last.weight.T
    generator = torch.Generator().manual_seed(0)
    draws = [metric.cotangents([y], generator)[0] for _ in range(2)]
    score = sum(float((u * delta).square().sum()) for u in draws if u is not None)
    assert found[names[1]].gradient[INT8] == pytest.approx(score, rel=1e-2)
    assert found[names[1]].output_sqnr == pytest.approx(
        float((y.square().sum() / delta.square().sum()).detach()), rel=1e-2
    )


class Computed:
    """A comparison of a small model that was computed once."""

    def __init__(self) -> None:
        chosen = pareto.Settings(
            hardware="a100", start="16", narrowest=8, convolutions=False, cast_shares=(0.3,), targets=(40, 90), draws=1
        )
        comparison = pareto.Comparison(pareto.Study(small_task(), chosen), 0.3)
        self.found, self.beside = comparison.rows(), comparison.points()

    def rows(self) -> list[Row]:
        return self.found

    def points(self) -> list[Row]:
        return self.beside


@pytest.fixture(scope="module")
def comparison() -> Computed:
    return Computed()


def test_a_small_model_is_compared(comparison: Computed) -> None:
    rows = comparison.rows()
    assert [r["target"] for r in rows] == [40, 90]
    for row in rows:
        assert float(row["time"]) <= float(row["limit"]) * (1 + 1e-9)
        assert 0.5 < float(row["after"]) < 2.0
        assert 1 <= int(row["runs"]) <= 25
        assert float(row["ours"]) > 0
        for method in METHODS:
            assert row[method] == "-" or float(row[method]) > 0.3
    assert float(rows[0]["ours"]) < float(rows[1]["ours"])
    points = {str(r["point"]): r for r in comparison.points()}
    assert {"start", "autocast bf16", "tier", INT8} <= set(points)
    assert points["start"]["saving %"] == 0.0
    assert float(points[INT8]["drift"]) > float(points["autocast bf16"]["drift"]) > float(points["start"]["drift"])


def row(task: str, target: int, **changes: float | str) -> Row:
    ratios = dict.fromkeys(METHODS, 8.0) | {"LP": 1.0, "best one": 1.0}
    return {"task": task, "casts": 0.3, "target": target, "before": 1.0, "after": 1.0, "runs": 1, **ratios, **changes}


def verdicts(rows: list[Row]) -> dict[str, str]:
    return {str(r["criterion"]): str(r["holds"]) for r in criteria(rows)}


def test_criteria_follow_the_rows() -> None:
    good = [row(f"t{i}", target) for i in range(8) for target in (40, 80)]
    assert set(verdicts(good).values()) == {"", "True"}
    bad = [*good[:-2], row("t7", 40, LP=0.5), row("t7", 80, **{"best one": 0.9, "after": 2.0})]
    found = verdicts(bad)
    failed = {name for name, holds in found.items() if holds == "False"}
    assert failed == {
        "ours over LP, worst cell", "ours over the best single format, worst cell", "the same after repair"
    }  # fmt: skip
    close = [row(f"t{i}", 40, **dict.fromkeys(HEURISTICS, 1.5)) for i in range(8)]
    assert sum(holds == "False" for holds in verdicts(close).values()) == 3


def test_a_heuristic_that_does_not_reach_the_time_is_beaten() -> None:
    rows = [row(f"t{i}", 40, ends="-") for i in range(8)]
    every = "tasks where ours is at most half of every heuristic in every cell"
    assert verdicts(rows)[every] == "True"


def test_the_command_writes_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], comparison: Computed
) -> None:
    monkeypatch.setattr(pareto, "Study", lambda task, settings: None)
    monkeypatch.setattr(pareto, "Comparison", lambda study, share: comparison)
    monkeypatch.setattr(pareto, "load", lambda name: None)
    file = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["pareto", "--task", "dlrm", "--targets", "40,90", "--json", str(file)])
    pareto.main()
    written = json.loads(file.read_text())
    assert written["rows"] == comparison.rows() and written["points"] == comparison.points()
    assert written["criteria"] == criteria(comparison.rows())
    assert written["settings"]["targets"] == [40, 90]
    assert "small" in capsys.readouterr().out
