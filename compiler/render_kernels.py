"""Kernels of a plan and audits as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType

from ..codegen.audit import Audit, Ran
from ..codegen.emission.kernel_files import EmittedKernel
from ..codegen.emission.plan_kernels import PlanKernels
from ..hardware_db.capability import Device
from ..passes.plan import PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES
from .console import Printer, bytes_text, coloured, plain_table, time_text

_SHOWN = 5


def print_kernels(
    printer: Printer,
    plan: PrecisionPlan,
    device: Device,
    needed: PlanKernels,
    emitted: Sequence[EmittedKernel],
    output: Path | None,
    seconds: Mapping[str, float],
) -> None:
    """Every kernel with its tile, registers, spills, shared memory, occupancy and matrix instruction; then what
    libraries compute and what nothing does."""
    parts: list[RenderableType] = [f"{plan.model.source} on {device.id} ({device.isa})", ""]
    if emitted:
        parts += [_kernel_table(emitted), ""]
    if needed.library:
        parts += [_library_table(needed), ""]
    covered = f"{100 * needed.covered:.4g} % of the planned GEMM FLOPs are covered"
    kernels = sum(k.flops for k in needed.kernels)
    if needed.flops:
        library = sum(c.flops for c in needed.library)
        by_kernels, by_libraries = (f"{100 * flops / needed.flops:.1f} %" for flops in (kernels, library))
        covered += f": {by_kernels} by {len(emitted)} kernels, {by_libraries} by libraries"
    parts.append(covered)
    if needed.uncovered:
        shown = list(needed.uncovered.items())[:_SHOWN]
        parts += [f"not covered: {key}: {reason}" for key, reason in shown]
        if len(needed.uncovered) > _SHOWN:
            parts.append(f"... and {len(needed.uncovered) - _SHOWN} more")
    poor = [k.name for k in emitted if not k.native or k.compiled.code.spills]
    if poor:
        parts.append(f"without the planned matrix instruction, or with spills: {', '.join(poor)}")
    parts.append("% of peak is predicted, not measured.")
    if output is not None:
        parts.append(f"{len(emitted)} kernels written to {output}")
    parts.append(", ".join(f"{name} {s:.1f} s" for name, s in seconds.items()))
    printer.print(*parts)


def _kernel_table(emitted: Sequence[EmittedKernel]) -> RenderableType:
    table = plain_table()
    for name in ("kernel", "nodes", "tile", "warps", "stages", "regs", "spills", "shared", "occ.", "matrix instruction",
                 "µs", "% peak"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("kernel", "matrix instruction") else "right")
    for kernel in sorted(emitted, key=lambda k: -k.planned.time_us):
        config, code = kernel.planned.call.config, kernel.compiled.code
        share = kernel.planned.peak_share
        table.add_row(
            kernel.name,
            f"{len(kernel.planned.nodes):,}",
            config.text,
            str(config.num_warps),
            str(config.num_stages),
            str(code.registers),
            str(code.spills),
            bytes_text(kernel.compiled.shared_bytes),
            f"{100 * kernel.compiled.occupancy:.0f}%",
            _short(kernel),
            time_text(kernel.planned.time_us) if kernel.planned.time_us else "",
            "" if share is None else f"{100 * share:.0f}",
        )
    return table


def _short(kernel: EmittedKernel) -> str:
    """The matrix instruction that multiplies in the planned format, without the parts that all have."""
    found = kernel.instructions
    if not found:
        return "" if kernel.planned.call.operand_format is None else "none"
    text = found[0]
    for part in (".sync.aligned", ".mma_async", "mma.sync", ".row.col", ".satfinite", ".cta_group::1"):
        text = text.replace(part, "mma" if part == "mma.sync" else "")
    return text


def _library_table(needed: PlanKernels) -> RenderableType:
    table = plain_table()
    for name in ("library call", "op", "format", "nodes", "GEMM FLOPs"):
        table.add_column(name, justify="right" if name in ("nodes", "GEMM FLOPs") else "left")
    for call in sorted(needed.library, key=lambda c: -c.flops):
        share = 100 * call.flops / needed.flops if needed.flops else 0.0
        table.add_row(call.implementation, call.op, coloured(call.compute), f"{len(call.nodes):,}", f"{share:.1f}%")
    return table


def print_audit(printer: Printer, plan: PrecisionPlan, audit: Audit, *, every_node: bool) -> None:
    """What runs for the planned nodes: folded by what was planned and what runs, or one line for each node."""
    table = plain_table()
    if every_node:
        for name in ("key", "planned", "runs", "how", "reason"):
            table.add_column(name)
        for entry in audit:
            table.add_row(
                entry.key, coloured(entry.compute, _planned(entry.compute, entry.recipe, entry.output)),
                entry.implementation, entry.ran.value, entry.reason,
            )  # fmt: skip
    else:
        groups: Counter[tuple[str, str, str, str, str, str]] = Counter()
        flops: Counter[tuple[str, str, str, str, str, str]] = Counter()
        for entry in audit:
            op = entry.op if entry.op in GEMM_CLASSES else "other"
            group = (op, entry.compute, _planned(entry.compute, entry.recipe, entry.output), entry.implementation,
                     entry.ran.value, entry.reason)  # fmt: skip
            groups[group] += 1
            flops[group] += entry.flops if entry.op in GEMM_CLASSES else 0
        total = sum(flops.values()) or 1
        for name in ("op", "nodes", "GEMM FLOPs", "planned", "runs", "how", "reason"):
            table.add_column(name, justify="right" if name in ("nodes", "GEMM FLOPs") else "left")
        for group, count in sorted(groups.items(), key=lambda item: (-flops[item[0]], item[0])):
            op, compute, planned, implementation, ran, reason = group
            share = f"{100 * flops[group] / total:.1f}%" if flops[group] else ""
            table.add_row(op, f"{count:,}", share, coloured(compute, planned), implementation, ran, reason)
    missing = len(plan) - len(audit)
    notes = [f"{len(audit):,} of {len(plan):,} planned nodes"] if missing else []
    if any(e.ran is Ran.FELL_BACK for e in audit):
        notes.append(
            "nodes that fell back are rounded as planned, but multiplied in fp32: --strict makes that an error"
        )
    printer.print(table, "", *notes, str(audit))


def _planned(compute: str, recipe: str, output: str) -> str:
    scales = "" if recipe == "none" else f" {recipe}"
    return f"{compute}{scales} → {output}"
