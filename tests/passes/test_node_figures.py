"""Shares, slack and margins of nodes against what they are made of."""

from __future__ import annotations

import pytest
from plan_samples import HEAD, edited, sample_plan, traced_plan

from dsmp.passes.critical_path import slacks
from dsmp.passes.exchange import exchanges_of
from dsmp.passes.node_figures import figures_of


def test_figures() -> None:
    plan = sample_plan(2, budget=1e-4)
    program, solution = plan.program, plan.solution
    assert program is not None and solution is not None and solution.limit is not None
    figures = figures_of(plan)
    assert set(figures) == set(plan.by_key)
    assert sum(f.drift for f in figures.values()) == pytest.approx(solution.drift)
    assert sum(f.share or 0.0 for f in figures.values()) == pytest.approx(solution.drift / solution.limit)
    assert sum(f.time_us for f in figures.values()) == pytest.approx(solution.time_us - solution.cast_us)
    assert {key: f.slack_us for key, f in figures.items()} == slacks(plan)
    exchanges = exchanges_of(plan, program)
    for key in program.keys:
        costs = [
            exchanges.change(exchanges.group(key), label).priced(solution) for label in exchanges.alternatives(key)
        ]
        assert figures[key].margin_us == pytest.approx(min(c for c in costs if c is not None))


def test_choices_at_the_optimum_lose_nothing_that_a_step_would_gain() -> None:
    """With nothing to keep the plan back, no single change makes it faster."""
    figures = figures_of(sample_plan(3, budget=None))
    assert all(f.share is None for f in figures.values())
    assert min(f.margin_us for f in figures.values() if f.margin_us is not None) >= -1e-9


def test_views_cost_nothing_and_have_no_margin() -> None:
    plan = sample_plan(1)
    figures = figures_of(plan)
    views = [figures[d.key] for d in plan if d.op == "view"]
    assert {(f.time_us, f.drift, f.margin_us) for f in views} == {(0.0, 0.0, None)}


def test_edited_nodes_cost_nothing_that_is_known() -> None:
    figures = figures_of(edited(sample_plan(1), HEAD, recipe="mx32/mx32"))
    assert (figures[HEAD].time_us, figures[HEAD].margin_us) == (0.0, None)


def test_plans_without_calibration_have_none() -> None:
    assert figures_of(traced_plan(sample_plan(1).nodes, None)) == {}
