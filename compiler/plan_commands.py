"""`dsmp explain` and `dsmp pareto`: what asks a calibrated plan for more than its decisions. Needs no model."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ..errors import AmbiguousHardwareError, InvalidOptionError, PlanFileError, UnknownHardwareError
from ..hardware_db.capability import Device
from ..hardware_db.detect import resolve_hardware
from ..passes.explain import explain as explain_node
from ..passes.files import write_atomically
from ..passes.node_lookup import find_decision
from ..passes.pareto import pareto_front
from ..passes.plan import PrecisionPlan, load_plan
from .console import Printer, write_json
from .pareto_figure import check_matplotlib, check_suffix, csv_text, figure_bytes, front_table
from .render_explain import print_explanation

MIN_POINTS, MAX_POINTS = 2, 1000


def explain(path: Path, key: str, *, want: str | None, as_json: bool) -> None:
    """`dsmp explain plan.json KEY`: print why a node got its format, or the same as JSON.

    Raises PlanSchemaError, UnknownKeyError, AmbiguousKeyError, UnknownFormatError, UnknownRecipeError.
    """
    with _without_collection():
        plan = load_plan(path)
        explanation = explain_node(plan, find_decision(plan, key), want=want, device=_device(plan))
    if as_json:
        write_json(asdict(explanation))
    else:
        print_explanation(Printer(), plan, explanation)


def pareto(path: Path, *, output: Path | None, csv_file: Path | None, points: int) -> None:
    """`dsmp pareto plan.json`: print time against drift over all budgets; as a figure and as CSV where asked for.

    Raises PlanSchemaError, NotCalibratedError, InvalidOptionError, MissingPackageError, PlanFileError.
    """
    if not MIN_POINTS <= points <= MAX_POINTS:
        raise InvalidOptionError("--points", points, f"a number of budgets from {MIN_POINTS} to {MAX_POINTS}")
    if output is not None:
        check_suffix(output)
        check_matplotlib()
    plan = load_plan(path)
    front = pareto_front(plan, points=points, device=_device(plan))
    printer = Printer()
    written = []
    if output is not None:
        written.append(write_atomically(output, figure_bytes(front, plan, output.suffix), PlanFileError, "figure"))
    if csv_file is not None:
        written.append(write_atomically(csv_file, csv_text(front), PlanFileError, "CSV file"))
    printer.print(front_table(front), "", *front.notes, *(f"written to {file}" for file in written))


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """A large plan is a million objects that all stay: looking for garbage among them doubles the time of an answer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _device(plan: PrecisionPlan) -> Device | None:
    """The planned hardware; None where it is described in a file that is not at hand."""
    try:
        return resolve_hardware(plan.hardware)
    except (UnknownHardwareError, AmbiguousHardwareError):
        return None
