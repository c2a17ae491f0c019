"""The joint graph of a whole module with its calling convention, for the sharder.

`torch.compile` fixes the shapes of a graph's inputs before a backend sees it, so parameters cannot be cut into shards
there. Here AOTAutograd exports the graph with descriptors that say which placeholder is which parameter, buffer or
input, and which output is whose gradient. The module runs on fake tensors: parameters may be on the meta device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, ParamAOTInput, PlainAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_map_only

from ..errors import CaptureError
from ..passes.graph import output_node, placeholders
from ..passes.keys import ModuleNames
from ..passes.loss_decomp import loss_decompositions
from ..passes.sharding import ShardingPlan
from .capture import failure_text, key_graph
from .tracing import explicit_precision

log = logging.getLogger("dsmp")


@dataclass(frozen=True, kw_only=True, slots=True)
class JointCapture:
    """A joint graph (inference graph where nothing needs a gradient) with the loss decomposed, keyed as plans
    know its nodes.

    `names` maps placeholders of plain inputs to the argument they come from; `in_spec` flattens ((args), {kwargs}) in
    the order of `PlainAOTInput.idx`, `out_spec` rebuilds what the module returns. `training` is the module's mode.
    """

    gm: fx.GraphModule
    names: Mapping[str, str]
    in_spec: TreeSpec
    out_spec: TreeSpec
    training: bool = True


def capture_joint(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, device: str = "cpu"
) -> JointCapture:
    """Export the joint graph of one call, on fake tensors of a device type. Inputs that require a gradient get one.

    Raises CaptureError when the model cannot be run or traced so.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # tensors that are neither parameters nor buffers

    def fake(x: Tensor) -> Tensor:
        plain = (
            x.detach()
            if x.device.type == "meta"
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        )
        return FakeTensor(mode, plain, torch.device(device))

    def fake_input(x: Tensor) -> Tensor:
        return fake(x).requires_grad_(x.requires_grad)

    kwargs = dict(kwargs or {})
    module = _fake_copy(model, fake)
    _keep_plain_outputs(module)
    inputs = tree_map_only(Tensor, fake_input, (tuple(args), kwargs))
    try:
        with contextlib.ExitStack() as stack, explicit_precision(), _module_paths(module), _as_compiling():
            exported = aot_export_joint_with_descriptors(
                stack, module, inputs[0], inputs[1], decompositions=dict(loss_decompositions())
            )
    except Exception as error:
        raise CaptureError(f"{type(model).__name__} cannot be traced for sharding: {failure_text(error)}.") from error
    gm = exported.graph_module
    _name_ties(gm, model)
    parameters = [n for n in placeholders(gm) if isinstance(n.meta["desc"], ParamAOTInput)]
    key_graph(gm, ModuleNames(), frozenset(parameters))
    flat = input_names(model, args, kwargs)
    names = {
        n.name: flat[n.meta["desc"].idx] for n in placeholders(gm) if isinstance(n.meta.get("desc"), PlainAOTInput)
    }
    spec = tree_flatten(inputs)[1]
    return JointCapture(gm=gm, names=names, in_spec=spec, out_spec=exported.out_spec, training=model.training)


def check_names(capture: JointCapture, plan: ShardingPlan) -> None:
    """Raise ShardingPlanError when a rule of a plan names no parameter, buffer or input of the captured model."""
    described: list[Any] = [n.meta.get("desc") for n in placeholders(capture.gm)]
    plan.check_names([d.target for d in described if hasattr(d, "target")], capture.names.values())


def _name_ties(gm: fx.GraphModule, model: nn.Module) -> None:
    """Let a parameter that several modules own have one name, so that it cannot be placed in two ways."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    name_of = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}

    def renamed(desc: Any) -> Any:
        if isinstance(desc, ParamAOTInput):
            return ParamAOTInput(name_of.get(desc.target, desc.target))
        return GradAOTOutput(renamed(desc.grad_of)) if isinstance(desc, GradAOTOutput) else desc

    for node in placeholders(gm):
        node.meta["desc"] = renamed(node.meta.get("desc"))
    output_node(gm).meta["desc"] = [renamed(d) for d in output_node(gm).meta["desc"]]


def input_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every leaf of the arguments: the parameter of `forward` that takes it, and the path inside it."""
    try:
        positional = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        positional = []
    found = []
    leaves: Any = tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    for path, _ in leaves:
        which, key = path[0].idx, path[1]
        name = str(key.key) if which else positional[key.idx] if key.idx < len(positional) else str(key.idx)
        found.append(name + keystr(path[2:]))
    return found


def _fake_copy(model: nn.Module, fake: Any) -> nn.Module:
    """A copy of a module in which every parameter and buffer is fake."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake(buffer)
    return copy.deepcopy(model, memo)


def _keep_plain_outputs(module: nn.Module) -> None:
    """Let a module keep no cache of keys and values (transformers' models make one unless their config says no), and
    return None for anything else that is neither a tensor nor a plain value: these are state between calls, and no
    outputs of a graph."""
    for part in module.modules():
        if getattr(getattr(part, "config", None), "use_cache", False):
            part.config.use_cache = False  # type: ignore[union-attr]
    forward, kept = module.forward, (Tensor, int, float, bool, str, type(None))

    def plain(value: Any) -> Any:
        if isinstance(value, kept):
            return value
        log.warning("a sharded %s returns no %s: it gives None", type(module).__name__, type(value).__name__)
        return None

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return tree_map(plain, forward(*args, **kwargs))

    module.forward = run


@contextlib.contextmanager
def _as_compiling() -> Iterator[None]:
    """Let the model see that it is traced (`torch.compiler.is_compiling()`), as torch.export does: libraries then leave
    out checks of values, which fake tensors do not have."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _module_paths(model: nn.Module) -> Iterator[None]:
    """Let nodes that are traced while a module is called carry its path, as they do under torch.compile."""
    current = fx.traceback

    def enter(path: str) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            stack = dict(current.current_meta.get("nn_module_stack", {}))
            stack[str(id(module))] = (path, type(module))
            current.current_meta["nn_module_stack"] = stack

        return hook

    def leave(module: nn.Module, *_: Any) -> None:
        stack = dict(current.current_meta.get("nn_module_stack", {}))
        stack.pop(str(id(module)), None)
        current.current_meta["nn_module_stack"] = stack

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with current.preserve_node_meta():
            yield
    finally:
        for handle in handles:
            handle.remove()
