"""Record what a model's graph is called with: the keyed ATen graph and the tensors that its placeholders stand for.

The model is called under torch.compile with a backend that traces the frame as the planner does. Of an inference graph
the inputs are known when it is called. Of a joint graph, that of the model with its loss, the forward part is run and
the call of the backward part tells the tangents; nothing is run beyond that, and the model's state is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from ..errors import CalibrationError, CaptureError, DsmpError
from ..passes.graph import placeholders
from ..passes.keys import ModuleNames, plain_path
from .batches import Batch
from .capture import CapturedGraph, failures_as, key_graph
from .capture_state import ModelState, uncompiled
from .identity import frame_names, module_names
from .objective import LOSS, Objective, traced_step
from .saved_activations import copy_graph
from .tracing import PARTITION_ARGUMENTS, explicit_precision, parameter_indices, weight_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One call of a graph: values for its placeholders (for a joint graph: inputs, then tangents).

    `varying` are the positions of inputs that belong to the batch, not to the model; `forward_outputs` counts the
    outputs of the forward pass, which come first.
    """

    graph: CapturedGraph
    inputs: tuple[Any, ...]
    varying: frozenset[int]
    forward_outputs: int


class _Recorded(BaseException):
    """Ends the call once everything is known; no `except Exception` on the way may take it for a failure."""

    def __init__(self, call: RecordedCall) -> None:
        super().__init__()
        self.call = call


def record_calls(
    model: nn.Module | Callable[..., Any], batches: Iterable[Batch], objective: Objective | None
) -> Iterator[RecordedCall]:
    """The graph and its inputs for each batch: the joint graph of the training step that an `objective` makes of the
    model, or the inference graph without one.

    The objective is part of the graph, since errors of the outputs change its gradients. Batches of the same shapes
    share one graph. The model's parameters, buffers, gradients and the random state are left as they were. Raises
    CalibrationError when a batch does not fit the model, LossError when the objective's loss fails.
    """
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    names = module_names(model) if isinstance(model, nn.Module) else {}
    if objective is not None and isinstance(objective.loss, nn.Module):
        names |= {ident: f"{LOSS}.{path}" for ident, path in module_names(objective.loss).items()}
    recorder = _Recorder(names, {id(t) for t in tensors})
    torch._dynamo.reset()
    whole = ModelState(model, ())  # torch.compile leaves a mark on the module
    try:
        with (
            torch._dynamo.config.patch(
                suppress_errors=False, optimize_ddp=False, automatic_dynamic_shapes=False, recompile_limit=1 << 16
            ),
            torch.set_grad_enabled(objective is not None),
            uncompiled(model) as plain,
        ):
            run: Callable[..., Any] = plain
            if objective is not None:
                run = traced_step(plain, recorder.named(objective.value, LOSS))
            compiled = torch.compile(run, backend=recorder.compile, dynamic=False)
            for number, batch in enumerate(batches, start=1):
                before = ModelState(model, (batch.args, batch.kwargs))
                try:
                    with explained(number):
                        yield _record(plain, compiled, recorder, batch, objective)
                finally:
                    before.restore()
    finally:
        torch._dynamo.reset()
        whole.restore()


def _record(
    plain: Callable[..., Any], compiled: Callable[..., Any], recorder: _Recorder, batch: Batch,
    objective: Objective | None,
) -> RecordedCall:  # fmt: skip
    recorder.graphs = 0
    try:
        if objective is None:
            compiled(*batch.args, **batch.kwargs)
        else:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                labels = objective.labels(recorder.look(plain)(*batch.args, **batch.kwargs), batch)
            value = compiled(batch.args, batch.kwargs, labels)
            if not value.requires_grad:
                raise CalibrationError(_NOTHING_TO_TRAIN)
            value.backward()
    except _Recorded as recorded:
        if objective is not None and not recorded.call.graph.joint:
            raise CalibrationError(_NOTHING_TO_TRAIN) from None
        if recorder.graphs <= 1:
            return recorded.call
        raise CalibrationError(
            f"the model and its loss are captured in {recorder.graphs} graphs (torch.compile breaks them), and a model "
            "is measured from its inputs to its outputs. Remove the graph breaks (TORCH_LOGS=graph_breaks shows them)."
        ) from None
    raise CalibrationError("the model ran without a graph to measure: it computes nothing with tensors.")


_NOTHING_TO_TRAIN = (
    "the loss does not depend on any parameter that requires a gradient: there is no training step to measure. Plan "
    "inference (training=False, on the command line --infer)."
)


@contextlib.contextmanager
def explained(number: int) -> Iterator[None]:
    """What goes wrong with a batch, told as such."""
    remedy = "Each batch must be what the model is called with."
    with failures_as(CalibrationError, f"calibration batch {number} does not fit the model", remedy):
        yield


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _Recorder:
    """The backend: one keyed graph for each set of shapes."""

    def __init__(self, names: Mapping[str, str], state: set[int]) -> None:
        self.names = dict(names)
        self.state = state
        self.graphs = 0

    def named(self, function: Callable[..., Any], path: str) -> nn.Module:
        """A function as a module of the given path, so that what it computes is told from what its caller does."""
        module = _Function(function)
        self.names[str(id(module))] = path
        return module

    def look(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """A model to be called before its step is recorded: of a function, that call tells the names of its modules,
        since inside the step the way to them is longer."""
        if isinstance(model, nn.Module):
            return model

        def note(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
            for node in gm.graph.nodes:
                for ident, (path, _) in node.meta.get("nn_module_stack", {}).items():
                    self.names.setdefault(str(ident).split("@")[0], plain_path(path))
            return gm.forward

        return torch.compile(model, backend=note, dynamic=False)

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        self.graphs += 1
        names = frame_names()
        names = ModuleNames(by_id={**names.by_id, **self.names}, frame=names.frame)
        return record_graph(gm, example_inputs, names, state=self.state)


def record_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], names: ModuleNames, *, state: set[int]
) -> Callable[..., Any]:
    """A callable that, called like the Dynamo graph, raises `_Recorded` with the traced graph and its inputs: at once
    for an inference graph, in the backward pass for a joint graph."""
    found: dict[str, Any] = {}

    def key(graph: fx.GraphModule) -> CapturedGraph:
        parameters = weight_nodes(graph, parameter_indices(example_inputs))
        return CapturedGraph(gm=graph, parameters=parameters, keys=key_graph(graph, names, parameters))

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        joint.meta[PARTITION_ARGUMENTS] = kwargs
        found["graph"], found["outputs"] = key(joint), kwargs["num_fwd_outputs"]
        scratch, _ = copy_graph(joint, frozenset())  # partitioning changes its graph
        return min_cut_rematerialization_partition(scratch, inputs, **kwargs)

    def forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def call(args: list[Any]) -> Any:
            found["inputs"] = tuple(args)
            return graph(*args)

        return _boxed(call)

    def backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def call(args: list[Any]) -> Any:
            captured: CapturedGraph = found["graph"]
            count = len(placeholders(captured.gm)) - len(found["inputs"])
            raise _Recorded(_call(captured, (*found["inputs"], *args[len(args) - count :]), found["outputs"]))

        return _boxed(call)

    def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = key(graph)

        def call(args: list[Any]) -> Any:
            raise _Recorded(_call(captured, tuple(args), len(graph.graph.output_node().args[0])))  # type: ignore[arg-type]

        return _boxed(call)

    def _call(captured: CapturedGraph, inputs: tuple[Any, ...], outputs: int) -> RecordedCall:
        positions = frozenset(
            i
            for i, x in enumerate(inputs)
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and id(x) not in state
        )
        return RecordedCall(graph=captured, inputs=inputs, varying=positions, forward_outputs=outputs)

    with explicit_precision():
        try:
            compiled: Callable[..., Callable[..., Any]] = aot_autograd(
                fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition,
                decompositions=select_decomp_table, keep_inference_input_mutations=True,
            )  # fmt: skip
            return compiled(gm, example_inputs)
        except DsmpError:
            raise
        except Exception as error:
            raise CaptureError(f"AOTAutograd cannot trace the graph: {type(error).__name__}: {error}") from error


def _boxed(call: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
