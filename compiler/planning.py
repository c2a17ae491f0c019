"""`dsmp.plan`: from a model and example inputs to a precision plan, offline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..errors import InputSpecError, InvalidOptionError
from ..hardware_db.catalog import load_catalog
from ..hardware_db.cluster import cluster_of
from ..hardware_db.detect import resolve_hardware
from ..hardware_db.overlays import HardwareFile
from ..passes.plan import PrecisionPlan
from ..passes.program import Cost, DriftKind
from ..passes.rules import Rule, parse_rules
from ..passes.scores import Scores, load_scores
from ..passes.sharding import ShardingRule
from .batches import Loss, split_inputs
from .calibrated import Calibration, calibrate, check_measurable, plan_from_scores
from .capture import capture
from .input_spec import required_inputs
from .mesh_planning import MeshRequest, plan_for_mesh, without_gradients
from .pipeline import make_plan


def plan(
    model: nn.Module | Callable[..., Any] | ExportedProgram,
    inputs: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    hardware: str | None = None,
    hardware_file: HardwareFile = (),
    training: bool = True,
    rules: Mapping[str, str] | Iterable[Rule | Mapping[str, str]] | None = None,
    source: str | None = None,
    calibration: Any = None,
    loss: Loss | None = None,
    budget: float | str | None = None,
    memory: int | str | None = None,
    drift: DriftKind | None = None,
    cost: Cost = "roofline",
    tied: bool = True,
    draws: int = 2,
    scores: Scores | str | os.PathLike[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    node: str | None = None,
    zero: int | None = None,
    sequence: bool | None = None,
    wire: str | Mapping[str, str] | None = None,
    sharding_rules: Iterable[ShardingRule] = (),
) -> PrecisionPlan:
    """Plan the numeric format of every node of a model's forward and backward graph.

    `inputs` is a tensor, a tuple of positional inputs or a dict of keyword inputs, `kwargs` further keyword inputs;
    both may be on the meta device together with the model. `hardware` is a device name ("h800"), None or "auto" for the
    running device; `hardware_file` is a TOML file, or several, that add or correct devices. `training` plans the joint
    forward and backward graph, otherwise inference. `rules` maps globs over node keys to formats and is applied last.
    The model is left exactly as it was.

    With `calibration`, batches that the model is called with (`inputs` may then be left out), formats are chosen from
    what they measured to do: the fastest predicted time within `budget`, 0.005 or "0.5%" by default.

    * `loss(output, target)` returns a number; batches are then (inputs, target) pairs. Without one nothing needs
      labels: a model that returns its loss is trained on that, others on labels drawn from their own outputs.
    * `drift` is what the budget limits: "kl", the rise of the cross-entropy on the model's own distribution relative to
      its entropy (or to `loss`); "bernoulli", the same for independent probabilities; "l2", the relative root mean
      square error of the outputs. By default what the outputs call for. A training step is judged by its gradients:
      their mean relative squared error, an upper bound of the share of the step's progress that is lost.
    * `memory` limits the activations saved for the backward pass: bytes, "2GB", or "60%" of what is saved as written.
    * `cost` "roofline" predicts the device's time; "bits" counts multiplied bits, for models too small for a roofline.
    * `tied`: repeated blocks, q/k/v and gate/up take the same formats. `draws`: random cotangents per sample.
    * `scores`: what an earlier calibration measured (`dsmp.measure_scores`), in place of calibrating again; the plan is
      then not tried out.

    With a `mesh`, ranks by dimension ({"dp": 256, "tp": 8}, outermost first), the plan also says where every parameter
    lies, what every collective sends, and the time and memory of a rank; no process group and no device is needed.
    `inputs` are those of all ranks together.

    * `node`: the machine of several devices whose links are priced ("hgx-h800"); by default the one of `hardware`.
    * `zero`, `sequence`: the ZeRO stage, and whether sequences are divided over tp; by default what is fastest of what
      fits. `sharding_rules` place single parameters.
    * `wire`: what collectives send, one format or formats by mesh dimension; by default what loses nothing.
    * `scores` of the model, measured on one device, and `budget`: formats of nodes and of collectives are chosen
      together, as the fastest within the budget.

    Raises CaptureError, InputSpecError, UnknownHardwareError, HardwareDataError, RuleError, PlanHardwareError; with
    calibration CalibrationError, LossError, BudgetError, ScoresError; with a mesh ShardingPlanError, IndivisibleError,
    UnshardableError, ClusterError.

        plan = dsmp.plan(model, x, hardware="h800")
        plan.save("plan.json")
        compiled = torch.compile(model, backend="dsmp", options={"plan": "plan.json"})

        plan = dsmp.plan(model, hardware="h800", calibration=batches, budget="0.5%")
        cheaper = plan.solve(budget=0.01)

        plan = dsmp.plan(model, inputs, hardware="h800", mesh={"dp": 256, "tp": 8})
        sharded = dsmp.parallelize(model, mesh, plan, inputs=inputs)
    """
    device = resolve_hardware(hardware, hardware_file)
    checked = parse_rules(rules)
    settings = Calibration(
        batches=calibration, loss=loss, drift=drift, budget=budget, memory=memory, cost=cost, tied=tied, draws=draws
    )
    settings.check(scored=scores is not None)
    if scores is not None and not isinstance(scores, (Scores, str, os.PathLike)):
        raise InvalidOptionError("scores", scores, "Scores of dsmp.measure_scores, or the path of a file of them")
    args, named = split_inputs(inputs, kwargs)
    if calibration is not None:
        settings = settings.read()
        if not args and not named:
            args, named = settings.batches[0].args, settings.batches[0].kwargs
    if calibration is not None and isinstance(model, ExportedProgram):
        raise InvalidOptionError("calibration", "an exported program", "a module: calibrate before exporting it")
    if not args and not named:
        _check_needs_none(model)
    if mesh is not None:
        if calibration is not None or memory is not None or cost != "roofline" or not tied:
            allowed = "with scores that were measured on one device (dsmp.measure_scores) and a budget, no calibration"
            raise InvalidOptionError("mesh", dict(mesh), allowed)
        if not isinstance(model, nn.Module):
            raise InvalidOptionError("mesh", dict(mesh), f"with a module, not a {type(model).__name__}")
        request = MeshRequest(
            mesh=mesh, zero=zero, sequence=sequence, sharding_rules=tuple(sharding_rules), wire=wire,
            scores=scores if scores is None or isinstance(scores, Scores) else load_scores(scores),
            budget=settings.amount,
        )  # fmt: skip
        cluster = cluster_of(load_catalog(hardware_file), device.id, node)
        name = source or type(model).__name__
        shown = model if training else without_gradients(model)
        return plan_for_mesh(shown, args, named, device, cluster, request, rules=checked, source=name)
    stray = {"node": node, "zero": zero, "sequence": sequence, "wire": wire, "sharding_rules": tuple(sharding_rules)}
    for option, value in stray.items():
        if value not in (None, ()):
            raise InvalidOptionError(option, value, "with a mesh")
    with torch.inference_mode(False):
        captured = capture(model, args, named, training=training, source=source)
        if calibration is not None:
            assert not isinstance(model, ExportedProgram)
            return calibrate(model, captured, device, settings, training=training, rules=checked).plan
    if scores is not None:
        known = scores if isinstance(scores, Scores) else load_scores(scores)
        return plan_from_scores(captured, device, known, settings, rules=checked)
    return make_plan(captured, device, rules=checked)


def _check_needs_none(model: nn.Module | Callable[..., Any] | ExportedProgram) -> None:
    """Raise InputSpecError for a model that cannot be called without inputs."""
    if isinstance(model, ExportedProgram):
        return
    needed = required_inputs(model.forward if isinstance(model, nn.Module) else model)
    if needed:
        name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "the model")
        raise InputSpecError(
            f"{name} needs inputs ({', '.join(needed)}) to be captured with, and none were given: "
            "dsmp.plan(model, inputs, ...). Only calibration batches make them superfluous, scores do not."
        )


def measure_scores(
    model: nn.Module | Callable[..., Any],
    calibration: Any,
    *,
    hardware: str | None = None,
    hardware_file: HardwareFile = (),
    training: bool = True,
    loss: Loss | None = None,
    drift: DriftKind | None = None,
    draws: int = 2,
    source: str | None = None,
) -> Scores:
    """Measure how sensitive a model's nodes are, without a plan: scores to save, and to plan from for any budget.

    Arguments are those of `plan`; every 8-bit format of `hardware` is measured, the rest estimated. Raises
    CalibrationError, LossError, CaptureError, UnknownHardwareError.
    """
    device = resolve_hardware(hardware, hardware_file)
    settings = Calibration(batches=calibration, loss=loss, drift=drift, draws=draws)
    settings.check(scored=False)
    settings = settings.read()
    first = settings.batches[0]
    with torch.inference_mode(False):
        captured = capture(model, first.args, first.kwargs, training=training, source=source)
        check_measurable(captured, training)
        measurement = settings.measure(
            model, [device], training=training, source=captured.source, captured=captured, whole=True
        )
    return measurement.scores
