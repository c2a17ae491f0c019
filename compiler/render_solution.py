"""What a calibrated plan says of itself in sentences: budget, drift, how near the optimum is, and prices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..passes.assignment import Floats
from ..passes.plan import PrecisionPlan
from ..passes.program import DriftKind, Solution
from .console import bytes_text, time_text

_MEANING: dict[DriftKind, str] = {
    "kl": "of the loss",
    "bernoulli": "of the loss",
    "l2": "root mean square error of the outputs",
    "gradients": "squared error of the gradients",
}


def solution_lines(plan: PrecisionPlan) -> list[str]:
    """Lines for the summary of a plan; none for a plan that was made without calibration."""
    s = plan.solution
    if s is None:
        return []
    optimum = f"optimum: {time_text(s.time_us)} µs, {time_text(s.cast_us)} µs of it casts"
    bound = f"no plan within the budgets is below {time_text(s.bound_us)} µs (gap {percent(s.gap)})"
    prices = _prices(s)
    return [_budget(plan, s), _drift(s), f"{optimum}; {bound}", *([prices] if prices else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class AmountAxis:
    """How drifts are written as budgets: functions for an axis in percent, and what the percent are of."""

    amount_percent: Callable[[Floats], Floats]
    drift: Callable[[Floats], Floats]
    meaning: str


def amount_axis(plan: PrecisionPlan) -> AmountAxis | None:
    """The user's unit of a calibrated plan; None where drifts have none (a loss of 0)."""
    program = plan.program
    if program is None or not math.isfinite(program.amount(1.0)):
        return None
    # amount is a power of drift: linear in the logarithm, so two values tell it
    one = program.amount(1.0)
    power = 0.5 if program.drift == "l2" else 1.0
    return AmountAxis(
        amount_percent=lambda drift: 100 * one * np.maximum(drift, 0.0) ** power,
        drift=lambda percents: (np.maximum(percents, 0.0) / (100 * one)) ** (1 / power),
        meaning=_MEANING[program.drift],
    )


def budget_text(plan: PrecisionPlan, amount: float | None) -> str:
    """An error budget in the user's unit: `0.5 % of the loss`."""
    meaning = _MEANING[plan.program.drift] if plan.program is not None else ""
    return f"{percent(amount)} {meaning}".rstrip() if amount is not None else "not a share of the loss, which is 0"


def percent(share: float) -> str:
    """A share of 1 in percent with three digits: `0.5 %`, `104 %`, `2.1e-05 %`."""
    return f"{100 * share:.3g} %" if share < 10 else f"{100 * share:,.0f} %"


def drift_text(drift: float, share: float | None) -> str:
    """A drift as share of the budget, or as it is where there is no budget."""
    return percent(share) if share is not None else f"{drift:.3g}"


def _budget(plan: PrecisionPlan, s: Solution) -> str:
    parts = []
    amount = plan.budget.amount if plan.budget is not None else None
    if amount is None and s.limit is not None and plan.program is not None:
        amount = plan.program.amount(s.limit)
    if s.limit is not None:
        parts.append(
            f"{budget_text(plan, amount)}, {_named_drift(plan)} of {s.limit:.3g}"
            if amount is not None
            else f"{s.limit:.3g}"
        )
    if s.memory_limit is not None:
        parts.append(f"{bytes_text(s.memory_limit)} saved for the backward pass")
    return f"budget: {'; '.join(parts) or 'none'}; binding: {', '.join(s.binding) or 'nothing'}"


def _named_drift(plan: PrecisionPlan) -> str:
    kind = plan.program.drift if plan.program is not None else None
    return "a divergence (KL, of the outputs)" if kind in ("kl", "bernoulli") else "a drift"


def _drift(s: Solution) -> str:
    share = f" ({percent(s.drift / s.limit)} of the budget)" if s.limit else ""
    text = f"drift: predicted {s.drift:.3g}{share}"
    if s.measured is None:
        return f"{text}, not measured"
    text += f", measured {s.measured:.3g}"
    if s.limit:
        text += f" ({percent(s.measured / s.limit)} of the budget)"
    if s.ratio is not None:
        text += f", root of measured over predicted {s.ratio:.2f}"
    if s.p95 is not None:
        text += f", 95th percentile {s.p95:.3g} over {s.samples:,} samples"
    return f"{text}; {s.runs:,} simulated {'run' if s.runs == 1 else 'runs'}"


def _prices(s: Solution) -> str:
    parts = []
    if s.price_us_per_drift and s.limit:
        parts.append(f"{time_text(s.price_us_per_drift * s.limit / 100)} µs for 1 % more of the error budget")
    if s.price_us_per_byte:
        parts.append(f"{time_text(s.price_us_per_byte * 1e6)} µs for 1 MB more")
    return f"prices at the optimum: {', '.join(parts)}" if parts else ""
