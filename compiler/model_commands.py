"""`dsmp report MODEL`, `dsmp plan` and `dsmp report`: what loads, captures and plans models, for one device or several.

What a model prints while it is built goes to standard error, like progress and timings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError, RuleError
from ..hardware_db.capability import Device
from ..hardware_db.detect import resolve_hardware
from ..passes.plan import PrecisionPlan
from ..passes.rules import Rule, parse_rules
from .calibrated_commands import CalibrationArguments, calibrated_plans, calibration_settings
from .capture import Capture, capture
from .cli_mesh import MeshArguments
from .commands import print_compared, print_plan
from .compare_plans import Planned
from .console import Printer, Stages, write_json
from .demo import DEMO_DEVICES, run_demo
from .execution import Execution, predict_execution
from .hardware.selection import check_different
from .mesh_commands import plan_on_mesh
from .model_source import LoadedModel, load_model, with_inputs
from .pipeline import make_plan
from .render import facts_line, print_summary
from .render_demo import print_demo
from .report import RunFacts, peak_memory_bytes

EMBEDDED_MODEL = "dsmp.compiler.small_gpt:demo_model"
"""What is planned where several devices, but no MODEL, are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """A MODEL and how to plan it, as written on the command line. `hardware` may name several devices, with commas."""

    model: str
    hardware: str | None = None
    hardware_files: Sequence[Path] = ()
    infer: bool = False
    inputs: Sequence[str] = ()
    config: Path | None = None
    rules: Sequence[str] = ()
    debug: bool = False
    calibration: Mapping[str, Any] = field(default_factory=dict)
    mesh: MeshArguments | None = None


def report_model(
    arguments: ModelArguments, *, match: str | None, phase: str | None, every_node: bool, as_json: bool
) -> None:
    """`dsmp report MODEL`: plan a model and print the table or the plan as JSON; side by side for several devices.

    Raises DsmpError.
    """
    planned = _plan(arguments, named_devices(arguments.hardware, arguments.hardware_files))
    if len(planned) > 1:
        print_compared(planned, match=match, phase=phase, every_node=every_node, as_json=as_json)
    else:
        plan, facts = planned[0].plan, planned[0].facts
        print_plan(plan, facts, match=match, phase=phase, every_node=every_node, as_json=as_json)


def save_plan(arguments: ModelArguments, output: Path) -> None:
    """`dsmp plan MODEL -o FILE`: plan a model, write the plan in one step, print the summary. Raises DsmpError."""
    if names_several(arguments.hardware):
        raise InvalidOptionError("--hardware", arguments.hardware, "one device: a plan file holds the plan for one")
    _check_writable(output)
    (planned,) = _plan(arguments, named_devices(arguments.hardware, arguments.hardware_files))
    try:
        planned.plan.save(output)
    except OSError as error:
        raise InvalidOptionError("--output", str(output), f"a file that can be written ({error})") from error
    printer = Printer()
    print_summary(printer, planned.plan, planned.facts)
    printer.print(f"written to {output}")


def demo(hardware: str | None, *, files: Sequence[Path], as_json: bool, debug: bool) -> None:
    """`dsmp report` without MODEL: the embedded model on the running device and, simulated, on others.

    Where several devices are named, it is only planned for each.
    """
    if names_several(hardware):
        arguments = ModelArguments(model=EMBEDDED_MODEL, hardware=hardware, hardware_files=files, debug=debug)
        report_model(arguments, match=None, phase=None, every_node=False, as_json=as_json)
        return
    devices = [resolve_hardware(h, files) for h in ((hardware,) if hardware is not None else DEMO_DEVICES)]
    stages = Stages()
    with only_our_words(debug):
        result = run_demo(devices, files=files, stages=stages)
    if as_json:
        write_json(asdict(result))
        Printer(sys.stderr).print(facts_line(RunFacts(seconds=stages.seconds, peak_bytes=peak_memory_bytes())))
    else:
        print_demo(Printer(), result)


def names_several(hardware: str | None) -> bool:
    """Whether `--hardware` lists more than one device."""
    return hardware is not None and "," in hardware


def named_devices(hardware: str | None, files: Sequence[Path]) -> list[Device]:
    """The devices of `--hardware`: one name, several with commas between them, or None for the running one.

    Raises InvalidOptionError for an empty name or a device that is named twice, and what `resolve_hardware` raises.
    """
    if hardware is None:
        return [resolve_hardware(None, files)]
    names = [name.strip() for name in hardware.split(",")]
    if not all(names):
        raise InvalidOptionError("--hardware", hardware, "names of devices with one comma between them: a100,h800")
    devices = [resolve_hardware(name, files) for name in names]
    check_different("--hardware", names, [d.id for d in devices])
    return devices


def parse_rule(text: str) -> Rule:
    """A rule from `GLOB=FORMAT`. Raises RuleError."""
    glob, equals, name = text.rpartition("=")
    if not equals or not glob:
        raise RuleError(f"cannot read rule {text!r}; write GLOB=FORMAT, such as '*.mlp.*=bf16'.")
    return parse_rules({glob: name})[0]


def _plan(arguments: ModelArguments, devices: Sequence[Device]) -> list[Planned]:
    """Load and capture a model once, then plan it for each device and predict how it will run there."""
    rules = [parse_rule(r) for r in arguments.rules]
    if arguments.mesh is not None:
        return [_plan_on_mesh(arguments, arguments.mesh, devices, rules)]
    wanted = CalibrationArguments(**arguments.calibration) if arguments.calibration else None
    training = not arguments.infer
    stages = Stages()
    plans = []
    with only_our_words(arguments.debug), calibration_settings(wanted) as settings:
        with stages.stage("loading", f"loading {arguments.model}"):
            loaded = load_model(
                arguments.model, inputs=arguments.inputs, config=arguments.config, training=training,
                inputs_later=wanted is not None and wanted.calibrate is not None,
            )  # fmt: skip
            if settings is not None and loaded.lacks:
                loaded = with_inputs(loaded, settings.batches[0].args, settings.batches[0].kwargs)
        with stages.stage("capture", f"capturing {arguments.model}"):
            captured = _capture(loaded, training=training)
        if settings is not None and wanted is not None:
            found = calibrated_plans(wanted, settings, loaded, captured, devices, rules, stages, training=training)
        for number, device in enumerate(devices):
            with stages.stage("planning", f"planning for {device.id}"):
                if settings is not None:
                    plan = found[number]
                else:
                    plan = make_plan(captured, device, rules=rules, predict_memory=False)
            with stages.stage("predicting casts and memory", f"predicting casts and saved activations on {device.id}"):
                execution = predict_execution(captured, plan.by_key, device)
            plans.append((plan, execution))
    peak_bytes = peak_memory_bytes()
    return [
        Planned(
            plan=_with_memory(plan, execution),
            facts=RunFacts(seconds=stages.seconds, casts=execution.casts, peak_bytes=peak_bytes),
        )
        for plan, execution in plans
    ]


def _plan_on_mesh(
    arguments: ModelArguments, mesh: MeshArguments, devices: Sequence[Device], rules: Sequence[Rule]
) -> Planned:
    if len(devices) > 1:
        raise InvalidOptionError("--hardware", arguments.hardware, "one device, that of the mesh's ranks")
    if stray := [name for name in arguments.calibration if name not in ("scores", "budget")]:
        allowed = "without --mesh, which takes --scores (kept with --save-scores) and --budget"
        raise InvalidOptionError(f"--{stray[0].replace('_', '-')}", "given", allowed)
    training = not arguments.infer
    stages = Stages()
    with only_our_words(arguments.debug):
        with stages.stage("loading", f"loading {arguments.model}"):
            loaded = load_model(arguments.model, inputs=arguments.inputs, config=arguments.config, training=training)
        with stages.stage("planning", f"planning for {devices[0].id} on a mesh"):
            plan = plan_on_mesh(
                mesh, loaded, devices[0], rules, arguments.hardware_files,
                given_inputs=bool(arguments.inputs), training=training, **arguments.calibration,
            )  # fmt: skip
    return Planned(plan=plan, facts=RunFacts(seconds=stages.seconds, peak_bytes=peak_memory_bytes()))


def captured_plan(arguments: ModelArguments, stages: Stages) -> tuple[Capture, PrecisionPlan, Device]:
    """A model's graphs and the plan for the one device of `--hardware`, not calibrated. Raises DsmpError."""
    if names_several(arguments.hardware):
        raise InvalidOptionError("--hardware", arguments.hardware, "one device")
    (device,) = named_devices(arguments.hardware, arguments.hardware_files)
    rules = [parse_rule(r) for r in arguments.rules]
    training = not arguments.infer
    with stages.stage("loading", f"loading {arguments.model}"):
        loaded = load_model(arguments.model, inputs=arguments.inputs, config=arguments.config, training=training)
    with stages.stage("capture", f"capturing {arguments.model}"):
        captured = _capture(loaded, training=training)
    with stages.stage("planning", f"planning for {device.id}"):
        plan = make_plan(captured, device, rules=rules, predict_memory=False)
    return captured, plan, device


def _with_memory(plan: PrecisionPlan, execution: Execution) -> PrecisionPlan:
    saved = {"saved_bytes": execution.saved_bytes, "saved_bytes_fp32": execution.saved_bytes_fp32}
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=saved)})


@contextlib.contextmanager
def only_our_words(debug: bool) -> Iterator[None]:
    """Send what a model prints to standard error, and keep torch from logging the tracebacks of errors that we report.

    Whoever debugs, or has asked torch for logs, gets them.
    """
    loggers = [logging.getLogger(n) for n in logging.root.manager.loggerDict if n == "torch" or n.startswith("torch.")]
    handlers = {h for logger in loggers for h in logger.handlers}
    if debug or "TORCH_LOGS" in os.environ:
        handlers = set()
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def _capture(loaded: LoadedModel, *, training: bool) -> Capture:
    if loaded.exported is not None:
        # what was given on the command line replaces the inputs that the archive was saved with
        loaded.exported.example_inputs = (loaded.args, loaded.kwargs)
        return capture(loaded.exported, training=training, source=loaded.source)
    assert loaded.module is not None
    return capture(loaded.module, loaded.args, loaded.kwargs, training=training, source=loaded.source)


def _check_writable(output: Path) -> None:
    """Raise before minutes of work are done for a file that cannot be written."""
    folder = output.parent
    if output.is_dir():
        raise InvalidOptionError("--output", str(output), "a file; this is a folder")
    if not folder.is_dir():
        raise InvalidOptionError("--output", str(output), f"a file in a folder that exists; there is no {folder}")
    if not os.access(folder, os.W_OK):
        raise InvalidOptionError("--output", str(output), f"a file in a folder that can be written; {folder} cannot")
