"""Where two plans differ, module by module: how many nodes, in which formats, and what it does to time and drift.

Repeated blocks that differ alike are one entry, as in the report. Times and drifts are of all nodes of a module, since
the time of a node also changes when a neighbour stores its result in another format; shared casts belong to no module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from ..passes.keys import NodeKey
from ..passes.node_figures import NodeFigures, figures_of
from ..passes.plan import Decision, PlanDifference, PrecisionPlan
from .report import fold, planned_time_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """All nodes of a module in one plan: predicted microseconds, drift (None without calibration)."""

    time_us: float
    drift: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChange:
    """Nodes of one phase and operator that change from and to the same formats; the first stands for all."""

    phase: str
    op: str
    count: int
    first: PlanDifference


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDifference:
    """One module, or repeated ones that differ alike: `changed` of `nodes` nodes."""

    label: str
    modules: tuple[str, ...]
    nodes: int
    changed: int
    before: Totals
    after: Totals
    changes: tuple[FormatChange, ...]


def compare_modules(before: PrecisionPlan, after: PrecisionPlan, *, folded: bool = True) -> list[ModuleDifference]:
    """The modules in which two plans differ, in the order of their first difference; one entry each unless `folded`."""
    differences: defaultdict[str, list[PlanDifference]] = defaultdict(list)
    for d in before.diff(after):
        differences[NodeKey.parse(d.key).fqn].append(d)
    figures = figures_of(before), figures_of(after)
    members = _members(before, after)

    def kind(module: str) -> Hashable:
        return tuple((d.key[len(module) :], _formats(d.before), _formats(d.after)) for d in differences[module])

    def entry(label: str, modules: Sequence[str]) -> ModuleDifference:
        found = [d for module in modules for d in differences[module]]
        sides = [
            _totals([d for module in modules for d in members[module][i]], figures[i], plan)
            for i, plan in enumerate((before, after))
        ]
        keys = {d.key for module in modules for side in members[module] for d in side}
        return ModuleDifference(
            label=label, modules=tuple(modules), nodes=len(keys), changed=len(found),
            before=sides[0], after=sides[1], changes=_changes(found),
        )  # fmt: skip

    if not folded:
        return [entry(module, [module]) for module in differences]
    rows = fold(list(differences), lambda module: f"{module}|fprop|module|0", kind)
    return [entry(label.rsplit("|", 3)[0], modules) for label, modules in rows]


def _members(before: PrecisionPlan, after: PrecisionPlan) -> Mapping[str, tuple[list[Decision], list[Decision]]]:
    """The decisions of every module path in either plan."""
    found: defaultdict[str, tuple[list[Decision], list[Decision]]] = defaultdict(lambda: ([], []))
    for i, plan in enumerate((before, after)):
        for d in plan:
            found[NodeKey.parse(d.key).fqn][i].append(d)
    return found


def _totals(decisions: Sequence[Decision], figures: Mapping[str, NodeFigures], plan: PrecisionPlan) -> Totals:
    return Totals(
        time_us=sum(planned_time_us(d, figures) for d in decisions),
        drift=sum(figures[d.key].drift for d in decisions) if plan.program is not None and figures else None,
    )


def _changes(differences: Sequence[PlanDifference]) -> tuple[FormatChange, ...]:
    kinds: dict[Hashable, PlanDifference] = {}
    counts: Counter[Hashable] = Counter()
    for d in differences:
        key = NodeKey.parse(d.key)
        kind = key.phase, key.op, _formats(d.before), _formats(d.after)
        kinds.setdefault(kind, d)
        counts[kind] += 1
    found = []
    for same, first in kinds.items():
        key = NodeKey.parse(first.key)
        found.append(FormatChange(phase=key.phase, op=key.op, count=counts[same], first=first))
    return tuple(found)


def _formats(d: Decision | None) -> Hashable:
    return (d.compute, d.recipe, d.accumulate, d.output) if d is not None else None
