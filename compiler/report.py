"""What people read of a plan: rows folded over repeated layers, totals of what is no GEMM, shares of work, differences.

This module has the facts; `render.py` gives them a form.

Folding joins nodes whose keys differ in nothing but layer indices (the components of the module path that are numbers)
and whose entries agree in everything but their costs, and writes the indices as ranges: `layers.[0-31].mlp.up_proj`.
Each folded row stands for exactly the nodes that its label spells out, none is lost and none is shown twice: where the
indices of a group are no full grid, the group becomes several rows.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeVar

from ..errors import InvalidOptionError
from ..passes.keys import PHASES, NodeKey
from ..passes.node_figures import NodeFigures, figures_of
from ..passes.plan import Decision, PlanDifference, PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES, Reason

if sys.platform != "win32":
    import resource

T = TypeVar("T")

NOTHING: Mapping[str, NodeFigures] = MappingProxyType({})
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_INDEX = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: a label and the decisions it stands for, alike but for layer index and cost.

    `figures` has one entry per decision, none for a plan that was made without calibration.
    """

    label: str
    decisions: tuple[Decision, ...]
    figures: tuple[NodeFigures, ...] = ()

    @property
    def first(self) -> Decision:
        return self.decisions[0]

    @property
    def count(self) -> int:
        return len(self.decisions)

    @property
    def flops(self) -> int:
        """Floating-point operations of all nodes of the row."""
        return sum(d.flops for d in self.decisions)

    @property
    def time_us(self) -> float:
        """Predicted microseconds of all nodes of the row, in their planned formats."""
        if self.figures:
            return sum(f.time_us for f in self.figures)
        return sum(map(planned_time_us, self.decisions))

    @property
    def share(self) -> float | None:
        """The part of the drift budget that the row's nodes use together; None without figures or budget."""
        shares = [f.share for f in self.figures if f.share is not None]
        return sum(shares) if shares else None

    @property
    def slack_us(self) -> float | None:
        """The least slack of the row's nodes; None without figures."""
        return min((f.slack_us for f in self.figures), default=None)

    @property
    def margin_us(self) -> float | None:
        """The closest of the row's choices; None without figures or where no node has an alternative."""
        return min((f.margin_us for f in self.figures if f.margin_us is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassTotal:
    """All nodes of one op class without a row of their own: how many, in which formats, bytes moved, microseconds."""

    op: str
    count: int
    formats: tuple[tuple[str, int], ...]
    bytes: int
    time_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What was measured while a plan was made: seconds per stage, casts, peak memory of the process in bytes."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    casts: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A plan, the rows and totals to show of it, and facts of the run that made it (None for a plan from a file)."""

    plan: PrecisionPlan
    rows: tuple[Row, ...]
    rest: tuple[ClassTotal, ...]
    shown: int
    facts: RunFacts | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffRow:
    """Alike differences between two plans; one side is None where that plan lacks the nodes."""

    label: str
    differences: tuple[PlanDifference, ...]

    @property
    def before(self) -> Decision | None:
        return self.differences[0].before

    @property
    def after(self) -> Decision | None:
        return self.differences[0].after


def make_report(
    plan: PrecisionPlan,
    *,
    match: str | None = None,
    phase: str | None = None,
    every_node: bool = False,
    facts: RunFacts | None = None,
) -> Report:
    """The report of a plan: GEMM-class nodes folded and the rest added up per op class; one row each with `every_node`.

    `match` and `phase` choose nodes (see `choose`). Raises InvalidOptionError.
    """
    chosen = choose(plan, match=match, phase=phase)
    figures = figures_of(plan)
    if every_node:
        rows, rest = [row_of(d.key, (d,), figures) for d in chosen], []
    else:
        rows = fold_decisions((d for d in chosen if d.op in GEMM_CLASSES), figures)
        rest = totals((d for d in chosen if d.op not in GEMM_CLASSES), figures)
    return Report(plan=plan, rows=tuple(rows), rest=tuple(rest), shown=len(chosen), facts=facts)


def choose(plan: PrecisionPlan, *, match: str | None = None, phase: str | None = None) -> list[Decision]:
    """The decisions whose key or module path matches the glob and whose phase is the given one, in the plan's order.

    Raises InvalidOptionError where the plan has no such phase or nothing matches.
    """
    present = [p for p in PHASES if any(d.phase == p for d in plan)]
    if phase is not None and phase not in present:
        raise InvalidOptionError("--phase", phase, f"the phases of this plan: {', '.join(present)}")
    nodes = [d for d in plan if phase is None or d.phase == phase]
    if match is None:
        return nodes
    chosen = [d for d in nodes if fnmatchcase(d.key, match) or fnmatchcase(d.module, match)]
    if not chosen:
        allowed = f"a glob that some node key or module path matches, such as {nodes[0].key!r}" if nodes else "nothing"
        raise InvalidOptionError("--match", match, allowed)
    return chosen


def planned_time_us(decision: Decision, figures: Mapping[str, NodeFigures] = NOTHING) -> float:
    """Predicted microseconds of a node in its planned format; 0 where nothing was predicted.

    `figures` tell candidates of one format apart, which a decision alone cannot.
    """
    if decision.key in figures:
        return figures[decision.key].time_us
    return decision.time_us.get(decision.compute, 0.0)


# ---- folding -----------------------------------------------------------------------------------------------


def fold_decisions(decisions: Iterable[Decision], figures: Mapping[str, NodeFigures] = NOTHING) -> list[Row]:
    """Rows of decisions that agree in everything but layer index and cost, in the order of their first nodes."""
    folded = fold(list(decisions), lambda d: d.key, kind_of)
    return [row_of(label, members, figures) for label, members in folded]


def row_of(label: str, decisions: tuple[Decision, ...], figures: Mapping[str, NodeFigures] = NOTHING) -> Row:
    """A row with the figures of its nodes, of a calibrated plan."""
    return Row(label=label, decisions=decisions, figures=tuple(figures[d.key] for d in decisions if d.key in figures))


def fold_differences(differences: Iterable[PlanDifference]) -> list[DiffRow]:
    """Rows of differences that agree in everything but layer index and cost, in the order of their first nodes."""

    def kind(difference: PlanDifference) -> Hashable:
        return tuple(kind_of(d) if d is not None else None for d in (difference.before, difference.after))

    folded = fold(list(differences), lambda d: d.key, kind)
    return [DiffRow(label=label, differences=members) for label, members in folded]


def kind_of(d: Decision) -> Hashable:
    """What two decisions must have in common to share a row."""
    shapes = tuple(map(tuple, d.shapes))
    reason = (d.reason.code, without_numbers(d.reason.text))
    return d.op, d.aten, shapes, d.compute, d.recipe, d.accumulate, d.output, reason


def fold(
    items: Sequence[T], key_of: Callable[[T], str], alike: Callable[[T], Hashable]
) -> list[tuple[str, tuple[T, ...]]]:
    """Labels and members of folded rows. Keys must be unique; each item is in exactly one row."""
    groups: dict[Hashable, dict[tuple[int, ...], T]] = defaultdict(dict)
    patterns: dict[Hashable, tuple[str | None, ...]] = {}
    for item in items:
        key = NodeKey.parse(key_of(item))
        parts = key.fqn.split(".")
        pattern = tuple(None if _INDEX.fullmatch(p) else p for p in parts)
        group: Hashable = (pattern, key.phase, key.op, key.ordinal, alike(item))
        groups[group][tuple(int(p) for p in parts if _INDEX.fullmatch(p))] = item
        patterns[group] = pattern
    position = {key_of(item): i for i, item in enumerate(items)}
    rows: list[tuple[str, tuple[T, ...]]] = []
    for group, members in groups.items():
        tail = key_of(next(iter(members.values()))).partition("|")[2]
        for grid in _grids(list(members)):
            inside = [set(axis) for axis in grid]
            found = [m for at, m in members.items() if all(i in axis for i, axis in zip(at, inside, strict=True))]
            rows.append((f"{_label(patterns[group], grid)}|{tail}", tuple(found)))
    return sorted(rows, key=lambda row: position[key_of(row[1][0])])


def _grids(points: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Points as disjoint full grids (one tuple of indices per axis) that cover them exactly."""
    if not points[0]:
        return [()]
    tails: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for first, *rest in points:
        tails[first].append(tuple(rest))
    firsts: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    for first, rests in tails.items():
        firsts[frozenset(rests)].append(first)
    return [(tuple(sorted(heads)), *grid) for rest, heads in firsts.items() for grid in _grids(sorted(rest))]


def _label(pattern: Sequence[str | None], grid: Sequence[tuple[int, ...]]) -> str:
    axes = iter(grid)
    return ".".join(_ranges(next(axes)) if part is None else part for part in pattern)


def _ranges(indices: Sequence[int]) -> str:
    """`7` for one index, `[0-3,5]` for several, from sorted indices."""
    if len(indices) == 1:
        return str(indices[0])
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "]"


# ---- sums --------------------------------------------------------------------------------------------------


def totals(decisions: Iterable[Decision], figures: Mapping[str, NodeFigures] = NOTHING) -> list[ClassTotal]:
    """One total per op class, the slowest class first."""
    classes: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        classes[d.op].append(d)
    found = [
        ClassTotal(
            op=op,
            count=len(members),
            formats=tuple(Counter(stored_as(d) for d in members).most_common()),
            bytes=sum(d.bytes for d in members),
            time_us=sum(planned_time_us(d, figures) for d in members),
        )
        for op, members in classes.items()
    ]
    return sorted(found, key=lambda t: (-t.time_us, t.op))


def stored_as(d: Decision) -> str:
    """A node's formats in one word: `fp32`, or `fp32→bf16` when its result is stored in another one."""
    return d.compute if d.compute == d.output else f"{d.compute}→{d.output}"


def flop_shares(plan: PrecisionPlan) -> dict[str, dict[str, float]]:
    """Share of the GEMM FLOPs per phase and format; the shares of each phase, and those under "all", add up to 1."""
    flops: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    for d in plan:
        if d.op in GEMM_CLASSES:
            flops[d.phase][d.compute] += d.flops
    flops["all"] = Counter()
    for phase in PHASES:
        flops["all"].update(flops[phase])
    return {
        phase: {name: count / total for name, count in counts.most_common()}
        for phase, counts in flops.items()
        if (total := counts.total())
    }


def peak_memory_bytes() -> int | None:
    """The most memory this process has held so far, None where the system does not tell."""
    if sys.platform == "win32":
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# ---- words -------------------------------------------------------------------------------------------------


def shape_text(d: Decision) -> str:
    """A GEMM's shape as a reader thinks of it, the result shapes of any other node.

    Matrix products are MxKxN, with the batch in front (`32·128x64x128`); attention is the shape of its queries, and of
    its keys where that differs; a convolution is its two operands.
    """
    shapes = ["x".join(map(str, s)) if s else "scalar" for s in d.shapes]
    if d.op in ("linear", "matmul", "grouped_mm") and len(d.shapes) == 3:
        left, right, out = d.shapes
        if len(left) >= 2 and len(right) >= 2 and left[-1] == right[-2] and len(left) + len(right) + len(out) in (6, 9):
            batch = "".join(f"{size}·" for size in left[:-2])
            return f"{batch}{left[-2]}x{left[-1]}x{right[-1]}"
    if d.op == "sdpa" and len(d.shapes) >= 3:
        first = 1 if d.phase != "fprop" else 0
        query, keys = shapes[first], shapes[first + 1]
        return query if query == keys else f"{query}, keys {keys}"
    if d.op in GEMM_CLASSES and len(shapes) >= 2:
        return ", ".join(shapes[:2])
    return ", ".join(shapes)


def format_text(d: Decision) -> str:
    """Compute format and recipe: `fp8_e4m3 1x128/128x128`, `tf32`."""
    return d.compute if d.recipe == "none" else f"{d.compute} {d.recipe}"


def short_reason(reason: Reason) -> str:
    """The reason without what the format columns say already: of a choice with refusals, the refusals.

    What an optimum was weighed against is said in full.
    """
    if reason.code == "optimal":
        return reason.text
    head, *refusals = reason.text.split("; ")
    return "; ".join(refusals) or (head.partition(":")[0] if reason.code == "tier" else head)


def without_numbers(text: str) -> str:
    """A sentence with its numbers masked, so that reasons compare equal whatever they cost."""
    return _NUMBER.sub("#", text)
