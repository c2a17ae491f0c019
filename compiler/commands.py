"""`dsmp report plan.json` and `dsmp diff`: what needs only plans, and how plans are printed.

JSON goes to standard output alone; everything else that is worth a word then goes to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..passes.plan import Decision, PlanDifference, PrecisionPlan, load_plan
from .compare_modules import ModuleDifference, compare_modules
from .compare_plans import Planned, compare_plans
from .console import Printer, write_json, write_text
from .render import facts_line, print_report
from .render_diff import print_diff, print_module_diff
from .render_plans import print_plans
from .report import RunFacts, choose, fold_differences, make_report


def report_file(path: Path, *, match: str | None, phase: str | None, every_node: bool, as_json: bool) -> None:
    """`dsmp report plan.json`: print the report of a plan file. Raises PlanSchemaError and InvalidOptionError."""
    print_plan(load_plan(path), None, match=match, phase=phase, every_node=every_node, as_json=as_json)


def print_plan(
    plan: PrecisionPlan,
    facts: RunFacts | None,
    *,
    match: str | None,
    phase: str | None,
    every_node: bool,
    as_json: bool,
) -> None:
    """Print the table of a plan, or the plan as JSON.

    The JSON is a plan that `load_plan` reads; `match` and `phase` leave out nodes there too, and the header still says
    how many there were. Raises InvalidOptionError.
    """
    if not as_json:
        print_report(Printer(), make_report(plan, match=match, phase=phase, every_node=every_node, facts=facts))
        return
    chosen = choose(plan, match=match, phase=phase)
    write_text(plan.model_copy(update={"nodes": chosen}).to_json())
    notes = Printer(sys.stderr)
    if len(chosen) < len(plan):
        notes.print(f"{len(chosen):,} of {len(plan):,} nodes written")
    if facts is not None:
        notes.print(f"casts: {facts.casts:,}; {facts_line(facts)}")


def print_compared(
    planned: Sequence[Planned], *, match: str | None, phase: str | None, every_node: bool, as_json: bool
) -> None:
    """Print plans of one model for several devices side by side, or all of them as JSON: `{"plans": {device: plan}}`.

    `match` and `phase` leave out nodes there too. Raises InvalidOptionError.
    """
    if not as_json:
        print_plans(Printer(), compare_plans(planned, match=match, phase=phase, every_node=every_node))
        return
    texts = []
    for p in planned:
        chosen = p.plan.model_copy(update={"nodes": choose(p.plan, match=match, phase=phase)})
        texts.append(f"{json.dumps(p.plan.hardware)}: {chosen.to_json().rstrip()}")
    write_text('{"plans": {\n' + ",\n".join(texts) + "\n}}\n")
    notes = Printer(sys.stderr)
    notes.print("casts: " + ", ".join(f"{p.facts.casts:,} for {p.plan.hardware}" for p in planned))
    notes.print(facts_line(planned[-1].facts))


def diff(before: Path, after: Path, *, flat: bool, as_json: bool) -> bool:
    """`dsmp diff A B`: print where two plans differ, by module or, with `flat`, node by node; returns whether they do.

    Raises PlanSchemaError.
    """
    first, second = load_plan(before), load_plan(after)
    differences = first.diff(second)
    if as_json:
        heads = {"before": _head(first), "after": _head(second)}
        modules = [_module(m) for m in compare_modules(first, second, folded=False)]
        nodes = [_both_sides(d) for d in differences]
        write_json({"equal": not nodes, **heads, "modules": modules, "nodes": nodes})
    elif flat:
        print_diff(Printer(), first, second, fold_differences(differences), str(before), str(after))
    else:
        print_module_diff(Printer(), first, second, compare_modules(first, second), str(before), str(after))
    return bool(differences)


def _head(plan: PrecisionPlan) -> dict[str, Any]:
    return plan.model_dump(mode="json", by_alias=True, exclude={"nodes", "program"})


def _module(m: ModuleDifference) -> Mapping[str, Any]:
    return {
        "module": m.label, "changed": m.changed, "nodes": m.nodes, "before": asdict(m.before), "after": asdict(m.after),
    }  # fmt: skip


def _both_sides(d: PlanDifference) -> Mapping[str, Any]:
    def side(decision: Decision | None) -> dict[str, Any] | None:
        return decision.model_dump(mode="json") if decision is not None else None

    return {"key": d.key, "before": side(d.before), "after": side(d.after)}
