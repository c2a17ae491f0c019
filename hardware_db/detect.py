"""The running device, as a `Device`. The only file of this layer that imports torch.

Reading and deciding are apart: `read_gpu` and `read_cpu` turn what the runtime says into `Properties`, and
`match`, a pure function, turns those into a device. In this order, first hit wins:

1. the exact runtime name, vendor words and a MIG suffix aside (never a substring: "L4" is in "L40S", "T4" in
   "T400");
2. instruction set, units and memory, if they fit one device only;
3. the instruction set's default profile, for NVIDIA the nearest older one of the same major version.

Units and memory always come from the runtime, so that a MIG slice or a sibling with fewer units is scaled
down. Whatever was scaled or assumed makes the device `estimated`. A HIP device is told by its gfx name: its
(9, 4) is no CUDA capability.

CPUs: the profile with most flags among those the CPU has all of (and, where a profile names one, its maker
and family). A CPU is always `estimated`: clocks depend on load, cores are the threads that torch uses. AMX
counts only if torch can switch it on, since containers may show the flag and forbid the use.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import UndetectedHardwareError
from .capability import Device
from .catalog import Catalog, device_from_row, load_catalog, normalise, strip_vendor
from .schema import Architecture

MEMORY_TOLERANCE = 0.08
"""Relative distance in memory up to which two devices may be the same product (reserve, ECC, GB against
GiB)."""

_MIG = re.compile(r"\s+MIG\s+\S+\s*$")
_GENERIC_NAMES = frozenset({"", "amdradeongraphics"})
_FLAG_SPELLINGS = {"fma3": "fma"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Properties:
    """What a runtime says of a device. Unknown numbers are 0.

    GPUs: `isa` ("sm_90", "gfx942"), `units` (multiprocessors or CUs), `memory_bytes`, `clock_mhz`,
    `bandwidth` (bytes/s), `l2_bytes`. CPUs: `flags`, `vendor` and `family` as in /proc/cpuinfo, `units` =
    cores that may be used.
    """

    backend: Literal["cuda", "rocm", "cpu"]
    name: str = ""
    isa: str = ""
    units: int = 0
    memory_bytes: int = 0
    clock_mhz: float = 0.0
    bandwidth: float = 0.0
    l2_bytes: int = 0
    flags: frozenset[str] = frozenset()
    vendor: str = ""
    family: int = 0


def resolve_hardware(name: str | None = None) -> Device:
    """The device a user means: None and "auto" the running one, "cpu" the running CPU, else a catalogue name.

    Raises `UnknownHardwareError`, `AmbiguousHardwareError`, or `UndetectedHardwareError` for a running device
    that nothing is known of.
    """
    wanted = "auto" if name is None else name.strip().lower()
    if wanted == "auto":
        return detect()
    if wanted == "cpu":
        return match(read_cpu())
    return load_catalog().resolve(name or "")


def detect() -> Device:
    """The running device: torch's current CUDA or ROCm device if there is one, else the CPU."""
    return match(read_gpu() if torch.cuda.is_available() else read_cpu())


def match(properties: Properties, catalog: Catalog | None = None) -> Device:
    """The device that `properties` describe (see the module docstring). Pure; `UndetectedHardwareError` if
    none fits."""
    catalog = catalog or load_catalog()
    return _match_cpu(properties, catalog) if properties.backend == "cpu" else _match_gpu(properties, catalog)


def read_gpu(index: int | None = None) -> Properties:
    """Properties of a CUDA or ROCm device (default: the current one)."""
    return gpu_properties(torch.cuda.get_device_properties(index), hip=torch.version.hip is not None)


def gpu_properties(raw: Any, *, hip: bool) -> Properties:
    """Properties from torch's record of a device. Bandwidth is taken from CUDA only: clock (double data rate)
    x bus; HIP reports memory clocks on another scale."""
    bus_bits, memory_khz = getattr(raw, "memory_bus_width", 0), getattr(raw, "memory_clock_rate", 0)
    return Properties(
        backend="rocm" if hip else "cuda",
        name=raw.name or "",
        isa=raw.gcnArchName.split(":")[0] if hip else f"sm_{raw.major}{raw.minor}",
        units=raw.multi_processor_count,
        memory_bytes=raw.total_memory,
        clock_mhz=getattr(raw, "clock_rate", 0) / 1e3,
        bandwidth=0.0 if hip else 2.0 * memory_khz * 1e3 * bus_bits / 8,
        l2_bytes=getattr(raw, "L2_cache_size", 0),
    )


def read_cpu() -> Properties:
    """Properties of this process's CPU."""
    info = _read_text("/proc/cpuinfo")
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    known = {k for k, v in capabilities.items() if v is True}
    return cpu_properties(
        info,
        extra_flags=known,
        amx=_torch_says("_is_amx_tile_supported") and _torch_says("_init_amx"),
        cores=torch.get_num_threads(),
        memory_bytes=_main_memory_bytes(),
    )


def cpu_properties(
    cpuinfo: str, *, extra_flags: Iterable[str] = (), amx: bool, cores: int, memory_bytes: int
) -> Properties:
    """Properties from the text of /proc/cpuinfo (may be empty) and torch's flags; without `amx` its flags are
    dropped."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = {_flag(f) for f in (*fields.get("flags", "").split(), *extra_flags)}
    family = fields.get("cpu family", "")
    return Properties(
        backend="cpu",
        name=fields.get("model name", platform.machine()),
        units=cores,
        memory_bytes=memory_bytes,
        flags=frozenset(f for f in flags if amx or not f.startswith("amx")),
        vendor=fields.get("vendor_id", ""),
        family=int(family) if family.isdigit() else 0,
    )


def _match_gpu(properties: Properties, catalog: Catalog) -> Device:
    base_name = strip_vendor(normalise(_MIG.sub("", properties.name)))
    rows = [r for r in catalog.rows.values() if catalog.profile(r.id).isa == properties.isa]
    for row in rows:
        if base_name in {strip_vendor(normalise(n)) for n in row.detect_names}:
            return _adjusted(device_from_row(row, catalog.profile(row.id)), properties)
    alike = [
        r
        for r in rows
        if r.units == properties.units
        and abs(properties.memory_bytes - r.memory_bytes) <= MEMORY_TOLERANCE * r.memory_bytes
    ]
    if len(alike) == 1:
        known_name = normalise(properties.name) in _GENERIC_NAMES
        found = _adjusted(device_from_row(alike[0], catalog.profile(alike[0].id)), properties)
        return found if known_name else dataclasses.replace(found, name=properties.name, estimated=True)
    profile = _default_profile(properties.isa, catalog)
    if profile is None or properties.units <= 0:
        isas = sorted({p.isa for p in catalog.architectures.values() if p.kind == "gpu"})
        raise UndetectedHardwareError(
            f"{properties.name or 'a GPU without a name'} ({properties.isa}) has no architecture profile; "
            f"profiles exist for {', '.join(isas)}",
            catalog.names(),
        )
    return _estimated_gpu(profile, properties)


def _adjusted(device: Device, properties: Properties) -> Device:
    """A catalogue device with the runtime's memory; scaled, and then estimated, if it has other units (MIG,
    siblings)."""
    memory = properties.memory_bytes or device.memory_bytes
    if properties.units in (0, device.units):
        return dataclasses.replace(device, memory_bytes=memory)
    return dataclasses.replace(
        device,
        units=properties.units,
        memory_bytes=memory,
        # a MIG slice's bandwidth goes with its share of the memory, not of the units
        memory_bandwidth=device.memory_bandwidth * min(1.0, memory / device.memory_bytes),
        l2_bytes=min(device.l2_bytes or 0, properties.l2_bytes) or device.l2_bytes,
        estimated=True,
    )


def _default_profile(isa: str, catalog: Catalog) -> Architecture | None:
    defaults = {p.isa: p for p in catalog.architectures.values() if p.isa_default}
    if isa in defaults or not isa.startswith("sm_"):
        return defaults.get(isa)
    version = int(isa.removeprefix("sm_"))
    older = [
        int(i.removeprefix("sm_"))
        for i in defaults
        if i.startswith("sm_") and int(i.removeprefix("sm_")) // 10 == version // 10
    ]
    nearest = max((v for v in older if v < version), default=None)
    return defaults[f"sm_{nearest}"] if nearest is not None else None


def _estimated_gpu(profile: Architecture, properties: Properties) -> Device:
    assumed = profile.estimate
    vector = properties.clock_mhz or assumed.vector_clock_mhz
    bandwidth = properties.units * assumed.memory_bandwidth_bytes_per_s_per_unit
    return Device(
        id=re.sub(r"[^a-z0-9]+", "-", (properties.name or properties.isa).lower()).strip("-"),
        name=properties.name or f"unnamed {profile.family} device",
        vendor=profile.vendor,
        isa=properties.isa,
        kind="gpu",
        units=properties.units,
        vector_clock_mhz=vector,
        matrix_clock_mhz=vector * assumed.matrix_clock_mhz / assumed.vector_clock_mhz,
        memory_bytes=properties.memory_bytes,
        memory_bandwidth=properties.bandwidth or bandwidth,
        l2_bytes=properties.l2_bytes or None,
        link_bandwidth=None,
        logical_devices=1,
        launch_overhead_s=profile.launch_overhead_s,
        efficiency=profile.efficiency,
        estimated=True,
        confidence="C",
        profile=profile,
    )


def _match_cpu(properties: Properties, catalog: Catalog) -> Device:
    flags = {_flag(f) for f in properties.flags}
    fitting = [
        p
        for p in catalog.architectures.values()
        if p.kind == "cpu"
        and flags >= {_flag(f) for f in p.cpu_flags}
        and p.cpu_vendor in (None, properties.vendor)
        and p.cpu_family in (None, properties.family)
    ]
    rows = {r.arch: r for r in catalog.rows.values()}
    if not fitting:
        raise UndetectedHardwareError(
            f"CPU {properties.name!r} has none of the known flag sets (the least is avx2, fma and f16c)",
            catalog.names(),
        )
    profile = max(fitting, key=lambda p: (len(p.cpu_flags), p.cpu_vendor is not None))
    reference = device_from_row(rows[profile.key], profile)
    cores = properties.units or reference.units
    share = min(1.0, cores / reference.units)
    return dataclasses.replace(
        reference,
        name=properties.name or reference.name,
        units=cores,
        memory_bytes=properties.memory_bytes or reference.memory_bytes,
        memory_bandwidth=min(
            reference.memory_bandwidth, cores * profile.estimate.memory_bandwidth_bytes_per_s_per_unit
        ),
        l2_bytes=int((reference.l2_bytes or 0) * share) or None,
        estimated=True,
    )


def _flag(name: str) -> str:
    """One spelling for kernel and torch flag names: `avx512_f`, `avx512f` -> `avx512f`; `fma3` -> `fma`."""
    plain = name.replace("_", "").lower()
    return _FLAG_SPELLINGS.get(plain, plain)


def _torch_says(function: str) -> bool:
    """torch's private capability functions come and go: one that is missing says no."""
    asked = getattr(torch.cpu, function, None)
    return bool(asked()) if asked is not None else False


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _main_memory_bytes() -> int:
    """Installed memory or the container's limit, whichever is less; 0 when neither can be read."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        installed = 0
    limit = _read_text("/sys/fs/cgroup/memory.max").strip()
    limits = [int(limit)] if limit.isdigit() else []
    return min([m for m in (installed, *limits) if m > 0], default=0)
