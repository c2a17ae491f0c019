"""`dsmp hardware calibrate`: measure the running device, write a data file, show what was found.

Under torchrun all processes measure the collectives, and rank 0 alone goes on, writes and prints.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...errors import InvalidOptionError
from ...hardware_db.capability import Device
from ...hardware_db.detect import detect
from ...hardware_db.measurement import GemmPoint, Measurement
from ...hardware_db.overlays import SUFFIX, user_folder
from ..console import Printer, coloured, digits, plain_table, write_json
from .collectives import OPERATIONS, measure_collectives, process_group
from .gemm import shape_text
from .measure import FULL, QUICK, choose_operators, count_steps, measure
from .overlay_file import check_writable, write
from .timing import IDLE_LOAD, load_per_core


def calibrate(*, output: Path | None, quick: bool, formats: list[str] | None, files: list[Path], as_json: bool) -> None:
    """Measure, write to `output` (default: the user's own folder) and print. Raises DsmpError before it measures."""
    effort = QUICK if quick else FULL
    with process_group() as rank:
        hardware = detect(files)
        target = _target(output, hardware) if rank == 0 else None
        operators = choose_operators(hardware, formats)
        with _progress(len(OPERATIONS), shown=rank == 0) as step:
            collectives = measure_collectives(step)
    if target is None:
        return
    busy = busy_note(hardware)
    with _progress(count_steps(hardware, operators, effort), shown=True) as step:
        measurement = measure(hardware, operators, effort, collectives, step)
    write(measurement, target)
    if as_json:
        write_json({"file": str(target), "measurement": measurement.model_dump(mode="json")})
    else:
        Printer().print(*summary(measurement, hardware), "", _where(target, named=output is not None))
    if busy:
        Printer(sys.stderr).print(f"warning: {busy}")


def summary(measurement: Measurement, hardware: Device) -> list[RenderableType]:
    """What was measured, as a table of formats and lines about everything else."""
    m = measurement
    lines: list[RenderableType] = [
        f"{m.name} ({m.device}), {m.units} {hardware.profile.unit_kind}{'s' if m.units > 1 else ''}, torch {m.torch}",
        "",
        _format_table(m, hardware),
        "",
        f"memory bandwidth: {digits(m.memory_bandwidth_bytes_per_s / 1e9)} GB/s"
        f" ({_percent(m.memory_bandwidth_bytes_per_s, hardware.memory_bandwidth)} of the data's)",
        f"launch overhead: {digits(m.launch_overhead_s * 1e6)} µs",
    ]
    if m.conversion:
        table = plain_table()
        table.add_column("conversion")
        table.add_column("scales")
        table.add_column("GB/s", justify="right")
        for c in m.conversion:
            table.add_row(f"{c.source} → {c.target}", c.recipe, digits(c.bytes_per_s / 1e9))
        lines += ["", table]
    if m.collective:
        table = plain_table()
        for name in ("collective", "backend", "ranks", "latency µs", "GB/s"):
            table.add_column(name, justify="left" if name in ("collective", "backend") else "right")
        for point in m.collective:
            rate, latency = digits(point.bytes_per_s / 1e9), digits(point.latency_s * 1e6)
            table.add_row(point.op, point.backend, str(point.ranks), latency, rate)
        lines += ["", table]
    return lines


def busy_note(hardware: Device) -> str | None:
    """What to say when other programs take cores away from measuring a CPU."""
    load = load_per_core()
    if hardware.kind != "cpu" or load <= IDLE_LOAD:
        return None
    return (
        f"other programs were running (load {load:.1f} per core), so rates are too low; calibrate again when the "
        "machine is idle"
    )


def _format_table(measurement: Measurement, hardware: Device) -> RenderableType:
    table = plain_table()
    for name in ("format", "largest shape", "GFLOP/s", "of peak", "of fp32: mean", "least", "most", "operator"):
        table.add_column(name, justify="left" if name in ("format", "largest shape", "operator") else "right")
    for point in _largest(measurement.gemm):
        peak = hardware.matrix_peaks.get(point.key) or hardware.vector_peaks.get(point.key)
        ratios = measurement.ratios_to_fp32(point.key).values()
        mean = measurement.ratio_to_fp32(point.key)
        speeds = (mean, min(ratios), max(ratios)) if mean is not None else ()
        table.add_row(
            coloured(point.format), shape_text(point), digits(point.flop_per_s / 1e9),
            _percent(point.flop_per_s, peak) if peak else "",
            *([f"{s:.2g}x" for s in speeds] or ["", "", ""]), point.operator,
        )  # fmt: skip
    return table


def _largest(points: Sequence[GemmPoint]) -> list[GemmPoint]:
    """Of each format the point with most operations, in the order of the formats."""
    found: dict[str, GemmPoint] = {}
    for point in points:
        if point.format not in found or point.shape.flops >= found[point.format].shape.flops:
            found[point.format] = point
    return list(found.values())


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _where(target: Path, *, named: bool) -> str:
    if named:
        return f"written to {target}; plans use it with --hardware-file {target}"
    return f"written to {target}; plans for this device use it from now on"


def _target(output: Path | None, hardware: Device) -> Path:
    """The file to write, which can be written. Raises `InvalidOptionError`."""
    target = output
    if target is None:
        folder = user_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidOptionError(
                "--output", str(folder), f"a file; the folder for the user's own cannot be made ({error})"
            ) from error
        target = folder / f"{hardware.id}-{hardware.units}{SUFFIX}"
    check_writable(target)
    return target


@contextlib.contextmanager
def _progress(steps: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, if that is a terminal; what is yielded is called with the name of each next step."""
    console = Console(file=sys.stderr)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not shown or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=steps)
        started = False

        def step(text: str) -> None:
            nonlocal started
            progress.update(task, description=text, advance=int(started))
            started = True

        yield step
