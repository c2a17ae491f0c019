"""The devices of this machine as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from ..console import Printer
from .detection_facts import Detection
from .facts import DeviceFacts
from .figures import fact_text, value_text
from .render import sentence


def print_detections(printer: Printer, found: Sequence[Detection], folder: str, files: Sequence[str]) -> None:
    """Each device, what it was taken for, and which data files of the user's count."""
    for d in found:
        printer.print(*_lines(d), "")
    printer.print(f"your data files: {', '.join(files) or 'none'}; those in {folder} are read by every command")


def _lines(d: Detection) -> list[RenderableType]:
    backend = str(d.said["backend"])
    title = Text(
        f"{d.said.get('name') or 'a device without a name'} ({backend}{', auto' if d.default else ''})", "bold"
    )
    said = (f"{fact_text(k)} {value_text(k, v)}" for k, v in d.said.items() if k not in ("backend", "name"))
    lines: list[RenderableType] = [title, f"  the runtime says: {', '.join(said)}"]
    if d.device is None:
        return [*lines, Text(f"  not recognised: {d.how}", style="yellow")]
    lines.append(f"  taken for: {d.device.id}, {d.how}")
    lines.append(f"  figures: {'estimated' if d.estimated else 'as in the data'}; {_main_figures(d.device)}")
    lines += [Text("  ").append_text(sentence(text)) for text in d.device.caveats]
    return [*lines, f"  calibration: {d.calibration}"]


def _main_figures(device: DeviceFacts) -> str:
    structure, memory = device.groups["structure"].values, device.groups["memory"].values
    peaks = {f"{r.format} {value_text('_flop_per_s', r.peak_flop_per_s)}" for r in device.rates if r.format == "fp32"}
    units = f"{value_text('units', structure['units'])} {structure['unit_kind']}"
    bandwidth = value_text("bandwidth_bytes_per_s", memory["memory_bandwidth_bytes_per_s"])
    return ", ".join((units, value_text("memory_bytes", memory["memory_bytes"]), bandwidth, *sorted(peaks)))
