"""What a pipeline schedule costs: idle time and live microbatches, from the order of work of each rank.

The order says what every rank does one after the other; a piece of work starts when the rank is free and what it reads
has arrived: a forward needs that of the stage before, an input gradient that of the stage behind (of the last stage its
own forward), a weight gradient its own input gradient. The bubble is the idle share of all ranks' time from the first
start to the last end, for GPipe and 1F1B with equal stages (p - 1) / (m + p - 1) (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters", section 2.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import ScheduleError

WorkKind = Literal["F", "I", "W", "B"]


class Work(NamedTuple):
    """Forward, input gradient, weight gradient, or both gradients (B) of a microbatch in a stage."""

    stage: int
    kind: WorkKind
    microbatch: int


Order = Sequence[Sequence[Work]]
"""The work of each rank, in order."""


class StageSeconds(NamedTuple):
    """Seconds of one microbatch in a stage or layer."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        return sum(self)

    def of(self, kind: WorkKind) -> float:
        if kind == "B":
            return self.input_gradient + self.weight_gradient
        return {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient}[kind]

    def __add__(self, other: object) -> StageSeconds:
        assert isinstance(other, StageSeconds)
        return StageSeconds(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of a step, and of each rank the seconds in which it works; `bubble` is the idle share."""

    step: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy) / (self.step * len(self.busy)) if self.step else 0.0


def simulate(order: Order, seconds: Sequence[StageSeconds], sends: Sequence[float] = ()) -> Timing:
    """Run an order with the durations of each stage; `sends[s]` are seconds from stage s to s + 1 and back.

    Raises ScheduleError for an order that waits for ever.
    """
    last = len(seconds) - 1
    done: dict[tuple[int, str, int], float] = {}
    at, clock, busy = [0] * len(order), [0.0] * len(order), [0.0] * len(order)

    def ready(work: Work) -> float | None:
        stage, kind, microbatch = work
        if kind == "F":
            return 0.0 if stage == 0 else _later(done.get((stage - 1, "F", microbatch)), _send(sends, stage - 1))
        if kind == "W":
            return done.get((stage, "I", microbatch))
        own = done.get((stage, "F", microbatch))
        if stage == last or own is None:
            return own
        return _later(done.get((stage + 1, "I", microbatch)), _send(sends, stage))

    moving = True
    while moving:
        moving = False
        for rank, works in enumerate(order):
            while at[rank] < len(works):
                work = works[at[rank]]
                start = ready(work)
                if start is None:
                    break
                took = seconds[work.stage].of(work.kind)
                clock[rank] = max(clock[rank], start) + took
                busy[rank] += took
                done[work.stage, "I" if work.kind == "B" else work.kind, work.microbatch] = clock[rank]
                at[rank] += 1
                moving = True
    waiting = [works[i] for works, i in zip(order, at, strict=True) if i < len(works)]
    if waiting:
        raise ScheduleError(f"the schedule's order waits for ever at {waiting[0]}.")
    return Timing(step=max(clock, default=0.0), busy=tuple(busy))


def peak_live(works: Sequence[Work]) -> int:
    """The most microbatches, over all stages of a rank, whose activations are kept at one time."""
    return max((sum(v.values()) for v in live_microbatches(works)), default=0)


def live_microbatches(works: Sequence[Work]) -> list[Mapping[int, int]]:
    """Live microbatches by stage of a rank, at the moments at which no other moment has as many in every stage.

    Activations are kept from the forward until the weight gradient.
    """
    live: Counter[int] = Counter()
    seen: set[tuple[tuple[int, int], ...]] = set()
    for work in works:
        if work.kind == "F":
            live[work.stage] += 1
            seen.add(tuple(sorted(live.items())))
        elif work.kind in ("W", "B"):
            live[work.stage] -= 1
    moments = [dict(items) for items in seen]

    def covers(a: Mapping[int, int], b: Mapping[int, int]) -> bool:
        return a != b and all(a.get(stage, 0) >= n for stage, n in b.items())

    return [m for m in moments if not any(covers(other, m) for other in moments)]


def _later(time: float | None, send: float) -> float | None:
    return None if time is None else time + send


def _send(sends: Sequence[float], boundary: int) -> float:
    return sends[boundary] if boundary < len(sends) else 0.0
