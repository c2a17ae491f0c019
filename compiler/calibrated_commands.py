"""Calibration on the command line: `--calibrate FILE.py:batches --budget 0.5%` of `dsmp plan` and `dsmp report`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from ..errors import InvalidOptionError
from ..hardware_db.capability import Device
from ..passes.plan import PrecisionPlan
from ..passes.program import Cost, DriftKind
from ..passes.rules import Rule
from ..passes.scores import load_scores
from .calibrated import Calibration, check_measurable, plan_from_measurement, plan_from_scores
from .calibration_source import calibration_code
from .capture import Capture
from .console import Stages
from .model_building import LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationArguments:
    """How to calibrate, as written on the command line: batches to measure on, or scores measured before."""

    calibrate: str | None = None
    loss: str | None = None
    budget: str | None = None
    memory: str | None = None
    drift: str | None = None
    cost: str = "roofline"
    untied: bool = False
    draws: int = 2
    scores: Path | None = None
    save_scores: Path | None = None


def _first_set(arguments: CalibrationArguments) -> str:
    plain = CalibrationArguments()
    names = [f.name for f in fields(plain) if getattr(arguments, f.name) != getattr(plain, f.name)]
    return names[0].replace("_", "-")


@contextlib.contextmanager
def calibration_settings(arguments: CalibrationArguments | None) -> Iterator[Calibration | None]:
    """What calibration is asked for, checked, with its batches read; the user's code stays importable in the block.

    None for no calibration. Raises InvalidOptionError, BudgetError, CalibrationError, LossError.
    """
    if arguments is None:
        yield None
        return
    if arguments.calibrate is None:
        for option, value in (("--loss", arguments.loss), ("--save-scores", arguments.save_scores)):
            if value is not None:
                raise InvalidOptionError(option, str(value), "with --calibrate")
    settings = Calibration(
        batches=arguments.calibrate, drift=cast("DriftKind | None", arguments.drift), budget=arguments.budget,
        memory=arguments.memory, cost=cast("Cost", arguments.cost), tied=not arguments.untied, draws=arguments.draws,
    )  # fmt: skip
    settings.check(scored=arguments.scores is not None)
    if arguments.calibrate is None:
        if arguments.scores is None:
            raise InvalidOptionError(f"--{_first_set(arguments)}", "given", "with --calibrate, or with --scores")
        yield settings
        return
    with calibration_code(arguments.calibrate, arguments.loss) as (batches, loss):
        yield replace(settings, batches=batches, loss=loss).read()


def calibrated_plans(
    arguments: CalibrationArguments,
    settings: Calibration,
    loaded: LoadedModel,
    captured: Capture,
    devices: Sequence[Device],
    rules: Sequence[Rule],
    stages: Stages,
    *,
    training: bool,
) -> list[PrecisionPlan]:
    """One calibrated plan for each device, from one measurement of a loaded model. Raises DsmpError."""
    if arguments.scores is not None:
        scores = load_scores(arguments.scores)
        with stages.stage("solving", "solving"):
            return [plan_from_scores(captured, d, scores, settings, rules=rules) for d in devices]
    if loaded.module is None:
        raise InvalidOptionError("--calibrate", loaded.source, "a module: calibrate before exporting it")
    check_measurable(captured, training)
    with stages.stage("calibration", f"measuring on {len(settings.batches)} batches") as tell:
        measurement = settings.measure(
            loaded.module, devices, training=training, source=captured.source, captured=captured,
            whole=arguments.save_scores is not None, tell=tell,
        )  # fmt: skip
    if arguments.save_scores is not None:
        measurement.scores.save(arguments.save_scores)
    with stages.stage("solving and testing", "solving") as tell:
        return [plan_from_measurement(captured, d, measurement, settings, rules=rules, tell=tell).plan for d in devices]
