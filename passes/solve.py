"""From a program and budgets to decisions: the optimum, what it was weighed against, and one sentence for each node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import PlanHardwareError, PlanSchemaError
from .assignment import Assignment
from .keys import NodeKey
from .plan_fields import GEMM_CLASSES, Reason
from .program import Candidate, Program, Solution
from .rules import Rule
from .select_optimal import select_optimal


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """The candidate chosen for each node of a program, why, and the certificate."""

    chosen: Mapping[str, Candidate]
    reasons: Mapping[str, Reason]
    solution: Solution


def solve_program(program: Program, *, drift: float = math.inf, saved_bytes: float = math.inf) -> Solved:
    """The fastest choice within a budget on drift and one on saved bytes.

    Raises BudgetError when no choice meets them, TieError for tied nodes without a format in common, PlanSchemaError
    for a budget on drifts that are not known.
    """
    if math.isfinite(drift):
        _check_drifts(program)
    assignment = select_optimal(program.problem(drift=drift, saved_bytes=saved_bytes))
    chosen = program.chosen(assignment)
    solution = Solution(
        limit=drift if math.isfinite(drift) else None,
        memory_limit=int(saved_bytes) if math.isfinite(saved_bytes) else None,
        time_us=assignment.totals.time,
        cast_us=assignment.totals.cast_time,
        drift=assignment.totals.error,
        saved_bytes=int(assignment.totals.memory),
        bound_us=max(0.0, assignment.bound),
        gap=assignment.gap,
        price_us_per_drift=assignment.error_price,
        price_us_per_byte=assignment.memory_price,
        binding=list(assignment.binding),
    )
    barred = _barred(program, chosen)
    reasons = {key: _reason(_open(program, key, barred), c, solution, assignment) for key, c in chosen.items()}
    return Solved(chosen=chosen, reasons=reasons, solution=solution)


def _check_drifts(program: Program) -> None:
    for key, found in program.allowed.items():
        unknown = next((c for c in found if c.drift is None), None)
        if unknown is not None:
            raise PlanSchemaError(
                f"{key}: the candidate {unknown.label} has no drift and is not blocked, so no budget can hold. Block "
                "it, or write the drift that was measured."
            )


def _barred(program: Program, chosen: Mapping[str, Candidate]) -> set[tuple[str, str]]:
    """(key, label) of what the readers of a value rule out with the candidates that they take."""
    return {
        (copy.value, label)
        for copy in program.copies
        if copy.barred and any(chosen[k].label in wanted for k, wanted in copy.readers.items())
        for label in copy.barred
    }


def _open(program: Program, key: str, barred: set[tuple[str, str]]) -> list[Candidate]:
    """A node's candidates with those blocked that its readers rule out."""
    why = Reason(code="readers", text="kept as traced: a reader takes it wider than it could be stored")
    return [
        c.model_copy(update={"blocked": why}) if (key, c.label) in barred and c.blocked is None else c
        for c in program.candidates[key]
    ]


_CLEAR = 1 - 1e-9
"""Numbers that are nearer than this to each other differ in the order of a sum only."""


def priced(candidate: Candidate, solution: Solution) -> float:
    """A candidate's time with its drift and memory charged at the optimum's prices, in microseconds."""
    return (
        candidate.time_us
        + solution.price_us_per_drift * (candidate.drift or 0.0)
        + solution.price_us_per_byte * candidate.saved_bytes
    )


def best_alternative(candidates: Sequence[Candidate], chosen: Candidate, solution: Solution) -> Candidate | None:
    """The allowed candidate that comes next to the chosen one at the optimum's prices, of those that are better than it
    in anything: faster, more exact, or smaller where memory is short. None if there is no such."""

    def better(c: Candidate) -> bool:
        smaller = solution.price_us_per_byte > 0 and c.saved_bytes < chosen.saved_bytes
        faster, more_exact = c.time_us < _CLEAR * chosen.time_us, (c.drift or 0.0) < _CLEAR * (chosen.drift or 0.0)
        return faster or more_exact or smaller

    others = [c for c in candidates if c.blocked is None and c.label != chosen.label and better(c)]
    return min(others, key=lambda c: (priced(c, solution), c.label), default=None)


def _reason(candidates: Sequence[Candidate], chosen: Candidate, solution: Solution, assignment: Assignment) -> Reason:
    blocked = [c.blocked for c in candidates if c.blocked is not None]
    forced = next((why for why in blocked if why.code == "rule"), None)
    if forced is not None:
        return forced
    if len(candidates) == len(blocked) + 1:
        return blocked[0] if blocked else Reason(code="only", text="no other format is offered for this node")
    other = best_alternative(candidates, chosen, solution)
    if other is None:
        return Reason(code="optimal", text=f"{chosen.label}: no other choice is faster or more exact")
    gain = abs(other.time_us - chosen.time_us)
    if chosen.time_us < other.time_us:
        text = f"{chosen.label} saves {gain:.3g} us over {other.label}{_share(chosen, other, solution)}"
    elif gain == 0.0:
        text = f"{chosen.label}: {other.label} is as fast here, casts and tied nodes decide"
    else:
        text = f"{other.label} would save {gain:.3g} us{_share(chosen, other, solution)}"
    return Reason(code="optimal", text=text)


def _share(chosen: Candidate, other: Candidate, solution: Solution) -> str:
    more = abs((chosen.drift or 0.0) - (other.drift or 0.0))
    if not solution.limit or not more:
        return ""
    return f" for {100 * more / solution.limit:.2g} % of the budget"


def force(program: Program, rules: Iterable[tuple[Rule, list[str]]]) -> Program:
    """A program in which nodes may only take what a rule asks for: rules with keys, the last one for a key wins.

    A rule on a GEMM asks for its arithmetic, on any other node for the format that its result is stored in. Raises
    PlanHardwareError for a node that has no candidate in the format that is neither blocked by the device nor by a
    veto.
    """
    candidates = dict(program.candidates)
    for rule, keys in rules:
        why = Reason(code="rule", text=f"the rule {rule.match!r} asks for {rule.asked}")
        for key in keys:
            gemm = NodeKey.parse(key).op in GEMM_CLASSES
            known = program.candidates[key]
            asked = [rule.fits(c.compute, c.recipe) if gemm else c.output == rule.format for c in known]
            if not any(wanted and _free(c) for wanted, c in zip(asked, known, strict=True)):
                barred = next((c.blocked.text for w, c in zip(asked, known, strict=True) if w and c.blocked), "")
                because = f": {barred.rstrip('.')}" if barred else ""
                can = ", ".join(dict.fromkeys(c.compute if gemm else c.output for c in known if _free(c)))
                raise PlanHardwareError(f"{key}: {why.text}{because}. It may take {can}.")
            candidates[key] = [_ruled(c, wanted, why) for wanted, c in zip(asked, known, strict=True)]
    return program.model_copy(update={"candidates": candidates})


def _ruled(candidate: Candidate, wanted: bool, why: Reason) -> Candidate:
    """A candidate under a rule: blocked unless wanted; what blocked it before stays, an earlier rule does not."""
    before = None if _free(candidate) else candidate.blocked
    return candidate.model_copy(update={"blocked": before or (None if wanted else why)})


def _free(candidate: Candidate) -> bool:
    return candidate.blocked is None or candidate.blocked.code == "rule"
