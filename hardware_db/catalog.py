"""The catalogue: every device, link and node of the data files and of the user's overlays, found by the names people
type.

`load_catalog()` reads all TOML files of `data/`, then the user's (overlays.py), applies inheritance (inheritance.py),
validates (parsing.py) and checks records against each other (checks.py). A new device is a new table; no code changes.

Names. Case and punctuation do not count, nor do leading vendor words: `H800-SXM`, `NVIDIA H800` and `nvidia-h800` are
one name. Ids win over aliases, aliases over profiles (`cpu-avx2`: the class, with its reference device's figures),
those over instruction sets (`gfx90a`: their reference device), families (`hopper`), vendors and kinds; at one level, a
name that fits several devices raises `AmbiguousHardwareError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import rtoml

from ..errors import (
    AmbiguousHardwareError,
    HardwareDataError,
    NodeIsNoDeviceError,
    UnknownHardwareError,
    UnknownNodeError,
    near_matches,
)
from .capability import Device
from .checks import check_detection, check_node, check_references, check_row
from .derivation import device_from_row
from .device_row import DeviceRow
from .inheritance import Layers, flatten, resolve_profiles
from .measurement import Measurement
from .names import Level, class_id, group_levels, level, look_up, normalise, product_levels
from .overlays import HardwareFile, Stamp, overlay_files, read_overlay
from .parsing import parse_architectures, parse_devices, parse_links, parse_measurement, parse_nodes
from .schema import Architecture
from .topology import Link, Node

_TABLES = {"architecture": "key", "device": "id", "link": "kind", "node": "id", "measurement": "device"}
_Tables = dict[str, dict[str, Layers]]


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All records, validated, and the indices of names, made when the first name is looked up.

    `changed_by` names, for a device or profile that overlays defined or corrected, the files that did.
    """

    architectures: Mapping[str, Architecture]
    rows: Mapping[str, DeviceRow]
    links: Mapping[str, Link]
    nodes: Mapping[str, Node]
    measurements: tuple[tuple[str, Measurement], ...]
    changed_by: Mapping[str, tuple[str, ...]]

    @cached_property
    def products(self) -> tuple[Level, ...]:
        """Names of single devices, best level first."""
        return product_levels(self.rows)

    @cached_property
    def groups(self) -> tuple[Level, ...]:
        """Words for groups of devices, best level first."""
        return group_levels(self.architectures, self.rows)

    def names(self) -> list[str]:
        """The ids of all devices, sorted."""
        return sorted(self.rows)

    def profile(self, device_id: str) -> Architecture:
        """The architecture profile of a device."""
        return self.architectures[self.rows[device_id].arch]

    def device(self, device_id: str) -> Device:
        """The device with exactly this id (KeyError if there is none)."""
        row, profile = self.rows[device_id], self.profile(device_id)
        overlays = [f for key in (*self.lineage(profile), row.id) for f in self.changed_by.get(key, ())]
        return device_from_row(row, profile, tuple(dict.fromkeys(overlays)))

    def lineage(self, profile: Architecture) -> list[str]:
        """The keys of a profile and of all that it inherits from, nearest first."""
        keys = [profile.key]
        while profile.parent is not None:
            profile = self.architectures[profile.parent]
            keys.append(profile.key)
        return keys

    def class_device(self, profile: Architecture) -> Device:
        """The device that stands for a profile: its reference's figures under the profile's name, estimated.

        Raises KeyError for a profile without a reference.
        """
        if profile.reference is None:
            raise KeyError(profile.key)
        return dataclasses.replace(self.device(profile.reference), id=class_id(profile.key), estimated=True)

    def devices(self) -> list[Device]:
        """All devices, sorted by id."""
        return [self.device(i) for i in self.names()]

    def resolve(self, name: str) -> Device:
        """The device that `name` means.

        Raises `AmbiguousHardwareError` when it fits several, `UnknownHardwareError` (with near matches) when none.
        """
        ids = look_up(name, self.products)
        if not ids:
            for profile in self.architectures.values():
                if normalise(profile.key) == normalise(name) and profile.reference is not None:
                    return self.class_device(profile)
            ids = look_up(name, self.groups)
        if len(ids) == 1:
            return self.device(ids[0])
        if ids:
            raise AmbiguousHardwareError(name, ids)
        if (node := self._node(name)) is not None:
            raise NodeIsNoDeviceError(name, node.count, node.device)
        raise UnknownHardwareError(name, self._suggestions(name), len(self.rows))

    def _suggestions(self, name: str) -> list[str]:
        """The ids that end in what was typed (`4090`), else those, of nodes too, that are spelled most like it."""
        tail = f"-{normalise(name)}"
        if ending := [i for i in self.rows if i.endswith(tail)]:
            return ending[:3]
        spellings = {n: row.id for row in self.rows.values() for n in (row.name, *row.aliases, row.id)}
        spellings |= {i: i for i in self.nodes}
        return list(dict.fromkeys(spellings[n] for n in near_matches(name, spellings)))

    def resolve_node(self, name: str) -> Node:
        """The node that `name` means. Raises `UnknownNodeError` (with near matches)."""
        node = self._node(name)
        if node is None:
            raise UnknownNodeError(name, self.nodes)
        return node

    def _node(self, name: str) -> Node | None:
        pairs = [(n, node.id) for node in self.nodes.values() for n in (node.id, node.name, *node.aliases)]
        ids = look_up(name, (level(pairs),))
        return self.nodes[ids[0]] if len(ids) == 1 else None

    def calibrated(self, device: Device) -> Device:
        """A running device with what was measured on it, if any measurement applies; the last one wins."""
        for file, measurement in reversed(self.measurements):
            if measurement.applies_to(device.id, device.name, device.units):
                overlays = tuple(dict.fromkeys((*device.overlays, file)))
                return dataclasses.replace(device, measured=measurement, overlays=overlays)
        return device


def load_catalog(hardware_file: HardwareFile = ()) -> Catalog:
    """The catalogue shipped with dsmp under the user's own data files, then under those of `hardware_file`.

    Raises `HardwareDataError` if a file cannot be read or the data contradicts itself.
    """
    return _load(overlay_files(hardware_file))


@lru_cache(maxsize=8)
def _load(overlays: tuple[Stamp, ...]) -> Catalog:
    texts: dict[str, str] = {}
    for overlay in overlays:
        texts.pop(str(overlay.path), None)  # a file named again comes where it is named last
        texts[str(overlay.path)] = read_overlay(overlay.path)
    try:
        return build_catalog(_shipped_texts(), texts)
    except HardwareDataError as error:
        if not texts or any(path in str(error) for path in texts):
            raise
        raise HardwareDataError(f"{', '.join(texts)}: changes records of dsmp's so that they fail: {error}") from None


@lru_cache(maxsize=1)
def _shipped_texts() -> dict[str, str]:
    folder = resources.files(__package__).joinpath("data")
    return {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".toml")}


def resolve(name: str) -> Device:
    """The catalogue device that `name` means (see the module docstring); does not look at the running machine."""
    return load_catalog().resolve(name)


def names() -> list[str]:
    """The ids of all catalogue devices, sorted."""
    return load_catalog().names()


def build_catalog(texts: Mapping[str, str], overlays: Mapping[str, str] | None = None) -> Catalog:
    """A catalogue from TOML texts keyed by file name; `overlays` may add records or correct those before them.

    Raises `HardwareDataError` naming the file and the key.
    """
    tables: _Tables = {kind: {} for kind in _TABLES}
    measured: list[tuple[str, dict[str, Any]]] = []
    changed: dict[str, tuple[str, ...]] = {}
    for file, text in sorted(texts.items()):
        _collect(tables, measured, file, text)
    for file, text in (overlays or {}).items():
        for key in _collect(tables, measured, file, text, correct=True):
            changed[key] = (*changed.get(key, ()), Path(file).name)
    architectures = parse_architectures(resolve_profiles(tables["architecture"]))
    flat = {
        kind: {k: (layers[-1][0], flatten(kind, k, layers)) for k, layers in tables[kind].items()}
        for kind in ("device", "link", "node")
    }
    rows = parse_devices(flat["device"])
    for key, row in rows.items():
        check_row(row, architectures, flat["device"][key][0])
    links, nodes = parse_links(flat["link"]), parse_nodes(flat["node"])
    for key, node in nodes.items():
        check_node(node, rows, links, flat["node"][key][0])
    check_references(architectures, rows, {k: layers[-1][0] for k, layers in tables["architecture"].items()})
    check_detection(rows, architectures)
    return Catalog(
        architectures=architectures,
        rows=rows,
        links=links,
        nodes=nodes,
        measurements=tuple((Path(file).name, parse_measurement(t, file)) for file, t in measured),
        changed_by=changed,
    )


def _collect(
    tables: _Tables, measured: list[tuple[str, dict[str, Any]]], file: str, text: str, *, correct: bool = False
) -> list[str]:
    """Add a file's tables; with `correct`, a table whose key is there already becomes a layer over it.

    Returns the keys of its profiles and devices.
    """
    seen: set[tuple[str, str]] = set()
    for kind, records in _read_toml(file, text).items():
        if kind == "measurement":
            measured.extend((file, r) for r in records)
            continue
        for table in records:
            key = str(table.get(_TABLES[kind], "?"))
            known = tables[kind].get(key, ())
            if known and (not correct or (kind, key) in seen):
                raise HardwareDataError(f"{file}: {kind} {key!r} is already in {known[-1][0]}.")
            tables[kind][key] = (*known, (file, table))
            seen.add((kind, key))
    return [key for kind, key in seen if kind in ("architecture", "device")]


def _read_toml(file: str, text: str) -> dict[str, list[dict[str, Any]]]:
    try:
        tables: dict[str, Any] = rtoml.loads(text)
    except rtoml.TomlParsingError as error:
        raise HardwareDataError(f"{file}: not valid TOML: {' '.join(str(error).split())}.") from None
    for key, value in tables.items():
        if key not in _TABLES or not isinstance(value, list) or not all(isinstance(t, dict) for t in value):
            allowed = ", ".join(f"[[{k}]]" for k in _TABLES)
            raise HardwareDataError(f"{file}: {key}: allowed are {allowed} tables.")
    return tables
