"""What must hold between records: stated peaks against derived ones, and references that exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import HardwareDataError, did_you_mean
from .derivation import derive_peaks
from .device_row import DeviceRow
from .names import normalise, strip_vendor
from .schema import Architecture
from .topology import Link, Node

RESERVED = ("auto", "cpu")
"""Names that never mean a row."""
STATED_TOLERANCE = 0.03
"""Largest accepted relative distance between a derived peak and the vendor's."""


def check_row(row: DeviceRow, architectures: Mapping[str, Architecture], file: str) -> None:
    """A device's profile exists; a rated device has a clock and cores that fit its units; one with totals only has a
    peak to plan with."""
    where = f"{file}: device {row.id!r}"
    profile = architectures.get(row.arch)
    if profile is None:
        hint = did_you_mean(row.arch, architectures) or "`dsmp hardware show` tells profiles."
        raise HardwareDataError(f"{where}: arch: no profile {row.arch!r}; {hint}")
    if row.id in RESERVED:
        raise HardwareDataError(f"{where}: id: {', '.join(RESERVED)} mean the running device, take another id.")
    if empty := [n for n in (*row.aliases, row.name) if not normalise(n)]:
        raise HardwareDataError(f"{where}: {empty[0]!r} has neither letters nor digits, so nobody could type it.")
    if profile.totals_only:
        if not row.stated_matrix_tflops_per_card:
            raise HardwareDataError(f"{where}: stated_matrix_tflops_per_card: missing, and {profile.key} has no rates.")
        if not any("fp32@fp32" in peaks for peaks in derive_peaks(row, profile)):
            raise HardwareDataError(f"{where}: no fp32 peak: state fp32, or give assumed_fp32_share.")
        return
    if row.vector_clock_mhz is None:
        raise HardwareDataError(f"{where}: vector_clock_mhz: missing; only totals_only profiles go without.")
    if row.assumed_fp32_share is not None:
        raise HardwareDataError(f"{where}: assumed_fp32_share: {profile.key} has rates, nothing needs assuming.")
    lanes = profile.lanes_per_unit
    if row.cores is not None and lanes is not None and row.cores != row.units * lanes:
        raise HardwareDataError(
            f"{where}: cores: {row.cores} are not {row.units} units of {lanes} lanes ({row.units * lanes})."
        )
    check_stated(row, profile, file)


def check_stated(row: DeviceRow, profile: Architecture, file: str) -> None:
    """Every stated dense peak is derivable, and near the derived one or excused; no excuse is stale."""
    vector, matrix = derive_peaks(row, profile)
    where = f"{file}: device {row.id!r}"
    disagreeing = set()
    for domain, stated, peaks in (
        ("vector", row.stated_vector_tflops_per_card, vector),
        ("matrix", row.stated_matrix_tflops_per_card, matrix),
    ):
        for rate_key, tflops in stated.items():
            key = f"{domain}.{rate_key}"
            if rate_key not in peaks:
                raise HardwareDataError(f"{where}: {key}: a peak is stated, but no rate is known.")
            derived = peaks[rate_key] * row.logical_devices / 1e12
            numbers = f"derived {derived:.4g} TFLOPS, stated {tflops:.4g}"
            if abs(derived / tflops - 1) <= STATED_TOLERANCE:
                continue
            if 1.9 <= tflops / derived <= 2.1:
                raise HardwareDataError(f"{where}: {key}: {numbers}, twice as much: state the dense peak.")
            if key not in row.known_disagreements:
                raise HardwareDataError(
                    f"{where}: {key}: {numbers}. Correct it, or add a reason to known_disagreements."
                )
            disagreeing.add(key)
    if stale := set(row.known_disagreements) - disagreeing:
        raise HardwareDataError(f"{where}: known_disagreements: {', '.join(sorted(stale))} agree or are not stated.")


def check_references(
    architectures: Mapping[str, Architecture], rows: Mapping[str, DeviceRow], files: Mapping[str, str]
) -> None:
    """Each profile's reference is a device of that very profile; each instruction set has at most one default.

    `files` says where each profile stands.
    """
    defaults: dict[str, str] = {}
    for profile in architectures.values():
        where = f"{files[profile.key]}: architecture {profile.key!r}"
        if profile.isa_default and (other := defaults.setdefault(profile.isa, profile.key)) != profile.key:
            raise HardwareDataError(f"{where}: isa_default: {other!r} is the default of {profile.isa} already.")
        if profile.reference is None:
            continue
        if profile.reference not in rows:
            hint = did_you_mean(profile.reference, rows) or "name one of this profile."
            raise HardwareDataError(f"{where}: reference: no device {profile.reference!r}; {hint}")
        if rows[profile.reference].arch != profile.key:
            raise HardwareDataError(f"{where}: reference: {profile.reference!r} is of another profile.")


def check_detection(rows: Mapping[str, DeviceRow], architectures: Mapping[str, Architecture]) -> None:
    """No two devices look alike to the runtime: same name, instruction set, units and memory."""
    owners: dict[tuple[str, str, int, int], str] = {}
    for row in rows.values():
        for name in row.detect_names:
            key = (strip_vendor(normalise(name)), architectures[row.arch].isa, row.units, row.memory_bytes)
            owner = owners.setdefault(key, row.id)
            if owner != row.id:
                raise HardwareDataError(
                    f"devices {owner!r} and {row.id!r}: detect_names: both are {name!r} with the same units and memory."
                )


def check_node(node: Node, rows: Iterable[str], links: Mapping[str, Link], file: str) -> None:
    """A node's device and links exist."""
    where = f"{file}: node {node.id!r}"
    if node.device not in (known := list(rows)):
        hint = did_you_mean(node.device, known) or "`dsmp hardware list` shows all."
        raise HardwareDataError(f"{where}: device: no device {node.device!r}; {hint}")
    for key, kind in (("link", node.link), ("fabric", node.fabric)):
        if kind is not None and kind not in links:
            raise HardwareDataError(f"{where}: {key}: no link {kind!r}; known: {', '.join(sorted(links))}.")
