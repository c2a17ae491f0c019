"""The part of a report that a mesh adds: collectives by mesh dimension, the step, the memory of a rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..passes.keys import NodeKey
from ..passes.mesh_plan import CollectiveDecision, MeshPlan, Placing, RankMemory, StepTime
from .console import bytes_text, coloured, digits, plain_table, time_text


def mesh_lines(plan: MeshPlan) -> list[RenderableType]:
    """A heading, the table of collectives, and lines on the step, on memory, and on what else was tried."""
    ranks = math.prod(plan.mesh.values())
    sizes = " x ".join(f"{dim} {n:,}" for dim, n in plan.mesh.items())
    lines: list[RenderableType] = [
        "",
        Text(f"mesh {sizes} = {ranks:,} ranks, links of {plan.node}, {placing_text(plan.placings[0])}", style="bold"),
    ]
    lines.append(_table(plan.collectives, plan.step) if plan.collectives else "no collective")
    lines += [_step(plan.step), _memory(plan.memory)]
    if len(plan.placings) > 1:
        lines.append("also tried: " + "; ".join(map(_tried, plan.placings[1:])))
    lines += [f"not divided: {reason}" for reason in plan.refused]
    return lines


def placing_text(placing: Placing) -> str:
    """`ZeRO 3, sequences divided`."""
    return f"ZeRO {placing.zero}, sequences {'divided' if placing.sequence else 'whole'}"


def _table(collectives: Sequence[CollectiveDecision], step: StepTime) -> Table:
    groups: defaultdict[tuple[str, str, str, str, bool], list[CollectiveDecision]] = defaultdict(list)
    for c in collectives:
        phase = "forward" if NodeKey.parse(c.key).phase == "fprop" else "backward"
        groups[c.dim, c.kind, phase, c.wire, c.hidden].append(c)
    table = plain_table()
    for name in ("over", "collective", "pass", "n", "format", "sent", "as traced", "µs", "% of step", "beside"):
        right = name in ("n", "sent", "as traced", "µs", "% of step")
        table.add_column(name, justify="right" if right else "left")
    for (dim, kind, phase, wire, hidden), found in sorted(groups.items()):
        spent = sum(c.time_us for c in found)
        table.add_row(
            dim, kind.replace("_", "-"), phase, f"{len(found):,}", coloured(wire.partition(":")[0], wire),
            bytes_text(sum(c.bytes for c in found)), bytes_text(sum(c.bytes_as_written for c in found)),
            time_text(spent), f"{100 * spent / step.total_us:.1f}", "computation" if hidden else "nothing: waited for",
        )  # fmt: skip
    return table


def _step(step: StepTime) -> str:
    waits = "".join(f", waiting for {dim} {time_text(us)}" for dim, us in step.exposed_us.items() if us)
    return (
        f"step of a rank: {time_text(step.total_us)} µs: forward {time_text(step.forward_us)}, backward "
        f"{time_text(step.backward_us)}{waits}; bound by {step.bound}"
    )


def _memory(memory: RankMemory) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer (two fp32 moments)": memory.optimizer,
        "saved activations": memory.activations,
        "gathered parameters": memory.gathered,
    }
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    fits = "" if memory.fits else ": DOES NOT FIT"
    total, available = bytes_text(memory.total), bytes_text(memory.available)
    return f"memory of a rank: {total} of {available}{fits}: {listed}"


def _tried(placing: Placing) -> str:
    fits = "" if placing.fits else ", does not fit"
    return f"{placing_text(placing)}: {digits(placing.step_us)} µs, {bytes_text(placing.memory_bytes)}{fits}"
