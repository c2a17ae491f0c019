"""Drift at equal cost: our plans against rankings, gradient scores with a linear program, lists and uniform formats.

    python -m bench.pareto [--task NAME ...] [--hardware h800] [--cast-share 0.3,0.6] [--targets 40,60,80]
                           [--start 16|traced] [--narrowest 8] [--convolutions] [--json FILE]

The cost of a plan is FLOPs times bits plus a time per quantised element, shared between the readers of a copy, such
that quantisation eats `--cast-share` of what uniform 8 bits save. A target is a share of the largest net saving that
can be reached from the start: all GEMMs in 16 bits, each in its best 16-bit format (`--start 16`), or all nodes as
traced. Each method gives its plan of least drift, by what it knows from the calibration data, that takes at most the
target's time.

Our plans are solved for, run on the calibration data and repaired (at most 25 runs, plans with one narrow format among
them). The drifts compared are those of
simulated runs on held-out samples, mean KL or mean relative squared error; a column holds that of a method over ours,
"-" where a method reaches no such time. Runs of random rankings are averaged geometrically.

With `--convolutions` the device is given the 8-bit convolutions that its matrix units could do but its libraries lack.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.baselines import (
    as_decided,
    autocast,
    gradient_program,
    labels_of,
    random_rankings,
    rankings,
    shortest_prefix,
    uniform,
)
from bench.equal_cost import (
    Choice,
    Costs,
    between,
    is_low,
    least_drift,
    least_time,
    low_arithmetics,
    starting_labels,
    with_low_format,
)
from bench.node_statistics import Arithmetic, NodeStatistics, gather
from bench.pareto_criteria import criteria
from bench.table import Row, show
from bench.tasks import TASKS, Task, load
from dsmp.compiler.batches import read_batches
from dsmp.compiler.recording import RecordedCall, record_calls
from dsmp.compiler.repair import HIGH, LOW, MAX_RUNS, ROUNDS, learn, ratio_of
from dsmp.compiler.scoring import Measurement, device_labels, measure
from dsmp.compiler.single_formats import HOPELESS
from dsmp.compiler.trial import Trial
from dsmp.hardware_db import resolve
from dsmp.hardware_db.capability import Device
from dsmp.passes.formulate import formulate
from dsmp.passes.gemm import gemm_op
from dsmp.passes.graph import calls
from dsmp.passes.keys import key_of
from dsmp.passes.labels import gemm_label
from dsmp.passes.plan import Decision
from dsmp.passes.program import Program
from dsmp.passes.select_default import select_default

DEFAULT_TASKS = tuple(name for name in TASKS if name != "crnn")  # an unrolled LSTM of 515 GEMMs takes too long
RANKING_FORMATS: tuple[Arithmetic, ...] = (("fp8_e4m3", "row/row"), ("int8", "row/row"))
"""Formats of the rankings, the first one that the device has."""
SINGLE_FORMATS = 3
"""Plans with one format that are run on held-out data, those of least predicted drift."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is compared, apart from the tasks."""

    hardware: str
    start: str
    narrowest: int
    convolutions: bool
    cast_shares: tuple[float, ...]
    targets: tuple[int, ...]
    draws: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """Our plan for a target: its drift on the calibration data, measured over predicted there before and after repair
    (roots), and how many runs that took."""

    choice: Choice
    measured: float
    before: float
    after: float
    runs: int


class HeldOut:
    """Drifts of choices on held-out samples; a choice is run once."""

    def __init__(self, program: Program, trial: Trial) -> None:
        self.program = program
        self.trial = trial
        self.known: dict[frozenset[tuple[str, str]], tuple[float, float]] = {}
        self.samples = 0

    def drift(self, choice: Choice) -> float:
        low = choice.low(self.program)
        name = frozenset((key, c.label) for key, c in low.items())
        if name not in self.known:
            result = self.trial.run(low)
            self.known[name] = result.drift, result.p95
            self.samples = result.samples
        return self.known[name][0]


class Study:
    """One task on one device: measured once, compared at any cast share."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self.task = task
        self.settings = settings
        device = resolve(settings.hardware)
        self.device = _with_convolutions(device) if settings.convolutions else device
        self.calls = list(record_calls(task.model, read_batches(task.calibration, with_target=False), None))
        held = list(record_calls(task.model, read_batches(task.held_out, with_target=False), None))
        labels = device_labels(self.device)
        self.measurement: Measurement = measure(
            self.calls, source=task.name, drift=task.drift, labels=labels, draws=settings.draws
        )
        graph = self.calls[0].graph
        self.gemms = [str(key_of(n)) for n in calls(graph.gm) if gemm_op(n) is not None]
        self.decisions: Sequence[Decision] = select_default(
            graph.gm, self.device, parameters=graph.parameters
        ).decisions
        self.ranking = next(pair for pair in RANKING_FORMATS if gemm_label(*pair) in labels)
        self.statistics = self._statistics()
        self.held_out = self._trial(held)
        self.calibration = self._trial(self.calls)

    def program(self, cast_share: float) -> Program:
        graph = self.calls[0].graph
        program = formulate(
            [(graph.gm, graph.parameters)], self.device, self.measurement.scores,
            cost="bits", tied=False, cast_share=cast_share,
        )  # fmt: skip
        widest = 16 if self.settings.start == "16" else 64
        return between(program, self.gemms, narrowest=self.settings.narrowest, widest=widest)

    def _statistics(self) -> dict[str, NodeStatistics]:
        program = self.program(0.0)
        scored = {
            key: {(c.compute, c.label.partition(":")[2].partition("->")[0] or "none") for c in program.allowed[key]
                  if is_low(c)}
            for key in self.gemms
        }  # fmt: skip
        return gather(
            self.calls, self.measurement.metric, ranking=self.ranking, scored=scored, draws=self.settings.draws
        )

    def _trial(self, recorded: Sequence[RecordedCall]) -> Trial:
        return Trial(recorded, self.measurement.metric, self.decisions, storage=self.device.storage)

    def repaired(self, program: Program, time_us: float) -> Ours | None:
        """Our plan for a time: solved, run on the calibration data, and solved again with what the runs taught."""
        trial = self._trial(self.calls)
        tried: list[tuple[float, Choice]] = []
        before: float | None = None
        choice = least_drift(program, time_us)
        if choice is None:
            return None
        for number in range(ROUNDS + 1):
            low = choice.low(program)
            measured = trial.run(low).drift
            ratio = ratio_of(measured, choice.drift) or 1.0
            before = ratio if before is None else before
            tried.append((measured, choice))
            if LOW <= ratio <= HIGH or number == ROUNDS or trial.runs >= MAX_RUNS - 1:
                break
            program = learn(program, low, trial, measured, MAX_RUNS)
            choice = least_drift(program, time_us)
            assert choice is not None  # only drifts have changed
        for name in low_arithmetics(program, self.gemms):
            alone = least_drift(with_low_format(program, self.gemms, name), time_us)
            # as the product does (compiler/single_formats.py), while runs last and where there is hope
            if alone is None or trial.runs >= MAX_RUNS or alone.drift > HOPELESS * min(t[0] for t in tried):
                continue
            tried.append((trial.run(alone.low(program)).drift, alone))
        measured, best = min(tried, key=lambda t: t[0])
        # Its prediction is that of the program with all that was learnt.
        best = replace(best, drift=program.totals(best.labels).error)
        after = ratio_of(measured, best.drift) or 1.0
        return Ours(choice=best, measured=measured, before=before or 1.0, after=after, runs=trial.runs)


def _with_convolutions(device: Device) -> Device:
    """The device with convolutions in every format in which it has linear layers."""
    limits = {
        name: limit.model_copy(update={"op_classes": (*limit.op_classes, "conv")}) if "linear" in limit.op_classes
        else limit
        for name, limit in device.profile.limits.items()
    }  # fmt: skip
    return replace(device, profile=device.profile.model_copy(update={"limits": limits}))


class Comparison:
    """All methods on one program."""

    def __init__(self, study: Study, cast_share: float) -> None:
        self.study = study
        self.cast_share = cast_share
        self.program = study.program(cast_share)
        self.gemms = study.gemms
        self.costs = Costs(self.program)
        self.start = starting_labels(self.program, self.gemms)
        if study.settings.start == "traced":
            self.start = {key: found[0].label for key, found in self.program.candidates.items()}
        self.start_time = self.costs.choice(self.start).time_us
        self.least_time = least_time(self.program)
        self.arithmetics = low_arithmetics(self.program, self.gemms)
        self.low = labels_of(self.program, self.gemms, gemm_label(*study.ranking))
        self.held_out = HeldOut(self.program, study.held_out)

    def rows(self) -> list[Row]:
        """One row per target; none where nothing can be saved in 8 bits."""
        free = sum(any(is_low(c) for c in self.program.allowed[key]) for key in self.gemms)
        if not free or self.least_time >= self.start_time:
            return []
        return [row for target in self.study.settings.targets if (row := self._row(target, free)) is not None]

    def _row(self, target: int, free: int) -> Row | None:
        started = time.perf_counter()
        limit = self.start_time - target / 100 * (self.start_time - self.least_time)
        ours = self.study.repaired(self.program, limit)
        if ours is None:
            return None
        drift = self.held_out.drift(ours.choice)

        def over(choice: Choice | None) -> float | str:
            return "-" if choice is None else _over(self.held_out.drift(choice), drift)

        single = gemm_label(*self.study.ranking)
        best = self._best_single_format(limit)
        one = self.study.repaired(with_low_format(self.program, self.gemms, single), limit) if self.low else None
        orders = rankings(self.study.statistics, self.gemms)
        ranked = {n: shortest_prefix(self.costs, self.start, order, self.low, limit) for n, order in orders.items()}
        drawn = [
            shortest_prefix(self.costs, self.start, order, self.low, limit) for order in random_rankings(self.gemms)
        ]
        drawn_drifts = [self.held_out.drift(c) for c in drawn if c is not None]
        lp = gradient_program(self.costs, self.start, self.study.statistics, self.arithmetics, limit)
        lp_single = gradient_program(self.costs, self.start, self.study.statistics, [single], limit)
        return {
            "task": self.study.task.name, "casts": self.cast_share, "target": target, "free": free,
            "ours": drift, "one": over(one.choice if one else None),
            "best one": best[0] / drift if best else "-",
            "random": statistics.geometric_mean(drawn_drifts) / drift if drawn_drifts else "-",
            **{name: over(choice) for name, choice in ranked.items()},
            "LP": over(lp), "LP one": over(lp_single),
            "GEMMs": len(self.gemms), "samples": self.study.measurement.scores.samples,
            "held out": self.held_out.samples, "before": ours.before, "after": ours.after, "runs": ours.runs,
            "calibration": ours.measured,
            "LP calibration": self._calibration_drift(lp) / ours.measured if lp else "-",
            "one before": one.before if one else "-", "one after": one.after if one else "-",
            "one runs": one.runs if one else "-",
            "held out / predicted": math.sqrt(drift / ours.choice.drift) if ours.choice.drift else "-",
            "best format": best[1] if best else "-",
            "ours: formats": ours.choice.formats(self.program, self.gemms),
            "LP: formats": lp.formats(self.program, self.gemms) if lp else "-",
            "time": ours.choice.time_us, "limit": limit, "start time": self.start_time, "least time": self.least_time,
            "seconds": time.perf_counter() - started,
        }  # fmt: skip

    def _calibration_drift(self, choice: Choice) -> float:
        """Drift on the calibration data: where it differs from that on held-out data, samples are few."""
        return self.study.calibration.run(choice.low(self.program)).drift

    def _best_single_format(self, limit: float) -> tuple[float, str] | None:
        """The least held-out drift of plans with one narrow format, and which it is; chosen with hindsight among those
        of least predicted drift."""
        alone = [
            (choice.drift, name, choice)
            for name in self.arithmetics
            if (choice := least_drift(with_low_format(self.program, self.gemms, name), limit)) is not None
        ]
        promising = sorted(alone, key=lambda t: t[:2])[:SINGLE_FORMATS]
        return min(((self.held_out.drift(choice), name) for _, name, choice in promising), default=None)

    def points(self) -> list[Row]:
        """What takes the time it takes: uniform formats, autocast's list, the device's tier, and the start."""
        found = {"start": dict(self.start), "autocast bf16": autocast(self.program, self.gemms, self.start)}
        found |= {name: uniform(self.program, self.gemms, self.start, name) for name in self.arithmetics}
        found["tier"] = as_decided(self.program, self.start, self.study.decisions)
        choices = {name: self.costs.choice(labels) for name, labels in found.items()}
        # The uniform formats take one and the same time.
        ours = {t: least_drift(self.program, t) for t in dict.fromkeys(c.time_us for c in choices.values())}
        rows: list[Row] = []
        for name, choice in choices.items():
            least = ours[choice.time_us]
            drift = self.held_out.drift(choice)
            rows.append(
                {
                    "task": self.study.task.name, "casts": self.cast_share, "point": name,
                    "saving %": 100 * (self.start_time - choice.time_us) / (self.start_time - self.least_time),
                    "drift": drift,
                    "over ours": _over(drift, self.held_out.drift(least) if least else 0.0),
                }
            )  # fmt: skip
        return rows


def _over(drift: float, ours: float) -> float | str:
    """A drift over ours; "-" where ours is exact, as the start may be."""
    return drift / ours if ours > 0 else "-"


EQUAL_COST = (
    "task", "casts", "target", "free", "ours", "one", "best one", "random", "ends", "range", "weight SQNR",
    "output SQNR", "LP", "LP one",
)  # fmt: skip
PREDICTION = (
    "task", "casts", "target", "samples", "before", "after", "runs", "held out", "held out / predicted",
    "ours: formats", "best format",
)  # fmt: skip


def _columns(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return [{name: row[name] for name in names} for row in rows]


def _write(file: Path, settings: Settings, rows: Sequence[Row], points: Sequence[Row], found: Sequence[Row]) -> None:
    data: Mapping[str, Any] = {
        "title": "Drift at equal cost", "settings": asdict(settings), "torch": torch.__version__,
        "dsmp": version("dsmp"), "rows": rows, "points": points, "criteria": found,
    }  # fmt: skip
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="only these tasks")
    parser.add_argument("--hardware", default="h800")
    parser.add_argument("--cast-share", default="0.3", help="one or several, with commas")
    parser.add_argument("--targets", default="40,60,80", help="percentages of the largest saving")
    parser.add_argument("--start", choices=("16", "traced"), default="16", help="what savings are counted from")
    parser.add_argument("--narrowest", type=int, default=8, help="least bits of a format; 4 takes in int4 and fp4")
    parser.add_argument("--convolutions", action="store_true", help="assume 8-bit convolutions")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads wait for each other on small models
    settings = Settings(
        hardware=arguments.hardware,
        start=arguments.start,
        narrowest=arguments.narrowest,
        convolutions=arguments.convolutions,
        cast_shares=tuple(float(x) for x in arguments.cast_share.split(",")),
        targets=tuple(int(x) for x in arguments.targets.split(",")),
    )
    rows: list[Row] = []
    points: list[Row] = []
    for name in arguments.task or DEFAULT_TASKS:
        study = Study(load(name), settings)
        for share in settings.cast_shares:
            comparison = Comparison(study, share)
            added = comparison.rows()
            if not added:
                print(f"{name}: no GEMM may be computed in 8 bits on {settings.hardware}, nothing to compare")
                continue
            rows += added
            points += comparison.points()
            show(f"{name}: drift over ours at equal cost", _columns(added, EQUAL_COST))
    if not rows:
        parser.exit(1, "nothing to compare\n")
    found = criteria(rows)
    show(f"Drift at equal cost on {settings.hardware}, over ours", _columns(rows, EQUAL_COST))
    show("Our plans: measured over predicted, roots", _columns(rows, PREDICTION))
    show("Beside the front", points)
    show("Criteria", found)
    if arguments.json:
        _write(arguments.json, settings, rows, points, found)


if __name__ == "__main__":
    main()
