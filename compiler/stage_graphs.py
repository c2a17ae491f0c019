"""Cut an exported model into modules, one per stage, that keep the names of its modules and parameters.

Every stage takes (values that the stage before sends, inputs of the model by name) and returns what the next stage
reads, the last one the loss. What depends on no parameter is computed in every stage that reads it, so that only values
with a gradient are sent. Calls of one module lie in a part of that module's own path, which Dynamo records, so that
nodes of a stage have the keys that they have in the whole model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import TreeSpec, tree_map_only, tree_unflatten

from ..errors import CaptureError, PipelineError, StageSplitError
from ..passes.graph import output_node, root, tensors_of
from ..passes.keys import plain_path
from ..passes.layers import find_layers
from .capture import failure_text
from .identity import PART
from .joint_capture import input_names

Loss = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An exported model as one flat graph: its program, and the names of its tensor inputs in order."""

    program: ExportedProgram
    gm: fx.GraphModule
    inputs: tuple[str, ...]
    out_spec: TreeSpec

    @property
    def returns_number(self) -> bool:
        """Whether the model returns one tensor of one value."""
        results = _flat(output_node(self.gm).args[0])
        values = [t for n in results if isinstance(n, fx.Node) for t in tensors_of(n)]
        return len(results) == len(values) == 1 and values[0].numel() == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGraph:
    """A stage's module, and the (fake) values that it gets from the stage before and sends to the next."""

    module: fx.GraphModule
    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]


def export_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exported:
    """Export a model on inputs of one microbatch. Raises CaptureError when torch.export cannot."""
    try:
        program = torch.export.export(model, tuple(args), dict(kwargs))
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be exported for a pipeline: {failure_text(error)}. Its forward must be "
            "one graph (torch.export.export(model, args) must work); otherwise cut it by hand with "
            "torch.distributed.pipelining."
        ) from error
    gm: Any = program.module(check_guards=False)
    names = input_names(model, args, kwargs)
    found = [(n, name) for n, name in zip(_placeholders(gm), names, strict=True) if tensors_of(n)]
    return Exported(
        program=program, gm=gm, inputs=tuple(name for _, name in found), out_spec=program.call_spec.out_spec
    )


def cut_graph(
    exported: Exported,
    stage_of: Mapping[str, int],
    stages: int,
    wanted: Sequence[int],
    *,
    wire: torch.dtype | None,
    device: torch.device,
    loss: Loss | None,
) -> dict[int, StageGraph]:
    """The modules of the `wanted` stages, from the stage of every layer; they hold copies of its parameters.

    With `wire`, floating-point values are cast to it before they are sent and back after they were received, and so
    their gradients are. `loss` is called with the model's output and `target`; without one the output is the loss.
    Raises StageSplitError where a parameter is used in several stages or a value that has no gradient would be sent.
    """
    cut = _Cut(exported, stage_of, stages)
    return {s: _Stage(cut, s, wire, device, loss).build() for s in wanted}


class _Cut:
    """Which nodes of a flat graph each stage computes, and which values cross."""

    def __init__(self, exported: Exported, stage_of: Mapping[str, int], stages: int) -> None:
        self.exported, self.stages = exported, stages
        self.gm = exported.gm
        nodes = [n for n in self.gm.graph.nodes if n.op == "call_function"]
        self.state = {n: _state(self.gm, n) for n in self.gm.graph.nodes if n.op == "get_attr"}
        parameters = {n for n, value in self.state.items() if isinstance(value, nn.Parameter)}
        found = find_layers(nodes, _path, parameters, stage_of.get)
        self.of = found.of
        self.results = _flat(output_node(self.gm).args[0])
        self._check_ties(parameters)
        self.kept = [self._wanted(s) for s in range(stages)]
        self.crossing = [self._crossing(s) for s in range(stages - 1)]

    def _check_ties(self, parameters: set[fx.Node]) -> None:
        stages: dict[int, set[int]] = {}
        names: dict[int, list[str]] = {}
        for node in parameters:
            ident = id(self.state[node])
            stages.setdefault(ident, set()).update(self.of[u] for u in node.users if u in self.of)
            names.setdefault(ident, []).append(str(node.target))
        for ident, used in stages.items():
            if len(used) > 1:
                raise StageSplitError(
                    f"parameter {' = '.join(sorted(names[ident]))} is used in stages "
                    f"{', '.join(map(str, sorted(used)))}: each would hold and train a copy of its own. Untie it, or "
                    "keep its modules in one stage."
                )

    def _wanted(self, stage: int) -> set[fx.Node]:
        """What a stage computes: its own values and writes, and what it needs that belongs to none."""
        own = [n for n, s in self.of.items() if s == stage]
        found: set[fx.Node] = set()
        todo = [n for n in own if n.users or _writes(n)]
        if stage == self.stages - 1:
            todo += [n for n in self.results if isinstance(n, fx.Node)]
        while todo:
            node = todo.pop()
            if node in found or self.of.get(node, stage) != stage:
                continue
            found.add(node)
            todo += node.all_input_nodes
        return found

    def _crossing(self, stage: int) -> list[fx.Node]:
        """Values of this stage and earlier ones that later ones read, in graph order."""
        later = set().union(*self.kept[stage + 1 :])
        outside = {n for node in later for n in node.all_input_nodes}
        outside |= {n for n in self.results if isinstance(n, fx.Node)}
        found = [n for n, s in self.of.items() if s <= stage and n in outside]
        for node in found:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or not value.is_floating_point():
                what = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
                raise StageSplitError(
                    f"between stages {stage} and {stage + 1} the value {node.name} ({what}, of "
                    f"{_path(node) or 'the model'}) would be sent, and only floating-point tensors can be. Cut at "
                    "another layer."
                )
        return found


class _Stage:
    """Builds the module of one stage."""

    def __init__(
        self, cut: _Cut, stage: int, wire: torch.dtype | None, device: torch.device, loss: Loss | None
    ) -> None:
        self.cut, self.stage, self.wire, self.device, self.loss = cut, stage, wire, device, loss
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.parts = 0
        self.copies: dict[int, Any] = {}

    def build(self) -> StageGraph:
        received, sent = (self._crossing(self.stage - 1), self._crossing(self.stage))
        if self.stage:
            for i, node in enumerate(received):
                self.new[node] = self._cast(self._placeholder(f"received_{i}", node), node.meta["val"].dtype)
        else:
            self.graph.placeholder("first")
        for node, name in zip(self._tensor_inputs(), self.cut.exported.inputs, strict=True):
            self.new[node] = self._placeholder(argument_name(name), node)
        target = self.graph.placeholder(TARGET, default_value=None)
        self._place([n for n in self.cut.gm.graph.nodes if n in self.cut.kept[self.stage]])
        if self.stage + 1 < self.cut.stages:
            self.graph.output(tuple(self._sendable(n) for n in sent))
        else:
            results = [self.new[n] if isinstance(n, fx.Node) else n for n in self.cut.results]
            self.root.add_module(LOSS, _Loss(self.loss, self.cut.exported.out_spec))
            self.graph.output(self.graph.call_module(LOSS, (results, target)))
        module = fx.GraphModule(self.root, self.graph)
        return StageGraph(module=module, received=self._wired(received), sent=self._wired(sent))

    def _crossing(self, border: int) -> list[fx.Node]:
        return self.cut.crossing[border] if 0 <= border < self.cut.stages - 1 else []

    def _tensor_inputs(self) -> list[fx.Node]:
        return [n for n in _placeholders(self.cut.gm) if tensors_of(n)]

    def _wired(self, nodes: Sequence[fx.Node]) -> tuple[Tensor, ...]:
        values = [n.meta["val"] for n in nodes]
        return tuple(torch.empty(v.shape, dtype=self.wire or v.dtype, device="meta") for v in values)

    def _placeholder(self, name: str, node: fx.Node) -> fx.Node:
        found = self.graph.placeholder(name)
        found.meta["val"] = node.meta["val"]
        return found

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if self.wire is None:
            return node
        return self.graph.call_function(torch.ops.aten.to.dtype, (node, dtype))

    def _sendable(self, node: fx.Node) -> fx.Node:
        """A value as it is sent: in the wire's format, contiguous, and neither a view nor what was received."""
        found = self._cast(self.new[node], self.wire or node.meta["val"].dtype)
        own = self.cut.of[node] == self.stage and root(node) is node and node.meta["val"].is_contiguous()
        if own:
            return found
        return self.graph.call_function(
            torch.ops.aten.clone.default, (found,), {"memory_format": torch.contiguous_format}
        )

    def _place(self, nodes: Sequence[fx.Node]) -> None:
        """Put nodes in: calls that follow each other in one module as a part of that module."""
        run: list[fx.Node] = []
        for node in nodes:
            if node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                if run and _path(run[0]) != _path(node):
                    self._part(run)
                    run = []
                run.append(node)
        if run:
            self._part(run)

    def _attribute(self, node: fx.Node) -> None:
        *path, last = str(node.target).split(".")
        value = self._copy(self.cut.state[node])
        owner = _module_at(self.root, path)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        elif isinstance(value, Tensor):
            persistent = str(node.target) in self.cut.exported.program.state_dict
            owner.register_buffer(last, value, persistent=persistent)
        else:
            raise PipelineError(f"the model holds {node.target}, a {type(value).__name__} that a stage cannot hold.")
        self.new[node] = self.graph.get_attr(str(node.target))

    def _copy(self, value: Any) -> Any:
        """A tensor of the model's state of the stage's own, on its device; what is on the meta device stays there."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.copies:
            copy = value.detach().clone()
            copy = copy if copy.is_meta else copy.to(self.device)
            self.copies[id(value)] = (
                nn.Parameter(copy, value.requires_grad) if isinstance(value, nn.Parameter) else copy
            )
        return self.copies[id(value)]

    def _part(self, run: Sequence[fx.Node]) -> None:
        """Calls of one module as a module of their own, which takes parameters as arguments."""
        inside = set(run)
        graph = fx.Graph()
        here: dict[fx.Node, fx.Node] = {}
        read = dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside)
        for node in read:
            here[node] = graph.placeholder(node.name)
        for node in run:
            here[node] = graph.node_copy(node, here.__getitem__)
            here[node].args = tree_map_only(torch.device, self._device, here[node].args)
            here[node].kwargs = tree_map_only(torch.device, self._device, here[node].kwargs)
        results = [n for n in run if n in self.cut.results or any(u not in inside for u in n.users)]
        graph.output(tuple(here[n] for n in results))
        path = _path(run[0]).split(".") if _path(run[0]) else []
        name = f"{PART}{self.parts}"
        self.parts += 1
        _module_at(self.root, path).add_module(name, fx.GraphModule(nn.Module(), graph))
        call = self.graph.call_module(".".join([*path, name]), tuple(self.new[n] for n in read))
        for i, node in enumerate(results):
            self.new[node] = self.graph.call_function(operator.getitem, (call, i))

    def _device(self, device: torch.device) -> torch.device:
        return self.device if device.type in ("meta", self.device.type) else device


LOSS = "_dsmp_loss"
TARGET = "loss_target"
"""The argument of a stage that the loss function gets beside the output of the model."""


class _Loss(nn.Module):
    """The loss of one microbatch, as float[1]: what the schedule can put together with those of the others."""

    def __init__(self, loss: Loss | None, spec: TreeSpec) -> None:
        super().__init__()
        self.loss, self.spec = loss, spec

    def forward(self, results: list[Any], target: Any) -> Tensor:
        output = tree_unflatten(results, self.spec)
        found: Tensor = output if self.loss is None else self.loss(output, target)
        return found.reshape(1)


def argument_name(name: str) -> str:
    """An input's name as an argument of a stage."""
    return "input_" + "".join(c if c.isalnum() else "_" for c in name)


def _module_at(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at a path, made where there is none."""
    for name in path:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


def _path(node: fx.Node) -> str:
    """The module path of a node of an exported graph."""
    stack = node.meta.get("nn_module_stack")
    return plain_path(list(stack.values())[-1][0]) if stack else ""


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def _state(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The parameter, buffer or constant of a get_attr node."""
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]
