"""What a device of this machine says of itself and what it was taken for, as plain data. Imports no torch.

Names carry units, as in facts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UndetectedHardwareError
from ...hardware_db.capability import Device
from ...hardware_db.catalog import Catalog
from ...hardware_db.cpu_features import canonical_flags
from ...hardware_db.matching import Evidence, Properties, identify
from .facts import DeviceFacts, Value, device_facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """One device of this machine. `default`: what `auto` means.

    `said` is what the runtime says, `how` what it was recognised by. `device` is None, and `how` says why, where it was
    taken for nothing. `calibration` is a sentence about measurements of it.
    """

    default: bool
    said: dict[str, Value]
    device: DeviceFacts | None
    estimated: bool
    how: str
    calibrated: bool
    calibration: str


def detection(properties: Properties, catalog: Catalog, *, default: bool) -> Detection:
    """Match a device that a runtime describes and say how that went."""
    said = _said(properties, catalog)
    try:
        found = identify(properties, catalog)
    except UndetectedHardwareError as error:
        return Detection(
            default=default, said=said, device=None, estimated=False, how=str(error), calibrated=False, calibration=""
        )
    device = catalog.calibrated(found.device)
    return Detection(
        default=default,
        said=said,
        device=device_facts(catalog, device),
        estimated=device.estimated,
        how=_how(device, found.evidence, catalog),
        calibrated=device.measured is not None,
        calibration=_calibration(device, catalog),
    )


def _said(properties: Properties, catalog: Catalog) -> dict[str, Value]:
    """What the runtime says, without what it is silent about; of a CPU's flags those that some profile asks for."""
    asked = {f for p in catalog.architectures.values() for f in canonical_flags(p.cpu_flags)}
    said: dict[str, Value] = {
        "backend": properties.backend,
        "name": properties.name,
        "isa": properties.isa,
        "pci_id": properties.pci_id,
        "units": properties.units,
        "memory_bytes": properties.memory_bytes,
        "clock_hz": properties.clock_mhz * 1e6,
        "bandwidth_bytes_per_s": properties.bandwidth,
        "l2_bytes": properties.l2_bytes,
        "vendor": properties.vendor,
        "cpu_family": properties.family,
        "flags": tuple(sorted(canonical_flags(properties.flags) & asked)),
    }
    return {k: v for k, v in said.items() if v}


def _how(device: Device, evidence: Evidence, catalog: Catalog) -> str:
    """What the device was recognised by, and what of the product's it has."""
    if evidence == "class":
        by = "its features" if device.kind == "cpu" else "its instruction set, as a product that is not in the data"
        return f"by {by}: profile {device.architecture}, scaled from {device.profile.reference}"
    row = catalog.rows[device.id]
    part = "" if row.units == device.units else f", with {device.units:,} of its {row.units:,} units"
    what = "instruction set, units and memory, which fit no other product" if evidence == "structure" else evidence
    return f"by its {what}{part}"


def _calibration(device: Device, catalog: Catalog) -> str:
    if device.measured is not None:
        return f"measured on {device.measured.date} with torch {device.measured.torch} ({device.overlays[-1]})"
    others = [(file, m.units) for file, m in catalog.measurements if (m.device, m.name) == (device.id, device.name)]
    if not others:
        return "none; `dsmp hardware calibrate` measures this device"
    found = ", ".join(f"{units:,} units ({file})" for file, units in others)
    return f"none for {device.units:,} units; there is one for {found}. Calibrate anew, or use as many threads"
