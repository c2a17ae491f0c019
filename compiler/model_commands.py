"""`dsmp report MODEL`, `dsmp plan` and `dsmp report`: what loads, captures and plans models.

What a model prints while it is built goes to standard error, like progress and timings.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import InvalidOptionError, RuleError
from ..hardware_db.detect import resolve_hardware
from ..passes.plan import PrecisionPlan, Rule, parse_rules
from .capture import Capture, capture
from .commands import print_plan, write_text
from .demo import DEMO_DEVICES, run_demo
from .model_source import LoadedModel, load_model
from .pipeline import make_plan, predict_execution
from .render import Printer, Stages, facts_line, print_summary
from .render_demo import print_demo
from .report import RunFacts, peak_memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """A MODEL and how to plan it, as written on the command line."""

    model: str
    hardware: str | None = None
    infer: bool = False
    inputs: Sequence[str] = ()
    config: Path | None = None
    rules: Sequence[str] = ()
    debug: bool = False


def report_model(
    arguments: ModelArguments, *, match: str | None, phase: str | None, every_node: bool, as_json: bool
) -> None:
    """`dsmp report MODEL`: plan a model and print the table or the plan as JSON. Raises DsmpError."""
    plan, facts = _plan(arguments)
    print_plan(plan, facts, match=match, phase=phase, every_node=every_node, as_json=as_json)


def save_plan(arguments: ModelArguments, output: Path) -> None:
    """`dsmp plan MODEL -o FILE`: plan a model, write the plan in one step, print the summary. Raises DsmpError."""
    _check_writable(output)
    plan, facts = _plan(arguments)
    try:
        plan.save(output)
    except OSError as error:
        raise InvalidOptionError("--output", str(output), f"a file that can be written ({error})") from error
    printer = Printer()
    print_summary(printer, plan, facts)
    printer.print(f"written to {output}")


def demo(hardware: str | None, *, as_json: bool, debug: bool) -> None:
    """`dsmp report` without MODEL: the embedded model on the running device and, simulated, on others."""
    devices = [resolve_hardware(h) for h in ((hardware,) if hardware is not None else DEMO_DEVICES)]
    stages = Stages()
    with _only_our_words(debug):
        result = run_demo(devices, stages=stages)
    if as_json:
        write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")
        Printer(sys.stderr).print(facts_line(RunFacts(seconds=stages.seconds, peak_bytes=peak_memory_bytes())))
    else:
        print_demo(Printer(), result)


def parse_rule(text: str) -> Rule:
    """A rule from `GLOB=FORMAT`. Raises RuleError."""
    glob, equals, name = text.rpartition("=")
    if not equals or not glob:
        raise RuleError(f"cannot read rule {text!r}; write GLOB=FORMAT, such as '*.mlp.*=bf16'.")
    return parse_rules({glob: name})[0]


def _plan(arguments: ModelArguments) -> tuple[PrecisionPlan, RunFacts]:
    """Load, capture and plan a model, and predict how it will run, with the time each took."""
    device = resolve_hardware(arguments.hardware)
    rules = [parse_rule(r) for r in arguments.rules]
    stages = Stages()
    with _only_our_words(arguments.debug):
        with stages.stage("loading", f"loading {arguments.model}"):
            loaded = load_model(
                arguments.model, inputs=arguments.inputs, config=arguments.config, training=not arguments.infer
            )
        with stages.stage("capture", f"capturing {arguments.model}"):
            captured = _capture(loaded, training=not arguments.infer)
        with stages.stage("planning", f"planning for {device.id}"):
            plan = make_plan(captured, device, rules=rules, predict_memory=False)
        with stages.stage("predicting casts and memory", "predicting casts and saved activations"):
            execution = predict_execution(captured, plan.by_key, device)
    saved = {"saved_bytes": execution.saved_bytes, "saved_bytes_fp32": execution.saved_bytes_fp32}
    plan = plan.model_copy(update={"prediction": plan.prediction.model_copy(update=saved)})
    return plan, RunFacts(seconds=stages.seconds, casts=execution.casts, peak_bytes=peak_memory_bytes())


@contextlib.contextmanager
def _only_our_words(debug: bool) -> Iterator[None]:
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
