"""A calibrated plan's nodes in numbers: time, share of the drift budget, slack, and how clear the choice is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .critical_path import critical_path
from .exchange import exchanges_of
from .plan import PrecisionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFigures:
    """`time_us` in the chosen formats, `drift` of the choice, `share` of it in the budget (None: no budget), `slack_us`
    as in `critical_path`, `margin_us` by which the choice beats the best alternative at the optimum's prices, casts
    included and all other nodes unchanged (None: there is no other)."""

    time_us: float
    drift: float
    share: float | None
    slack_us: float
    margin_us: float | None


def figures_of(plan: PrecisionPlan) -> Mapping[str, NodeFigures]:
    """Figures by key, of views too; nothing for a plan that was made without calibration."""
    program, solution = plan.program, plan.solution
    if program is None or solution is None:
        return {}
    exchanges = exchanges_of(plan, program)
    chosen = exchanges.chosen
    margins: dict[str, float] = {}
    for key in chosen:
        group = exchanges.group(key)
        if group[0] != key and group[0] in margins:
            margins[key] = margins[group[0]]
            continue
        costs = (exchanges.change(group, label).priced(solution) for label in exchanges.alternatives(key))
        if known := [cost for cost in costs if cost is not None]:
            margins[key] = min(known)
    slack = critical_path(plan, chosen).slack_us
    found = {}
    for d in plan:
        mine = chosen.get(d.key)
        drift = (mine.drift or 0.0) if mine is not None else 0.0
        found[d.key] = NodeFigures(
            time_us=mine.time_us if mine is not None else 0.0,
            drift=drift,
            share=drift / solution.limit if solution.limit else None,
            slack_us=slack.get(d.key, 0.0),
            margin_us=margins.get(d.key),
        )
    return found
