"""What all errors share: their base, and texts that name near misses and long lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

SHOWN = 12
NODES_SHOWN = 8


class DsmpError(Exception):
    """Base of all errors that dsmp raises on purpose."""


def near_matches(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that look most like `name`, best first."""
    lowered = {k.lower(): k for k in known}
    return [lowered[m] for m in difflib.get_close_matches(name.lower(), lowered, n=limit, cutoff=0.5)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean a or b?`, or "" where no known name is near."""
    near = near_matches(name, known)
    return f"did you mean {' or '.join(near)}?" if near else ""


def unknown_text(kind: str, name: str, known: Iterable[str], remedy: str) -> str:
    names = sorted(known)
    near = near_matches(name, names)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}. {remedy}".rstrip()


def listed(nodes: Sequence[int], names: Sequence[str]) -> str:
    """The first of some nodes by key, else by number, and how many more there are."""
    shown = [*names[:NODES_SHOWN]] or [f"node {n}" for n in nodes[:NODES_SHOWN]]
    more = len(nodes) - len(shown)
    return f"{', '.join(shown)}{f' and {more:,} more' if more > 0 else ''}"
