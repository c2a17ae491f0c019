"""Which wire format a collective gets, what it then sends, and why some are left as they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from ..passes.graph import FLOAT_DTYPES, numel_of
from ..passes.keys import key_of
from ..passes.wire_formats import WireFormat
from .collective_nodes import Collective, GroupSize, find_collectives, group_size_by_name, ring_bytes
from .wire import row_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What became of a collective: its key, kind and format, the bytes that a rank sends, as written and now.

    `bucket` numbers the payload it is part of; None where it was left as written, and then `reason` says why.
    """

    key: str
    kind: str
    ranks: int
    wire: str
    bucket: int | None
    bytes_as_written: float
    bytes: float
    reason: str = ""

    @property
    def described(self) -> str:
        """The format and the bytes, as a part of a sentence."""
        return f"sent as {self.wire}: {self.bytes:,.0f} bytes a rank in place of {self.bytes_as_written:,.0f}"


def wires_by_key(
    gm: fx.GraphModule, globs: Mapping[str, WireFormat], group_size: GroupSize = group_size_by_name
) -> dict[fx.Node, WireFormat]:
    """The format of each collective of a keyed graph, from globs over keys; of several that match the last counts."""
    found = {}
    for key, collective in _keyed(gm, group_size):
        for glob, wire in globs.items():
            if fnmatchcase(key, glob):
                found[collective.start] = wire
    return found


def has_collectives(gm: fx.GraphModule) -> bool:
    """Whether a keyed graph has collectives that wire formats can be given to."""
    return bool(_keyed(gm, group_size_by_name))


def unmatched_globs(gm: fx.GraphModule, globs: Mapping[str, WireFormat]) -> list[tuple[str, str]]:
    """(glob, key of a collective as an example) of globs that match none of the graph's; empty if it has none."""
    keys = [key for key, _ in _keyed(gm, group_size_by_name)] if globs else []
    return [(glob, keys[0]) for glob in globs if keys and not any(fnmatchcase(key, glob) for key in keys)]


def _keyed(gm: fx.GraphModule, group_size: GroupSize) -> list[tuple[str, Collective]]:
    """Collectives that have keys: those of floating-point tensors, so not those of payloads."""
    return [(str(key), c) for c in find_collectives(gm, group_size) if (key := key_of(c.start)) is not None]


def plan_sending(
    gm: fx.GraphModule, wires: Mapping[fx.Node, WireFormat], group_size: GroupSize = group_size_by_name
) -> dict[Collective, Sent]:
    """What these formats make of the collectives that `wires` maps, in graph order; nothing is changed.

    A collective stays as written, with the reason, where the format would not make it smaller or does not hold for its
    dtype, or where it computes something other than a sum or a mean.
    """
    found = {}
    for c in find_collectives(gm, group_size):
        if c.start not in wires:
            continue
        wire = wires[c.start]
        reason = why_as_written(c, wire)
        found[c] = Sent(
            key=str(key_of(c.start) or c.start.name),
            kind=c.kind,
            ranks=c.ranks,
            wire="fp32" if reason else str(wire),
            bucket=None,
            bytes_as_written=c.sent_bytes,
            bytes=c.sent_bytes if reason else sent_bytes(c, wire),
            reason=reason,
        )
    return found


def why_as_written(c: Collective, wire: WireFormat) -> str:
    """Why a collective stays as it is; `""` if it does not."""
    if wire.name == "fp32":
        return "as written"
    if c.wait is None:
        return "its result is used in other ways than through one wait_tensor"
    if c.value.dtype not in FLOAT_DTYPES:
        return f"{c.value.dtype} is no floating-point dtype"
    if c.reduce_op not in ("", "sum", "avg"):
        return f"the reduction {c.reduce_op!r} is neither a sum nor a mean"
    if wire.is_sparse and not isinstance(c.value.numel(), int):
        return "how many values top-k sends would depend on a symbolic size"
    if sent_bytes(c, wire) >= c.sent_bytes:
        return f"{wire} would send {sent_bytes(c, wire):,.0f} bytes in place of {c.sent_bytes:,.0f}"
    return ""


def sent_bytes(c: Collective, wire: WireFormat) -> float:
    """Bytes that a rank sends for a collective in a format."""
    count = numel_of(c.value)
    if c.kind == "all_gather" or (c.kind == "all_reduce" and wire.is_sparse):
        return ring_bytes("all_gather", wire.payload_bytes(count), c.ranks)
    share = wire.payload_bytes(row_length(count, c.ranks))
    twice = ring_bytes("all_gather", share, c.ranks) if c.kind == "all_reduce" else 0
    return ring_bytes("all_to_all", share * c.ranks, c.ranks) + twice
