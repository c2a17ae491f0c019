"""Why a node got its format, why not another one, and at which budget that would change: facts from the plan alone.

Questions are answered in the order in which a format falls out: it is no candidate, it is blocked (by the device, a
veto or a rule), a tie bars it, the error or the memory budget does not hold it, or it simply does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware_db.capability import Device
from ..hardware_db.formats import get_format, split_recipe
from ..hardware_db.schema import OP_CLASSES
from .critical_path import critical_path
from .exchange import Change, CopyChange, exchanges_of
from .flip_budget import Flip, find_flip
from .labels import split_label
from .plan import Decision, PrecisionPlan
from .plan_fields import GEMM_CLASSES, STORED_FORMATS
from .price_estimate import Budgeted
from .program import Candidate, Program, Solution

_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A way to compute a node: formats, microseconds, drift (None: not measured) and its share of the budget, bytes
    saved, and why it may not be chosen, as a code and a sentence. The time is that of the product with the casts of its
    weights; the casts of activations, which other nodes share, are not in it."""

    label: str
    compute: str
    recipe: str
    accumulate: str
    output: str
    time_us: float
    drift: float | None = None
    share: float | None = None
    measured: bool = False
    saved_bytes: int = 0
    blocked: str | None = None
    blocked_code: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CastEdge:
    """A converted copy that the node makes for others or reads: `now` and `then` are its readers before and after the
    change, `us` and `us_then` what it costs, once for all of them. `state` is kept, added, removed, or repriced."""

    value: str
    format: str
    recipe: str
    role: str
    now: tuple[str, ...]
    then: tuple[str, ...]
    us: float
    us_then: float
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """The first thing that keeps the alternative from being chosen: a code and one sentence."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The answer. `follows` is the node whose format a view takes; everything else is then about that node.

    `alternative` is what was asked for, else the best other option; `change` is what taking it would do, together with
    all `tied` nodes and with every other node unchanged; `margin_us` is that change at the optimum's prices. `missing`
    says what the plan does not know.
    """

    key: str
    op: str
    hardware: str
    reason: str
    chosen: Option
    follows: str | None = None
    asked: str | None = None
    options: tuple[Option, ...] = ()
    tied: tuple[str, ...] = ()
    alternative: Option | None = None
    change: Change | None = None
    change_share: float | None = None
    margin_us: float | None = None
    casts: tuple[CastEdge, ...] = ()
    constraint: Constraint | None = None
    flip: Flip | None = None
    slack_us: float | None = None
    critical_path_us: float | None = None
    missing: tuple[str, ...] = ()


def explain(
    plan: PrecisionPlan, decision: Decision, *, want: str | None = None, device: Device | None = None
) -> Explanation:
    """Explain one node of a plan; `want` asks why it did not get a format (`fp8_e4m3`) or a label
    (`fp8_e4m3:row/row`). `device` is the planned hardware, which is asked about formats that the plan does not mention.

    Raises UnknownFormatError and UnknownRecipeError for a `want` that is neither.
    """
    _check(want)
    follows = None
    source = decision
    if plan.program is not None and decision.op == "view":
        source = _source(plan, plan.program, decision)
        follows = source.key if source.key != decision.key else None
    if plan.program is None or plan.solution is None or source.key not in plan.program.candidates:
        return _from_decision(plan, decision, want, device, follows)
    return _Explainer(plan, plan.program, plan.solution, source, device).run(decision, want, follows)


class _Explainer:
    def __init__(
        self, plan: PrecisionPlan, program: Program, solution: Solution, source: Decision, device: Device | None
    ) -> None:
        self.plan, self.program, self.solution, self.node, self.device = plan, program, solution, source, device
        self.exchanges = exchanges_of(plan, program)
        self.group = self.exchanges.group(source.key)
        self.candidates = program.candidates[source.key]
        self.chosen = self.exchanges.chosen.get(source.key)

    def run(self, decision: Decision, want: str | None, follows: str | None) -> Explanation:
        wanted = self._alternative(want)
        reachable = wanted is not None and all(self.exchanges.candidate(k, wanted.label) for k in self.group)
        change = None
        if wanted is not None and reachable and wanted is not self.chosen:
            change = self.exchanges.change(self.group, wanted.label)
        path = critical_path(self.plan, self.exchanges.chosen)
        constraint = self._constraint(want, wanted, change)
        if constraint is not None and constraint.code == "stored-too-narrow":
            change = None  # its time is a penalty, no prediction
        limit = self.solution.limit
        return Explanation(
            key=decision.key, op=decision.op, hardware=self.plan.hardware, reason=self.node.reason.text,
            chosen=self._option(self.chosen) if self.chosen is not None else _planned(self.node),
            follows=follows, asked=want, options=tuple(map(self._option, self.candidates)),
            tied=tuple(k for k in self.group if k != self.node.key),
            alternative=self._option(wanted) if wanted is not None else None,
            change=change, change_share=_share(change.drift if change is not None else None, limit),
            margin_us=change.priced(self.solution) if change is not None else None,
            casts=self._casts(wanted if change is not None else None),
            constraint=constraint, flip=self._flip(want, wanted, constraint),
            slack_us=path.slack_us.get(self.node.key), critical_path_us=path.length_us,
            missing=() if self.chosen is not None else ("its formats were edited into what is no candidate",),
        )  # fmt: skip

    def _alternative(self, want: str | None) -> Candidate | None:
        """The candidate that was asked for, in its best form, or the best other one."""
        found = self.candidates if want is None else [c for c in self.candidates if _is_meant(c, want, self.node.op)]
        if want is not None and self.chosen in found:
            return self.chosen
        allowed = set(self.exchanges.alternatives(self.node.key))

        def rank(candidate: Candidate) -> tuple[bool, bool, bool, float, str]:
            if candidate.label not in allowed:
                return True, candidate.blocked is not None, True, 0.0, candidate.label
            change = self.exchanges.change(self.group, candidate.label)
            worse = change.time_us >= 0 and (change.drift or 0.0) >= 0 and change.saved_bytes >= 0
            return False, False, worse, change.priced(self.solution) or 0.0, candidate.label

        return min((c for c in found if c is not self.chosen), key=rank, default=None)

    def _constraint(self, want: str | None, wanted: Candidate | None, change: Change | None) -> Constraint | None:
        if wanted is None:
            return _no_candidate(self.node, want, self.device) if want is not None else None
        if wanted is self.chosen:
            return Constraint(code="chosen", text=f"{wanted.label} is what was chosen")
        if wanted.blocked is not None:
            return Constraint(code=wanted.blocked.code, text=wanted.blocked.text)
        for key in self.group:
            other = self.exchanges.candidate(key, wanted.label)
            if other is None or other.blocked is not None:
                why = other.blocked.text if other is not None and other.blocked is not None else "it is no candidate"
                return Constraint(code="tie", text=f"tied with {key}, which cannot take {wanted.label}: {why}")
        narrow = next((c for c in self.exchanges.copies(self.group, wanted.label) if c.barred_then), None)
        if narrow is not None:
            text = (
                f"{narrow.copy.value} would be stored for readers that round it themselves, and "
                f"{narrow.readers_then[0]} wants it in {narrow.copy.format}"
            )
            return Constraint(code="stored-too-narrow", text=text)
        assert change is not None
        return self._weighed(wanted, change)

    def _weighed(self, wanted: Candidate, change: Change) -> Constraint:
        s = self.solution
        drift = change.drift or 0.0
        if change.time_us >= 0:
            extra = f", {change.cast_us:+.3g} us of it casts" if change.cast_us else ""
            text = f"{wanted.label} does not pay: {change.time_us:+.3g} us{extra}"
            if drift < 0 and s.price_us_per_drift:
                text += f"; the drift it would spare is worth {-drift * s.price_us_per_drift:.3g} us elsewhere"
            return Constraint(code="does-not-pay", text=text)
        gain = f"{wanted.label} would save {-change.time_us:.3g} us"
        # a plan whose run drifted further than predicted was held back by as much
        true = max(1.0, s.measured / s.drift) if s.measured and s.drift else 1.0
        if s.limit is not None and true * (s.drift + drift) > s.limit * (1 + _TOLERANCE):
            left = max(0.0, s.limit - true * s.drift)
            needs = f"{_part(true * drift, s.limit)} of the error budget, of which {_part(left, s.limit)} is left"
            scaled = f" (predictions times {true:.3g}, as measured)" if true > 1 else ""
            return Constraint(code="error-budget", text=f"{gain} but needs {needs}{scaled}")
        if s.memory_limit is not None and s.saved_bytes + change.saved_bytes > s.memory_limit:
            left = s.memory_limit - s.saved_bytes
            text = f"{gain} but needs {change.saved_bytes:,} bytes more, of the memory budget {left:,} are left"
            return Constraint(code="memory-budget", text=text)
        why = f"the solver's gap is {100 * s.gap:.2g} %, repairs may have held the plan back, or it was edited"
        text = f"{gain} within the budgets: {why}"
        return Constraint(code="within-gap", text=text)

    def _flip(self, want: str | None, wanted: Candidate | None, constraint: Constraint | None) -> Flip | None:
        if wanted is None or constraint is None:
            return None
        if constraint.code not in ("does-not-pay", "error-budget", "memory-budget", "within-gap"):
            return None
        budget: Budgeted = "memory" if constraint.code == "memory-budget" else "error"
        meant = [wanted.label]
        if want is not None:
            allowed = self.exchanges.alternatives(self.node.key)
            meant += [c.label for c in self.candidates if c.label in allowed and _is_meant(c, want, self.node.op)]
        return find_flip(self.program, self.solution, self.exchanges, self.node.key, meant, budget)

    def _casts(self, wanted: Candidate | None) -> tuple[CastEdge, ...]:
        found = self.exchanges.copies(self.group, wanted.label if wanted is not None else None)
        return tuple(_edge(c, self.group) for c in found)

    def _option(self, candidate: Candidate) -> Option:
        limit = self.solution.limit
        return Option(
            label=candidate.label, compute=candidate.compute, recipe=candidate.recipe,
            accumulate=candidate.accumulate, output=candidate.output, time_us=candidate.time_us, drift=candidate.drift,
            share=_share(candidate.drift, limit),
            measured=candidate.measured, saved_bytes=candidate.saved_bytes,
            blocked=candidate.blocked.text if candidate.blocked is not None else None,
            blocked_code=candidate.blocked.code if candidate.blocked is not None else None,
        )  # fmt: skip


def _source(plan: PrecisionPlan, program: Program, view: Decision) -> Decision:
    """The node whose numbers a view shows, the last view before an input where it shows an input."""
    node, seen = view, {view.key}
    while node.op == "view" and (reads := program.reads.get(node.key)) and reads[0] in plan.by_key:
        node = plan.by_key[reads[0]]
        if node.key in seen:
            break
        seen.add(node.key)
    return node


def _from_decision(
    plan: PrecisionPlan, decision: Decision, want: str | None, device: Device | None, follows: str | None
) -> Explanation:
    """What is known of a node without candidates: its reason, predicted times, and what its device says."""
    missing: tuple[str, ...] = ()
    if plan.program is None:
        missing = ("drift, casts, ties and data flow: the plan was made without calibration",)
    elif decision.op == "view":
        missing = ("it shows an input of the graph, whose format nobody chooses",)
    constraint = None
    if want is not None and want in (decision.compute, _text(decision)):
        constraint = Constraint(code="chosen", text=f"{want} is what was chosen")
    elif want is not None:
        name = _format_of(want)
        if decision.op == "view":
            constraint = Constraint(code="view", text="no arithmetic: it takes the format of what it reads")
        elif name in decision.time_us or name in decision.reason.text:
            constraint = Constraint(code=decision.reason.code, text=decision.reason.text)
        else:
            constraint = _no_candidate(decision, want, device)
    options = tuple(
        Option(label=name, compute=name, recipe="", accumulate="", output="", time_us=time_us)
        for name, time_us in decision.time_us.items()
    )
    return Explanation(
        key=decision.key, op=decision.op, hardware=plan.hardware, reason=decision.reason.text,
        chosen=_planned(decision), follows=follows, asked=want, options=options, constraint=constraint, missing=missing,
    )  # fmt: skip


def _planned(d: Decision) -> Option:
    return Option(
        label=_text(d), compute=d.compute, recipe=d.recipe, accumulate=d.accumulate, output=d.output,
        time_us=d.time_us.get(d.compute, 0.0),
    )  # fmt: skip


def _text(d: Decision) -> str:
    return d.compute if d.recipe == "none" else f"{d.compute}:{d.recipe}"


def _format_of(want: str) -> str:
    arithmetic, output = split_label(want)
    return arithmetic.partition(":")[0] or output.removeprefix("->")


def _check(want: str | None) -> None:
    """Raise for a format or recipe that does not exist."""
    if want is None:
        return
    arithmetic, output = split_label(want)
    name, colon, recipe = arithmetic.partition(":")
    if output or not name:
        get_format(output.removeprefix("->"))
    if name:
        get_format(name)
    if colon:
        split_recipe(recipe)


def _is_meant(candidate: Candidate, want: str, op: str) -> bool:
    """Whether a candidate is what a format, the label of an arithmetic, or a whole label names."""
    held = candidate.compute if op in GEMM_CLASSES else candidate.output
    return want in (candidate.label, held, split_label(candidate.label)[0])


def _no_candidate(d: Decision, want: str, device: Device | None) -> Constraint:
    """Why a plan does not even name a format for a node."""
    name = _format_of(want)
    if d.op not in GEMM_CLASSES and name not in STORED_FORMATS:
        text = f"{name} is for GEMMs: this node ({d.op}) computes as traced and only its storage is chosen"
        return Constraint(code="no-candidate", text=text)
    if device is not None and d.op in OP_CLASSES:
        verdict = device.supports(d.op, None, name)
        if not verdict.ok:
            return Constraint(code="verdict", text=verdict.reason.rstrip("."))
    text = f"{want} is no candidate for this node ({d.op}, traced in {d.traced})"
    return Constraint(code="no-candidate", text=text)


def _edge(c: CopyChange, group: Sequence[str]) -> CastEdge:
    if not c.readers_then:
        state = "removed"
    elif not c.readers:
        state = "added"
    else:
        state = "kept" if c.time_us == c.time_us_then else "repriced"
    return CastEdge(
        value=c.copy.value, format=c.copy.format, recipe=c.copy.recipe,
        role="makes" if c.copy.value in group else "reads",
        now=c.readers, then=c.readers_then, us=c.time_us, us_then=c.time_us_then, state=state,
    )  # fmt: skip


def _share(drift: float | None, limit: float | None) -> float | None:
    return drift / limit if drift is not None and limit else None


def _part(drift: float, limit: float) -> str:
    return f"{100 * drift / limit:.3g} %" if limit else f"{drift:.3g}"
