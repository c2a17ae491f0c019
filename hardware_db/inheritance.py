"""Raw tables before validation: profiles start from their parent's tables, overlays from what they correct.

Tables merge key by key, everything else replaces; the value 0 deletes what was inherited (and is an error where nothing
was).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import HardwareDataError, did_you_mean
from .schema import canonical_rate_key

Layers = tuple[tuple[str, Mapping[str, Any]], ...]
"""A record's table and its corrections in order, each with the file it stands in."""
Raw = Mapping[str, Layers]
"""Records by key."""

_RATES = (("vector",), ("matrix",), ("stated_vector_tflops_per_card",), ("stated_matrix_tflops_per_card",))
_OWN_KEYS = frozenset({"key", "parent", "isa_default", "reference", "source"})


def flatten(kind: str, key: str, layers: Layers, inherited: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What is inherited under a record's table under its corrections.

    Raises `HardwareDataError` on a 0 that deletes nothing and on a rate that no format has.
    """
    table: Mapping[str, Any] = inherited or {}
    for file, own in layers:
        table = merge(table, own, f"{file}: {kind} {key!r}")
    return dict(table)


def resolve_profiles(raw: Raw) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every profile's table with all it inherits, sorted by key, each with the file that spoke last.

    `key`, `parent`, `isa_default`, `reference` and `source` are never inherited. Raises `HardwareDataError` on an
    unknown parent, a circle, or a 0 that deletes nothing.
    """
    resolved: dict[str, tuple[str, dict[str, Any]]] = {}
    for key in raw:
        _resolve(key, raw, resolved, ())
    return dict(sorted(resolved.items()))


def _resolve(
    key: str, raw: Raw, resolved: dict[str, tuple[str, dict[str, Any]]], below: tuple[str, ...]
) -> dict[str, Any]:
    """One profile's table, added to `resolved`. `below` is the chain that led here, to find circles."""
    if key in resolved:
        return resolved[key][1]
    layers = raw[key]
    file, parent = next(((f, t["parent"]) for f, t in reversed(layers) if "parent" in t), (layers[-1][0], None))
    where = f"{file}: architecture {key!r}: parent"
    inherited: dict[str, Any] = {}
    if parent is not None:
        if not isinstance(parent, str):
            raise HardwareDataError(f"{where}: the key of a profile in quotes is wanted, not {parent!r}.")
        if parent in (key, *below):
            raise HardwareDataError(f"{where}: circle through {parent!r}.")
        if parent not in raw:
            hint = did_you_mean(parent, raw) or "`dsmp hardware show` tells profiles."
            raise HardwareDataError(f"{where}: no profile {parent!r}; {hint}")
        inherited = {k: v for k, v in _resolve(parent, raw, resolved, (key, *below)).items() if k not in _OWN_KEYS}
    table = flatten("architecture", key, layers, inherited)
    resolved[key] = (layers[-1][0], table)
    return table


def merge(
    inherited: Mapping[str, Any], own: Mapping[str, Any], where: str, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`own` over `inherited`. `where` and `path` name the place in errors."""
    rates = path in _RATES
    merged = {_rate_key(k, where, path): v for k, v in inherited.items()} if rates else dict(inherited)
    for raw_key, value in own.items():
        key = _rate_key(raw_key, where, path) if rates else raw_key
        if isinstance(value, dict):
            base = merged.get(key)
            merged[key] = merge(base if isinstance(base, dict) else {}, value, where, (*path, key))
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
