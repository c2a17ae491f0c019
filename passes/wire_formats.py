"""What tensors look like while a collective moves them: names, options and sizes of wire formats. No process groups.

A tensor of n values travels as a *payload* of `WireFormat.payload_bytes(n)` bytes:

    fp32, bf16, fp16   n values, cast: 4 n, 2 n, 2 n bytes
    fp8, int8          n codes and, for every block of b values, a bf16 scale: n + 2 ceil(n / b)
    int4               the same with two codes in a byte: ceil(n / 2) + 2 ceil(n / b)
    topk               the k = ceil(keep * n) largest values in fp32 and their int32 positions: 8 k

so int8 with blocks of 128 takes 0.254 of fp32's bytes and int4 0.129.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from ..errors import InvalidWireFormatError, UnknownWireFormatError

_N = TypeVar("_N", int, float)

WireName = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "topk"]
WIRE_NAMES: tuple[WireName, ...] = get_args(WireName)
BLOCK_NAMES: frozenset[str] = frozenset({"fp8", "int8", "int4"})

DEFAULT_BLOCK = 128
DEFAULT_KEEP = 0.01

_LEAST_BLOCK, _MOST_BLOCK = 8, 65536
_SCALE_BYTES = 2
_POSITION_BYTES = 8  # an fp32 value and its int32 position


@dataclass(frozen=True, order=True, slots=True)
class WireFormat:
    """One way to write a tensor down for a collective.

    `block` is how many values share a scale (fp8, int8, int4), `keep` the share of values that is sent (topk). As text:
    `int8`, `int8:64` (blocks of 64), `topk:0.05` (5 % of the values). Raises UnknownWireFormatError for a name that is
    none, InvalidWireFormatError for a block outside 8 ... 65536 or a share outside (0, 1].
    """

    name: str
    block: int = DEFAULT_BLOCK
    keep: float = DEFAULT_KEEP

    def __post_init__(self) -> None:
        if self.name not in WIRE_NAMES:
            raise UnknownWireFormatError(self.name, WIRE_NAMES)
        if not _LEAST_BLOCK <= self.block <= _MOST_BLOCK:
            raise InvalidWireFormatError(
                f"{self.name}:{self.block}",
                f"blocks of {_LEAST_BLOCK} to {_MOST_BLOCK} values, such as {self.name}:128",
            )
        if not 0 < self.keep <= 1:
            raise InvalidWireFormatError(f"{self.name}:{self.keep}", "shares above 0 and up to 1, such as topk:0.01")

    def __str__(self) -> str:
        if self.name in BLOCK_NAMES and self.block != DEFAULT_BLOCK:
            return f"{self.name}:{self.block}"
        if self.name == "topk" and self.keep != DEFAULT_KEEP:
            return f"{self.name}:{self.keep!r}"
        return self.name

    @property
    def has_blocks(self) -> bool:
        """Whether values share scales."""
        return self.name in BLOCK_NAMES

    @property
    def is_sparse(self) -> bool:
        """Whether only some values are sent."""
        return self.name == "topk"

    def kept(self, count: int) -> int:
        """How many of `count` values are sent: all of them, or topk's ceil(keep * count)."""
        return min(count, math.ceil(self.keep * count)) if self.is_sparse else count

    def payload_bytes(self, count: int) -> int:
        """Bytes of the payload of `count` values; 0 for none. `count` may be a symbolic size, save under topk."""
        if self.is_sparse:
            return _POSITION_BYTES * self.kept(count)
        if not self.has_blocks:
            return count * (4 if self.name == "fp32" else 2)
        values = (count + 1) // 2 if self.name == "int4" else count
        return values + _SCALE_BYTES * self.blocks(count)

    def blocks(self, count: int) -> int:
        """How many scales `count` values have; the last block may be partial."""
        return (count + self.block - 1) // self.block


FP32 = WireFormat("fp32")
"""As written: what has this format is left alone."""


def parse_wire(wire: str | WireFormat) -> WireFormat:
    """The inverse of `str`; a format is itself. Raises UnknownWireFormatError or InvalidWireFormatError."""
    if isinstance(wire, WireFormat):
        return wire
    if not isinstance(wire, str):
        raise InvalidWireFormatError(wire, f"a name ({', '.join(WIRE_NAMES)}), or 'int8:64', 'topk:0.05'")
    return _parsed(wire)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> WireFormat:
    name, colon, value = text.partition(":")
    if not colon:
        return WireFormat(name)
    if name in BLOCK_NAMES:
        return WireFormat(name, block=_number(text, value, int, "a whole number of values, such as int8:64"))
    if name == "topk":
        return WireFormat(name, keep=_number(text, value, float, "a share of the values, such as topk:0.01"))
    if name in WIRE_NAMES:
        raise InvalidWireFormatError(text, f"no block for {name}, whose values have no scales: write {name!r}")
    raise UnknownWireFormatError(name, WIRE_NAMES)


def _number(text: str, value: str, kind: Callable[[str], _N], allowed: str) -> _N:
    try:
        return kind(value)
    except ValueError:
        raise InvalidWireFormatError(text, allowed) from None
