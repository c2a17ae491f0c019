"""A Pareto front as a figure, as CSV, and as the table on the terminal. Needs matplotlib for the figure alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import InvalidOptionError, MissingPackageError
from ..passes.pareto import Kind, ParetoFront, Point
from ..passes.plan import PrecisionPlan
from .console import plain_table, time_text
from .render_solution import amount_axis, percent

SUFFIXES = (".png", ".svg", ".pdf")

_MARKERS: dict[Kind, str] = {"format": "s", "autocast": "^", "tier": "D", "default": "P"}
_PLAN = "black"
_LEFT = 0.5  # of the least drift on the axis: where a drift of 0 is drawn


def check_suffix(path: Path) -> None:
    """Raise InvalidOptionError for a file name that stands for no kind of figure."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidOptionError("--output", str(path), f"a file that ends in {', '.join(SUFFIXES)}")


def check_matplotlib() -> None:
    """Raise MissingPackageError where figures cannot be drawn."""
    _matplotlib()


def _matplotlib() -> Any:
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingPackageError("matplotlib", "a figure", "plots") from error


def figure_bytes(front: ParetoFront, plan: PrecisionPlan, suffix: str) -> bytes:
    """The figure as a file of a suffix's kind: microseconds against drift, and against the user's unit on top.

    Raises MissingPackageError without matplotlib.
    """
    figure = _matplotlib().Figure(figsize=(10.5, 6), layout="constrained")
    axes = figure.subplots()
    _draw(axes, front, plan)
    data = io.BytesIO()
    # without a date the same front gives the same bytes
    metadata = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix.lower()]
    figure.savefig(data, format=suffix.lower().removeprefix("."), dpi=150, metadata=metadata)
    return data.getvalue()


def _draw(axes: Any, front: ParetoFront, plan: PrecisionPlan) -> None:
    everything = (*front.front, front.plan, *front.others)
    positive = [p.drift for p in everything if p.drift > 0] or [1.0]
    left = _LEFT * min(positive)

    def at(points: Sequence[Point]) -> tuple[list[float], list[float]]:
        return [max(p.drift, left) for p in points], [p.time_us for p in points]

    axes.set_xscale("log")
    axes.plot(*at(front.front), marker=".", color="C0", drawstyle="steps-post", label="optimum", zorder=2)
    for point, colour in zip(front.others, _colours(len(front.others)), strict=True):
        axes.scatter(*at([point]), marker=_MARKERS[point.kind], s=60, color=colour, label=name_of(point), zorder=3)
    axes.scatter(*at([front.plan]), marker="*", s=180, color=_PLAN, edgecolor="white", label="this plan", zorder=4)
    if front.limit:
        axes.axvline(front.limit, color=_PLAN, linestyle="--", linewidth=1, label="its budget")
    axes.set_xlim(left / 1.5, 2 * max(*positive, front.limit or 0.0))
    axes.set_ylim(bottom=0)
    zero = f" (0 at {left:.1g})" if any(p.drift == 0 for p in everything) else ""
    axes.set_xlabel(f"predicted drift{zero}")
    axes.set_ylabel("predicted time, µs")
    axes.set_title(f"{front.source} on {front.hardware}", pad=12)
    axes.grid(visible=True, alpha=0.3)
    # beside the axes, where it covers nothing
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0, fontsize="small")
    if (unit := amount_axis(plan)) is not None:
        top = axes.secondary_xaxis("top", functions=(unit.amount_percent, unit.drift))
        top.set_xlabel(f"error budget, % {unit.meaning}")


def _colours(count: int) -> list[tuple[float, float, float]]:
    """As many different colours: hues evenly around the circle, each second one darker."""
    return [hsv_to_rgb(i / max(count, 1), 0.85, 0.6 if i % 2 else 0.9) for i in range(count)]


def csv_text(front: ParetoFront) -> str:
    """Every point as a line; empty where there is no figure. The columns are the fields of `Point`."""
    text = io.StringIO()
    names = [f.name for f in fields(Point)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for point in (*front.front, front.plan, *front.others):
        writer.writerow(
            {k: "" if v is None else repr(v) if isinstance(v, float) else v for k, v in asdict(point).items()}
        )
    return text.getvalue()


def front_table(front: ParetoFront) -> Table:
    """All points by rising drift; beside the front, what the optimum of the same drift would take."""
    table = plain_table()
    for name in ("", "budget", "drift", "µs", "casts µs", "optimum there µs"):
        table.add_column(name, justify="left" if not name else "right")
    points = sorted((*front.front, front.plan, *front.others), key=lambda p: (p.drift, p.time_us, p.name))
    for p in points:
        amount = percent(p.amount) if p.amount is not None else ""
        optimum = time_text(p.optimum_us) if p.optimum_us is not None else ""
        table.add_row(name_of(p), amount, f"{p.drift:.3g}", time_text(p.time_us), time_text(p.cast_us), optimum)
    return table


def name_of(point: Point) -> str:
    """A point's name in words: `all bf16` for a single format."""
    return f"all {point.name}" if point.kind == "format" else point.name
