"""From the graph that Dynamo captured to the ATen graph that dsmp works on.

AOTAutograd traces a Dynamo graph, with Inductor's decompositions, into one joint graph of the forward and backward
pass, or into an inference graph when no gradient is needed. Whoever wants that graph, the planner or the eager
executor, gets it here, so both see what Inductor's joint pre pass sees and nodes get the same keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.lowering  # Inductor's decomposition table refers to it without importing it
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    SubclassGetAttrAOTInput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from ..codegen.cpu.held_graph import take_apart
from ..codegen.eager import lower_for_eager
from ..errors import CaptureError
from ..passes.graph import placeholders

PARTITION_ARGUMENTS = "dsmp_partition_arguments"

GraphPass = Callable[[fx.GraphModule], None]


@contextlib.contextmanager
def explicit_precision() -> Iterator[None]:
    """Trace the backward pass with the precision that the graph spells out.

    By default the backward pass of an autocast region is traced under the same autocast, which turns a region that was
    explicitly fp32 into half precision (https://github.com/pytorch/pytorch/issues/153044).
    """
    if hasattr(functorch_config, "backward_pass_autocast"):
        with functorch_config.patch(backward_pass_autocast="off"):
            yield
    else:
        yield


def compile_eagerly(gm: fx.GraphModule, example_inputs: Sequence[Any], graph_pass: GraphPass) -> Callable[..., Any]:
    """Trace, run `graph_pass` on the joint or inference graph in place, and return a callable that runs it op by op."""

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        joint.meta[PARTITION_ARGUMENTS] = kwargs
        graph_pass(joint)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph_pass(graph)
        return boxed(graph)

    with explicit_precision():
        compile_joint: Callable[..., Callable[..., Any]] = aot_autograd(
            fw_compiler=lambda graph, inputs: boxed(graph),
            bw_compiler=lambda graph, inputs: boxed(graph),
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=select_decomp_table,
            keep_inference_input_mutations=True,
        )
        return compile_joint(gm, example_inputs)


def trace(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """The joint graph (inference graph when no gradient is needed) of a Dynamo graph; nothing is compiled.

    Inputs on the meta device are traced as fake CPU tensors, so a model without memory gives the graph that it would
    give with memory. Raises CaptureError when AOTAutograd cannot trace the graph.
    """
    if any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in example_inputs):
        gm, example_inputs = _off_meta(gm, example_inputs)
    found: list[fx.GraphModule] = []

    def stop(graph: fx.GraphModule) -> None:
        found.append(graph)
        raise _Traced

    try:
        compile_eagerly(gm, example_inputs, stop)
    except _Traced:
        return found[0]
    except Exception as error:
        raise CaptureError(f"AOTAutograd cannot trace the graph: {type(error).__name__}: {error}") from error
    raise CaptureError("AOTAutograd returned without a graph: the captured code computes no tensor.")


class _Traced(BaseException):
    """Ends tracing once the graph is known; no `except Exception` on the way may take it for a failure."""


def fake_inputs(example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a Dynamo graph without their memory, to trace it again later, when the context of this tracing (and
    with it sizes that are symbols) is gone."""
    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        value = mode.from_tensor(x)
        return torch.nn.Parameter(value, x.requires_grad) if isinstance(x, torch.nn.Parameter) else value

    return [fake(x) for x in example_inputs]


def parameter_indices(example_inputs: Sequence[Any]) -> frozenset[int]:
    """Which inputs of a Dynamo graph are parameters."""
    return frozenset(i for i, x in enumerate(example_inputs) if isinstance(x, torch.nn.Parameter))


def weight_nodes(graph: fx.GraphModule, indices: frozenset[int]) -> frozenset[fx.Node]:
    """`parameter_nodes`, and the weights that released layers hold packed: their products become torch's, in place."""
    return parameter_nodes(graph, indices) | take_apart(graph)


def parameter_nodes(graph: fx.GraphModule, indices: frozenset[int]) -> frozenset[fx.Node]:
    """The placeholders of a joint or inference graph that hold the Dynamo graph's inputs of these indices.

    A placeholder's descriptor says which input it is, or which one it is the local part of; where there is none, its
    position does.
    """
    found = set()
    for position, node in enumerate(placeholders(graph)):
        descriptor = _described(node)
        if isinstance(descriptor, (SubclassSizeAOTInput, SubclassStrideAOTInput)):
            continue  # a size of a DTensor
        if type(descriptor).__name__ == "ParamAOTInput" or getattr(descriptor, "idx", position) in indices:
            found.add(node)
    return frozenset(found)


def input_node(graph: fx.GraphModule, index: int) -> fx.Node:
    """The placeholder of a joint or inference graph that holds the Dynamo graph's input of an index, no subclass."""
    return next(
        node for position, node in enumerate(placeholders(graph)) if getattr(_described(node), "idx", position) == index
    )


def _described(placeholder: fx.Node) -> Any:
    """What AOTAutograd says that a placeholder is, or is a local part of; None where it says nothing."""
    descriptor = placeholder.meta.get("desc")
    while isinstance(descriptor, SubclassGetAttrAOTInput):
        descriptor = descriptor.base
    return descriptor


def boxed(graph: fx.GraphModule) -> Callable[..., Any]:
    """A callable with boxed arguments that frees each argument as soon as the graph has read it."""
    lower_for_eager(graph)
    graph.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    graph.recompile()
    forward = graph.forward
    forward_boxed: Any = lambda args: forward(args)  # noqa: E731 - a function object that takes an attribute
    forward_boxed._boxed_call = True
    return forward_boxed  # type: ignore[no-any-return]


def _off_meta(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of the graph and its inputs in which every meta tensor and device is a fake CPU one."""
    context = torch._guards.TracingContext.try_get()
    mode = context.fake_mode if context is not None and context.fake_mode is not None else FakeTensorMode()
    cpu = torch.device("cpu")

    def device(a: Any) -> Any:
        return cpu if isinstance(a, torch.device) and a.type == "meta" else a

    def fake(x: Any) -> Any:
        if not (isinstance(x, torch.Tensor) and x.device.type == "meta"):
            return x
        return FakeTensor(mode, x.detach(), cpu).requires_grad_(x.requires_grad)

    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for node in copy.graph.nodes:
        node.args = tree_map(device, node.args)
        node.kwargs = tree_map(device, node.kwargs)
    for name, buffer in list(copy.named_buffers(recurse=False)) + list(copy.named_parameters(recurse=False)):
        if buffer.device.type == "meta":
            delattr(copy, name)
            setattr(copy, name, fake(buffer))
    copy.recompile()
    return copy, [fake(x) for x in example_inputs]
