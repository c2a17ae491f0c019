"""`dsmp kernels` and `dsmp audit`: the kernels that a plan needs, and what would run for each of its nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..codegen.audit import Audit, merged
from ..codegen.emission.kernel_files import EmittedKernel, emit_kernels
from ..codegen.emission.plan_kernels import PlanKernels, plan_kernels
from ..codegen.lower_products import Lowering
from ..codegen.registry import check_names
from ..codegen.targets import NO_MATRIX_INSTRUCTIONS, TARGETS, get_target, target_of
from ..errors import InvalidOptionError, KernelUnavailableError
from ..hardware_db.capability import Device
from ..hardware_db.detect import resolve_hardware
from ..passes.plan import PrecisionPlan, load_plan
from .capture import Capture
from .console import Printer, Stages, write_json
from .execution import apply_decisions
from .model_commands import ModelArguments, captured_plan, only_our_words
from .pipeline import check_plan_hardware
from .render_kernels import print_audit, print_kernels
from .saved_activations import copy_graph, lazily


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Which implementations to use: `GLOB=NAME` texts, and names not to use."""

    use: Sequence[str] = ()
    without: Sequence[str] = ()

    @property
    def forced(self) -> dict[str, str]:
        """Names by glob. Raises InvalidOptionError."""
        found = {}
        for text in self.use:
            glob, equals, name = text.rpartition("=")
            if not equals or not glob:
                raise InvalidOptionError("--use", text, "GLOB=NAME, such as '*.mlp.*=triton_gemm'")
            check_names("--use", [name])
            found[glob] = name
        return found

    def checked(self) -> Sequence[str]:
        """The names not to use. Raises InvalidOptionError."""
        check_names("--without", self.without)
        return self.without


def kernels(
    arguments: ModelArguments, *, target: str | None, output: Path | None, choices: Choices, as_json: bool
) -> None:
    """`dsmp kernels MODEL|plan.json --target T -o DIR`: print the kernels of a plan; with `output` write their sources.

    Raises UnknownTargetError for an instruction set without kernels, InvalidOptionError for a folder that cannot be
    written and for a target that is not the plan's, and what planning raises.
    """
    forced, without = choices.forced, choices.checked()
    if output is not None:
        _check_folder(output)
    stages = Stages()
    plan, device = _plan_for(arguments, target, stages)
    isa = target_of(device)
    if isa is None:
        raise _without_kernels(device.isa)
    needed = plan_kernels(plan, device, forced=forced, without=without)
    with stages.stage("compiling", f"compiling {len(needed.kernels)} kernels for {isa.isa}") as tell:
        emitted = emit_kernels(
            needed.kernels, isa, output, {"plan": f"{plan.model.source} on {device.id}"},
            lambda name, done: tell(name, done, len(needed.kernels)),
        )  # fmt: skip
    if as_json:
        write_json(_as_json(plan, device, needed, emitted))
    else:
        print_kernels(Printer(), plan, device, needed, emitted, output, stages.seconds)


def audit(arguments: ModelArguments, *, choices: Choices, every_node: bool, strict: bool, as_json: bool) -> bool:
    """`dsmp audit MODEL`: print what runs for each planned node on this machine; returns whether nothing fell back.

    Raises KernelUnavailableError, SilentFallbackError under strict, and what planning raises.
    """
    forced, without = choices.forced, choices.checked()
    stages = Stages()
    with only_our_words(arguments.debug):
        captured, plan, device = captured_plan(arguments, stages)
        running = resolve_hardware(None, arguments.hardware_files)
        found = audit_capture(
            captured,
            plan,
            device,
            Lowering(device=device, native=device.id == running.id, forced=forced, without=without),
        )
    if as_json:
        write_json([{**asdict(e), "ran": e.ran.value} for e in found])
    else:
        print_audit(Printer(), plan, found, every_node=every_node)
    if strict:
        found.check()
    return not found.fallbacks


def audit_capture(captured: Capture, plan: PrecisionPlan, device: Device, lowering: Lowering) -> Audit:
    """What would run for every planned node of a captured model: decisions applied to copies of its graphs."""
    audits = []
    for graph in captured:
        with lazily():
            copy, parameters = copy_graph(graph.gm, graph.parameters)
            applied = apply_decisions(
                copy, plan.by_key, storage=device.storage, same_device=lowering.native, parameters=parameters,
                lowering=lowering,
            )  # fmt: skip
        if applied.audit is not None:
            audits.append(applied.audit)
    return merged(audits)


def _plan_for(arguments: ModelArguments, target: str | None, stages: Stages) -> tuple[PrecisionPlan, Device]:
    """The plan of a file, or one made for the device of `--hardware` or the target's reference device."""
    if arguments.model.endswith(".json"):
        plan = load_plan(arguments.model)
        device = resolve_hardware(arguments.hardware or plan.hardware, arguments.hardware_files)
        check_plan_hardware(plan, device)
        if target is not None and target_of(device) is not get_target(target):
            raise InvalidOptionError("--target", target, f"{device.isa}, which the plan was made for, or a MODEL")
        return plan, device
    if target is not None:
        if target in NO_MATRIX_INSTRUCTIONS:
            raise _without_kernels(target)
        get_target(target)
        if arguments.hardware is None:
            arguments = ModelArguments(**{**_fields(arguments), "hardware": target})
    with only_our_words(arguments.debug):
        _, plan, device = captured_plan(arguments, stages)
    if target is not None and target_of(device) is not get_target(target):
        raise InvalidOptionError(
            "--target", target, f"{device.isa}, the instruction set of {device.id}, or leave it out"
        )
    return plan, device


def _without_kernels(isa: str) -> KernelUnavailableError:
    return KernelUnavailableError(
        f"there are no Triton kernels for {isa}: its products are left to libraries. Targets: {', '.join(TARGETS)}."
    )


def _fields(arguments: ModelArguments) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ModelArguments.__dataclass_fields__}


def _check_folder(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise InvalidOptionError("--output", str(output), "a folder; this is a file")
    parent = next(p for p in (output, *output.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise InvalidOptionError("--output", str(output), f"a folder that can be written; {parent} cannot")


def _as_json(
    plan: PrecisionPlan, device: Device, needed: PlanKernels, emitted: Sequence[EmittedKernel]
) -> dict[str, Any]:
    return {
        "model": plan.model.source,
        "hardware": device.id,
        "covered": needed.covered,
        "kernels": [json.loads(json.dumps(k.figures())) for k in emitted],
        "library": [asdict(c) for c in needed.library],
        "uncovered": dict(needed.uncovered),
    }
