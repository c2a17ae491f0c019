"""What a report of a calibrated plan shows beside: drift, slack, margin, and how good the plan is."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from plan_samples import sample_plan, traced_plan

from dsmp.compiler.compare_plans import Planned, compare_plans
from dsmp.compiler.console import Printer
from dsmp.compiler.render import print_report
from dsmp.compiler.report import RunFacts, make_report
from dsmp.passes.node_figures import figures_of
from dsmp.passes.plan import PrecisionPlan
from dsmp.passes.program import Solution

PLAN = sample_plan(3, budget=2e-4)


def rendered(plan: PrecisionPlan, width: int | None = None, **options: object) -> str:
    stream = io.StringIO()
    print_report(Printer(stream, width=width), make_report(plan, **options))  # type: ignore[arg-type]
    return stream.getvalue()


def with_solution(plan: PrecisionPlan, **changes: object) -> PrecisionPlan:
    assert plan.solution is not None
    return plan.model_copy(update={"solution": Solution.model_validate({**plan.solution.model_dump(), **changes})})


def test_rows_add_up() -> None:
    report, figures = make_report(PLAN), figures_of(PLAN)
    solution = PLAN.solution
    assert solution is not None
    time_us = sum(r.time_us for r in report.rows) + sum(t.time_us for t in report.rest)
    assert time_us == pytest.approx(solution.time_us - solution.cast_us)
    for row in report.rows:
        mine = [figures[d.key] for d in row.decisions]
        assert row.share == pytest.approx(sum(f.share or 0.0 for f in mine))
        assert row.slack_us == min(f.slack_us for f in mine)
        assert row.margin_us == min(f.margin_us for f in mine if f.margin_us is not None)


def test_time_tells_candidates_of_one_format_apart() -> None:
    """A decision's own times know the fastest candidate of each format only."""
    report, chosen = make_report(PLAN, every_node=True), figures_of(PLAN)
    assert {row.label: row.time_us for row in report.rows} == {key: f.time_us for key, f in chosen.items()}
    assert any(d.time_us.get(d.compute) != pytest.approx(chosen[d.key].time_us, abs=1e-3) for d in PLAN)


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60])
def test_fits_any_width(width: int) -> None:
    text = rendered(PLAN, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("drift", "slack", "margin", "layers.0.down|fprop|linear|0", "binding: error"):
        assert word in " ".join(text.split())


def test_a_table_at_120_columns() -> None:
    lines = rendered(PLAN, 120).splitlines()
    assert re.split(r" +", lines[0]) == ["key", "n", "format", "µs", "drift", "slack", "margin", "reason"]


def test_golden(golden: Callable[[str, str], None]) -> None:
    """Of one block, which is small enough for the solver to try everything."""
    plan = with_solution(sample_plan(1, budget=1e-4), measured=4.6e-4, ratio=1.07, p95=1.9e-3, samples=128, runs=2)
    numbers = re.compile(r"(?<=[ <(+-])\d[\d,.]*(?:e-\d+)?(?=[ ),;]|x as|th |$)")
    golden("report_calibrated.txt", "".join(f"{numbers.sub('#', line)}\n" for line in squeezed(rendered(plan))))


def squeezed(text: str) -> list[str]:
    """Lines without padding, which changes with the numbers."""
    return ["" if set(line) == {"─"} else re.sub(r" {2,}", "  ", line) for line in text.splitlines()]


def test_summary() -> None:
    text = rendered(with_solution(PLAN, measured=4.6e-4, ratio=1.07, p95=1.9e-3, samples=128, runs=2))
    solution = PLAN.solution
    assert solution is not None and solution.limit is not None
    assert "budget: 0.02 % of the loss, a divergence (KL, of the outputs) of 0.0004; binding: error" in text
    share = f"{100 * solution.drift / solution.limit:.3g} % of the budget"
    assert f"drift: predicted {solution.drift:.3g} ({share}), measured 0.00046 (" in text
    assert "root of measured over predicted 1.07" in text
    assert "95th percentile 0.0019 over 128 samples; 2 simulated runs" in text
    assert re.search(r"optimum: \d+ µs, [\d.]+ µs of it casts; no plan within the budgets is below \d+ µs \(gap", text)
    assert re.search(r"prices at the optimum: [\d.]+ µs for 1 % more of the error budget", text)


def test_summary_without_budgets_and_runs() -> None:
    text = rendered(sample_plan(1, budget=None))
    assert "budget: none; binding: nothing" in text
    assert ", not measured" in text
    assert "prices" not in text


def test_summary_with_a_memory_budget() -> None:
    text = rendered(with_solution(PLAN, memory_limit=3_000_000, price_us_per_byte=2e-6, binding=["error", "memory"]))
    assert "; 3 MB saved for the backward pass; binding: error, memory" in text
    assert "2.00 µs for 1 MB more" in text


def test_without_calibration_nothing_is_added() -> None:
    text = rendered(traced_plan(PLAN.nodes, None))
    assert not any(word in text for word in ("slack", "margin", "optimum", "budget:"))


def test_side_by_side_uses_the_chosen_candidates_times() -> None:
    other = PLAN.model_copy(update={"hardware": "other"})
    compared = compare_plans([Planned(plan=p, facts=RunFacts()) for p in (PLAN, other)], every_node=True)
    figures = figures_of(PLAN)
    assert all(row.time_us == figures[row.label].time_us for line in compared.lines for row in line)
    folded = compare_plans([Planned(plan=p, facts=RunFacts()) for p in (PLAN, other)])
    total = sum(line[0].time_us for line in folded.lines) + sum(t[0].time_us for t in folded.rest if t[0])
    assert total == pytest.approx(sum(f.time_us for f in figures.values()))
