"""From what a runtime says of a device to a `Device`: pure decisions, no torch (detect.py reads).

First hit wins:

1. the exact runtime name (runtime_names.py), never a part of it. Where products share a name, the one most alike in
   units, then memory.
2. the PCI product id.
3. instruction set, units and memory, if they fit one product only.
4. the class: the instruction set's default profile, or the one that the name speaks for (GeForce halves fp32
   accumulation), or that of the nearest relative (instruction_sets.py), scaled from the profile's reference device.

Units and memory always come from the runtime where it tells them, so MIG slices, virtual GPUs and siblings are scaled.
Whatever was scaled or assumed is `estimated`.

CPUs: the profile with most flags among those the CPU has all of (and, where a profile names them, its maker and
family); the product, if the model name is one of that profile's. A CPU is always `estimated`: clocks depend on load,
and units are the threads that torch uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..errors import UndetectedHardwareError
from .capability import Device
from .catalog import Catalog
from .cpu_features import canonical_flags
from .device_row import DeviceRow
from .instruction_sets import nearest_isa
from .runtime_names import cpu_key, is_generic, product_classes, product_key, read_board
from .schema import VENDORS, Architecture, Vendor

Backend = Literal["cuda", "rocm", "xpu", "mps", "hpu", "npu", "musa", "mlu", "cpu"]
Evidence = Literal["name", "PCI product id", "structure", "class"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

MEMORY_TOLERANCE = 0.10
"""Relative distance in memory up to which two devices may be the same product: ECC takes 1/16 of GDDR, drivers keep
some."""

_VENDORS: dict[Backend, tuple[Vendor, ...]] = {
    "cuda": ("nvidia", "iluvatar", "metax"),
    "rocm": ("amd", "hygon"),
    "xpu": ("intel",),
    "mps": ("apple",),
    "hpu": ("intel",),
    "npu": ("huawei",),
    "musa": ("moore-threads",),
    "mlu": ("cambricon",),
    "cpu": VENDORS,
}
_CPU_VENDORS: dict[str, Vendor] = {
    "GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon", "ARM": "arm", "Fujitsu": "fujitsu",
    "HiSilicon": "huawei", "NVIDIA": "nvidia", "Apple": "apple", "Ampere": "ampere",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Properties:
    """What a runtime says of a device; 0 and "" where it is silent.

    `isa` is spelled as in the data files ("sm_90", "gfx942", "intel_gpu_pvc", "metal"), `pci_id` is the PCI product id,
    `units` counts multiprocessors, compute units, Xe-cores, GPU cores, or the cores that may be used; `memory_bytes`,
    `clock_mhz`, `bandwidth` (bytes/s) and `l2_bytes` are of this logical device. CPUs only: `flags`, `vendor` and
    `family` (cpu_features.py).
    """

    backend: Backend
    name: str = ""
    isa: str = ""
    pci_id: str = ""
    units: int = 0
    memory_bytes: int = 0
    clock_mhz: float = 0.0
    bandwidth: float = 0.0
    l2_bytes: int = 0
    flags: frozenset[str] = frozenset()
    vendor: str = ""
    family: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A device and what it was recognised by."""

    device: Device
    evidence: Evidence


def match(properties: Properties, catalog: Catalog) -> Device:
    """The device that `properties` describe. Raises `UndetectedHardwareError` if nothing is known of it."""
    return identify(properties, catalog).device


def identify(properties: Properties, catalog: Catalog) -> Match:
    """The device that `properties` describe, and by what. Raises `UndetectedHardwareError` if nothing is known."""
    if properties.backend == "cpu":
        return _match_cpu(properties, catalog)
    rows = _candidates(properties, catalog)
    if row := _by_name(properties, rows):
        return Match(device=_running(row, properties, catalog), evidence="name")
    if row := _by_pci_id(properties, rows):
        return Match(device=_running(row, properties, catalog), evidence="PCI product id")
    if row := _by_structure(properties, rows, catalog):
        found = _running(row, properties, catalog)
        if not is_generic(properties.name):
            found = replace(found, name=properties.name, estimated=True)
        return Match(device=found, evidence="structure")
    return Match(device=_of_its_class(properties, catalog), evidence="class")


def _candidates(properties: Properties, catalog: Catalog) -> list[DeviceRow]:
    """The products that can run behind the backend. An instruction set that the runtime names excludes all others of
    its kind (sm_80 excludes sm_90, but not a MetaX part behind the CUDA API)."""
    found = []
    for row in catalog.rows.values():
        profile = catalog.architectures[row.arch]
        other_isa = _isa_kind(profile.isa) == _isa_kind(properties.isa) and profile.isa != properties.isa
        if profile.kind != "cpu" and _fits_backend(profile, properties) and not other_isa:
            found.append(row)
    return found


def _fits_backend(profile: Architecture, properties: Properties) -> bool:
    # Intel's GPUs and its Gaudi parts have a runtime each
    gaudi = profile.isa.startswith("hpu")
    return profile.vendor in _vendors(properties) and gaudi == (properties.backend == "hpu")


def _vendors(properties: Properties) -> tuple[Vendor, ...]:
    """Whose device this can be: the maker that the name begins with, if it is one of the backend's."""
    vendors = _VENDORS[properties.backend]
    first = properties.name.lower().partition(" ")[0]
    return tuple(v for v in vendors if v == first) or vendors


def _isa_kind(isa: str) -> str:
    return re.split(r"[^a-z]", isa, maxsplit=1)[0]


def _by_name(properties: Properties, rows: Iterable[DeviceRow]) -> DeviceRow | None:
    key = read_board(properties.name).key
    named = [r for r in rows if key and key in {product_key(n) for n in r.detect_names}]
    if is_generic(properties.name):
        named = [r for r in named if r.units == properties.units]
    return _most_alike(properties, named)


def _by_pci_id(properties: Properties, rows: Iterable[DeviceRow]) -> DeviceRow | None:
    """The product with this PCI id. Where products share it, the most alike, unless others are just as much alike."""
    found = [r for r in rows if properties.pci_id in r.pci_ids]
    best = _most_alike(properties, found)
    twins = [r for r in found if best and (r.units, r.memory_bytes) == (best.units, best.memory_bytes)]
    return best if len(twins) == 1 else None


def _by_structure(properties: Properties, rows: Iterable[DeviceRow], catalog: Catalog) -> DeviceRow | None:
    """The only product with this instruction set, units and memory, unless its class is not the one the name tells."""
    classes = product_classes(properties.name)
    alike = [
        r
        for r in rows
        if catalog.architectures[r.arch].isa == properties.isa
        and r.units == properties.units
        and _same_memory(r.memory_bytes, properties.memory_bytes)
        and (not classes or _class(r.arch) is None or _class(r.arch) in classes)
    ]
    return alike[0] if len(alike) == 1 else None


def _most_alike(properties: Properties, rows: Iterable[DeviceRow]) -> DeviceRow | None:
    def distance(row: DeviceRow) -> tuple[float, float, str]:
        memory = _distance(row.memory_bytes, properties.memory_bytes)
        return _distance(row.units, properties.units), memory, row.id

    return min(rows, key=distance, default=None)


def _distance(known: float, told: float) -> float:
    return abs(math.log(told / known)) if told > 0 else 0.0


def _same_memory(known: int, told: int) -> bool:
    return abs(told - known) <= MEMORY_TOLERANCE * known


def _class(profile_key: str) -> str | None:
    """The class that a profile's key ends in: "half" for nv.sm_89.half, None for nv.sm_90."""
    last = profile_key.rpartition(".")[2]
    return last if last in ("full", "half", "notc") else None


def _running(row: DeviceRow, properties: Properties, catalog: Catalog) -> Device:
    """A product with the runtime's units and memory."""
    device = catalog.device(row.id)
    units, memory = properties.units or device.units, properties.memory_bytes or device.memory_bytes
    if device.profile.totals_only:
        units = device.units  # the vendor's totals are of the whole chip, whatever the runtime counts
    # main memory that a GPU shares comes in any size and tells nothing of the product
    whole = row.segment == "integrated" or _same_memory(device.memory_bytes, memory)
    if units == device.units and whole:
        return replace(device, memory_bytes=memory)
    share = units / device.units
    keeps_bandwidth = whole or row.segment == "edge" or read_board(properties.name).takes_turns
    bandwidth = device.memory_bandwidth if keeps_bandwidth else _bandwidth(device, share, memory)
    l2 = properties.l2_bytes or (int(device.l2_bytes * min(1.0, share)) if device.l2_bytes else None)
    return device.scaled(units=units, memory_bytes=memory, memory_bandwidth=bandwidth, l2_bytes=l2)


def _bandwidth(device: Device, share: float, memory_bytes: int) -> float:
    """A slice or sibling has its share of the memory's channels; more memory adds channels only with more units."""
    memory_share = memory_bytes / device.memory_bytes
    return device.memory_bandwidth * (memory_share if memory_share < 1 else max(1.0, min(memory_share, share)))


def _of_its_class(properties: Properties, catalog: Catalog) -> Device:
    profile = _profile(properties, catalog) if properties.units > 0 else None
    if profile is None or profile.reference is None:
        name, isa = properties.name or "a device without a name", properties.isa or f"torch.{properties.backend}"
        raise UndetectedHardwareError(f"{name} ({isa}) is no known product, nor is there a profile of its class")
    reference = catalog.class_device(profile)
    share = properties.units / reference.units
    l2 = properties.l2_bytes or (int(reference.l2_bytes * share) if reference.l2_bytes else None)
    scaled = reference.scaled(
        units=properties.units,
        memory_bytes=properties.memory_bytes or reference.memory_bytes,
        memory_bandwidth=properties.bandwidth or reference.memory_bandwidth * share,
        l2_bytes=l2,
    )
    return replace(
        _at_clock(scaled, properties.clock_mhz),
        name=properties.name or f"unnamed {profile.family} device",
        isa=properties.isa or profile.isa,
        link_bandwidth=None,
        logical_devices=1,
        confidence="C",
    )


def _profile(properties: Properties, catalog: Catalog) -> Architecture | None:
    """The profile of an unknown product: of its class where the name tells one, else its instruction set's default."""
    profiles = [p for p in catalog.architectures.values() if p.kind != "cpu" and _fits_backend(p, properties)]
    isa = nearest_isa(properties.isa, {p.isa for p in profiles if p.isa_default})
    mine = [p for p in profiles if p.isa == isa and p.reference is not None]
    for wanted in product_classes(properties.name):
        if found := next((p for p in mine if _class(p.key) == wanted), None):
            return found
    return next((p for p in mine if p.isa_default), None)


def _at_clock(device: Device, vector_clock_mhz: float) -> Device:
    """The device at the runtime's clock, the matrix clock in the same proportion; unchanged where either is unknown."""
    if not device.vector_clock_mhz or vector_clock_mhz <= 0:
        return device
    ratio = vector_clock_mhz / device.vector_clock_mhz
    return replace(
        device,
        vector_clock_mhz=vector_clock_mhz,
        matrix_clock_mhz=device.matrix_clock_mhz * ratio if device.matrix_clock_mhz else None,
        vector_peaks={k: v * ratio for k, v in device.vector_peaks.items()},
        matrix_peaks={k: v * ratio for k, v in device.matrix_peaks.items()},
    )


def _match_cpu(properties: Properties, catalog: Catalog) -> Match:
    flags = canonical_flags(properties.flags)
    fitting = [
        p
        for p in catalog.architectures.values()
        if p.kind == "cpu"
        and flags >= canonical_flags(p.cpu_flags)
        and p.cpu_vendor in (None, properties.vendor)
        and p.cpu_family in (None, properties.family)
    ]
    if not fitting:
        raise UndetectedHardwareError(
            f"CPU {properties.name or 'without a name'} has none of the known sets of features (x86 needs avx2, fma "
            "and f16c, Arm asimd with half precision)"
        )
    profile = max(fitting, key=_specificity)
    if (row := _cpu_by_name(properties, [r for r in catalog.rows.values() if r.arch == profile.key])) is not None:
        return Match(device=_with_threads(catalog.device(row.id), properties), evidence="name")
    reference = catalog.class_device(profile)
    device = replace(
        _with_threads(reference, properties),
        name=properties.name or f"unnamed {profile.family} CPU",
        vendor=_CPU_VENDORS.get(properties.vendor, reference.vendor),
        confidence="C",
    )
    return Match(device=device, evidence="class")


def _cpu_by_name(properties: Properties, rows: Iterable[DeviceRow]) -> DeviceRow | None:
    """The only product with the CPU's model name; among several the one whose cores are all in use."""
    key = cpu_key(properties.name)
    named = [r for r in rows if key in {cpu_key(n) for n in r.detect_names}]
    whole = [r for r in named if r.units == properties.units]
    return next((found[0] for found in (named, whole) if len(found) == 1), None)


def _specificity(profile: Architecture) -> tuple[int, bool, bool]:
    return len(canonical_flags(profile.cpu_flags)), profile.cpu_family is not None, profile.cpu_vendor is not None


def _with_threads(device: Device, properties: Properties) -> Device:
    """The share of a CPU that the running process uses."""
    units = properties.units or device.units
    reachable = units * (device.profile.single_unit_bandwidth_bytes_per_s or device.memory_bandwidth)
    return device.scaled(
        units=units,
        memory_bytes=properties.memory_bytes or device.memory_bytes,
        memory_bandwidth=min(device.memory_bandwidth, reachable),
        l2_bytes=int(device.l2_bytes * min(1.0, units / device.units)) if device.l2_bytes else None,
    )
