"""Plans of one model for several devices as tables: one line for the same nodes, one column for each device."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..hardware_db.schema import natural_accumulator
from ..passes.plan import Decision, PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES
from .compare_plans import ComparedPlans, Planned
from .console import Printer, bytes_text, coloured, plain_table, time_text
from .render import facts_line, gflop_text, legend, ratio_text
from .report import Row, flop_shares, format_text, shape_text


def print_plans(printer: Printer, compared: ComparedPlans) -> None:
    """The decisions side by side, the totals of the other nodes, and a summary of each device."""
    printer.print(*_lines(printer, compared), "")
    if compared.rest:
        full = _rest(compared, formats=True)
        printer.print(full if printer.fits(full) else _rest(compared, formats=False), "")
    if compared.shown < compared.nodes:
        printer.print(f"{compared.shown:,} of {compared.nodes:,} nodes shown; the summary is of whole plans.", "")
    _print_summary(printer, compared)


def _lines(printer: Printer, compared: ComparedPlans) -> list[RenderableType]:
    if not compared.lines:
        return ["no GEMM-class node"]
    table: RenderableType = _line_table(compared)
    if not printer.fits(table):
        table = Text("\n").join(_stacked(compared.devices, line) for line in compared.lines)
    reasons = []
    for i, device in enumerate(compared.devices):
        reasons += [f"{device}: {sentence}" for sentence in legend(line[i] for line in compared.lines)]
    return [table, "", *reasons]


def _line_table(compared: ComparedPlans) -> Table:
    table = plain_table()
    for name in ("key", "n", "shape", "GFLOP"):
        table.add_column(name, justify="right" if name in ("n", "GFLOP") else "left")
    for device in compared.devices:
        table.add_column(device)
        table.add_column("µs", justify="right")
        table.add_column("reason")
    for line in compared.lines:
        row = line[0]
        cells = [row.label, f"{row.count:,}", shape_text(row.first), gflop_text(row.flops)]
        table.add_row(*cells, *(cell for side in line for cell in _side(side)))
    return table


def _side(row: Row) -> tuple[RenderableType, ...]:
    return _formats(row.first), time_text(row.time_us), row.first.reason.code


def _formats(d: Decision) -> Text:
    """`fp8_e4m3 1x128/128x128 → bf16`: computed in, stored in; the accumulator where it is not the natural one."""
    accumulate = "" if d.accumulate == natural_accumulator(d.compute) else f" +{d.accumulate}"
    return coloured(d.compute, f"{format_text(d)}{accumulate} → {d.output}")


def _stacked(devices: Sequence[str], line: Sequence[Row]) -> Text:
    row = line[0]
    parts = [f"{row.count}x" if row.count > 1 else "", shape_text(row.first), f"{gflop_text(row.flops)} GFLOP"]
    text = Text.assemble((row.label, "bold"), "  ", " ".join(filter(None, parts)))
    for device, side in zip(devices, line, strict=True):
        text.append(f"\n  {device}: ").append_text(_formats(side.first))
        text.append(f"  {time_text(side.time_us)} µs  {side.first.reason.code}")
    return text


def _rest(compared: ComparedPlans, *, formats: bool) -> Table:
    table = plain_table()
    table.add_column("other nodes")
    table.add_column("n", justify="right")
    for device in compared.devices:
        table.add_column(f"{device} µs", justify="right")
        if formats:
            table.add_column("formats")
    for totals in compared.rest:
        known = next(t for t in totals if t is not None)
        cells = [known.op, f"{known.count:,}"]
        for total in totals:
            cells.append(time_text(total.time_us) if total is not None else "")
            if formats:
                cells.append(", ".join(f"{name} {n:,}" for name, n in total.formats) if total is not None else "")
        table.add_row(*cells)
    return table


def _print_summary(printer: Printer, compared: ComparedPlans) -> None:
    first = compared.planned[0].plan
    gemms = sum(d.op in GEMM_CLASSES for d in first)
    title = f"{first.model.source} on {len(compared.planned)} devices: {len(first):,} nodes, {gemms:,} GEMM-class"
    table = _summary_table(compared.planned)
    lines: list[RenderableType] = [Text(title, style="bold")]
    lines += [table] if printer.fits(table) else [_summary_text(p) for p in compared.planned]
    for plan in (p.plan for p in compared.planned):
        if plan.hardware_data:
            lines.append(f"hardware data of {plan.hardware}: {'; '.join(plan.hardware_data)}")
    if first.rules:
        lines.append("rules: " + ", ".join(map(str, first.rules)))
    printer.print(*lines, facts_line(compared.planned[-1].facts))


def _summary_table(planned: Sequence[Planned]) -> Table:
    table = plain_table()
    for name in ("device", "GEMM FLOPs in", "predicted µs", "fp32 µs", "speed", "saved for backward", "casts"):
        table.add_column(name, justify="left" if name in ("device", "GEMM FLOPs in") else "right")
    for p in planned:
        table.add_row(Text(p.plan.hardware, style="bold"), *_summary_cells(p))
    return table


def _summary_cells(p: Planned) -> list[str]:
    predicted = p.plan.prediction
    shares = flop_shares(p.plan).get("all", {})
    return [
        ", ".join(f"{100 * share:.1f} % {name}" for name, share in shares.items()) or "none",
        f"{predicted.time_us:,.0f}",
        f"{predicted.time_us_fp32:,.0f}",
        ratio_text(predicted.time_us, predicted.time_us_fp32),
        _saved(p.plan),
        f"{p.facts.casts:,}" if p.facts.casts is not None else "",
    ]


def _summary_text(p: Planned) -> str:
    shares, time, fp32, speed, saved, casts = _summary_cells(p)
    memory = f"; saved for backward {saved}" if saved else ""
    return f"{p.plan.hardware}: {shares}; predicted {time} µs, fp32 {fp32} µs ({speed}){memory}; {casts} casts"


def _saved(plan: PrecisionPlan) -> str:
    """`9.57 MB (-36 %)`, the change to fp32; nothing for inference."""
    saved, fp32 = plan.prediction.saved_bytes, plan.prediction.saved_bytes_fp32
    if saved is None or not fp32:
        return ""
    return f"{bytes_text(saved)} ({100 * (saved / fp32 - 1):+.0f} %)"
