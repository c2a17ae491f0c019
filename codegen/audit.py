"""What really runs for every planned node: the other half of a plan.

An entry per planned node says which implementation computes it and how: natively, in Triton's interpreter, simulated
because another device was planned for, as traced, or fallen back to simulation on the very device that it was planned
for, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Self

from ..errors import SilentFallbackError
from ..passes.plan import Decision
from ..passes.plan_fields import GEMM_CLASSES

_SHOWN = 5


class Ran(Enum):
    """How a node ran."""

    NATIVE = "native"
    INTERPRETED = "interpreted"
    SIMULATED = "simulated"
    AS_TRACED = "as traced"
    FELL_BACK = "fell back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One planned node: what was planned (`compute`, `recipe`, `output`), what ran, how, and why."""

    key: str
    op: str
    compute: str
    recipe: str
    output: str
    flops: int
    implementation: str
    ran: Ran
    reason: str

    @classmethod
    def of(cls, decision: Decision, implementation: str, ran: Ran, reason: str) -> Self:
        """The entry of a decision."""
        return cls(
            key=decision.key,
            op=decision.op,
            compute=decision.compute,
            recipe=decision.recipe,
            output=decision.output,
            flops=decision.flops,
            implementation=implementation,
            ran=ran,
            reason=reason,
        )


@dataclass(frozen=True)
class Audit:
    """The entries of a compiled model, in the plan's order."""

    entries: tuple[Entry, ...]

    @cached_property
    def by_key(self) -> dict[str, Entry]:
        """Entries by node key."""
        return {e.key: e for e in self.entries}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def fallbacks(self) -> list[Entry]:
        """Nodes that did not become what was planned."""
        return [e for e in self.entries if e.ran is Ran.FELL_BACK]

    def __str__(self) -> str:
        products = [e for e in self.entries if e.flops and e.op in GEMM_CLASSES]
        total = sum(e.flops for e in products) or 1
        shares: Counter[str] = Counter()
        for entry in products:
            shares[f"{entry.ran.value} ({entry.implementation})"] += entry.flops
        text = ", ".join(f"{100 * f / total:.1f}% {name}" for name, f in shares.most_common())
        tail = f"; {len(self.fallbacks)} nodes fell back" if self.fallbacks else ""
        return f"{len(self.entries)} planned nodes; GEMM FLOPs: {text or 'none'}{tail}"

    def check(self) -> None:
        """Raise SilentFallbackError when a node that was planned narrow runs wide on the device it was planned for."""
        lost = self.fallbacks
        if lost:
            named = "; ".join(f"{e.key} ({e.compute}): {e.reason}" for e in lost[:_SHOWN])
            more = f"; and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
            raise SilentFallbackError(
                f"{len(lost)} planned nodes would run wide: {named}{more}. Plan them as traced with a rule, or compile "
                "without strict."
            )


def merged(audits: Iterable[Audit]) -> Audit:
    """One audit of several graphs; of a key that stands in several the first counts, unless a later one fell back."""
    found: dict[str, Entry] = {}
    for audit in audits:
        for entry in audit:
            if entry.key not in found or entry.ran is Ran.FELL_BACK:
                found[entry.key] = entry
    return Audit(tuple(found.values()))
