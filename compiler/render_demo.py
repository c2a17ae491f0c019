"""The demonstration on one screen of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .console import Printer, bytes_text, coloured, plain_table
from .demo import Demo, DevicePlan, Example
from .report import without_numbers

_WIDTH = 100
_GEMM_PHASES = {"fprop", "dgrad", "wgrad"}


def print_demo(printer: Printer, demo: Demo) -> None:
    """What was run here, what is planned for the devices, and some decisions with their reasons."""
    lines: list[RenderableType] = [Text(f"One training step of a {demo.model}, run on {demo.running}", style="bold")]
    if demo.note:
        lines.append(Text(demo.note, style="yellow"))
    lines += [_runs(demo), "", _plans(demo.devices, simulated=True), ""]
    if demo.large:
        if any(d.time_us > d.time_us_fp32 for d in demo.devices):
            lines[-1] = "A step this small is mostly kernel launches and weight casts: there narrow formats cost time."
            lines.append("")
        lines += [Text(f"The same for a {demo.large_model}, planned on meta, not run", style="bold")]
        lines += [_plans(demo.large, simulated=False), ""]
    wide = f' ("wide": at width {demo.large[0].width})' if demo.large else ""
    lines += [Text(f"Some decisions, and why{wide}", style="bold"), _examples(demo), ""]
    lines.append("dsmp report MODEL --hardware H shows a model of yours; dsmp report --help tells how to name it.")
    Printer(printer.stream, width=min(printer.width, _WIDTH)).print(*lines)


def _runs(demo: Demo) -> Table:
    table = plain_table()
    for name in ("run here", "linear", "attention"):
        table.add_column(name)
    for name in ("loss error", "gradient error (both against fp64)", "compiled in"):
        table.add_column(name, justify="right")
    formats = [("fp32", "fp32"), ("bf16", "bf16"), (demo.here.formats["linear"], demo.here.formats["attention"])]
    for run, (linear, attention) in zip(demo.runs, formats, strict=True):
        compiled = f"{run.compile_s:.0f} s" if run.compile_s is not None else ""
        errors = (f"{run.loss_error:.1e}", f"{run.gradient_error:.1e}")
        table.add_row(run.name, coloured(linear), coloured(attention), *errors, compiled)
    return table


def _plans(devices: Sequence[DevicePlan], *, simulated: bool) -> Table:
    table = plain_table(gap=1)
    for name in ("planned\nfor", "\nlinear", "\nattention", "norm, soft-\nmax, loss", "\nstorage", "\nFLOPs"):
        table.add_column(name)
    table.add_column("predicted µs\n(speed of fp32)", justify="right")
    table.add_column("saved bytes\n(of fp32)", justify="right")
    if simulated:
        table.add_column("gradient\nerror", justify="right")
    for d in devices:
        cells = [coloured(d.formats[g]) for g in ("linear", "attention", "norm, softmax, loss", "storage")]
        shares = "\n".join(f"{100 * share:.0f} % {name}" for name, share in d.shares.items())
        saved, saved_fp32 = d.saved_bytes or 0, d.saved_bytes_fp32 or 1
        error = f"{d.simulated.gradient_error:.1e}" if d.simulated is not None else ""
        table.add_row(
            d.hardware, *cells, shares,
            f"{d.time_us:,.0f} ({d.time_us_fp32 / d.time_us:.1f}x)",
            f"{bytes_text(saved)} ({100 * saved / saved_fp32:.0f} %)",
            *((error,) if simulated else ()),
        )  # fmt: skip
    return table


def _examples(demo: Demo) -> Table:
    """Decisions of the small model, and those of the large one that are taken in another format."""
    table = plain_table()
    for name in ("", "node", "format", "reason"):
        table.add_column(name)
    common = _agreed(demo.devices)
    for d in demo.devices[:1]:
        _add_examples(table, "each device", [e for e in d.examples if e.key in common])
    for d in demo.devices:
        _add_examples(table, d.hardware, [e for e in d.examples if e.key not in common])
    for d in demo.large:
        small = {e.key: e.format for s in demo.devices if s.hardware == d.hardware for e in s.examples}
        _add_examples(table, f"{d.hardware} wide", [e for e in d.examples if small.get(e.key) != e.format])
    return table


def _agreed(devices: Sequence[DevicePlan]) -> set[str]:
    """The nodes that are decided alike, for the same reason, on all of several devices."""
    if len(devices) < 2:
        return set()
    decisions = [{(e.key, e.format, e.reason) for e in d.examples} for d in devices]
    return {key for key, _, _ in set.intersection(*decisions)}


def _add_examples(table: Table, title: str, examples: Sequence[Example]) -> None:
    """One row for all phases of a module that agree in format and, costs aside, in reason."""
    rows: dict[tuple[str, str, str], list[Example]] = {}
    for e in examples:
        rows.setdefault((_module(e), e.format, without_numbers(e.reason)), []).append(e)
    for i, ((module, name, _), members) in enumerate(rows.items()):
        phases = [e.key.split("|")[1] for e in members]
        node = f"{module} {'each phase' if set(phases) >= _GEMM_PHASES else '+'.join(phases)}"
        table.add_row(title if i == 0 else "", node, coloured(name.split()[0], name), members[0].reason)


def _module(e: Example) -> str:
    return e.key.split("|")[0].removeprefix("blocks.0.")
