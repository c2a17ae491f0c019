"""Bubbles and live microbatches of torch's schedules, and numbers that they do not work for."""

from __future__ import annotations

import pytest

from dsmp.compiler.pipeline_orders import SCHEDULES, schedule_kind, schedule_order
from dsmp.errors import ScheduleError, UnknownScheduleError
from dsmp.passes.pipeline_timing import StageSeconds, Work, live_microbatches, peak_live, simulate

EVEN = StageSeconds(1, 1, 1)


def timing(name, ranks, microbatches, seconds=EVEN, sends=()):
    order = schedule_order(name, ranks, microbatches)
    stages = 1 + max(w.stage for works in order for w in works)
    return simulate(order, [seconds] * stages, sends)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "bubbles"),
    [
        (4, 8, {"gpipe": 0.273, "1f1b": 0.273, "interleaved": 0.158, "zbv": 0.059, "dualpipev": 0.059}),
        (16, 128, {"gpipe": 0.105, "1f1b": 0.105, "interleaved": 0.055, "zbv": 0.019, "dualpipev": 0.019}),
    ],
)
def test_bubbles(ranks, microbatches, bubbles):
    found = {name: round(timing(name, ranks, microbatches).bubble, 3) for name in SCHEDULES}
    assert found == bubbles


def test_gpipe_and_1f1b_have_the_bubble_of_the_formula():
    for ranks, microbatches in ((2, 4), (3, 7), (8, 9)):
        for name in ("gpipe", "1f1b"):
            found = timing(name, ranks, microbatches, StageSeconds(1.0, 1.5, 0.5)).bubble
            assert found == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_the_most_live_microbatches():
    peaks = {n: max(map(peak_live, schedule_order(n, 16, 128))) for n in SCHEDULES}
    assert peaks == {"gpipe": 128, "1f1b": 16, "interleaved": 47, "zbv": 32, "dualpipev": 33}
    assert [peak_live(works) for works in schedule_order("1f1b", 4, 8)] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_does_every_microbatch_once_on_its_own_rank(name):
    kind = schedule_kind(name)
    order = schedule_order(name, 4, 8)
    for rank, works in enumerate(order):
        assert len(set(works)) == len(works)
        assert {kind.rank_of(w.stage, 4) for w in works} == {rank}
    done = [w for works in order for w in works]
    stages = 4 * (kind.stages_per_rank or 2)
    for kinds in (("F",), ("I", "B"), ("W", "B")):
        assert sorted((w.stage, w.microbatch) for w in done if w.kind in kinds) == [
            (s, m) for s in range(stages) for m in range(8)
        ]


def test_the_slowest_stage_and_sends_lengthen_the_step():
    order = schedule_order("1f1b", 2, 4)
    even = simulate(order, [StageSeconds(1, 1, 1)] * 2)
    slow = simulate(order, [StageSeconds(1, 1, 1), StageSeconds(2, 2, 2)])
    assert even.step == 15 and slow.step == 4 * 6 + 3 and slow.busy == (12, 24)
    assert simulate(order, [StageSeconds(1, 1, 1)] * 2, [0.5]).step > even.step


def test_an_order_that_waits_for_ever():
    with pytest.raises(ScheduleError, match="waits for ever"):
        simulate([[Work(0, "B", 0), Work(0, "F", 0)]], [StageSeconds(1, 1, 1)])


def test_moments_of_a_rank_with_several_stages():
    works = [Work(0, "F", 0), Work(2, "F", 0), Work(2, "B", 0), Work(0, "F", 1), Work(0, "B", 0), Work(0, "B", 1)]
    assert sorted(map(sorted, (m.items() for m in live_microbatches(works)))) == [[(0, 1), (2, 1)], [(0, 2), (2, 0)]]


def test_numbers_that_a_schedule_does_not_work_for():
    with pytest.raises(UnknownScheduleError, match=r"1f1b"):
        schedule_order("1f1", 4, 8)
    with pytest.raises(ScheduleError, match="interleaved does not work for 4 ranks and 11 microbatches"):
        schedule_order("interleaved", 4, 11)
    with pytest.raises(ScheduleError, match=r"8 stages are asked for; 1f1b on 4 ranks has 4"):
        schedule_order("1f1b", 4, 8, stages=8)
    with pytest.raises(ScheduleError, match=r"multiple of 4, at least 8"):
        schedule_order("interleaved", 4, 8, stages=4)
    with pytest.raises(ScheduleError, match="both must be 1 or more"):
        schedule_order("gpipe", 2, 0)
