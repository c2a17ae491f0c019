"""Raw tables before validation: profiles start from their parent's tables, overlays from what they correct.

Tables merge key by key, everything else replaces; the value 0 deletes what was inherited (and is an error where nothing
was).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import HardwareDataError, near_matches
from .schema import canonical_rate_key

Raw = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Tables by key, each with the file it stands in."""

_OWN_KEYS = frozenset({"key", "parent", "isa_default", "reference", "source"})


def resolve_profiles(raw: Raw) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every profile's table with all it inherits, sorted by key, each with the file it stands in.

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
    file, own = raw[key]
    where = f"{file}: architecture {key!r}"
    parent = own.get("parent")
    inherited: dict[str, Any] = {}
    if parent in (key, *below):
        raise HardwareDataError(f"{where}: parent: circle through {parent!r}.")
    if parent is not None:
        if parent not in raw:
            near = near_matches(str(parent), raw) or sorted(raw)
            raise HardwareDataError(f"{where}: parent: no profile {parent!r}; did you mean {' or '.join(near)}?")
        inherited = {k: v for k, v in _resolve(parent, raw, resolved, (key, *below)).items() if k not in _OWN_KEYS}
    table = merge(inherited, own, where)
    resolved[key] = (file, table)
    return table


def merge(
    inherited: Mapping[str, Any], own: Mapping[str, Any], where: str, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`own` over `inherited`. `where` and `path` name the place in errors."""
    merged = dict(inherited)
    for raw_key, value in own.items():
        key = _rate_key(raw_key, where, path) if path in (("vector",), ("matrix",)) else raw_key
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
