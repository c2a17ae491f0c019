"""The torch.compile backend: `torch.compile(model, backend="dsmp", options={...})`.

One function, registered through the entry point group `torch_dynamo_backends`. Both executors run the same pass on
the joint graph (inference graph without gradients): Inductor as its joint pre pass, the eager executor before
partitioning.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..codegen.audit import Audit
from ..codegen.cpu.extension import cpu_operators
from ..codegen.cpu.shared_steps import read_steps
from ..codegen.lower_products import Lowering
from ..codegen.sending import has_collectives, unmatched_globs
from ..errors import NoEffectError, PlanHardwareError, UnknownHardwareError
from ..hardware_db.capability import Device
from ..hardware_db.detect import detect, resolve_hardware
from ..hardware_db.formats import packs_weight
from ..passes.graph import calls
from ..passes.keys import ModuleNames, key_of
from ..passes.plan import Decision, PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES
from ..passes.select_default import rules_without_a_node, select_default
from .calibrated import Calibration, plan_from_measurement
from .capture import Capture, key_graph
from .execution import apply_decisions, with_wires
from .frame_recording import bind_to_weights, record_frame
from .identity import frame_names, module_paths
from .options import Options, parse_options
from .outside_graphs import gradient_reducer
from .pipeline import (
    assemble_plan,
    check_plan_hardware,
    log,
    of_these_dtypes,
    report_repeated,
    report_undecided,
)
from .plan_registry import being_compiled, compiled_name, defer, remember, remember_audit
from .shared_steps import StepsInput, giving_steps
from .tracing import (
    compile_eagerly,
    explicit_precision,
    fake_inputs,
    input_node,
    parameter_indices,
    trace,
    weight_nodes,
)


def dsmp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph at the precisions that were planned for it. See `options.py` for the options.

    `mode` is torch.compile's, handed on to Inductor. Raises the errors of `options.py`, UnknownHardwareError,
    PlanHardwareError and, with strict, PlanMismatchError.
    """
    checked = parse_options(options)
    names = frame_names()
    running = running_device(example_inputs, checked.hardware_file)
    target = being_compiled()
    if checked.budget is not None:
        bind_to_weights(gm, example_inputs)
        plan = _plan_from_first_batch(gm, example_inputs, checked, names, running, compiled_name(target))
        checked = replace(checked, plan=plan, rules=[])
    if checked.plan is not None:
        whole = remember(checked.plan, target)
        if checked.save_plan is not None:
            whole.save(checked.save_plan)
    reducer = gradient_reducer(target) if checked.wire else ""
    steps = StepsInput.of(checked.plan, example_inputs)
    graph_pass = PrecisionPass(
        checked, running, names, parameter_indices(example_inputs), module_paths(gm, names), target, reducer, steps
    )
    if steps is None:
        return _compile(gm, example_inputs, example_inputs, graph_pass, mode)
    with steps.added(gm, example_inputs) as inputs:
        return giving_steps(_compile(gm, [*example_inputs, steps.steps], inputs, graph_pass, mode))


def _compile(
    gm: fx.GraphModule,
    given: Sequence[Any],
    example_inputs: Sequence[Any],
    graph_pass: PrecisionPass,
    mode: str | None,
) -> Callable[..., Any]:
    """Hand a Dynamo graph to the executor, which runs the pass. `given` are its inputs, `example_inputs` those that it
    is compiled for, which may be fake ones of this compilation."""
    if graph_pass.options.executor == "eager":
        return compile_eagerly(gm, example_inputs, graph_pass.apply)
    patches: dict[str, Any] = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    # Casts that a user wrote, or that a simulated plan needs, keep their rounding inside fused kernels.
    patches |= {"joint_custom_pre_pass": graph_pass, "emulate_precision_casts": True}
    graph, inputs = copy.deepcopy(gm.graph), fake_inputs(given)
    with explicit_precision():
        compiled = cast("Callable[..., Any]", compile_fx(gm, list(example_inputs), config_patches=patches))
    if not graph_pass.ran:  # Inductor's caches had the graph
        with_gradients = torch.is_grad_enabled()

        def find_out() -> None:
            with torch.set_grad_enabled(with_gradients):
                graph_pass.apply(trace(fx.GraphModule(gm, graph), inputs))

        if graph_pass.options.strict:
            find_out()
        else:
            defer(graph_pass.owner(), find_out)
    return compiled


def _needs_operators(plan: PrecisionPlan | None) -> bool:
    """Whether a plan has products that dsmp's C++ operators for CPUs compute."""
    return plan is not None and any(packs_weight(d.recipe) for d in plan)


def running_device(example_inputs: Sequence[Any], hardware_files: Sequence[Path] = ()) -> Device:
    """The device that a graph runs on: that of its tensors, which need not be the machine's accelerator."""
    kinds = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    return resolve_hardware("cpu", hardware_files) if kinds == {"cpu"} else detect(hardware_files)


def _plan_from_first_batch(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    names: ModuleNames,
    running: Device,
    source: str,
) -> PrecisionPlan:
    """Measure the graph on the batch that it is compiled for, and solve for the fastest formats within the budget."""
    own = options.hardware in (None, "auto", running.id)
    device = running if own else resolve_hardware(options.hardware, options.hardware_file)
    frame, call = record_frame(gm, example_inputs, names)
    captured = Capture(source=source, graphs=[frame])
    calibration = Calibration(budget=options.budget, memory=options.memory, drift=options.drift)
    measurement = calibration.score([call], [device], source=captured.source)
    return plan_from_measurement(captured, device, measurement, calibration, rules=options.rules).plan


class PrecisionPass(CustomGraphPass):
    """Key, decide (or replay), legalise and lower one joint or inference graph in place."""

    def __init__(
        self,
        options: Options,
        running: Device,
        names: ModuleNames,
        parameter_indices: frozenset[int],
        module_paths: Sequence[str] = (),
        target: Any = None,
        reducer: str = "",
        steps: StepsInput | None = None,
    ) -> None:
        self.options = options
        self.target = None if target is None else weakref.ref(target)
        self.ran = False
        self.reducer = reducer
        self.names = names
        self.parameter_indices = parameter_indices
        self.steps = steps
        self.module_paths = module_paths
        self.running = running
        plan = options.plan
        # A plan's own rules are what people edit in the file: they are applied again, before those of the options.
        self.rules = [*(plan.rules if plan is not None else ()), *options.rules]
        wanted = plan.hardware if plan is not None and options.hardware is None else options.hardware
        try:
            self.device = self._device(wanted)
        except UnknownHardwareError:
            if plan is None or wanted != plan.hardware or not plan.hardware_data:
                raise
            raise PlanHardwareError(
                f"the plan is for {plan.hardware!r}, which no data file here has; of its figures the plan says: "
                f"{'; '.join(plan.hardware_data)}. Give the file: options={{'hardware_file': 'FILE.toml'}}."
            ) from None
        if plan is not None:
            if self.device.id != plan.hardware:
                log.warning("dsmp: a plan made for %s is replayed for %s", plan.hardware, self.device.id)
            check_plan_hardware(plan, self.device)
        # Inductor's caches may know the graph: then nothing but this loads the operators that it calls.
        self.operators = cpu_operators().ok if self._lowering().native and _needs_operators(plan) else None

    def _device(self, name: str | None) -> Device:
        if name in (None, "auto", self.running.id):
            return self.running
        return resolve_hardware(name, self.options.hardware_file)

    def __call__(self, graph: fx.Graph) -> None:
        owner = graph.owning_module
        assert owner is not None
        self.apply(owner)

    def apply(self, gm: fx.GraphModule) -> None:
        """Run the pass on a graph module."""
        parameters = weight_nodes(gm, self.parameter_indices)
        key_graph(gm, self.names, parameters)
        self._check_wire(gm)
        keys = [str(key) for node in calls(gm) if (key := key_of(node)) is not None]
        decisions = self._decisions(gm, parameters)
        applied = apply_decisions(
            gm,
            decisions,
            storage=self.device.storage,
            same_device=self.device.id == self.running.id,
            parameters=parameters,
            lowering=self._lowering(),
            wires=self.options.wire,
        )
        if self.steps is not None:
            read_steps(gm, input_node(gm, self.steps.index), self.steps.rows)
        self.ran = True
        plan = self.options.plan
        if plan is not None:
            report_undecided(applied.report.undecided, plan, strict=self.options.strict)
            report_repeated(plan, keys, strict=self.options.strict)
        if applied.audit is not None:
            self._check_globs(applied.audit)
            remember_audit(applied.audit, self.owner())
            if self.options.strict:
                applied.audit.check()
                print(f"dsmp: {compiled_name(self.owner())} on {self.device.id}: {applied.audit}", file=sys.stderr)

    def owner(self) -> Any:
        """What the user compiled, None where that is not known any more."""
        return None if self.target is None else self.target()

    def _check_wire(self, gm: fx.GraphModule) -> None:
        """Say which of the wire formats asked for reach no collective of this graph, and who sends outside of it."""
        wire = self.options.wire
        if wire and not has_collectives(gm):
            text = f"wire has no effect: this graph has no collectives. {self.reducer}".rstrip()
            if self.reducer and self.options.strict:
                raise NoEffectError(f"{text}.")
            log.warning("%s", text)
        for glob, example in unmatched_globs(gm, wire):
            log.warning("wire %r matches no collective of this graph; one is %s", glob, example)

    def _check_globs(self, audit: Audit) -> None:
        """Say which of the names asked for match no product of this graph."""
        products = [e.key for e in audit if e.op in GEMM_CLASSES]
        for glob, name in self.options.implementations.items():
            if not any(fnmatchcase(key, glob) for key in products):
                log.warning("implementation %r for %r matches no product of this graph", name, glob)

    def _lowering(self) -> Lowering:
        """How products run: native kernels on the planned device alone; the interpreter needs tensors on a CPU."""
        options = self.options
        native = self.device.id == self.running.id and options.kernels == "auto"
        return Lowering(
            device=self.device,
            native=native,
            interpret=options.kernels == "interpret" and self.running.kind == "cpu",
            forced=options.implementations,
            without=options.without,
        )

    def _decisions(self, gm: fx.GraphModule, parameters: frozenset[fx.Node]) -> Mapping[str, Decision]:
        plan, rules = self.options.plan, self.rules
        strict = self.options.strict
        if plan is not None and not rules:
            return of_these_dtypes(gm, plan.by_key, plan.model.source, strict=strict)
        selection = select_default(gm, self.device, parameters=parameters, rules=rules)
        selection = replace(selection, decisions=with_wires(gm, selection.decisions, self.options.wire))
        made = {d.key: d for d in selection.decisions}
        for rule in rules_without_a_node(self.options.rules, made):
            log.warning("rule %r -> %s matches no node of this graph that can follow it", rule.match, rule.asked)
        if plan is None:
            target = self.owner()
            remember(assemble_plan(compiled_name(target), self.device, [selection], rules), target)
            return made
        # A replayed plan with extra rules: the rules win, everything else is as planned.
        ruled = {k: d for k, d in made.items() if d.reason.code == "rule"}
        return of_these_dtypes(gm, {**plan.by_key, **ruled}, plan.model.source, strict=strict)

    def uuid(self) -> str:
        """What Inductor's caches key a compiled graph by: this code, plan or rules, device and module paths.

        Two graphs that differ only in the modules their nodes belong to look alike to Inductor, but have other keys.
        """
        plan = self.options.plan
        text = json.dumps(
            [
                _source_hash(),
                plan.digest if plan is not None else None,
                [r.model_dump() for r in self.rules],
                repr(self.device),
                self.device.profile.model_dump_json(),
                sorted(self.device.vector_peaks.items()) + sorted(self.device.matrix_peaks.items()),
                self.device.measured.model_dump_json() if self.device.measured else None,
                self.running.id,
                self.options.strict,
                [self.options.kernels, sorted(self.options.implementations.items()), sorted(self.options.without)],
                [[glob, str(wire)] for glob, wire in self.options.wire.items()],
                self.operators,
                list(self.module_paths),
                sorted(self.parameter_indices),
                None if self.steps is None else self.steps.index,
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _source_hash() -> str:
    """Hash over all of dsmp's sources and data: another version of the code must not find this one's cached graphs."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    folders = ("errors", "hardware_db", "passes", "codegen", "compiler")
    files = {*root.glob("*.py"), *(file for folder in folders for file in (root / folder).rglob("*.*"))}
    for file in sorted(files):
        if file.suffix in (".py", ".toml", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
