"""The options of `dsmp plan` and `dsmp report` that describe a mesh of devices. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..errors import InvalidOptionError

Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="D=N[,D=N...]", help="Plan for a mesh of devices: dp=256,tp=8 (dp: data, tp: tensor, ep: experts)."
    ),
]
NodeName = Annotated[
    str | None, typer.Option("--node", metavar="N", help="With --mesh: the machine whose links are priced (hgx-h800).")
]
Zero = Annotated[
    int | None, typer.Option(metavar="STAGE", help="With --mesh: ZeRO stage over dp, 0 to 3; default: as memory asks.")
]
Sequences = Annotated[
    bool | None,
    typer.Option("--sequence/--no-sequence", help="With --mesh: divide sequences over tp; default: what is faster."),
]
Wire = Annotated[
    list[str] | None,
    typer.Option(
        "--wire", metavar="[D=]FORMAT", help="With --mesh: what collectives send (bf16, int8, dp=int4); repeatable."
    ),
]
Place = Annotated[
    list[str] | None,
    typer.Option(
        "--place", metavar="GLOB=D:WHERE", help="With --mesh: place parameters, as in '*.embed*=tp:replicate'."
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshArguments:
    """A mesh and how to lie on it, read from the command line. `wire` has formats by mesh dimension, or one for all;
    `place` (glob over parameters, mesh dimension, placement)."""

    mesh: dict[str, int]
    node: str | None
    zero: int | None
    sequence: bool | None
    wire: str | dict[str, str] | None
    place: tuple[tuple[str, str, str], ...]


def mesh_arguments(
    mesh: str | None, *, node: str | None, zero: int | None, sequence: bool | None, wire: Sequence[str] | None,
    place: Sequence[str] | None,
) -> MeshArguments | None:  # fmt: skip
    """The options read; None without a mesh. Raises InvalidOptionError."""
    others: dict[str, Any] = {"--node": node, "--zero": zero, "--sequence": sequence, "--wire": wire, "--place": place}
    if mesh is None:
        stray = next((name for name, value in others.items() if value not in (None, [])), None)
        if stray is not None:
            raise InvalidOptionError(stray, others[stray], "with --mesh only, such as --mesh dp=256,tp=8")
        return None
    return MeshArguments(
        mesh=_sizes(mesh), node=node, zero=zero, sequence=sequence, wire=_wires(wire or ()),
        place=tuple(map(_placement, place or ())),
    )  # fmt: skip


def _sizes(text: str) -> dict[str, int]:
    allowed = "ranks by dimension, outermost first: dp=256,tp=8"
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not number.isdecimal() or int(number) < 1 or name in found:
            raise InvalidOptionError("--mesh", text, allowed)
        found[name] = int(number)
    return found


def _wires(texts: Sequence[str]) -> str | dict[str, str] | None:
    by_dim: dict[str, str] = {}
    for text in texts:
        dim, equals, name = text.partition("=")
        if not equals and len(texts) > 1:
            raise InvalidOptionError("--wire", text, "one format for all mesh dimensions, or DIMENSION=FORMAT for each")
        if not equals:
            return text
        if dim in by_dim:
            raise InvalidOptionError("--wire", text, f"one format for each mesh dimension; {dim} has {by_dim[dim]}")
        by_dim[dim] = name
    return by_dim or None


def _placement(text: str) -> tuple[str, str, str]:
    glob, _, where = text.rpartition("=")
    dim, colon, placement = where.partition(":")
    if not glob or not dim or not colon:
        raise InvalidOptionError("--place", text, "GLOB=DIMENSION:PLACEMENT, such as '*.embed*=tp:shard(1)'")
    return glob, dim, placement
