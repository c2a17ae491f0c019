"""Everything that is known of one device, as plain data: what `dsmp hardware show` prints as text or as JSON.

Names carry units, all of them SI: bytes, bytes per second, Hz, FLOP/s (OP/s for ints), seconds, watts; shares are
fractions. Peaks are dense and of one logical device. None means that no source says. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ...hardware_db.capability import Device
from ...hardware_db.catalog import Catalog
from ...hardware_db.device_row import GROUPS, Confidence, DeviceRow
from ...hardware_db.device_row import Group as GroupName
from ...hardware_db.formats import FORMATS
from ...hardware_db.schema import ACCUMULATORS, Choice, OpClass, natural_accumulator

Value = str | int | float | tuple[str, ...] | None
Engine = Literal["vector", "matrix"]

ENGINES: tuple[Engine, ...] = get_args(Engine)

TRUST = {
    "A": "verified: structure, clocks and memory were read in text of the vendor, or in text that cites it",
    "B": "verified: structure, clocks and memory were read in secondary sources, not in the vendor's text",
    "C": "not verified: some of structure, clocks and memory is recalled or disputed; measure before trusting it",
}
"""What the confidence in a device's figures means."""


_LADDERS: dict[str, OpClass] = {"linear": "linear", "conv": "conv", "attention": "sdpa", "other": "other"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Figures that share a source. `confidence` is None where only the profile's sources are known."""

    values: dict[str, Value]
    confidence: Confidence | None
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What one kind of units does in one format.

    `deviation` is derived over stated peak less one, `disagreement` the reason where they are known to disagree.
    `remarks` are what the accumulator and the inputs lose.
    """

    format: str
    accumulate: str
    engine: Engine
    flop_per_clock_per_unit: float | None
    peak_flop_per_s: float
    stated_peak_flop_per_s_per_card: float | None
    deviation: float | None
    disagreement: str | None
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was measured on a device and replaces its assumed efficiency and launch overhead; GEMMs by
    `format@accumulate`: the highest rate, and the mean rate as a multiple of fp32's on the same shapes."""

    date: str
    torch: str
    memory_bandwidth_bytes_per_s: float
    launch_overhead_s: float
    best_gemm_flop_per_s: dict[str, float]
    gemm_speed_over_fp32: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """Everything that is known of a device. `inherits` are the profiles that its own one starts from, nearest first."""

    id: str
    name: str
    vendor: str
    family: str
    isa: str
    kind: str
    segment: str | None
    year: int | None
    verified: bool
    trust: str
    caveats: tuple[str, ...]
    overlays: tuple[str, ...]
    aliases: tuple[str, ...]
    runtime_names: tuple[str, ...]
    pci_ids: tuple[str, ...]
    nodes: tuple[str, ...]
    groups: dict[str, Group]
    rates: tuple[Rate, ...]
    ladders: dict[str, tuple[str, ...]]
    limits: dict[str, str]
    refusals: dict[str, str]
    measured: Measured | None
    profile: str
    inherits: tuple[str, ...]
    toolchain: str
    note: str


def device_facts(catalog: Catalog, device: Device) -> DeviceFacts:
    """Everything that is known of a device, from the catalogue or detected.

    A running device has its own figures; what only the catalogue knows is left out where it is of another size.
    """
    profile = device.profile
    row = catalog.rows.get(device.id)
    return DeviceFacts(
        id=device.id,
        name=device.name,
        vendor=device.vendor,
        family=profile.family,
        isa=device.isa,
        kind=device.kind,
        segment=row.segment if row else None,
        year=row.year if row else None,
        verified=device.verified,
        trust=_trust(device, row),
        caveats=tuple(device.caveats),
        overlays=device.overlays,
        aliases=row.aliases if row else (),
        runtime_names=row.detect_names if row else (),
        pci_ids=row.pci_ids if row else (),
        nodes=tuple(n.id for n in catalog.nodes.values() if n.device == device.id),
        groups=_groups(device, row),
        rates=_rates(device, row if row is not None and row.units == device.units else None),
        ladders={
            name: tuple(choice_text(c) for c in device.ladder(op) if device.supports(op, None, c.format, c.accumulate))
            for name, op in _LADDERS.items()
        },
        limits={f: f"{_classes(limit.op_classes)}: {limit.reason}" for f, limit in profile.limits.items()},
        refusals=dict(profile.refusals),
        measured=_measured(device),
        profile=profile.key,
        inherits=tuple(catalog.lineage(profile)[1:]),
        toolchain=profile.toolchain,
        note=row.note if row else "",
    )


def choice_text(choice: Choice) -> str:
    """A rung of a ladder in one word or three: `fp8_e4m3 1x128/128x128`, `fp16 tensor +fp16`."""
    recipe = "" if choice.recipe == "none" else f" {choice.recipe}"
    accumulate = "" if choice.accumulate in ("fp32", natural_accumulator(choice.format)) else f" +{choice.accumulate}"
    return f"{choice.format}{recipe}{accumulate}"


def _trust(device: Device, row: DeviceRow | None) -> str:
    """How far to trust the figures, and which of those that are not needed for predictions are worse than the rest."""
    weak = [g for g in GROUPS if row is not None and device.verified and row.confidence_of(g) == "C"]
    return f"{TRUST[device.confidence]}; recalled or disputed: {', '.join(weak)}" if weak else TRUST[device.confidence]


def _groups(device: Device, row: DeviceRow | None) -> dict[str, Group]:
    profile, same_size = device.profile, row is not None and row.units == device.units
    link = row.interconnect if row else None
    values: dict[GroupName, dict[str, Value]] = {
        "structure": {
            "units": device.units,
            "unit_kind": profile.unit_kind,
            "lanes_per_unit": profile.lanes_per_unit,
            "cores": row.cores if row and same_size else None,
            "logical_devices_per_card": device.logical_devices,
            "scratchpad_bytes_per_unit": device.scratchpad_bytes,
            "l2_bytes": device.l2_bytes,
            "llc_bytes": row.llc_bytes if row and same_size else None,
        },
        "clocks": {
            "vector_clock_hz": _hertz(device.vector_clock_mhz),
            "matrix_clock_hz": _hertz(device.matrix_clock_mhz),
        },
        "memory": {
            "memory_bytes": device.memory_bytes,
            "memory_type": row.memory_type if row else None,
            "memory_bandwidth_bytes_per_s": device.memory_bandwidth,
            "one_core_bandwidth_bytes_per_s": profile.single_unit_bandwidth_bytes_per_s,
        },
        "link": {
            "link_kind": link.kind if link else None,
            "link_both_ways_bytes_per_s": link.bidirectional_bytes_per_s if link else None,
            "link_one_way_bytes_per_s": device.link_bandwidth,
        },
        "power": {"tdp_w_per_card": row.tdp_w_per_card if row else None},
        "peaks": {"stated_peaks": _count_stated(row) if row else None},
    }
    if row is not None:
        sourced: dict[str, Group] = {
            g: Group(values=values[g], confidence=row.confidence_of(g), sources=row.source_of(g)) for g in GROUPS
        }
    else:
        source = (f"{profile.reference}, which stands for the class {profile.key}, with what the runtime says",)
        sourced = {g: Group(values=v, confidence=device.confidence, sources=source) for g, v in values.items()}
    efficiency = profile.efficiency
    return sourced | {
        "rates": Group(
            values={
                "sparsity_factor": profile.sparsity_factor,
                "fp8_flavour": profile.fp8_flavour,
                "mx_formats": profile.mx_formats,
            },
            confidence=None,
            sources=profile.source,
        ),
        "storage": Group(
            values={
                "converted_on_load_and_store": profile.io_formats,
                "stored_between_nodes": profile.tier.storage,
            },
            confidence=None,
            sources=profile.source,
        ),
        "efficiency": Group(
            values={
                "peak_share": efficiency.compute,
                **{f"peak_share.{f}": share for f, share in efficiency.compute_by_format.items()},
                "bandwidth_share": efficiency.memory,
            },
            confidence=None,
            sources=(efficiency.source,),
        ),
        "launch": Group(
            values={"launch_overhead_s": profile.launch_overhead_s},
            confidence=None,
            sources=(profile.launch_overhead_source,),
        ),
    }


def _rates(device: Device, row: DeviceRow | None) -> tuple[Rate, ...]:
    """Every rate in the order of formats and accumulators; `row` is None where its stated peaks are of another size."""
    found = []
    for format in FORMATS:
        for accumulate in ACCUMULATORS:
            key = f"{format}@{accumulate}"
            found += [_rate(device, row, e, format, accumulate) for e in ENGINES if key in _peaks_of(device, e)]
    return tuple(found)


def _peaks_of(device: Device, engine: Engine) -> Mapping[str, float]:
    return device.vector_peaks if engine == "vector" else device.matrix_peaks


def _rate(device: Device, row: DeviceRow | None, engine: Engine, format: str, accumulate: str) -> Rate:
    key, profile = f"{format}@{accumulate}", device.profile
    peak = _peaks_of(device, engine)[key]
    stated = None
    if row is not None:
        totals = row.stated_vector_tflops_per_card if engine == "vector" else row.stated_matrix_tflops_per_card
        stated = totals[key] * 1e12 if key in totals else None
    derived = not profile.totals_only
    return Rate(
        format=format,
        accumulate=accumulate,
        engine=engine,
        flop_per_clock_per_unit=(profile.vector if engine == "vector" else profile.matrix).get(key),
        peak_flop_per_s=peak,
        stated_peak_flop_per_s_per_card=stated,
        deviation=peak * device.logical_devices / stated - 1 if stated and derived else None,
        disagreement=row.known_disagreements.get(f"{engine}.{key}") if row is not None else None,
        remarks=_remarks(device, format) if engine == "matrix" else (),
    )


def _remarks(device: Device, format: str) -> tuple[str, ...]:
    bits, every = device.accumulator_mantissa_bits(format), device.promote_every_k(format)
    remarks = []
    if bits is not None:
        promote = f", promote partial sums to fp32 every {every}" if every is not None else ""
        remarks.append(f"sums keep {bits} mantissa bits{promote}")
    if device.flushes_denormals(format):
        remarks.append("denormal inputs read as zero")
    if format in device.profile.mx_formats:
        remarks.append("mx: a power-of-two scale per 32 values")
    return tuple(remarks)


def _count_stated(row: DeviceRow) -> int:
    return len(row.stated_vector_tflops_per_card) + len(row.stated_matrix_tflops_per_card)


def _classes(op_classes: tuple[str, ...]) -> str:
    return f"{', '.join(op_classes)} only" if op_classes else "not used"


def _hertz(mhz: float | None) -> float | None:
    return mhz * 1e6 if mhz is not None else None


def _measured(device: Device) -> Measured | None:
    m = device.measured
    if m is None:
        return None
    keys = dict.fromkeys(point.key for point in m.gemm)
    return Measured(
        date=m.date,
        torch=m.torch,
        memory_bandwidth_bytes_per_s=m.memory_bandwidth_bytes_per_s,
        launch_overhead_s=m.launch_overhead_s,
        best_gemm_flop_per_s={k: max(p.flop_per_s for p in m.gemm if p.key == k) for k in keys},
        gemm_speed_over_fp32={k: ratio for k in keys if (ratio := m.ratio_to_fp32(k)) is not None},
    )
