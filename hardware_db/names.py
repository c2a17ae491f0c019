"""How devices are named: spellings that count as one name, and the index that finds a device by any of its names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .device_row import DeviceRow
from .schema import Architecture

_VENDOR_WORDS = (
    "nvidia", "amd", "intel", "apple", "google", "aws", "huawei", "tesla", "instinct", "radeon", "geforce", "arc",
)  # fmt: skip

Level = Mapping[str, tuple[str, ...]]
"""Normalised names and the ids of what they may mean."""


def normalise(name: str) -> str:
    """`name` in lower case, letters and digits only: `"NVIDIA A100-SXM4"` -> `"nvidiaa100sxm4"`."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def strip_vendor(normalised: str) -> str:
    """A normalised name without leading vendor and brand words; unchanged if nothing else would be left."""
    while normalised.startswith(_VENDOR_WORDS):
        rest = next(normalised[len(w) :] for w in _VENDOR_WORDS if normalised.startswith(w))
        if not rest:
            break
        normalised = rest
    return normalised


def look_up(name: str, levels: Iterable[Level]) -> tuple[str, ...]:
    """The ids that `name` means on the first level that knows it: one, several if it is ambiguous, none."""
    wanted = normalise(name)
    for level in levels:
        for key in (wanted, strip_vendor(wanted)):
            if ids := level.get(key):
                return ids
    return ()


def class_id(profile_key: str) -> str:
    """The id of a device that stands for its whole class: `"cpu.avx2"` -> `"cpu-avx2"`."""
    return re.sub(r"[^a-z0-9]+", "-", profile_key)


def product_levels(rows: Mapping[str, DeviceRow]) -> tuple[Level, ...]:
    """The index of single products, best level first: ids, then names and aliases."""
    return (
        level((i, i) for i in rows),
        level((n, i) for i, row in rows.items() for n in (row.name, *row.aliases, *row.detect_names)),
    )


def group_levels(architectures: Mapping[str, Architecture], rows: Mapping[str, DeviceRow]) -> tuple[Level, ...]:
    """The index of words for groups, best level first: instruction sets (which mean their default profile's reference
    device), families, vendors, kinds."""
    profiles = {i: architectures[row.arch] for i, row in rows.items()}
    return (
        level((a.isa, a.reference) for a in architectures.values() if a.isa_default and a.reference is not None),
        level((p.family, i) for i, p in profiles.items()),
        level((rows[i].vendor or p.vendor, i) for i, p in profiles.items()),
        level((p.kind, i) for i, p in profiles.items()),
    )


def level(pairs: Iterable[tuple[str, str]]) -> Level:
    """An index from (name, id) pairs, each name also without vendor words."""
    found: dict[str, set[str]] = {}
    for name, identity in pairs:
        key = normalise(name)
        for spelling in {key, strip_vendor(key)}:
            found.setdefault(spelling, set()).add(identity)
    return {key: tuple(sorted(ids)) for key, ids in found.items()}
