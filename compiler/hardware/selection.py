"""Which devices are meant on the command line: the filters of `dsmp hardware list`, and lists of names.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ...errors import InvalidOptionError
from ...hardware_db.capability import Device
from ...hardware_db.catalog import Catalog
from ...hardware_db.device_row import SEGMENTS
from ...hardware_db.formats import FORMATS, get_format
from ...hardware_db.schema import ACCUMULATORS, MATRIX_OP_CLASSES, VENDORS, Kind

KINDS: tuple[str, ...] = get_args(Kind)

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt])(i?)b?\s*", re.IGNORECASE)
_POWERS = " kmgt"
SOLD = 0.95
"""Share of the memory that a card is sold with which the runtime reports at least."""
_YEARS = re.compile(r"(\d{4})?(-)?(\d{4})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Checked filters, all of which a device must pass; None and () filter nothing.

    A device is of one of `vendors` and multiplies in each of `formats`. `years` are the first and last one. Memory
    counts as what a card is sold with: the driver's reserve and ECC take up to 5 % of that.
    """

    vendors: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    kind: str | None = None
    segment: str | None = None
    min_memory_bytes: float | None = None
    min_bandwidth_bytes_per_s: float | None = None
    years: tuple[int, int] | None = None
    verified: bool = False

    def __post_init__(self) -> None:
        for option, value, allowed in (
            *(("--vendor", v, VENDORS) for v in self.vendors),
            ("--kind", self.kind, KINDS),
            ("--segment", self.segment, SEGMENTS),
        ):
            if value is not None and value not in allowed:
                raise InvalidOptionError(option, value, ", ".join(allowed))
        for name in self.formats:
            formats_named(name)

    def admits(self, catalog: Catalog, device: Device) -> bool:
        """Whether a catalogue device passes all filters."""
        row = catalog.rows[device.id]
        return (
            (not self.vendors or device.vendor in self.vendors)
            and self.kind in (None, device.kind)
            and self.segment in (None, row.segment)
            and (self.min_memory_bytes is None or device.memory_bytes >= SOLD * self.min_memory_bytes)
            and (self.min_bandwidth_bytes_per_s is None or device.memory_bandwidth >= self.min_bandwidth_bytes_per_s)
            and (self.years is None or self.years[0] <= row.year <= self.years[1])
            and (device.verified or not self.verified)
            and all(any(multiplies(device, f) for f in formats_named(name)) for name in self.formats)
        )


def formats_named(name: str) -> list[str]:
    """The format of this name, or all of a width such as `fp8`. Raises UnknownFormatError."""
    return [f for f in FORMATS if f.startswith(f"{name}_")] or [get_format(name).name]


def multiplies(device: Device, format: str) -> bool:
    """Whether some matrix product can be computed in a format, with whatever accumulator."""
    accumulators = [a for a in ACCUMULATORS if f"{format}@{a}" in {**device.vector_peaks, **device.matrix_peaks}]
    return any(device.supports(op, None, format, a) for op in MATRIX_OP_CLASSES for a in accumulators)


def parse_size(option: str, text: str | None) -> float | None:
    """Bytes from `80GB`, `64GiB` or `1.5TB/s`; the unit must be there. Raises InvalidOptionError."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if match is None:
        raise InvalidOptionError(
            option, text, "a number with its unit such as 80GB, 79.5GiB or 2TB (a bandwidth may end in /s)"
        )
    number, prefix, binary = match.groups()
    base = 1024.0 if binary else 1000.0
    power: int = _POWERS.index(prefix.lower())
    return float(number) * base**power


def parse_years(option: str, text: str | None) -> tuple[int, int] | None:
    """The first and the last year of `2022`, `2020-2023`, `2022-` or `-2018`. Raises InvalidOptionError."""
    if text is None:
        return None
    match = _YEARS.fullmatch(text.strip())
    if match is None or not any(match.group(1, 3)) or (match[3] and not match[2]):
        raise InvalidOptionError(option, text, "a year or a range of years: 2022, 2020-2023, 2022- or -2018")
    first, dash, last = match.groups()
    if not dash:
        return int(first), int(first)
    return int(first or 0), int(last or 9999)


def check_different(option: str, names: Sequence[str], ids: Sequence[str]) -> None:
    """Raise InvalidOptionError where two names mean one device."""
    for i, identity in enumerate(ids):
        if identity in ids[:i]:
            first = names[ids.index(identity)]
            raise InvalidOptionError(option, names[i], f"different devices; {first!r} is {identity} too")
