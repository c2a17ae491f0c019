"""What people read of plans of one model for several devices: rows whose nodes are alike on every device, and sums.

This module has the facts; `render_plans.py` gives them a form.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from ..passes.node_figures import NodeFigures, figures_of
from ..passes.plan import Decision, PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES
from .report import ClassTotal, Row, RunFacts, choose, fold, kind_of, row_of, totals


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan and the facts of the run that made it."""

    plan: PrecisionPlan
    facts: RunFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPlans:
    """Plans of one captured model, with the rows and totals to show of them: one for each plan, in the plans' order.

    The rows of one line stand for the same nodes; a total is None where a plan has none of that op class.
    """

    planned: tuple[Planned, ...]
    lines: tuple[tuple[Row, ...], ...]
    rest: tuple[tuple[ClassTotal | None, ...], ...]
    shown: int

    @property
    def devices(self) -> list[str]:
        """The ids of the devices, in the order of the plans."""
        return [p.plan.hardware for p in self.planned]

    @property
    def nodes(self) -> int:
        """How many nodes each plan has."""
        return len(self.planned[0].plan)


def compare_plans(
    planned: Sequence[Planned], *, match: str | None = None, phase: str | None = None, every_node: bool = False
) -> ComparedPlans:
    """Plans of one captured model side by side: GEMM-class nodes folded, the rest added up; one line each with
    `every_node`.

    `match` and `phase` choose nodes (see `choose`). Raises InvalidOptionError.
    """
    keys = [d.key for d in choose(planned[0].plan, match=match, phase=phase)]
    nodes = [tuple(p.plan.by_key[key] for p in planned) for key in keys]
    gemms = [n for n in nodes if n[0].op in GEMM_CLASSES]
    figures = [figures_of(p.plan) for p in planned]
    if every_node:
        lines = [tuple(row_of(d.key, (d,), f) for d, f in zip(node, figures, strict=True)) for node in nodes]
        rest = []
    else:
        lines = _fold(gemms, figures)
        rest = _rest([n for n in nodes if n[0].op not in GEMM_CLASSES], figures)
    return ComparedPlans(planned=tuple(planned), lines=tuple(lines), rest=tuple(rest), shown=len(keys))


def _fold(nodes: Sequence[tuple[Decision, ...]], figures: Sequence[Mapping[str, NodeFigures]]) -> list[tuple[Row, ...]]:
    """Lines of nodes that are decided alike, but for costs, on each of the devices."""

    def kind(node: tuple[Decision, ...]) -> Hashable:
        return tuple(map(kind_of, node))

    folded = fold(nodes, lambda node: node[0].key, kind)
    return [
        tuple(row_of(label, decisions, f) for decisions, f in zip(zip(*members, strict=True), figures, strict=True))
        for label, members in folded
    ]


def _rest(
    nodes: Sequence[tuple[Decision, ...]], figures: Sequence[Mapping[str, NodeFigures]]
) -> list[tuple[ClassTotal | None, ...]]:
    """One total per op class and plan, in the first plan's order."""
    by_op = [{t.op: t for t in totals((node[i] for node in nodes), f)} for i, f in enumerate(figures)]
    return [tuple(found.get(op) for found in by_op) for op in by_op[0]]
