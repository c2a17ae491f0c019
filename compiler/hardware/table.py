"""What is known of several devices, as plain data: the lines of `dsmp hardware list` and the rows of `compare`.

Names carry units, as in facts.py. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...hardware_db.capability import Device
from ...hardware_db.catalog import Catalog
from ...hardware_db.device_row import Confidence
from ...hardware_db.formats import FORMATS
from ...hardware_db.schema import ACCUMULATORS
from .facts import ENGINES, DeviceFacts, Value

_QUANTITIES = ("_bytes", "_bytes_per_unit", "_per_s", "_hz", "_s", "_w_per_card")
_GROUPS = ("structure", "clocks", "memory", "link", "power")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedDevice:
    """One line of the list. Peaks by `format@accumulate`: of the matrix units where they have the format, else of the
    vector units."""

    id: str
    name: str
    vendor: str
    family: str
    isa: str
    kind: str
    segment: str
    year: int
    units: int
    unit_kind: str
    logical_devices_per_card: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    dense_peak_flop_per_s: dict[str, float]
    sparsity_factor: int
    peaks_are_vendor_totals: bool
    confidence: Confidence
    verified: bool
    overlays: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRow:
    """One fact of several devices, in their order. `ratios` to the first device are None where that makes no sense."""

    fact: str
    values: tuple[Value, ...]
    ratios: tuple[float | None, ...]

    @property
    def differs(self) -> bool:
        """Whether the devices do not agree."""
        return len(set(self.values)) > 1


# ---- the list ----------------------------------------------------------------------------------------------


def listed(catalog: Catalog, device: Device) -> ListedDevice:
    """A catalogue device's line of the list."""
    row, profile = catalog.rows[device.id], device.profile
    return ListedDevice(
        id=device.id,
        name=device.name,
        vendor=device.vendor,
        family=profile.family,
        isa=device.isa,
        kind=device.kind,
        segment=row.segment,
        year=row.year,
        units=device.units,
        unit_kind=profile.unit_kind,
        logical_devices_per_card=device.logical_devices,
        memory_bytes=device.memory_bytes,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth,
        dense_peak_flop_per_s=dense_peaks(device),
        sparsity_factor=profile.sparsity_factor,
        peaks_are_vendor_totals=profile.totals_only,
        confidence=device.confidence,
        verified=device.verified,
        overlays=device.overlays,
    )


def dense_peaks(device: Device) -> dict[str, float]:
    """FLOP/s by `format@accumulate`, in the order of formats: the matrix units' where they have it, else the vector
    units'."""
    best = {**device.vector_peaks, **device.matrix_peaks}
    return {key: best[key] for key in (f"{f}@{a}" for f in FORMATS for a in ACCUMULATORS) if key in best}


# ---- the comparison ----------------------------------------------------------------------------------------


def compare(devices: Sequence[DeviceFacts]) -> list[ComparedRow]:
    """One row for each fact that is known of some device."""
    columns = [{**_head(d), **_figures(d), **_peaks(d), **_precision(d), **_trust(d)} for d in devices]
    rows = (_row(fact, [column[fact] for column in columns]) for fact in columns[0])
    return [row for row in rows if any(v is not None for v in row.values)]


# Each part has the same facts for every device, so that the rows keep one order; None is what a device has not.


def _head(d: DeviceFacts) -> dict[str, Value]:
    names = ("name", "vendor", "family", "isa", "kind", "segment", "year")
    return {n: getattr(d, n) for n in names}


def _figures(d: DeviceFacts) -> dict[str, Value]:
    return {fact: value for g in _GROUPS for fact, value in d.groups[g].values.items()}


def _peaks(d: DeviceFacts) -> dict[str, Value]:
    peaks = {(r.format, r.accumulate, r.engine): r.peak_flop_per_s for r in d.rates}
    rates = ((f, a, engine) for f in FORMATS for a in ACCUMULATORS for engine in ENGINES)
    return {f"{engine}_peak_flop_per_s.{f}@{a}": peaks.get((f, a, engine)) for f, a, engine in rates}


def _precision(d: DeviceFacts) -> dict[str, Value]:
    """Sparsity, flavours, what sums and inputs lose, default formats."""
    remarks = {r.format: "; ".join(r.remarks) for r in d.rates if r.remarks}
    return {
        **d.groups["rates"].values,
        **d.groups["storage"].values,
        **{f"remarks.{f}": remarks.get(f) for f in FORMATS},
        **{f"ladder.{name}": " > ".join(ladder) for name, ladder in d.ladders.items() if name != "other"},
    }


def _trust(d: DeviceFacts) -> dict[str, Value]:
    """Assumed efficiency and launch, and how far to trust it all."""
    efficiency = d.groups["efficiency"].values
    return {
        **{f: efficiency.get(f) for f in ("peak_share", *(f"peak_share.{f}" for f in FORMATS), "bandwidth_share")},
        **d.groups["launch"].values,
        "toolchain": d.toolchain or None,
        "trust": d.trust.partition(":")[0],
        "changed_by": d.overlays or None,
    }


def _row(fact: str, values: Sequence[Value]) -> ComparedRow:
    ratios: list[float | None] = [None] * len(values)
    first = values[0]
    if fact.partition(".")[0].endswith(_QUANTITIES) and isinstance(first, int | float):
        ratios = [v / first if isinstance(v, int | float) else None for v in values]
    return ComparedRow(fact=fact, values=tuple(values), ratios=tuple(ratios))
