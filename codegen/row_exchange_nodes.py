"""Exchanges of rows in a graph: what `row_exchange.py`, or a user's own all-to-all, sends, and in which format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ..passes.graph import calls, concrete, node_op, value_of
from ..passes.keys import key_of
from ..passes.wire_formats import parse_wire


@dataclass(frozen=True, kw_only=True, slots=True)
class RowExchange:
    """One all-to-all of rows: the key of the node that gives them, among how many ranks, the format, the bytes of a
    row as computed and as sent."""

    key: str
    ranks: int
    wire: str
    row_bytes_as_written: int
    row_bytes: int

    @property
    def as_written(self) -> bool:
        """Whether rows are sent in the dtype that they have."""
        return self.row_bytes == self.row_bytes_as_written

    @property
    def described(self) -> str:
        """The format and the bytes, as a part of a sentence."""
        if self.as_written:
            return f"rows exchanged among {self.ranks} ranks as they are: {self.row_bytes:,} bytes each"
        return (
            f"rows exchanged among {self.ranks} ranks as {self.wire}: {self.row_bytes:,} bytes each in place of "
            f"{self.row_bytes_as_written:,}"
        )


def find_row_exchanges(gm: fx.GraphModule) -> Iterator[RowExchange]:
    """All-to-alls of floating-point tensors of a keyed graph, as they are or as payloads, in graph order.

    How many rows are sent is known only when the graph runs; sizes of a row are hints where they are symbolic.
    """
    for node in calls(gm):
        key, value, name = key_of(node), value_of(node), node_op(node)
        if key is None or value is None:
            continue
        size = math.prod(concrete(s) for s in value.shape[1:]) * value.dtype.itemsize
        if name == "_c10d_functional.all_to_all_single":
            yield RowExchange(key=str(key), ranks=_ranks(node), wire="", row_bytes_as_written=size, row_bytes=size)
        elif name == "dsmp.wire_decode_rows":
            moved, _, wire = node.args[:3]
            payload = value_of(moved) if isinstance(moved, fx.Node) else None
            sender = _sender(moved)
            if sender is None or payload is None:
                continue
            yield RowExchange(
                key=str(key),
                ranks=_ranks(sender),
                wire=str(parse_wire(str(wire))),
                row_bytes_as_written=size,
                row_bytes=concrete(payload.shape[1]),
            )


def _sender(moved: object) -> fx.Node | None:
    """The all-to-all behind the wait that gives a payload."""
    wait = moved if isinstance(moved, fx.Node) and node_op(moved) == "_c10d_functional.wait_tensor" else None
    start = wait.args[0] if wait is not None else None
    return start if isinstance(start, fx.Node) and node_op(start) == "_c10d_functional.all_to_all_single" else None


def _ranks(node: fx.Node) -> int:
    splits = node.args[1]
    return len(splits) if isinstance(splits, (list, tuple)) else 0
