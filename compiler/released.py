"""`dsmp.release_weights`: a planned model that keeps its narrow weights packed, and no fp32 copy of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from ..codegen.cpu.extension import cpu_operators
from ..codegen.cpu.held_modules import HeldConv2d, HeldLinear
from ..codegen.cpu.held_weights import DYNAMIC, STATIC
from ..errors import PlanMismatchError, ReleaseError
from ..hardware_db.formats import is_dynamic, is_static, packs_weight
from ..passes.keys import FPROP, NodeKey
from ..passes.plan import Decision, PrecisionPlan, load_plan
from ..passes.static_steps import steps_of
from .console import bytes_text
from .identity import module_names

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseReport:
    """What became of a model's weights.

    released: the format of each layer that holds its weight packed now, such as "int8 wide/row". `left`: why each of
    the other linears and convolutions of the plan keeps its weight. Bytes are of all parameters and buffers, each
    storage once.
    """

    released: Mapping[str, str]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        shrunk = f"{bytes_text(self.bytes_before)} -> {bytes_text(self.bytes_after)}"
        head = f"{len(self.released)} layers hold packed weights: {shrunk}"
        return "\n".join([head, *(f"  left {name or '(itself)'}: {why}" for name, why in self.left.items())])


@dataclass(slots=True)
class _Layer:
    """A module of the model: where it stands, and what the plan has its products do."""

    module: nn.Module
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


def release_weights(model: nn.Module, plan: PrecisionPlan | str | os.PathLike[str]) -> ReleaseReport:
    """Replace, in place, each `nn.Linear` and `nn.Conv2d` whose weight the plan stores narrow by a layer that holds the
    packed weight alone; of others' shares in a weight, hooks and subclasses it keeps off, and says so.

    The model then computes what `torch.compile(model, backend="dsmp", options={"plan": plan})` computed before: under
    that same call with all fusions, and eagerly or under other backends layer by layer. Its state holds the packed
    tensors, and loads into a model that was released with the same plan (as does a state with fp32 weights, which are
    packed while loading). Parameters stop asking for gradients: released models cannot be trained. References to the
    old weights elsewhere, as in an optimizer, keep these alive.

    Raises ReleaseError for a plan of a training step, a model in training mode or that is a single layer itself, and
    without the C++ operators; PlanMismatchError where the model lacks planned layers.
    """
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    plan = plan if isinstance(plan, PrecisionPlan) else load_plan(plan)
    layers = _layers(model, plan)
    _check(model, plan)
    before = _bytes(model)
    users = _users(model)
    released, left = {}, {}
    for name, layer in layers.items():
        reason = _why_left(layer, users)
        if not reason:
            try:
                fresh = _held(layer)
            except ValueError as error:
                reason = f"its weight cannot be packed: {error}"
        if reason:
            left[name] = reason
            continue
        for parent, own in layer.places:
            setattr(parent, own, fresh)
        first = layer.decisions[0]
        released[name] = f"{first.compute} {first.recipe}"
        layer.module = fresh
    if released:
        model.requires_grad_(False)
    return ReleaseReport(released=released, left=left, bytes_before=before, bytes_after=_bytes(model))


def _check(model: nn.Module, plan: PrecisionPlan) -> None:
    if any(d.phase != FPROP for d in plan):
        raise ReleaseError(
            "this plan is of a training step, which needs the weights themselves. Release with a plan for inference: "
            "dsmp.plan(..., training=False)."
        )
    if any(m.training for m in model.modules()):
        raise ReleaseError("the model is in training mode, and weights are released for inference: call model.eval().")
    verdict = cpu_operators()
    if not verdict.ok:
        raise ReleaseError(f"packed weights need dsmp's C++ operators, and {verdict.reason}")


def _layers(model: nn.Module, plan: PrecisionPlan) -> dict[str, _Layer]:
    """The modules of the plan's linears and convolutions, in the plan's order, by name."""
    decisions: defaultdict[str, list[Decision]] = defaultdict(list)
    for decision in plan:
        if decision.op in ("linear", "conv"):
            decisions[NodeKey.parse(decision.key).fqn].append(decision)
    places: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for own, child in parent._modules.items():
            if child is not None:
                places[id(child)].append((parent, own))
    names = module_names(model)
    modules = {names[str(id(m))]: m for m in model.modules()}
    missing = [name for name in decisions if name not in modules]
    if missing:
        raise PlanMismatchError(
            f"the model has no {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}, which the plan for "
            f"{plan.model.source} has. Give the model that the plan was made for, or its plan."
        )
    return {n: _Layer(modules[n], places[id(modules[n])], found) for n, found in decisions.items()}


def _users(model: nn.Module) -> Mapping[int, Sequence[str]]:
    """The names of all parameters and buffers by the address of their storage."""
    users: defaultdict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                users[tensor.untyped_storage()._cdata].append(f"{path}.{name}" if path else name)
    return users


def _why_left(layer: _Layer, users: Mapping[int, Sequence[str]]) -> str:
    """Why a layer keeps its weight, "" if it need not."""
    module, decisions = layer.module, layer.decisions
    narrow = [d for d in decisions if packs_weight(d.recipe)]
    if not narrow:
        return f"planned in {decisions[0].compute}, with no narrow weight"
    kinds = {(d.compute, d.recipe, d.static_range if is_static(d.recipe) else None) for d in decisions}
    if len(kinds) > 1:
        return "its products are planned in several ways"
    if isinstance(module, (HeldLinear, HeldConv2d)):
        return "it holds a packed weight already"
    if type(module) not in (nn.Linear, nn.Conv2d):
        return f"it is {type(module).__name__}, neither nn.Linear nor nn.Conv2d, and may read its weight in other ways"
    assert isinstance(module, (nn.Linear, nn.Conv2d))
    if not layer.places:
        return "it is the model itself, which cannot be replaced in place; put it into a module"
    if isinstance(module, nn.Conv2d) and (isinstance(module.padding, str) or module.padding_mode != "zeros"):
        return f"it is padded in mode {module.padding!r}, {module.padding_mode!r}; numbers of zeros alone are done"
    weight = module.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return f"its weight is {weight.dtype} on {weight.device}, not fp32 on a CPU"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    if own := sorted(_added(module) - _marks(module).keys()):
        return f"it has {', '.join(own[:5])} of its own, which would be lost"
    sharing = users[weight.untyped_storage()._cdata]
    if len(sharing) > 1:
        return f"its weight is shared: {', '.join(sharing)}"
    return ""


def _added(module: nn.Module) -> set[str]:
    """What was put onto a layer, by name."""
    plain = nn.Conv2d(1, 1, 1, device="meta") if isinstance(module, nn.Conv2d) else nn.Linear(1, 1, device="meta")
    return _own(module) - _own(plain) - {"_compiled_call_impl"}


def _marks(module: nn.Module) -> dict[str, Any]:
    """What of that says something about the layer and does nothing, such as transformers' `_is_hf_initialized`."""
    values = {name: module.__dict__[name] for name in _added(module) & module.__dict__.keys()}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, type(None)))}


def _own(module: nn.Module) -> set[str]:
    """What a module holds, by name: attributes, parameters, buffers and modules."""
    return {*module.__dict__, *module._parameters, *module._buffers, *module._modules}


def _held(layer: _Layer) -> HeldLinear | HeldConv2d:
    fresh = _packed(layer)
    fresh.__dict__.update({k: v for k, v in _marks(layer.module).items() if k not in fresh.__dict__})
    return fresh


def _packed(layer: _Layer) -> HeldLinear | HeldConv2d:
    decision, module = layer.decisions[0], layer.module
    steps = steps_of(*decision.static_range) if decision.static_range is not None else None
    if isinstance(module, nn.Conv2d):
        assert steps is not None  # convolutions have no other narrow weights
        return HeldConv2d(module, steps)
    assert isinstance(module, nn.Linear)
    in_steps = STATIC if is_static(decision.recipe) else DYNAMIC if is_dynamic(decision.recipe) else decision.compute
    return HeldLinear(module, in_steps, steps)


def _bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
