"""Capture a model offline: the graphs that `torch.compile` would hand to the backend, without compiling anything.

The model is run once under `torch.compile` with a backend that traces each frame's joint graph (or, when asked,
inference graph), keeps it, and runs the frame op by op. So graph breaks, several graphs, buffers and functional code
come out as they do at run time. A model on the meta device runs on the meta device and needs no memory.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..errors import CaptureError, DsmpError
from ..passes.even_splits import expect_even_splits
from ..passes.graph import complete_halves, is_joint
from ..passes.keys import KeyReport, ModuleNames, assign_keys, key_of
from ..passes.split_backward import split_backward
from .capture_state import ModelState, uncompiled
from .identity import frame_names, module_names
from .tracing import parameter_indices, trace, weight_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedGraph:
    """One keyed ATen graph: joint when it has a backward part, and the placeholders that hold parameters."""

    gm: fx.GraphModule
    parameters: frozenset[fx.Node]
    keys: KeyReport

    @property
    def joint(self) -> bool:
        return is_joint(self.gm)

    def key_texts(self) -> list[str]:
        """All node keys in graph order."""
        return [str(k) for n in self.gm.graph.nodes if (k := key_of(n)) is not None]


@dataclass(kw_only=True, slots=True)
class Capture:
    """All graphs of one model, in the order in which they were met, and how long capturing took."""

    source: str
    graphs: list[CapturedGraph] = field(default_factory=list)
    seconds: float = 0.0

    def __iter__(self) -> Iterator[CapturedGraph]:
        return iter(self.graphs)

    @property
    def joint(self) -> bool:
        return any(g.joint for g in self.graphs)


def key_graph(gm: fx.GraphModule, names: ModuleNames, parameters: frozenset[fx.Node]) -> KeyReport:
    """Bring a traced graph into the form decisions refer to: fused backward nodes split, float nodes keyed."""
    complete_halves(gm)
    expect_even_splits(gm)
    split_backward(gm)
    return assign_keys(gm, names, parameters.__contains__)


def capture(
    model: nn.Module | Callable[..., Any] | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = True,
    source: str | None = None,
) -> Capture:
    """Capture a module, function or exported program with example inputs, real or on the meta device.

    `training` asks for the joint forward and backward graph; without it, or when nothing requires a gradient, the
    inference graph is captured. The module's parameters, buffers and gradients and the random state stay as they
    were.

    Raises CaptureError when the model cannot be run or traced.
    """
    started = time.perf_counter()
    name = source or type(model).__name__
    if isinstance(model, ExportedProgram):
        found = Capture(source=name, graphs=[_capture_exported(model, training)])
    else:
        found = Capture(source=name, graphs=_capture_calls(model, args, kwargs or {}, training))
    if not found.graphs:
        raise CaptureError(f"{name} gave no graph to plan: {_why_empty(model)}.")
    found.seconds = time.perf_counter() - started
    return found


def _why_empty(model: Any) -> str:
    recurrent = [n or "it" for n, m in _modules(model) if isinstance(m, nn.RNNBase)]
    if recurrent and not torch._dynamo.config.allow_rnn:
        return (
            f"{', '.join(recurrent)} is an RNN, and torch.compile skips whatever calls one; "
            "set torch._dynamo.config.allow_rnn = True, here and where you compile"
        )
    return "it computes nothing with tensors"


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules()) if isinstance(model, nn.Module) else []


def _capture_calls(
    model: nn.Module | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], training: bool
) -> list[CapturedGraph]:
    graphs: list[CapturedGraph] = []
    root_names = module_names(model) if isinstance(model, nn.Module) else {}

    def record(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        names = frame_names()
        names = ModuleNames(by_id={**names.by_id, **root_names}, frame=names.frame)
        graph = trace(gm, example_inputs)
        parameters = weight_nodes(graph, parameter_indices(example_inputs))
        graphs.append(CapturedGraph(gm=graph, parameters=parameters, keys=key_graph(graph, names, parameters)))
        return gm.forward

    torch._dynamo.reset()
    state = ModelState(model, (args, kwargs))
    failed = f"{type(model).__name__} failed on the example inputs"
    try:
        with (
            failures_as(CaptureError, failed, "Check that the model runs on these inputs without dsmp."),
            torch._dynamo.config.patch(suppress_errors=False, optimize_ddp=False),
            torch.set_grad_enabled(training),
            uncompiled(model) as plain,
        ):
            torch.compile(plain, backend=record)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
        state.restore()
    return graphs


@contextlib.contextmanager
def failures_as(kind: type[DsmpError], failed: str, remedy: str) -> Iterator[None]:
    """Tell what goes wrong while a model runs as one error of ours: the one that a backend raised, else `kind`."""
    try:
        yield
    except DsmpError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, DsmpError):
            raise error.__cause__ from error
        raise kind(f"{failed}: {failure_text(error)}. {remedy}") from error


def failure_text(error: Exception) -> str:
    """What went wrong, in one line: the model's own error where Dynamo or a backend wraps it."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, Exception):
        return failure_text(inner)
    text = str(error).strip()
    told = _WRAPPED.search(text)
    if told is not None:
        return f"{told['kind']}: {told['text']}".rstrip(".")
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}".rstrip(".")


# How Dynamo quotes an error that an operator raised on fake tensors.
_WRAPPED = re.compile(r"got (?P<kind>\w+)\((?P<quote>['\"])(?P<text>.+?)(?P=quote)\)")


def _capture_exported(program: ExportedProgram, training: bool) -> CapturedGraph:
    """The graph of an exported program; its nodes carry the module stack that export recorded."""
    inputs: list[Any] = []
    user_inputs = iter(torch.utils._pytree.tree_leaves(program.example_inputs or ()))
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER:
            value: Any = program.state_dict[str(spec.target)]
            inputs.append(value if isinstance(value, nn.Parameter) else nn.Parameter(value))
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            name = str(spec.target)
            inputs.append(program.state_dict[name] if name in program.state_dict else program.constants[name])
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(next(user_inputs, None))
        else:
            raise CaptureError(
                f"the exported program has an input of kind {spec.kind.name}, which dsmp cannot capture."
            )
    gm = copy.deepcopy(program.graph_module)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
        graph = trace(gm, inputs)
    parameters = weight_nodes(graph, parameter_indices(inputs))
    return CapturedGraph(gm=graph, parameters=parameters, keys=key_graph(graph, ModuleNames(), parameters))
