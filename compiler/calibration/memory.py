"""What the running device takes to move, cast and quantise values, and to launch a kernel.

Casts and quantisation are measured on the operators that execute plans: `aten._to_copy`, and `dsmp::fake_quantize`
(passes/rounding_ops.py), the latter also where a device has the narrow format itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ...hardware_db.capability import Device
from ...hardware_db.formats import get_format, split_recipe
from ...hardware_db.measurement import Conversion
from ...passes.rounding_ops import fake_quantize_op
from .gemm import Pool, significant
from .timing import Clock, WallClock, kernel_seconds, seconds_per_call

CACHES = Path("/sys/devices/system/cpu")

_LEAST_STREAM_BYTES = 2**26
_ROWS, _COLUMNS = 1024, 4096
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def streaming_bytes(hardware: Device) -> int:
    """The size from which an array is read from memory: four times the last-level caches, at least 64 MiB, at most a
    sixteenth of the memory."""
    cache = cpu_cache_bytes(CACHES) if hardware.kind == "cpu" else 0
    return min(max(4 * (cache or hardware.l2_bytes or 0), _LEAST_STREAM_BYTES), hardware.memory_bytes // 16)


def cpu_cache_bytes(folder: Path) -> int:
    """Bytes of all last-level caches as Linux lists them under `folder`; 0 where it lists none."""
    caches: dict[tuple[int, str], int] = {}
    for index in folder.glob("cpu[0-9]*/cache/index*"):
        try:
            level, shared, size = ((index / n).read_text().strip() for n in ("level", "shared_cpu_list", "size"))
            caches[int(level), shared] = int(size[:-1]) * _UNITS[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue  # a cache that says nothing of itself
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def measure_bandwidth(hardware: Device, device: torch.device, clock: Clock, budget_s: float) -> float:
    """Bytes/s, read and written, of the triad a + s * b -> c over arrays that no cache holds (McCalpin, STREAM)."""
    count = streaming_bytes(hardware) // 4
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    seconds = kernel_seconds(lambda: torch.add(a, b, alpha=2.0, out=c), clock, budget_s)
    return significant(3 * 4 * count / seconds)


def measure_launch(device: torch.device, budget_s: float) -> float:
    """Seconds from one small elementwise operator to the next."""
    a, b = (torch.ones(8, device=device) for _ in range(2))
    return significant(seconds_per_call(lambda: torch.add(a, b), WallClock(device), budget_s))


def conversions(hardware: Device, measured: Iterable[str]) -> list[tuple[str, str, str]]:
    """(source, target, recipe) of what plans may convert on a device: casts between fp32 and the 16-bit formats, and
    quantisation from fp32 and from the tier's storage to the scaled formats of its ladders and to the measured formats
    of 8 bits."""
    casts = [pair for wide in ("bf16", "fp16") for pair in (("fp32", wide, "none"), (wide, "fp32", "none"))]
    scaled = {(f, r) for f, r in product(measured, ("tensor", "row")) if get_format(f).storage_bits <= 8}
    tier = hardware.profile.tier
    for choice in {c for ladder in (tier.linear, tier.conv, tier.attention) for c in ladder}:
        scaled |= {(choice.format, r.name) for r in split_recipe(choice.recipe) if r.is_scaled}
    sources = [s for s in dict.fromkeys(("fp32", hardware.storage)) if s in _TORCH_DTYPES]
    return casts + [(source, *target) for target in sorted(scaled) for source in sources]


def measure_conversions(
    wanted: Iterable[tuple[str, str, str]],
    hardware: Device,
    device: torch.device,
    clock: Clock,
    budget_s: float,
    progress: Callable[[str], None],
) -> list[Conversion]:
    """The rate of each conversion of an activation of 4 Mi values; those that a device refuses are left out.

    Sources take turns and together exceed the caches. Results are as large as a model's: memory for them is reused by
    the allocator, where that of much larger ones would be fetched from the operating system at every call.
    """
    found = []
    pools = {name: Pool(dtype, device, streaming_bytes(hardware)) for name, dtype in _TORCH_DTYPES.items()}
    for source, target, recipe in wanted:
        progress(f"{source} to {target}" + ("" if recipe == "none" else f" with scales ({recipe})"))
        try:
            seconds = _conversion_s(pools[source], target, recipe, clock, budget_s)
        except (RuntimeError, TypeError):
            continue
        moved = _ROWS * _COLUMNS * (get_format(source).storage_bits + get_format(target).storage_bits) / 8
        rate = significant(moved / seconds)
        found.append(Conversion(source=source, target=target, recipe=recipe, bytes_per_s=rate))
    return found


def _conversion_s(pool: Pool, target: str, recipe: str, clock: Clock, budget_s: float) -> float:
    def convert(values: Tensor) -> object:
        if recipe == "none":
            return torch.ops.aten._to_copy(values, dtype=_TORCH_DTYPES[target])
        return fake_quantize_op(values, target, recipe, -1)

    convert(pool.take(1, _COLUMNS))  # an operator's first call sets it up
    return kernel_seconds(lambda: convert(pool.take(_ROWS, _COLUMNS)), clock, budget_s)
