"""What the commands of `cli.py` do. Apart from it, so that `dsmp --help` and usage errors need not wait for torch.

Everything machine-readable goes to standard output alone; progress, timings and what a model prints while it is built
go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError, RuleError
from ..hardware_db.detect import resolve_hardware
from ..passes.plan import Decision, PlanDifference, PrecisionPlan, Rule, load_plan, parse_rules
from .capture import Capture, capture
from .demo import DEMO_DEVICES, run_demo
from .model_source import LoadedModel, load_model
from .pipeline import make_plan, predict_execution
from .render import Printer, Stages, facts_line, print_diff, print_report, print_summary
from .render_demo import print_demo
from .report import RunFacts, choose, fold_differences, make_report, peak_memory_bytes

PLAN_SUFFIX = ".json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """A MODEL and how to plan it, as written on the command line."""

    model: str
    hardware: str | None = None
    infer: bool = False
    inputs: Sequence[str] = ()
    config: Path | None = None
    rules: Sequence[str] = ()

    def given(self) -> list[str]:
        """The options that were set."""
        flags = {
            "--hardware": self.hardware is not None,
            "--infer": self.infer,
            "--input": bool(self.inputs),
            "--config": self.config is not None,
            "--rule": bool(self.rules),
        }
        return [name for name, is_set in flags.items() if is_set]


def report(
    arguments: ModelArguments,
    *,
    match: str | None,
    phase: str | None,
    every_node: bool,
    as_json: bool,
) -> None:
    """`dsmp report MODEL`: plan a model, or read a plan.json, and print the table or the plan as JSON.

    The JSON is a plan that `load_plan` reads; `match` and `phase` leave out nodes there too, and the header still says
    how many there were. Raises DsmpError.
    """
    if arguments.model.endswith(PLAN_SUFFIX):
        _no_options(arguments)
        plan, facts = load_plan(arguments.model), None
    else:
        plan, facts = _plan(arguments)
    if not as_json:
        print_report(Printer(), make_report(plan, match=match, phase=phase, every_node=every_node, facts=facts))
        return
    chosen = choose(plan, match=match, phase=phase)
    _write(plan.model_copy(update={"nodes": chosen}).to_json())
    notes = Printer(sys.stderr)
    if len(chosen) < len(plan):
        notes.print(f"{len(chosen):,} of {len(plan):,} nodes written")
    if facts is not None:
        notes.print(f"casts: {facts.casts:,}; {facts_line(facts)}")


def save_plan(arguments: ModelArguments, output: Path) -> None:
    """`dsmp plan MODEL -o FILE`: plan a model, write the plan in one step, print the summary. Raises DsmpError."""
    if arguments.model.endswith(PLAN_SUFFIX):
        raise InvalidOptionError("MODEL", arguments.model, "a model; this is a plan already, `dsmp report` shows it")
    _check_writable(output)
    plan, facts = _plan(arguments)
    try:
        plan.save(output)
    except OSError as error:
        raise InvalidOptionError("--output", str(output), f"a file that can be written ({error})") from error
    printer = Printer()
    print_summary(printer, plan, facts)
    printer.print(f"written to {output}")


def diff(before: Path, after: Path, *, as_json: bool) -> bool:
    """`dsmp diff A B`: print the nodes on which two plans differ; returns whether they do. Raises PlanSchemaError."""
    first, second = load_plan(before), load_plan(after)
    differences = first.diff(second)
    if as_json:
        heads = {"before": _head(first), "after": _head(second)}
        nodes = [_both_sides(d) for d in differences]
        _write(json.dumps({"equal": not nodes, **heads, "nodes": nodes}, indent=1, ensure_ascii=False) + "\n")
    else:
        print_diff(Printer(), first, second, fold_differences(differences))
    return bool(differences)


def demo(hardware: str | None, *, as_json: bool) -> None:
    """`dsmp report` without MODEL: the embedded model on the running device and, simulated, on others."""
    devices = [resolve_hardware(h) for h in ((hardware,) if hardware is not None else DEMO_DEVICES)]
    stages = Stages()
    with contextlib.redirect_stdout(sys.stderr):
        result = run_demo(devices, stages=stages)
    if as_json:
        _write(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")
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
    with contextlib.redirect_stdout(sys.stderr):
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


def _capture(loaded: LoadedModel, *, training: bool) -> Capture:
    if loaded.exported is not None:
        # what was given on the command line replaces the inputs that the archive was saved with
        loaded.exported.example_inputs = (loaded.args, loaded.kwargs)
        return capture(loaded.exported, training=training, source=loaded.source)
    assert loaded.module is not None
    return capture(loaded.module, loaded.args, loaded.kwargs, training=training, source=loaded.source)


def _no_options(arguments: ModelArguments) -> None:
    if given := arguments.given():
        allowed = "with a model only, a plan has its decisions; leave the option out"
        raise InvalidOptionError(given[0], arguments.model, allowed)


def _check_writable(output: Path) -> None:
    """Raise before minutes of work are done for a file that cannot be written."""
    folder = output.parent
    if output.is_dir():
        raise InvalidOptionError("--output", str(output), "a file; this is a folder")
    if not folder.is_dir():
        raise InvalidOptionError("--output", str(output), f"a file in a folder that exists; there is no {folder}")
    if not os.access(folder, os.W_OK):
        raise InvalidOptionError("--output", str(output), f"a file in a folder that can be written; {folder} cannot")


def _head(plan: PrecisionPlan) -> dict[str, Any]:
    return plan.model_dump(mode="json", by_alias=True, exclude={"nodes"})


def _both_sides(d: PlanDifference) -> Mapping[str, Any]:
    def side(decision: Decision | None) -> dict[str, Any] | None:
        return decision.model_dump(mode="json") if decision is not None else None

    return {"key": d.key, "before": side(d.before), "after": side(d.after)}


def _write(text: str) -> None:
    """Text to standard output as UTF-8, whatever the locale: plans are UTF-8 files."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()
