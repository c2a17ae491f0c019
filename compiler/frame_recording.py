"""Record the call of a frame that Dynamo is compiling right now: its graph, and the first batch as values for it.

Nothing of the user's is run. The frame is traced once more, by itself, and what its placeholders stand for is read off
their descriptors; a training step is judged on the frame's own outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CalibrationError
from ..passes.differentiable import run
from ..passes.graph import concrete, output_node, placeholders
from ..passes.keys import ModuleNames
from .batches import Batch
from .capture import CapturedGraph, key_graph
from .objective import LOSS, Manner, Objective
from .recording import RecordedCall
from .tracing import PARTITION_ARGUMENTS, parameter_indices, trace, weight_nodes


def record_frame(
    gm: fx.GraphModule, example_inputs: Sequence[Any], names: ModuleNames
) -> tuple[CapturedGraph, RecordedCall]:
    """The keyed graph of a Dynamo graph, and what to measure it on: itself with the first batch as inputs or, where a
    gradient is wanted, the joint graph of a training step on the frame's own loss, or on labels drawn from its outputs.

    Raises CalibrationError when the example inputs hold no values, or are not what the graph's placeholders stand for.
    """
    inputs = [x if isinstance(x, Tensor) else concrete(x) for x in example_inputs]
    if any(isinstance(x, Tensor) and (x.is_meta or isinstance(x, torch._subclasses.FakeTensor)) for x in inputs):
        raise CalibrationError(
            "a budget needs values to measure, and this model is compiled with meta or fake tensors. Give a plan "
            "instead, or compile with real ones."
        )
    with _disable_current_modes():
        graph, values = _traced(gm, inputs)
        frame = measured = _keyed(graph, inputs, names)
        outputs = len(_flat_outputs(graph))
        if frame.joint:
            empty = [
                torch.zeros(n.meta["val"].shape) if v is None else v
                for n, v in zip(placeholders(graph), values, strict=True)
            ]
            own = _own_outputs(graph)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                found = run(graph, empty, order=0)
            objective = Objective()
            labels = objective.labels([found[i] for i in own.values()], Batch(args=(), kwargs={}))
            drawn = labels[1] or []
            inputs += drawn
            graph, values = _traced(_judged(gm, objective, labels[0], len(drawn), list(own)), inputs)
            values = [_tangent(n) if v is None else v for n, v in zip(placeholders(graph), values, strict=True)]
            measured, outputs = _keyed(graph, inputs, names), graph.meta[PARTITION_ARGUMENTS]["num_fwd_outputs"]
    varying = frozenset(i for i, x in enumerate(values) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))
    return frame, RecordedCall(graph=measured, inputs=tuple(values), varying=varying, forward_outputs=outputs)


def _keyed(graph: fx.GraphModule, inputs: Sequence[Any], names: ModuleNames) -> CapturedGraph:
    parameters = weight_nodes(graph, parameter_indices(inputs))
    return CapturedGraph(gm=graph, parameters=parameters, keys=key_graph(graph, names, parameters))


def bind_to_weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Have Dynamo compile again for other weights: what was measured on one model is not true of the next one of its
    class, whose frames look alike. Called while the frame is being compiled."""
    context = torch._guards.TracingContext.try_get()
    for node, value in zip(placeholders(gm), example_inputs, strict=False):
        source = getattr(node, "_dynamo_source", None)
        if context is not None and source is not None and isinstance(value, nn.Parameter):
            context.guards_context.dynamo_guards.add(source.make_guard(GuardBuilder.ID_MATCH))
            return


def _traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The ATen graph and what its placeholders stand for, None for tangents."""
    # Sizes are those of this batch: symbols of the compilation that is going on would gather guards of this one.
    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
        graph = trace(_with_numbers(_untraced(gm), inputs), inputs)
    return graph, [_value(node, position, gm, inputs) for position, node in enumerate(placeholders(graph))]


def _with_numbers(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph with the numbers that it takes out of inputs: under dynamic=True a float comes as a tensor."""
    values = dict(zip(placeholders(gm), inputs, strict=True))
    for node in list(gm.graph.nodes):
        if node.op == "call_method" and node.target == "item" and isinstance(values.get(node.args[0]), Tensor):
            node.replace_all_uses_with(values[node.args[0]].item())
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _own_outputs(graph: fx.GraphModule) -> dict[int, int]:
    """Where a joint graph computes the Dynamo graph's outputs, by their positions there: it returns the new values of
    inputs that are written to as well, and what outputs are views of."""
    count = graph.meta[PARTITION_ARGUMENTS]["num_fwd_outputs"]
    descriptors = output_node(graph).meta.get("desc") or [None] * count
    return {
        getattr(descriptor, "idx", position): position
        for position, descriptor in enumerate(descriptors[:count])
        if descriptor is None or type(descriptor).__name__ == "PlainAOTOutput"
    }


def _judged(
    gm: fx.GraphModule, objective: Objective, how: Manner, drawn: int, judged_outputs: Sequence[int]
) -> fx.GraphModule:
    """The Dynamo graph with the objective of some of its outputs in their place; drawn labels are further inputs."""
    judged = _untraced(gm)
    output = output_node(judged)
    labels: list[fx.Node] = []
    for number in range(drawn):
        with judged.graph.inserting_after(placeholders(judged)[-1]):
            labels.append(judged.graph.placeholder(f"dsmp_labels_{number}"))

    def judge(outputs: Sequence[Any], labels: Any) -> Tensor:
        return objective.value([outputs[i] for i in judged_outputs], (how, labels))

    with judged.graph.inserting_before(output):
        value = judged.graph.call_function(judge, (output.args[0], labels))
    value.meta["nn_module_stack"] = {LOSS: (LOSS, torch.nn.Module)}
    output.args = ((value,),)
    judged.recompile()
    return judged


def _untraced(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph without the values it was traced with, which belong to the compilation that is going on."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for node in copy.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k not in ("example_value", "val")}
    return copy


def _tangent(node: fx.Node) -> Tensor:
    """The gradient that a step is started with: 1 of what is judged, 0 of the new values of inputs."""
    value = node.meta["val"]
    written = type(getattr(node.meta.get("desc"), "output", None)).__name__ == "InputMutationAOTOutput"
    return torch.zeros(value.shape, dtype=value.dtype) if written else torch.ones((), dtype=value.dtype)


def _value(node: fx.Node, position: int, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """What a placeholder stands for; None for a tangent."""
    descriptor = node.meta.get("desc")
    kind = type(descriptor).__name__
    if kind == "TangentAOTInput":
        return None
    name = getattr(descriptor, "target", None)
    if kind == "ParamAOTInput" and name is not None:
        return gm.get_parameter(name)
    if kind == "BufferAOTInput" and name is not None:
        return gm.get_buffer(name)
    index = getattr(descriptor, "idx", position if descriptor is None else None)
    if index is None or index >= len(inputs):
        raise CalibrationError(
            f"the compiled graph reads {descriptor}, which is no plain input of it. Make the plan offline: "
            "dsmp.plan(model, calibration=batches), and compile with options={'plan': plan}."
        )
    return inputs[index]


def _flat_outputs(gm: fx.GraphModule) -> list[Any]:
    outputs = output_node(gm).args[0]
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
