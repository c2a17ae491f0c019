"""The schedules of torch.distributed.pipelining by name: their classes, where stages lie, and the order of their work.

The order is the schedule's own intermediate representation. It is read without processes from schedules made on a
stand-in for a stage, as torch's visualizer does; that module is private, so where it is missing this says so.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch.distributed.pipelining import schedules

from ..errors import ScheduleError, UnknownScheduleError
from ..passes.pipeline_timing import Order, Work, WorkKind

try:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
except ImportError:  # a private module
    get_schedule_ops = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleKind:
    """A schedule of torch's: its class, how many stages a rank has (None: two or more), where they lie ("loop": rank
    s mod p, "v": there and back), and whether input and weight gradients are computed apart."""

    name: str
    torch_name: str
    stages_per_rank: int | None
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False

    @property
    def schedule_class(self) -> Any:
        return getattr(schedules, self.torch_name)

    @property
    def multi(self) -> bool:
        """Whether torch's class takes a list of stages."""
        return self.stages_per_rank != 1

    def rank_of(self, stage: int, ranks: int) -> int:
        turn, place = divmod(stage, ranks)
        return ranks - 1 - place if self.placement == "v" and turn % 2 else place


SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind(name="gpipe", torch_name="ScheduleGPipe", stages_per_rank=1),
        ScheduleKind(name="1f1b", torch_name="Schedule1F1B", stages_per_rank=1),
        ScheduleKind(name="interleaved", torch_name="ScheduleInterleaved1F1B", stages_per_rank=None),
        ScheduleKind(
            name="zbv", torch_name="ScheduleZBVZeroBubble", stages_per_rank=2, placement="v", splits_backward=True
        ),
        ScheduleKind(
            name="dualpipev", torch_name="ScheduleDualPipeV", stages_per_rank=2, placement="v", splits_backward=True
        ),
    )
}


def schedule_kind(name: str) -> ScheduleKind:
    """A schedule by name. Raises UnknownScheduleError."""
    found = SCHEDULES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise UnknownScheduleError(str(name), SCHEDULES)
    return found


def schedule_order(name: str, ranks: int, microbatches: int, stages: int | None = None) -> Order:
    """The order of work of each rank. `stages` is by default one per rank, two where the schedule has several.

    Raises UnknownScheduleError, and ScheduleError for numbers that the schedule does not work for.
    """
    kind = schedule_kind(name)
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"{ranks} ranks and {microbatches} microbatches are asked for; both must be 1 or more.")
    per_rank = kind.stages_per_rank or 2
    if stages is not None:
        per_rank, rest = divmod(stages, ranks)
        fits = per_rank == kind.stages_per_rank if kind.stages_per_rank else per_rank >= 2
        if rest or not fits:
            wanted = (
                f"{kind.stages_per_rank * ranks}"
                if kind.stages_per_rank
                else f"a multiple of {ranks}, at least {2 * ranks}"
            )
            raise ScheduleError(f"{stages} stages are asked for; {kind.name} on {ranks} ranks has {wanted}.")
    if get_schedule_ops is None:
        raise ScheduleError(
            "this version of torch has no torch.distributed.pipelining._schedule_visualizer, from which the order of "
            "work is read. Use torch 2.11 to 2.14."
        )
    with _refused(kind.name, ranks, microbatches):
        actions = get_schedule_ops(kind.torch_name.removeprefix("Schedule"), ranks, microbatches, per_rank)
    return [_works(rank_actions) for rank_actions in actions]


@contextlib.contextmanager
def _refused(name: str, ranks: int, microbatches: int) -> Iterator[None]:
    """Tell torch's refusal of numbers as ours."""
    try:
        yield
    except (ValueError, AssertionError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ScheduleError(
            f"{name} does not work for {ranks} ranks and {microbatches} microbatches: {text.rstrip('.')}. "
            "Take a multiple of the ranks, at least twice as many."
        ) from error


def _works(actions: Any) -> list[Work]:
    """Actions as work. Forwards are numbered anew per stage, and so are backwards, whether whole or in parts, since the
    order of 1F1B in torch 2.14 does not number the microbatches of its last rank as it runs them."""
    found: list[Work] = []
    numbers: Counter[tuple[int, bool]] = Counter()
    known: dict[tuple[int, int], int] = {}
    for action in actions:
        for part in () if action is None else action.sub_actions or (action,):
            stage, kind = part.stage_index, part.computation_type.value
            if kind == "W":
                found.append(Work(stage, "W", known[stage, part.microbatch_index]))
            elif kind in ("F", "I", "B"):  # others, such as the reduction of gradients, take no part
                number = numbers[stage, kind == "F"]
                numbers[stage, kind == "F"] += 1
                if kind == "I":
                    known[stage, part.microbatch_index] = number
                found.append(Work(stage, cast("WorkKind", kind), number))
    return found
