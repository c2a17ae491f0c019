"""The explanation of one node as a few lines: what was chosen, what else there was, what stands in the way."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..passes.explain import CastEdge, Explanation, Option
from ..passes.flip_budget import Flip
from ..passes.plan import PrecisionPlan
from .console import Printer, bytes_text, plain_table, time_text
from .render_solution import budget_text, drift_text, percent

_SHOWN = 4
_NO_UNITS = "verdict"
"""The code of options that the device refuses whatever the model."""


def print_explanation(printer: Printer, plan: PrecisionPlan, e: Explanation) -> None:
    """An explanation; `plan` gives amounts their unit."""
    lines: list[RenderableType] = [Text(e.key, style="bold")]
    if e.follows is not None:
        lines.append(f"a view: takes the format of what it reads, {e.follows}, of which the rest speaks")
    lines.append(f"chosen: {_option_text(e.chosen)} on {e.hardware}")
    lines.append(f"reason: {e.reason}")
    if e.tied:
        lines.append(f"tied with {_names(e.tied)}: they change together")
    lines += _alternative(plan, e)
    if e.casts and (edges := [c for c in e.casts if c.us or c.us_then]):
        lines += ["", _casts(edges), "a copy is made and paid once, however many read it"]
    if len(e.options) > 1:
        shown = [o for o in e.options if o.blocked_code != _NO_UNITS]
        lines += ["", _options(e, shown), *_option_notes(e, shown)]
    if e.slack_us is not None and e.critical_path_us is not None:
        on = "on it" if e.slack_us < 1e-6 else f"slack {time_text(e.slack_us)} µs"
        lines += ["", f"critical path {time_text(e.critical_path_us)} µs: {on}"]
    lines += [f"not known: {what}" for what in e.missing]
    printer.print(*lines)


def _alternative(plan: PrecisionPlan, e: Explanation) -> list[str]:
    lines = []
    if e.alternative is not None and e.change is not None:
        c = e.change
        parts = [f"{c.time_us:+.3g} µs" + (f" (casts {c.cast_us:+.3g})" if c.cast_us else "")]
        if c.drift is None:
            parts.append("drift not measured")
        else:
            share = f" ({'+' if c.drift >= 0 else ''}{percent(e.change_share)} of the budget)" if e.change_share else ""
            parts.append(f"drift {c.drift:+.3g}{share}")
        if c.saved_bytes:
            parts.append(f"saved bytes {'+' if c.saved_bytes > 0 else '-'}{bytes_text(abs(c.saved_bytes))}")
        if e.margin_us is not None:
            parts.append(f"in all {_clean(e.margin_us)} µs at the optimum's prices")
        which = "asked for" if e.asked is not None else "best alternative"
        whole = " for all tied nodes" if e.tied else ""
        lines.append(f"{which}: {e.alternative.label}: {', '.join(parts)}{whole}")
    if e.constraint is not None:
        lines.append(f"why not: {e.constraint.text} [{e.constraint.code}]" if e.constraint.code != "chosen" else
                     f"{e.constraint.text}")  # fmt: skip
    if e.flip is not None:
        lines.append(_flip_text(plan, e.flip))
    elif e.constraint is not None and e.constraint.code in ("does-not-pay", "error-budget", "memory-budget"):
        lines.append("no other budget was found at which it would be chosen")
    return lines


def _flip_text(plan: PrecisionPlan, flip: Flip) -> str:
    def written(value: float, amount: float | None) -> str:
        if flip.budget == "memory":
            return f"{value:,.0f} saved bytes"
        return budget_text(plan, amount) if amount is not None else f"a drift of {value:.4g}"

    more = "or more" if flip.value >= flip.before else "or less"
    if not flip.exact:
        about = written(flip.value, flip.amount)
        return f"would be chosen at a budget of about {about}: an estimate from prices, not solved"
    before = written(flip.before, flip.amount_before)
    return f"would be chosen at a budget of {written(flip.value, flip.amount)} {more}: solved, not yet at {before}"


def _casts(edges: Sequence[CastEdge]) -> Table:
    table = plain_table()
    for name in ("converted copy of", "as", "read now by", "then by", "µs", "then"):
        table.add_column(name, justify="right" if name in ("µs", "then") else "left", overflow="fold")
    for c in edges:
        form = c.format if c.recipe == "none" else f"{c.format} {c.recipe}"
        table.add_row(c.value, form, _names(c.now), _names(c.then), time_text(c.us), time_text(c.us_then))
    return table


def _option_notes(e: Explanation, shown: Sequence[Option]) -> list[str]:
    """What the table of options leaves out, and what its columns and marks stand for."""
    notes = []
    if lacking := dict.fromkeys(o.compute for o in e.options if o.blocked_code == _NO_UNITS):
        notes.append(f"not on {e.hardware} for {e.op}: {', '.join(lacking)} (--want FORMAT says why)")
    barred = dict.fromkeys((o.blocked_code, o.blocked) for o in shown if o.blocked is not None)
    notes += [f"{code}: {text}" for code, text in barred]
    if any(o.drift is not None for o in shown):
        notes.append(
            "µs: with casts of weights, without those of activations, which nodes share; "
            f"drift: {'of the error budget' if any(o.share is not None for o in shown) else 'in its own unit'}"
        )
    if any(o.measured for o in shown):
        notes.append("* measured with the format's own rounding; others are estimated from gradients and step sizes")
    return notes


def _options(e: Explanation, shown: Sequence[Option]) -> Table:
    table = plain_table()
    for name in ("option", "µs", "drift", "saved", ""):
        table.add_column(name, justify="right" if name in ("µs", "drift", "saved") else "left", overflow="fold")
    for o in shown:
        drift = "" if o.drift is None else drift_text(o.drift, o.share) + (" *" if o.measured else "")
        mark = "chosen" if o.label == e.chosen.label else o.blocked_code or ""
        saved = bytes_text(o.saved_bytes) if o.saved_bytes else ""
        table.add_row(o.label, time_text(o.time_us), drift, saved, mark)
    return table


def _option_text(o: Option) -> str:
    scaled = "" if o.recipe in ("none", "") else f" {o.recipe}"
    accumulate = f" +{o.accumulate}" if o.accumulate else ""
    text = f"{o.compute}{scaled}{accumulate} → {o.output}, {time_text(o.time_us)} µs"
    if o.drift is None:
        return text
    return f"{text}, drift {drift_text(o.drift, o.share)}{' of the budget' if o.share is not None else ''}"


def _names(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more if keys else "nobody"


def _clean(time_us: float) -> str:
    return "0" if abs(time_us) < 1e-6 else f"{time_us:+.3g}"
