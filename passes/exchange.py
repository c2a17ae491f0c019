"""What it would change to give nodes another label while all others keep theirs: time, casts, drift, saved bytes.

Tied nodes change together. A shared copy is paid once, by all who read it: it goes when its last reader goes, it comes
with its first one, and its time depends on the label of the node that computes the value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .plan import Decision, PrecisionPlan
from .program import Candidate, Copy, Program, Solution


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Differences after minus before: microseconds (casts included, and of casts alone), drift (None where a candidate
    was not measured), bytes."""

    time_us: float
    cast_us: float
    drift: float | None
    saved_bytes: int

    def priced(self, solution: Solution) -> float | None:
        """Microseconds with drift and memory charged at the prices of a solution; None without a drift."""
        if self.drift is None:
            return None
        budgets = solution.price_us_per_drift * self.drift + solution.price_us_per_byte * self.saved_bytes
        return self.time_us + budgets


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyChange:
    """One shared copy before and after: who reads it, and microseconds (0 where nobody reads it); `barred_then` where
    the value would be stored too narrow for it."""

    copy: Copy
    readers: tuple[str, ...]
    readers_then: tuple[str, ...]
    time_us: float
    time_us_then: float
    barred_then: bool = False


class Exchanges:
    """The choice that a plan made within its program, and what single changes of it would do."""

    def __init__(self, program: Program, chosen: Mapping[str, Candidate]) -> None:
        """`chosen` holds the candidate of each key; a key without one (edited into something that is no candidate)
        reads no copy and costs nothing."""
        self.chosen = chosen
        self.labels = labels = {key: c.label for key, c in chosen.items()}
        self._candidates = program.candidates
        self._groups = _tied(program.ties)
        self._touching: defaultdict[str, list[Copy]] = defaultdict(list)
        self._wanted: dict[int, int] = {}
        for copy in program.copies:
            for key in copy.readers:
                self._touching[key].append(copy)
            if copy.value in program.candidates and copy.value not in copy.readers:
                self._touching[copy.value].append(copy)
            self._wanted[id(copy)] = sum(labels.get(key) in wanted for key, wanted in copy.readers.items())

    def group(self, key: str) -> tuple[str, ...]:
        """The nodes that take the label of `key` with it, itself included, in the order of the ties."""
        return self._groups.get(key, (key,))

    def candidate(self, key: str, label: str) -> Candidate | None:
        """The candidate of that label, blocked or not."""
        return next((c for c in self._candidates[key] if c.label == label), None)

    def alternatives(self, key: str) -> list[str]:
        """The labels that a node may take beside its own, with all nodes that it is tied to."""
        group = self.group(key)
        return [
            c.label
            for c in self._candidates[key]
            if c.label != self.labels.get(key) and all(self._allows(member, c.label) for member in group)
        ]

    def _allows(self, key: str, label: str) -> bool:
        found = self.candidate(key, label)
        return found is not None and found.blocked is None

    def change(self, keys: Sequence[str], label: str) -> Change:
        """What it would change to give all `keys` the label; a key without such a candidate counts for nothing."""
        time_us, saved = 0.0, 0
        drift: float | None = 0.0
        for key in keys:
            after = self.candidate(key, label)
            if after is None:
                continue
            before = self.chosen.get(key)
            time_us += after.time_us - (before.time_us if before else 0.0)
            held = (before.drift or 0.0) if before else 0.0
            drift = None if drift is None or after.drift is None else drift + after.drift - held
            saved += after.saved_bytes - (before.saved_bytes if before else 0)
        cast_us = sum(self._cast_change(copy, keys, label) for copy in self._copies_of(keys))
        return Change(time_us=time_us + cast_us, cast_us=cast_us, drift=drift, saved_bytes=saved)

    def copies(self, keys: Sequence[str], label: str | None) -> list[CopyChange]:
        """The copies that `keys` make or read now or, with `label`, would then."""
        found = []
        for copy in self._copies_of(keys):
            now = tuple(key for key, wanted in copy.readers.items() if self.labels.get(key) in wanted)
            then = (
                now if label is None else tuple(k for k, w in copy.readers.items() if self._then(k, keys, label) in w)
            )
            if not now and not then:
                continue
            source_then = self._then(copy.value, keys, label) if label is not None else self.labels.get(copy.value)
            found.append(
                CopyChange(
                    copy=copy,
                    readers=now,
                    readers_then=then,
                    time_us=self._price(copy, self.labels.get(copy.value)) if now else 0.0,
                    time_us_then=self._price(copy, source_then) if then else 0.0,
                    barred_then=bool(then) and source_then in copy.barred,
                )
            )
        return found

    def _then(self, key: str, keys: Sequence[str], label: str) -> str | None:
        return label if key in keys else self.labels.get(key)

    def _copies_of(self, keys: Sequence[str]) -> Iterable[Copy]:
        if len(keys) == 1:
            return self._touching.get(keys[0], ())
        return {id(copy): copy for key in keys for copy in self._touching.get(key, ())}.values()

    def _cast_change(self, copy: Copy, keys: Sequence[str], label: str) -> float:
        count = self._wanted[id(copy)]
        source = self.labels.get(copy.value)
        before = self._price(copy, source) if count else 0.0
        for key in keys:
            wanted = copy.readers.get(key)
            if wanted is not None:
                count += (label in wanted) - (self.labels.get(key) in wanted)
        after = self._price(copy, label if copy.value in keys else source) if count else 0.0
        return after - before

    def _price(self, copy: Copy, source: str | None) -> float:
        return copy.time_us.get((source or "") if copy.value in self._candidates else "", 0.0)


def chosen_candidates(plan: PrecisionPlan, program: Program) -> dict[str, Candidate]:
    """The candidate that each decision stands for, by key; keys edited into what is no candidate are left out."""
    found = {}
    for key, candidates in program.candidates.items():
        decision = plan.by_key.get(key)
        chosen = chosen_candidate(decision, candidates) if decision is not None else None
        if chosen is not None:
            found[key] = chosen
    return found


def chosen_candidate(decision: Decision, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with a decision's formats, None if there is none."""
    for c in candidates:
        # field by field: building tuples for all candidates of a large plan takes several times as long
        if c.output != decision.output or c.compute != decision.compute or c.recipe != decision.recipe:
            continue
        if c.accumulate == decision.accumulate:
            return c
    return None


def labels_of(decisions: Iterable[Decision], program: Program) -> dict[str, str]:
    """The labels that decisions stand for in a program, by key, without those of nodes as traced. Where there is no
    such candidate, the one that is next to it: stored otherwise, then of another recipe, too."""
    found = {}
    for d in decisions:
        known = program.candidates.get(d.key, [])
        same = [c for c in known if c.compute == d.compute]
        taken = chosen_candidate(d, known) or next(
            iter([c for c in same if c.output == d.output] + [c for c in same if c.recipe == d.recipe] + same), None
        )
        if taken is not None and taken is not known[0]:
            found[d.key] = taken.label
    return found


def exchanges_of(plan: PrecisionPlan, program: Program) -> Exchanges:
    """The exchanges around what a plan chose."""
    return Exchanges(program, chosen_candidates(plan, program))


def _tied(ties: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The whole group of every tied key; ties that share a node are one group."""
    groups: dict[str, list[str]] = {}
    for tie in ties:
        merged: dict[str, None] = {}
        for key in tie:
            merged.update(dict.fromkeys(groups.get(key, [key])))
        whole = list(merged)
        groups.update(dict.fromkeys(whole, whole))
    return {key: tuple(whole) for key, whole in groups.items()}
