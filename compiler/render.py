"""Reports as tables: with the reasons in full, with their codes and the sentences below, or two
lines a row, whichever is the widest that fits (console.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..passes.plan import PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES
from .console import Printer, bytes_text, coloured, digits, plain_table, time_text
from .render_mesh import mesh_lines
from .render_solution import drift_text, solution_lines
from .report import (
    ClassTotal,
    Report,
    Row,
    RunFacts,
    flop_shares,
    format_text,
    shape_text,
    short_reason,
    without_numbers,
)

_FIGURES = ("drift", "slack", "margin")

# ---- the report --------------------------------------------------------------------------------------------


def print_report(printer: Printer, report: Report) -> None:
    """The table of a report, the totals of the other nodes, and the summary."""
    printer.print(*_rows(printer, report.rows), "")
    if report.rest:
        printer.print(_totals(report.rest), "")
    if report.shown < len(report.plan):
        printer.print(f"{report.shown:,} of {len(report.plan):,} nodes shown; the summary is of the whole plan.", "")
    print_summary(printer, report.plan, report.facts)


def print_summary(printer: Printer, plan: PrecisionPlan, facts: RunFacts | None) -> None:
    """Shares of the work, casts, prediction and, where the plan was just made, time and memory that took."""
    gemms = sum(d.op in GEMM_CLASSES for d in plan)
    title = f"{plan.model.source} on {plan.hardware}: {len(plan):,} nodes, {gemms:,} of them GEMM-class"
    lines: list[RenderableType] = [Text(title, style="bold"), _shares(plan)]
    lines += [*_prediction(plan, facts), *solution_lines(plan)]
    if plan.mesh is not None:
        lines += mesh_lines(plan.mesh)
    if plan.hardware_data:
        lines.append(f"hardware data: {'; '.join(plan.hardware_data)}")
    if plan.rules:
        lines.append("rules: " + ", ".join(map(str, plan.rules)) + _pending(plan))
    if facts is not None and (made := facts_line(facts)):
        lines.append(made)
    printer.print(*lines)


def facts_line(facts: RunFacts) -> str:
    """`capture 12.4 s, planning 0.3 s; peak memory of this process 1.03 GB`."""
    parts = [", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts.seconds.items())]
    if facts.peak_bytes is not None:
        parts.append(f"peak memory of this process {bytes_text(facts.peak_bytes)}")
    return "; ".join(p for p in parts if p)


def ratio_text(planned: float, fp32: float) -> str:
    """How fast in terms of fp32: `2.26x as fast`."""
    return f"{fp32 / planned:.2f}x as fast" if planned else "nothing to compare"


def _prediction(plan: PrecisionPlan, facts: RunFacts | None) -> list[str]:
    p = plan.prediction
    casts = "not known from a plan alone"
    if facts is not None and facts.casts is not None:
        casts = f"{facts.casts:,} inserted, roundings to simulated formats included"
    lines = [
        f"casts: {casts}",
        f"predicted time: {p.time_us:,.0f} µs, fp32 {p.time_us_fp32:,.0f} µs ({ratio_text(p.time_us, p.time_us_fp32)})",
    ]
    if p.saved_bytes is not None and p.saved_bytes_fp32:
        change = f"{100 * (p.saved_bytes / p.saved_bytes_fp32 - 1):+.0f} %"
        planned, fp32 = bytes_text(p.saved_bytes), bytes_text(p.saved_bytes_fp32)
        lines.append(f"saved activations: {planned}, fp32 {fp32} ({change})")
    return lines


def _shares(plan: PrecisionPlan) -> RenderableType:
    shares = flop_shares(plan)
    if not shares:
        return "no GEMM-class node"
    formats = list(shares["all"])
    table = plain_table()
    table.add_column("share of GEMM FLOPs")
    for name in formats:
        table.add_column(coloured(name), justify="right")
    for phase, parts in shares.items():
        table.add_row(phase, *(f"{100 * parts[f]:.1f} %" if f in parts else "" for f in formats))
    return table


def _totals(totals: Sequence[ClassTotal]) -> Table:
    table = plain_table()
    table.add_column("other nodes")
    table.add_column("n", justify="right")
    table.add_column("moved", justify="right")
    table.add_column("µs", justify="right")
    table.add_column("formats")
    for t in totals:
        formats = ", ".join(f"{name} {count:,}" for name, count in t.formats)
        table.add_row(t.op, f"{t.count:,}", bytes_text(t.bytes), time_text(t.time_us), formats)
    return table


def _rows(printer: Printer, rows: Sequence[Row]) -> list[RenderableType]:
    """The table in the widest layout that fits, with a legend of the reasons where the table has only their codes."""
    if not rows:
        return ["no GEMM-class node"]
    caption = [_caption(rows)] if rows[0].figures else []
    full = _row_table(rows, sentences=True)
    if printer.fits(full):
        return [full, *caption]
    layouts = [_row_table(rows, sentences=False), *([_figure_table(rows)] if rows[0].figures else [])]
    table: RenderableType = next(filter(printer.fits, layouts), None) or Text("\n").join(map(_stacked, rows))
    return [table, *caption, "", *legend(rows)]


def _caption(rows: Sequence[Row]) -> str:
    """The units of drift, slack and margin, and what they mean."""
    drift = "% of the error budget" if any(row.share is not None for row in rows) else "in the unit of the calibration"
    return (
        f"drift: {drift}; slack: µs before it delays the whole; margin: µs that the best other choice would cost; of a "
        "folded row the drifts are added, slack and margin are the least"
    )


def _row_table(rows: Sequence[Row], *, sentences: bool) -> Table:
    table = plain_table()
    table.add_column("key")
    for name in ("n", "shape", "GFLOP"):
        table.add_column(name, justify="left" if name == "shape" else "right")
    for name in ("format", "accumulate" if sentences else "acc", "output"):
        table.add_column(name)
    table.add_column("µs", justify="right")
    for name in _FIGURES if rows[0].figures else ():
        table.add_column(name, justify="right")
    table.add_column("reason")
    for row in rows:
        d = row.first
        table.add_row(
            row.label, f"{row.count:,}", shape_text(d), gflop_text(row.flops), coloured(d.compute, format_text(d)),
            d.accumulate, coloured(d.output), time_text(row.time_us), *_figures(row),
            short_reason(d.reason) if sentences else d.reason.code,
        )  # fmt: skip
    return table


def _figure_table(rows: Sequence[Row]) -> Table:
    """What a calibrated plan was decided by, without shapes: for terminals of 120 columns."""
    table = plain_table()
    for name in ("key", "n", "format", "µs", *_FIGURES, "reason"):
        table.add_column(name, justify="left" if name in ("key", "format", "reason") else "right")
    for row in rows:
        d = row.first
        formats = coloured(d.compute, f"{format_text(d)} → {d.output}")
        table.add_row(row.label, f"{row.count:,}", formats, time_text(row.time_us), *_figures(row), d.reason.code)
    return table


def _figures(row: Row) -> tuple[str, ...]:
    """Drift as share of the budget, slack and margin in microseconds; no cells without calibration."""
    if not row.figures:
        return ()
    drift = drift_text(sum(f.drift for f in row.figures), row.share)
    slack, margin = (signed_time(us) if us is not None else "" for us in (row.slack_us, row.margin_us))
    return drift, slack, margin


def signed_time(time_us: float) -> str:
    """Microseconds with three digits and a minus where there is one; differences that rounding makes are 0."""
    if abs(time_us) < 1e-6:
        return "0"
    return time_text(time_us) if time_us > 0 else f"-{time_text(-time_us)}"


def _stacked(row: Row) -> Text:
    d = row.first
    parts = [f"{row.count}x" if row.count > 1 else "", shape_text(d), f"{gflop_text(row.flops)} GFLOP"]
    line = Text.assemble((row.label, "bold"), "\n  ", " ".join(filter(None, parts)), "  ")
    line.append_text(coloured(d.compute, format_text(d)))
    line.append(f" +{d.accumulate} → ").append_text(coloured(d.output))
    line.append(f"  {time_text(row.time_us)} µs  {d.reason.code}")
    if row.figures:
        figures = zip(_FIGURES, _figures(row), strict=True)
        line.append("\n  " + "  ".join(f"{name} {text or 'none'}" for name, text in figures))
    return line


def legend(rows: Iterable[Row]) -> list[str]:
    """What the reason codes stand for; a sentence that differs in its numbers only is given once, as an example."""
    texts: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        text = short_reason(row.first.reason)
        texts.setdefault((row.first.reason.code, without_numbers(text)), []).append(text)
    return [f"{code}: {'e.g. ' if len(set(same)) > 1 else ''}{same[0]}" for (code, _), same in texts.items()]


def gflop_text(flops: float) -> str:
    """GFLOP with three digits."""
    return digits(flops / 1e9)


def _pending(plan: PrecisionPlan) -> str:
    """Says so when rules were edited into the file: they take effect when the plan is replayed."""
    open_rules = [
        r
        for r in plan.rules
        if any(r.concerns(d.key) and d.op in GEMM_CLASSES and not r.fits(d.compute, d.recipe) for d in plan)
    ]
    return " (edited: applied on replay, the table shows what stood before)" if open_rules else ""
