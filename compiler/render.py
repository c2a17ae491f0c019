"""Reports, plans' differences and progress as text on a console.

A table is shown in the widest of its layouts that fits: with the reasons in full, with their codes and the sentences
below, or two lines a row on narrow terminals. Where the output is no terminal, layouts are chosen for 200 columns and
no line is broken.
Results go to standard output, progress and warnings to standard error.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..passes.plan import GEMM_CLASSES, Decision, PrecisionPlan
from .report import (
    ClassTotal,
    DiffRow,
    Report,
    Row,
    RunFacts,
    flop_shares,
    format_text,
    shape_text,
    short_reason,
    without_numbers,
)

_UNLIMITED = 10_000
_PLAIN_WIDTH = 200
_STYLES = {"fp64": "dim", "fp32": "dim", "tf32": "green", "bf16": "cyan", "fp16": "cyan"}


class Printer:
    """Writes to a text stream: coloured and within its width on a terminal, plain and with unbroken lines otherwise."""

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        """`stream` None is standard output. `width` replaces the stream's own."""
        self.stream = stream if stream is not None else sys.stdout
        terminal = Console(file=self.stream)
        self.is_terminal = terminal.is_terminal
        self.line_width = width or _UNLIMITED
        self.width = width or (terminal.width if terminal.is_terminal else _PLAIN_WIDTH)

    def print(self, *renderables: RenderableType) -> None:
        """Write renderables one below the other, without blanks at the ends of lines where nothing is coloured."""
        if self.is_terminal:
            self._console(self.stream, width=self.width).print(*renderables, sep="\n")
            return
        text = io.StringIO()
        self._console(text, width=self.line_width, color_system=None).print(*renderables, sep="\n")
        self.stream.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))
        self.stream.flush()

    def _console(self, stream: Any, **options: Any) -> Console:
        # keys and file names may hold brackets and colons, which are not meant as markup
        return Console(file=stream, highlight=False, markup=False, emoji=False, **options)

    def fits(self, renderable: RenderableType) -> bool:
        """Whether a renderable's lines need no breaking."""
        console = Console(file=io.StringIO(), width=_UNLIMITED, markup=False, emoji=False)
        return Measurement.get(console, console.options, renderable).maximum <= self.width


class Stages:
    """Named stages of a run: their seconds, and a spinner on standard error while they last, if that is a terminal."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, text: str) -> Iterator[None]:
        """Measure a stage under `name` and show `text`; stages of one name are added up."""
        console = Console(file=sys.stderr)
        started = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task(text, total=None)
            try:
                yield
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


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
    lines: list[RenderableType] = [Text(title, style="bold"), _shares(plan), *_prediction(plan, facts)]
    if plan.rules:
        lines.append("rules: " + ", ".join(f"{r.match} → {r.format}" for r in plan.rules) + _pending(plan))
    if facts is not None and (made := facts_line(facts)):
        lines.append(made)
    printer.print(*lines)


def facts_line(facts: RunFacts) -> str:
    """`capture 12.4 s, planning 0.3 s; peak memory of this process 1.03 GB`."""
    parts = [", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts.seconds.items())]
    if facts.peak_bytes is not None:
        parts.append(f"peak memory of this process {bytes_text(facts.peak_bytes)}")
    return "; ".join(p for p in parts if p)


def bytes_text(count: float) -> str:
    """Bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


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
    full = _row_table(rows, sentences=True)
    if printer.fits(full):
        return [full]
    codes = _row_table(rows, sentences=False)
    table: RenderableType = codes if printer.fits(codes) else Text("\n").join(map(_stacked, rows))
    return [table, "", *_legend(rows)]


def _row_table(rows: Sequence[Row], *, sentences: bool) -> Table:
    table = plain_table()
    table.add_column("key")
    for name in ("n", "shape", "GFLOP"):
        table.add_column(name, justify="left" if name == "shape" else "right")
    for name in ("format", "accumulate" if sentences else "acc", "output"):
        table.add_column(name)
    table.add_column("µs", justify="right")
    table.add_column("reason")
    for row in rows:
        d = row.first
        table.add_row(
            row.label, f"{row.count:,}", shape_text(d), gflop_text(row.flops), coloured(d.compute, format_text(d)),
            d.accumulate, coloured(d.output), time_text(row.time_us),
            short_reason(d.reason) if sentences else d.reason.code,
        )  # fmt: skip
    return table


def _stacked(row: Row) -> Text:
    d = row.first
    parts = [f"{row.count}x" if row.count > 1 else "", shape_text(d), f"{gflop_text(row.flops)} GFLOP"]
    line = Text.assemble((row.label, "bold"), "\n  ", " ".join(filter(None, parts)), "  ")
    line.append_text(coloured(d.compute, format_text(d)))
    line.append(f" +{d.accumulate} → ").append_text(coloured(d.output))
    return line.append(f"  {time_text(row.time_us)} µs  {d.reason.code}")


def _legend(rows: Iterable[Row]) -> list[str]:
    """What the reason codes stand for; a sentence that differs in its numbers only is given once, as an example."""
    texts: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        text = short_reason(row.first.reason)
        texts.setdefault((row.first.reason.code, without_numbers(text)), []).append(text)
    return [f"{code}: {'e.g. ' if len(set(same)) > 1 else ''}{same[0]}" for (code, _), same in texts.items()]


def plain_table(gap: int = 2) -> Table:
    """A table without lines but one below its head, and `gap` blanks between columns."""
    padding = (0, gap - 1, 0, 0)  # the box itself puts one blank between columns
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, header_style="bold")


def coloured(name: str, text: str | None = None) -> Text:
    """A format's name (or `text` about it) in the colour of its width."""
    return Text(text or name, style=_STYLES.get(name, "magenta"))


def gflop_text(flops: float) -> str:
    """GFLOP with three digits."""
    return digits(flops / 1e9)


def time_text(time_us: float) -> str:
    """Microseconds with three digits."""
    return digits(time_us)


def digits(value: float) -> str:
    """A number with three significant digits, never in exponent form: 0.0025, 21.3, 1,234."""
    if value == 0:
        return "0"
    if value >= 99.995:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.2g}" if value >= 1e-4 else "<0.0001"


# ---- differences -------------------------------------------------------------------------------------------


def print_diff(
    printer: Printer,
    before: PrecisionPlan,
    after: PrecisionPlan,
    rows: Sequence[DiffRow],
    first: str = "before",
    second: str = "after",
) -> None:
    """Folded differences between two plans, named `first` and `second`: computed in → stored in; a sentence if none."""
    if before.model.fingerprint != after.model.fingerprint:
        printer.print(
            f"the plans are for different graphs: {before.model.source} ({before.model.fingerprint}) and "
            f"{after.model.source} ({after.model.fingerprint})"
        )
    if not rows:
        printer.print(f"no difference: all {len(before):,} nodes have the same formats")
        return
    table = plain_table()
    for name in ("key", "n", f"{first}: {before.hardware}", f"{second}: {after.hardware}"):
        table.add_column(name, justify="right" if name == "n" else "left", overflow="fold")
    for row in rows:
        sides = _side(row.before, row.after), _side(row.after, row.before)
        table.add_row(row.label, f"{len(row.differences):,}", *sides)
    count = sum(len(r.differences) for r in rows)
    both = len({*before.by_key, *after.by_key})
    printer.print(table, "", f"{count:,} of {both:,} nodes differ")


def _pending(plan: PrecisionPlan) -> str:
    """Says so when rules were edited into the file: they take effect when the plan is replayed."""
    open_rules = [
        r for r in plan.rules if any(r.applies(d.key) and d.op in GEMM_CLASSES and d.compute != r.format for d in plan)
    ]
    return " (edited: applied on replay, the table shows what stood before)" if open_rules else ""


def _side(d: Decision | None, other: Decision | None) -> Text:
    if d is None:
        return Text("absent", style="dim")
    accumulate = f" +{d.accumulate}" if other is not None and other.accumulate != d.accumulate else ""
    return coloured(d.compute, f"{format_text(d)}{accumulate} → {d.output}")
