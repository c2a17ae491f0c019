"""`dsmp.plan`: from a model and example inputs to a precision plan, offline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from ..hardware_db.detect import resolve_hardware
from ..hardware_db.overlays import HardwareFile
from ..passes.plan import PrecisionPlan, Rule, parse_rules
from .capture import capture
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
) -> PrecisionPlan:
    """Plan the numeric format of every node of a model's forward and backward graph.

    `inputs` is a tensor, a tuple of positional inputs or a dict of keyword inputs, `kwargs` further keyword inputs;
    both may be on the meta device together with the model. `hardware` is a device name ("h800"), None or "auto" for the
    running device; `hardware_file` is a TOML file, or several, that add or correct devices. `training` plans the joint
    forward and backward graph, otherwise inference. `rules` maps globs over node keys to formats and is applied last.
    The model is left exactly as it was.

    Raises CaptureError, UnknownHardwareError, HardwareDataError, RuleError, PlanHardwareError.

        plan = dsmp.plan(model, x, hardware="h800")
        plan.save("plan.json")
        compiled = torch.compile(model, backend="dsmp", options={"plan": "plan.json"})
    """
    device = resolve_hardware(hardware, hardware_file)
    checked = parse_rules(rules)
    args, named = split_inputs(inputs, kwargs)
    captured = capture(model, args, named, training=training, source=source)
    return make_plan(captured, device, rules=checked)


def split_inputs(inputs: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs from a tensor, a sequence or a mapping."""
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(kwargs or {})}
    if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
        return tuple(inputs), dict(kwargs or {})
    return (inputs,), dict(kwargs or {})
