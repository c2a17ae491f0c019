"""The front is the solver's, rises nowhere, lies below every simpler choice, and those are what they say."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from plan_samples import HEAD, edited, fastest_drift, sample_plan, sample_program, traced_plan

from dsmp.errors import NotCalibratedError
from dsmp.hardware_db import resolve
from dsmp.passes.pareto import ParetoFront, Point, pareto_front
from dsmp.passes.plan import PrecisionPlan
from dsmp.passes.plan_fields import GEMM_CLASSES


@pytest.fixture(scope="module")
def plan() -> PrecisionPlan:
    return sample_plan(2, budget=1e-4)


@pytest.fixture(scope="module")
def front(plan: PrecisionPlan) -> ParetoFront:
    return pareto_front(plan, points=12, device=resolve("h800"))


def named(front: ParetoFront, name: str) -> Point:
    (point,) = [p for p in front.others if p.name == name]
    return point


def test_front_falls(plan: PrecisionPlan, front: ParetoFront) -> None:
    points = front.front
    assert len(points) >= 8
    for a, b in pairwise(points):
        assert a.drift < b.drift
        assert a.time_us > b.time_us
    assert points[0].drift == 0.0  # fp32 everywhere: nothing is rounded
    assert points[-1].drift == pytest.approx(fastest_drift(plan))


def test_front_is_what_solving_gives(plan: PrecisionPlan, front: ParetoFront) -> None:
    for point in front.front[1::3]:
        assert point.amount is not None and point.gap is not None and point.bound_us is not None
        solved = traced_plan(plan.nodes, plan.program).solve(budget=point.amount * (1 + 1e-9)).solution
        assert solved is not None
        assert solved.time_us == pytest.approx(point.time_us, rel=2e-3)
        assert point.bound_us <= point.time_us * (1 + 1e-9)
        assert point.gap <= 2e-3


def test_nothing_is_faster_at_the_same_drift(front: ParetoFront) -> None:
    for point in (front.plan, *front.others):
        assert point.optimum_us is not None
        if point.kind in ("plan", "format"):  # these keep ties, since they treat tied nodes alike
            assert point.time_us >= point.optimum_us * (1 - 2e-3)


def test_the_plans_own_point(plan: PrecisionPlan, front: ParetoFront) -> None:
    s = plan.solution
    assert s is not None and s.limit is not None
    assert (front.plan.time_us, front.plan.drift) == (pytest.approx(s.time_us), pytest.approx(s.drift))
    assert front.plan.cast_us == pytest.approx(s.cast_us)
    assert (front.limit, front.limit_amount) == (s.limit, pytest.approx(1e-4))
    assert front.plan.amount == pytest.approx(s.drift / 2.0)


def totals(plan: PrecisionPlan, pick: dict[str, str]) -> tuple[float, float]:
    """Time and drift with labels given by op class."""
    assert plan.program is not None
    labels = {}
    for key, found in plan.program.allowed.items():
        d = plan.by_key[key]
        want = pick.get(d.op, pick["gemm" if d.op in GEMM_CLASSES else "other"])
        labels[key] = want if any(c.label == want for c in found) else "fp32"
    found = plan.program.totals(labels)
    return found.time, found.error


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("fp32", {"gemm": "fp32", "other": "fp32"}),
        ("bf16", {"gemm": "bf16->bf16", "other": "->bf16"}),
        # the head may not take 8 bits: it stays as traced
        ("fp8_e4m3:row/row", {"gemm": "fp8_e4m3:row/row->bf16", "other": "fp32"}),
        ("autocast bf16", {"gemm": "bf16->bf16", "other": "fp32"}),
    ],
)
def test_simple_choices(plan: PrecisionPlan, front: ParetoFront, name: str, pick: dict[str, str]) -> None:
    point = named(front, name)
    assert (point.time_us, point.drift) == pytest.approx(totals(plan, pick))


def test_which_simple_choices(front: ParetoFront) -> None:
    assert [(p.kind, p.name) for p in front.others] == [
        ("format", "fp32"), ("format", "bf16"), ("format", "fp8_e4m3:row/row"), ("format", "fp8_e4m3:tensor/tensor"),
        ("autocast", "autocast bf16"), ("tier", "h800 tier"),
    ]  # fmt: skip


def test_tier(plan: PrecisionPlan, front: ParetoFront) -> None:
    """An h800's ladder: fp8 for linears, bf16 for attention and where a veto bars fp8, everything else as traced."""
    assert plan.program is not None
    labels = {}
    for key, found in plan.program.allowed.items():
        op = plan.by_key[key].op
        narrow = [c for c in found if c.compute == "fp8_e4m3"]
        if op == "linear" and narrow:
            labels[key] = min(narrow, key=lambda c: c.time_us).label
        else:
            labels[key] = "bf16->bf16" if op in GEMM_CLASSES else "fp32"
    expected = plan.program.totals(labels)
    tier = named(front, "h800 tier")
    assert (tier.time_us, tier.drift) == (pytest.approx(expected.time), pytest.approx(expected.error))


def test_tier_takes_the_ladders_recipe() -> None:
    decisions, program = sample_program(1)
    head = [c.model_copy(update={"blocked": None}) for c in program.candidates[HEAD][:4]]
    block = head[2].model_copy(
        update={"label": "fp8_e4m3:1x128/128x128->bf16", "recipe": "1x128/128x128", "drift": 1.0}
    )
    program = program.model_copy(update={"candidates": {**program.candidates, HEAD: [*head, block]}})
    found = pareto_front(traced_plan(decisions, program).solve(budget=1e-3), points=2, device=resolve("h800"))
    assert named(found, "h800 tier").drift > 1.0


def test_without_a_device_it_says_so(plan: PrecisionPlan) -> None:
    found = pareto_front(plan, points=3)
    assert [p.kind for p in found.others].count("tier") == 0
    assert found.notes == ("no tier: h800 is no device that is known here",)


def test_budget_on_memory_holds_on_the_front() -> None:
    free = sample_plan(2, budget=1e-3)
    assert free.solution is not None
    limit = int(free.solution.saved_bytes * 1.02)
    plan = sample_plan(2, budget=1e-3, memory=limit)
    found = pareto_front(plan, points=6)
    assert found.front
    assert all(p.saved_bytes <= limit for p in found.front)
    assert named(found, "fp32").saved_bytes > limit  # simple choices keep no budget


def test_a_loss_of_zero_has_no_unit() -> None:
    decisions, program = sample_program(1)
    plan = traced_plan(decisions, program.model_copy(update={"loss": 0.0})).solve()
    assert all(p.amount is None for p in pareto_front(plan, points=3).front if p.drift)


def test_edited_plans_stand_as_traced_where_they_are_no_candidate(plan: PrecisionPlan) -> None:
    assert plan.program is not None
    other = edited(plan, HEAD, recipe="mx32/mx32")
    bf16, fp32 = plan.program.candidates[HEAD][1], plan.program.candidates[HEAD][0]
    found = pareto_front(other, points=2).plan
    assert found.time_us - pareto_front(plan, points=2).plan.time_us == pytest.approx(fp32.time_us - bf16.time_us)


def test_unlimited_plan() -> None:
    found = pareto_front(sample_plan(1, budget=None), points=4)
    assert found.limit is None
    assert math.isclose(found.plan.time_us, found.front[-1].time_us)


def test_needs_calibration(plan: PrecisionPlan) -> None:
    with pytest.raises(NotCalibratedError):
        pareto_front(traced_plan(plan.nodes, None))
