"""Differences between two plans as tables: by module with what they do to time and drift, or node by node."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..passes.plan import Decision, PrecisionPlan
from .compare_modules import ModuleDifference
from .console import Printer, coloured, plain_table, time_text
from .report import DiffRow, format_text


def print_module_diff(
    printer: Printer,
    before: PrecisionPlan,
    after: PrecisionPlan,
    modules: Sequence[ModuleDifference],
    first: str = "before",
    second: str = "after",
) -> None:
    """Differences between two plans, named `first` and `second`, one block per module, and the totals."""
    if _same(printer, before, after, not modules):
        return
    calibrated = all(m.before.drift is not None and m.after.drift is not None for m in modules)
    table = _table(before, after, first, second, calibrated=calibrated)
    for module in modules:
        drift = [_drift_change(module)] if calibrated else []
        change = _signed(module.after.time_us - module.before.time_us)
        label = Text(module.label or "(no module)", style="bold")
        table.add_row(label, f"{module.changed:,} of {module.nodes:,}", "", "", change, *drift)
        for c in module.changes:
            sides = formats_of(c.first.before, c.first.after), formats_of(c.first.after, c.first.before)
            table.add_row(f"  {c.phase} {c.op}", f"{c.count:,}", *sides, "", *[""] * len(drift))
    printer.print(table, "", *_totals(before, after, sum(m.changed for m in modules), modules))


def print_diff(
    printer: Printer,
    before: PrecisionPlan,
    after: PrecisionPlan,
    rows: Sequence[DiffRow],
    first: str = "before",
    second: str = "after",
) -> None:
    """Folded differences between two plans, named `first` and `second`: computed in → stored in; a sentence if none."""
    if _same(printer, before, after, not rows):
        return
    table = plain_table()
    for name in ("key", "n", f"{first}: {before.hardware}", f"{second}: {after.hardware}"):
        table.add_column(name, justify="right" if name == "n" else "left", overflow="fold")
    for row in rows:
        sides = formats_of(row.before, row.after), formats_of(row.after, row.before)
        table.add_row(row.label, f"{len(row.differences):,}", *sides)
    printer.print(table, "", *_totals(before, after, sum(len(r.differences) for r in rows), ()))


def formats_of(d: Decision | None, other: Decision | None) -> Text:
    """Computed in → stored in; the accumulator where the other side has another one."""
    if d is None:
        return Text("absent", style="dim")
    accumulate = f" +{d.accumulate}" if other is not None and other.accumulate != d.accumulate else ""
    return coloured(d.compute, f"{format_text(d)}{accumulate} → {d.output}")


def _same(printer: Printer, before: PrecisionPlan, after: PrecisionPlan, equal: bool) -> bool:
    """Say that the plans are for different graphs, and that they do not differ; returns whether they are equal."""
    if before.model.fingerprint != after.model.fingerprint:
        printer.print(
            f"the plans are for different graphs: {before.model.source} ({before.model.fingerprint}) and "
            f"{after.model.source} ({after.model.fingerprint})"
        )
    if equal:
        printer.print(f"no difference: all {len(before):,} nodes have the same formats")
    return equal


def _table(before: PrecisionPlan, after: PrecisionPlan, first: str, second: str, *, calibrated: bool) -> Table:
    table = plain_table()
    heads = ["module", "n", f"{first}: {before.hardware}", f"{second}: {after.hardware}", "µs"]
    for i, name in enumerate([*heads, *(["drift"] if calibrated else [])]):
        table.add_column(name, justify="right" if i in (1, 4, 5) else "left", overflow="fold")
    return table


def _totals(
    before: PrecisionPlan, after: PrecisionPlan, changed: int, modules: Sequence[ModuleDifference]
) -> list[RenderableType]:
    both = len({*before.by_key, *after.by_key})
    count = sum(len(m.modules) for m in modules)
    where = f" in {count:,} {'module' if count == 1 else 'modules'}" if count else ""
    lines: list[RenderableType] = [f"{changed:,} of {both:,} nodes differ{where}"]
    old, new = before.prediction.time_us, after.prediction.time_us
    lines.append(f"predicted time: {time_text(old)} → {time_text(new)} µs ({_signed(new - old)})")
    a, b = before.solution, after.solution
    if a is not None and b is not None:
        lines[-1] = f"{lines[-1]}, casts {time_text(a.cast_us)} → {time_text(b.cast_us)} µs"
        lines.append(f"predicted drift: {a.drift:.3g} → {b.drift:.3g} ({b.drift - a.drift:+.3g})")
    return lines


def _drift_change(module: ModuleDifference) -> str:
    change = (module.after.drift or 0.0) - (module.before.drift or 0.0)
    return f"{change:+.2g}" if change else "0"


def _signed(time_us: float) -> str:
    """A difference of microseconds with its sign; what rounding makes is 0."""
    if abs(time_us) < 1e-6:
        return "0"
    return f"{'+' if time_us > 0 else '-'}{time_text(abs(time_us))}"
