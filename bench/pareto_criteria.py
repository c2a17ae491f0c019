"""What rows of `bench.pareto` say about the project's criteria."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from bench.table import Row

HEURISTICS = ("random", "ends", "range", "weight SQNR", "output SQNR")
METHODS = ("one", "best one", *HEURISTICS, "LP", "LP one")
TRANSFORMERS = frozenset({"minilm", "vit", "chargpt"})
LOW, HIGH = 0.8, 1.25
_COMMON_SHARE = 0.3
_HIGH_SHARE = 0.6


def criteria(rows: Sequence[Row]) -> list[Row]:
    """Means and counts per method, then one row per criterion: what is asked for, what was found, whether it holds.

    Criteria of a cast share without rows are left out.
    """
    shares = sorted({float(r["casts"]) for r in rows})
    found: list[Row] = []
    for share in shares:
        cells = [r for r in rows if r["casts"] == share]
        for method in METHODS:
            ratios = _numbers(cells, method)
            missing = len(cells) - len(ratios)
            text = f"{statistics.geometric_mean(ratios):.3g}" if ratios else "-"
            if ratios:
                text += f", {min(ratios):.3g} to {max(ratios):.3g}"
            counts = f"{sum(x >= 2 for x in ratios)} of {len(cells)} cells >= 2"
            found.append(_row(f"{method} over ours, casts {share:g}", text, f"{counts}, {missing} not reached", ""))
    common = [r for r in rows if r["casts"] == _COMMON_SHARE]
    if common:
        found += _common(common)
    high = [r for r in rows if r["casts"] == _HIGH_SHARE and r["task"] in TRANSFORMERS]
    ratios = _numbers(high, "LP")
    if ratios:
        mean = statistics.geometric_mean(ratios)
        found.append(_row("LP over ours, transformers, casts 0.6", f"{mean:.3g}", ">= 1.3", mean >= 1.3))
    return found


def _common(rows: Sequence[Row]) -> list[Row]:
    tasks = list(dict.fromkeys(str(r["task"]) for r in rows))

    def tasks_where(holds: Callable[[list[Row]], bool]) -> int:
        return sum(holds([r for r in rows if r["task"] == task]) for task in tasks)

    every = tasks_where(lambda cells: all(_beaten(r, h) >= 2 for r in cells for h in HEURISTICS))
    on_average = tasks_where(lambda cells: all(_mean(_beaten(r, h) for r in cells) >= 2 for h in HEURISTICS))
    means = {h: statistics.geometric_mean(_numbers(rows, h)) for h in HEURISTICS if _numbers(rows, h)}
    least = min(means, key=lambda h: means[h])
    lp, single = _numbers(rows, "LP"), _numbers(rows, "best one")
    before = tasks_where(lambda cells: all(_believed(r["before"]) for r in cells))
    after = tasks_where(lambda cells: all(_believed(r["after"]) for r in cells))
    count = len(tasks)
    found = [
        _row("tasks where ours is at most half of every heuristic in every cell", f"{every} of {count}", ">= 6 of 8",
             every >= 0.75 * count),
        _row("tasks where it is on average over the targets", f"{on_average} of {count}", ">= 6 of 8",
             on_average >= 0.75 * count),
        _row("least mean of a heuristic over ours", f"{means[least]:.3g} ({least})", ">= 4", means[least] >= 4),
        _row("tasks with measured/predicted in [0.8, 1.25] before repair", f"{before} of {count}", ">= 6 of 8",
             before >= 0.75 * count),
        _row("the same after repair", f"{after} of {count}", "all", after == count),
        _row("most runs of a repair", str(max(int(r["runs"]) for r in rows)), "<= 25",
             max(int(r["runs"]) for r in rows) <= 25),
    ]  # fmt: skip
    if lp:
        found.append(_row("ours over LP, worst cell", f"{1 / min(lp):.3g}", "<= 1.1", 1 / min(lp) <= 1.1))
    if single:
        worst = 1 / min(single)
        found.append(_row("ours over the best single format, worst cell", f"{worst:.3g}", "<= 1.05", worst <= 1.05))
    return found


def _row(name: str, value: str, asked: str, holds: bool | str) -> Row:
    return {"criterion": name, "found": value, "asked": asked, "holds": holds if holds == "" else str(bool(holds))}


def _numbers(rows: Iterable[Row], name: str) -> list[float]:
    return [float(r[name]) for r in rows if not isinstance(r[name], str)]


def _beaten(row: Row, method: str) -> float:
    """A method's drift over ours; infinite where it does not reach the time."""
    value = row[method]
    return math.inf if isinstance(value, str) else float(value)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.inf if math.inf in numbers else statistics.geometric_mean(numbers)


def _believed(ratio: float | int | str | bool) -> bool:
    return LOW <= float(ratio) <= HIGH
