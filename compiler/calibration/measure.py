"""What to measure on the running device, in what order and with how much effort: from a device to a `Measurement`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import InvalidOptionError
from ...hardware_db.capability import Device
from ...hardware_db.formats import get_format
from ...hardware_db.measurement import CollectivePoint, Measurement
from ...hardware_db.work import GemmShape
from .gemm import BASE, GemmOperator, Grid, gemm_operators, measure_gemms
from .memory import (
    conversions,
    measure_bandwidth,
    measure_conversions,
    measure_launch,
    streaming_bytes,
)  # fmt: skip
from .timing import kernel_clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """The grid of products, and seconds to spend on every other number."""

    grid: Grid
    number_s: float


def _shapes(*sizes: tuple[int, ...]) -> tuple[GemmShape, ...]:
    """Shapes from (m, n, k) and (batch, m, n, k)."""
    return tuple(GemmShape(batch=math.prod(batch), m=m, n=n, k=k) for *batch, m, n, k in sizes)


FULL = Effort(
    grid=Grid(
        shapes=_shapes(
            (256, 256, 256), (1, 1024, 1024), (512, 512, 512), (48, 128, 128, 64), (1024, 1024, 1024),
            (16, 1024, 1024), (2048, 768, 768), (1, 4096, 4096), (2048, 3072, 768), (16, 4096, 4096),
            (2048, 2048, 2048), (16384, 64, 576), (96, 512, 512, 64), (768, 768, 8192), (4, 4096, 4096),
            (4096, 4096, 4096), (2048, 768, 3072), (96, 512, 64, 512), (128, 128, 128), (8192, 4096, 4096),
            (8192, 8192, 8192), (8192, 16384, 4096),
        ),
        point_s=0.2, round_s=1.0, total_s=60.0,
    ),
    number_s=0.5,
)  # fmt: skip
"""Square products, decoding, the linears and products of attention of a training step, a weight's gradient, a
convolution. Kinds take turns, so that a slow machine, where time is up early, has some of each."""

QUICK = Effort(
    grid=Grid(
        shapes=_shapes(
            (256, 256, 256), (1, 1024, 1024), (512, 512, 512), (48, 128, 128, 64), (1024, 1024, 1024),
            (16, 1024, 1024), (2048, 768, 768), (1, 4096, 4096), (2048, 3072, 768), (4096, 4096, 4096),
            (8192, 4096, 4096),
        ),
        point_s=0.08, round_s=0.4, total_s=9.0,
    ),
    number_s=0.1,
)  # fmt: skip
"""Half of the shapes, less than half of the time for each."""


def torch_device(hardware: Device) -> torch.device:
    """What torch calls a detected device."""
    accelerator = None if hardware.kind == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def choose_operators(hardware: Device, formats: Sequence[str] | None) -> list[GemmOperator]:
    """The products to measure: of all formats that run on the device, or of those asked for and fp32.

    Raises `UnknownFormatError`, and `InvalidOptionError` for a format that the device cannot multiply.
    """
    for name in formats or ():
        get_format(name)
    runnable = gemm_operators(hardware, torch_device(hardware), streaming_bytes(hardware))
    for name in formats or ():
        if name not in runnable:
            raise InvalidOptionError(
                "--format", name, f"what torch multiplies on {hardware.name}: {', '.join(sorted(runnable))}"
            )
    return [operator for name, operator in runnable.items() if not formats or name in (BASE, *formats)]


def count_steps(hardware: Device, operators: Sequence[GemmOperator], effort: Effort) -> int:
    """How often `measure` reports progress, at most."""
    return len(effort.grid.shapes) + len(conversions(hardware, [o.format for o in operators])) + 2


def measure(
    hardware: Device,
    operators: Sequence[GemmOperator],
    effort: Effort,
    collectives: Sequence[CollectivePoint],
    progress: Callable[[str], None],
) -> Measurement:
    """Measure a running device; `progress` hears what is measured next."""
    device = torch_device(hardware)
    clock = kernel_clock(device)
    with torch.inference_mode():
        progress("memory bandwidth")
        bandwidth = measure_bandwidth(hardware, device, clock, effort.number_s)
        progress("launch overhead")
        launch = measure_launch(device, effort.number_s)
        gemm = measure_gemms(operators, effort.grid, clock, progress)
        wanted = conversions(hardware, [o.format for o in operators])
        conversion = measure_conversions(wanted, hardware, device, clock, effort.number_s, progress)
    return Measurement(
        device=hardware.id, name=hardware.name, units=hardware.units,
        date=datetime.date.today().isoformat(), torch=str(torch.__version__),
        memory_bandwidth_bytes_per_s=bandwidth, launch_overhead_s=launch,
        gemm=tuple(gemm), conversion=tuple(conversion), collective=tuple(collectives),
    )  # fmt: skip
