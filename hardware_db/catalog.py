"""The catalogue: every device of the data files, found by the names people type.

`load_catalog()` reads all TOML files of `data/` (each may hold `[[architecture]]` and `[[device]]` tables, in
any file), applies inheritance, validates, and checks each vendor's stated dense peak against the derived one.
A new device is a new table in a data file; no code changes.

Inheritance. A profile starts from its parent's tables and says only what differs. Tables merge key by key,
everything else replaces; the value 0 deletes what was inherited (and is an error where nothing was). `key`,
`parent`, `isa_default` and `source` are never inherited.

Names. Case and punctuation do not count, nor do leading vendor words: `H800-SXM`, `NVIDIA H800` and
`nvidia-h800` are one name. Ids win over aliases, aliases over instruction sets (`sm_90`), those over families
(`hopper`) and kinds (`cpu`); at one level, a name that fits several devices raises `AmbiguousHardwareError`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from ..errors import AmbiguousHardwareError, HardwareDataError, UnknownHardwareError, near_matches
from .capability import Device
from .schema import Architecture, DeviceRow, canonical_rate_key, parse_architecture, parse_device

STATED_TOLERANCE = 0.03
"""Largest accepted relative distance between a derived peak and the vendor's."""

_VENDOR_WORDS = ("nvidia", "amd", "intel", "tesla", "instinct", "radeon")
_OWN_KEYS = frozenset({"key", "parent", "isa_default", "source"})


def normalise(name: str) -> str:
    """`name` in lower case, letters and digits only: `"NVIDIA A100-SXM4"` -> `"nvidiaa100sxm4"`."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def strip_vendor(normalised: str) -> str:
    """A normalised name without leading vendor words; unchanged if nothing else would be left."""
    stripped = True
    while stripped:
        stripped = False
        for word in _VENDOR_WORDS:
            if normalised.startswith(word) and len(normalised) > len(word):
                normalised, stripped = normalised[len(word) :], True
    return normalised


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """All profiles by key and all device rows by id, validated, plus the index of names (best level
    first)."""

    architectures: Mapping[str, Architecture]
    rows: Mapping[str, DeviceRow]
    levels: tuple[Mapping[str, tuple[str, ...]], ...]
    spellings: tuple[str, ...]

    def names(self) -> list[str]:
        """The ids of all devices, sorted."""
        return sorted(self.rows)

    def profile(self, device_id: str) -> Architecture:
        """The architecture profile of a device."""
        return self.architectures[self.rows[device_id].arch]

    def device(self, device_id: str) -> Device:
        """The device with exactly this id (KeyError if there is none)."""
        return device_from_row(self.rows[device_id], self.profile(device_id))

    def resolve(self, name: str) -> Device:
        """The device that `name` means.

        Raises `AmbiguousHardwareError` when it fits several, `UnknownHardwareError` (with near matches) when
        none.
        """
        wanted = normalise(name)
        for level in self.levels:
            for key in (wanted, strip_vendor(wanted)):
                ids = level.get(key, ())
                if len(ids) == 1:
                    return self.device(ids[0])
                if ids:
                    raise AmbiguousHardwareError(name, ids)
        raise UnknownHardwareError(name, [*self._suggestions(name), *self.rows])

    def _suggestions(self, name: str) -> list[str]:
        near = near_matches(name, self.spellings)
        return [] if any(n in self.rows for n in near) else near


def device_from_row(row: DeviceRow, profile: Architecture) -> Device:
    """A catalogue device: exactly what its row and profile say."""
    return Device(
        id=row.id,
        name=row.name,
        vendor=profile.vendor,
        isa=profile.isa,
        kind=profile.kind,
        units=row.units,
        vector_clock_mhz=row.vector_clock_mhz,
        matrix_clock_mhz=row.matrix_clock_mhz or row.vector_clock_mhz,
        memory_bytes=row.memory_bytes,
        memory_bandwidth=row.memory_bandwidth_bytes_per_s,
        l2_bytes=row.l2_bytes,
        link_bandwidth=row.interconnect.bidirectional_bytes_per_s / 2 if row.interconnect else None,
        logical_devices=row.logical_devices,
        launch_overhead_s=profile.launch_overhead_s,
        efficiency=profile.efficiency,
        estimated=False,
        confidence=row.confidence,
        profile=profile,
    )


@lru_cache(maxsize=1)
def load_catalog() -> Catalog:
    """The catalogue shipped with dsmp, read once. Raises `HardwareDataError` if its data contradicts
    itself."""
    folder = resources.files(__package__).joinpath("data")
    texts = {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".toml")}
    return build_catalog(texts)


def resolve(name: str) -> Device:
    """The catalogue device that `name` means (see the module docstring); does not look at the running
    machine."""
    return load_catalog().resolve(name)


def names() -> list[str]:
    """The ids of all catalogue devices, sorted."""
    return load_catalog().names()


def build_catalog(texts: Mapping[str, str]) -> Catalog:
    """A catalogue from TOML texts keyed by file name. Raises `HardwareDataError` naming the file and the
    key."""
    raw_profiles: dict[str, tuple[str, dict[str, Any]]] = {}
    raw_devices: list[tuple[str, dict[str, Any]]] = []
    for file, text in sorted(texts.items()):
        tables = _read_toml(file, text)
        for table in tables.get("architecture", []):
            key = str(table.get("key", "?"))
            if key in raw_profiles:
                raise HardwareDataError(f"{file}: architecture {key!r} is already in {raw_profiles[key][0]}.")
            raw_profiles[key] = (file, table)
        raw_devices += [(file, table) for table in tables.get("device", [])]
    architectures = {
        key: parse_architecture(_resolve_profile(key, raw_profiles, ()), raw_profiles[key][0])
        for key in sorted(raw_profiles)
    }
    rows: dict[str, DeviceRow] = {}
    for file, table in raw_devices:
        row = parse_device(table, file)
        if row.id in rows:
            raise HardwareDataError(f"{file}: device {row.id!r} appears twice.")
        if row.arch not in architectures:
            near = near_matches(row.arch, architectures) or sorted(architectures)
            raise HardwareDataError(
                f"{file}: device {row.id!r}: arch: no profile {row.arch!r}; did you mean {' or '.join(near)}?"
            )
        _check_stated(row, architectures[row.arch], file)
        rows[row.id] = row
    return _index(architectures, rows)


def _read_toml(file: str, text: str) -> dict[str, list[dict[str, Any]]]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HardwareDataError(f"{file}: not valid TOML: {error}.") from None
    for key, value in tables.items():
        if key not in ("architecture", "device") or not isinstance(value, list):
            raise HardwareDataError(f"{file}: {key}: allowed are [[architecture]] and [[device]] tables.")
    return tables


def _resolve_profile(key: str, raw: Mapping[str, tuple[str, dict[str, Any]]], below: tuple[str, ...]) -> dict[str, Any]:
    """The profile's table with everything it inherits. `below`: the chain that led here, to find circles."""
    file, own = raw[key]
    parent = own.get("parent")
    if parent is None:
        inherited: dict[str, Any] = {}
    elif parent not in raw:
        near = near_matches(str(parent), raw) or sorted(raw)
        raise HardwareDataError(
            f"{file}: architecture {key!r}: parent: no profile {parent!r}; did you mean {' or '.join(near)}?"
        )
    elif parent in (key, *below):
        raise HardwareDataError(f"{file}: architecture {key!r}: parent: circle through {parent!r}.")
    else:
        inherited = {k: v for k, v in _resolve_profile(parent, raw, (key, *below)).items() if k not in _OWN_KEYS}
    return _merge(inherited, own, f"{file}: architecture {key!r}", ())


def _merge(inherited: Mapping[str, Any], own: Mapping[str, Any], where: str, path: tuple[str, ...]) -> dict[str, Any]:
    merged = dict(inherited)
    for raw_key, value in own.items():
        key = _rate_key(raw_key, where, path) if path in (("vector",), ("matrix",)) else raw_key
        if isinstance(value, dict):
            base = merged.get(key)
            merged[key] = _merge(base if isinstance(base, dict) else {}, value, where, (*path, key))
        elif type(value) in (int, float) and value == 0:
            if key not in merged:
                raise HardwareDataError(
                    f"{where}: {'.'.join((*path, key))}: 0 deletes an inherited value, but none is inherited."
                )
            del merged[key]
        else:
            merged[key] = value
    return merged


def _rate_key(key: str, where: str, path: tuple[str, ...]) -> str:
    try:
        return canonical_rate_key(key)
    except ValueError as error:
        raise HardwareDataError(f"{where}: {'.'.join((*path, key))}: {error}.") from None


def _check_stated(row: DeviceRow, profile: Architecture, file: str) -> None:
    """Every stated dense peak is derivable, and near the derived one or excused; no excuse is stale."""
    device = device_from_row(row, profile)
    where = f"{file}: device {row.id!r}"
    disagreeing = set()
    for domain, stated, rates in (
        ("vector", row.stated_vector_tflops_per_card, profile.vector),
        ("matrix", row.stated_matrix_tflops_per_card, profile.matrix),
    ):
        for rate_key, tflops in stated.items():
            key = f"{domain}.{rate_key}"
            if rate_key not in rates:
                raise HardwareDataError(f"{where}: {key}: a peak is stated, but no rate is known.")
            clock = device.clock_mhz(domain == "matrix", rate_key.partition("@")[0])
            derived = device.units * rates[rate_key] * clock * 1e6 * row.logical_devices / 1e12
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


def _index(architectures: Mapping[str, Architecture], rows: Mapping[str, DeviceRow]) -> Catalog:
    detect_owner: dict[str, str] = {}
    for row in rows.values():
        for name in row.detect_names:
            owner = detect_owner.setdefault(strip_vendor(normalise(name)), row.id)
            if owner != row.id:
                raise HardwareDataError(f"devices {owner!r} and {row.id!r} share the detect name {name!r}.")
    profiles = {i: architectures[row.arch] for i, row in rows.items()}
    levels = (
        _level((row.id, i) for i, row in rows.items()),
        _level((n, i) for i, row in rows.items() for n in (row.name, *row.aliases, *row.detect_names)),
        _level((profiles[i].isa, i) for i in rows),
        _level((profiles[i].family, i) for i in rows),
        _level((profiles[i].kind, i) for i in rows),
    )
    spellings = (*rows, *sorted({n for row in rows.values() for n in (row.name, *row.aliases)}))
    return Catalog(architectures=architectures, rows=rows, levels=levels, spellings=spellings)


def _level(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for name, device_id in pairs:
        key = normalise(name)
        for spelling in {key, strip_vendor(key)}:
            found.setdefault(spelling, set()).add(device_id)
    return {key: tuple(sorted(ids)) for key, ids in found.items()}
