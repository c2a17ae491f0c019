"""`dsmp hardware detect`, and what `auto` and `cpu` mean in other commands: what asks torch for the running devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ...hardware_db.capability import Device
from ...hardware_db.catalog import load_catalog
from ...hardware_db.detect import read_cpu, read_gpu, read_running, read_xpu, resolve_hardware
from ...hardware_db.matching import Properties
from ...hardware_db.overlays import overlay_files, user_folder
from ..console import Printer, write_json
from .detection_facts import detection
from .render_detection import print_detections


def detect_hardware(*, files: Sequence[Path], as_json: bool) -> None:
    """`dsmp hardware detect`: all devices of this machine, the default one first. Raises HardwareDataError."""
    catalog = load_catalog(files)
    found = [detection(p, catalog, default=i == 0) for i, p in enumerate(_properties())]
    folder, data = str(user_folder()), [str(stamp.path) for stamp in overlay_files(files)]
    if as_json:
        write_json({"devices": [asdict(d) for d in found], "user_folder": folder, "user_files": data})
    else:
        print_detections(Printer(), found, folder, data)


def running_device(name: str, files: Sequence[Path]) -> Device:
    """What `auto` or `cpu` means on this machine. Raises HardwareDataError and UndetectedHardwareError."""
    return resolve_hardware(name, files)


def _properties() -> Iterator[Properties]:
    """What torch says of every device: the one that it runs on, its siblings, the CPU."""
    running = read_running()
    yield running
    if running.backend in ("cuda", "rocm"):
        current = torch.cuda.current_device()
        yield from (read_gpu(i) for i in range(torch.cuda.device_count()) if i != current)
    if running.backend == "xpu":
        current = torch.xpu.current_device()
        yield from (read_xpu(i) for i in range(torch.xpu.device_count()) if i != current)
    if running.backend != "cpu":
        yield read_cpu()
