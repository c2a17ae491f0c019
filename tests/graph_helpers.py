"""Small ATen graphs, ways to find nodes in them, to run them, and to write decisions by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dsmp.compiler.capture import CapturedGraph
from dsmp.compiler.saved_activations import copy_graph
from dsmp.hardware_db import load_catalog
from dsmp.passes.gemm import gemm_op
from dsmp.passes.graph import calls, concrete, float_dtype, node_op, placeholders
from dsmp.passes.keys import ModuleNames, assign_keys, key_of
from dsmp.passes.plan import Decision
from dsmp.passes.plan_fields import Reason

ONE_PER_TIER = sorted(
    {
        profile.tier.model_dump_json(): profile.reference
        for profile in reversed(load_catalog().architectures.values())
        if profile.reference is not None
    }.values()
)
"""One device for each precision tier that the catalogue has."""
FORMATS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def aten_graph(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The graph of ATen operators that a function calls, undecomposed, with fake values."""
    return make_fx(function, tracing_mode="fake")(*args)


def keyed_graph(function: Callable[..., Any], *args: Any, parameters: Sequence[int] = ()) -> CapturedGraph:
    """The keyed inference graph of a function whose arguments at `parameters` count as parameters."""
    gm = aten_graph(function, *args)
    nodes = placeholders(gm)
    weights = frozenset(nodes[i] for i in parameters)
    return CapturedGraph(gm=gm, parameters=weights, keys=assign_keys(gm, ModuleNames(), weights.__contains__))


def nodes_of(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    """All calls of an operator such as `aten.mm`, in graph order."""
    return [n for n in calls(gm) if node_op(n) == name]


def by_key(gm: fx.GraphModule) -> dict[str, fx.Node]:
    """Nodes by key text."""
    return {str(k): n for n in gm.graph.nodes if (k := key_of(n)) is not None}


def gemm_keys(gm: fx.GraphModule) -> list[str]:
    """The keys of all GEMMs, in graph order."""
    return [str(key_of(n)) for n in calls(gm) if gemm_op(n) is not None]


def copied(graph: CapturedGraph) -> CapturedGraph:
    """A copy of a shared capture that a test may change."""
    gm, parameters = copy_graph(graph.gm, graph.parameters)
    return CapturedGraph(gm=gm, parameters=parameters, keys=graph.keys)


def decision(node: fx.Node, compute: str, *, recipe: str = "none", output: str | None = None) -> Decision:
    """A hand-written decision for a keyed node; the result is stored as traced unless `output` says otherwise."""
    key = key_of(node)
    assert key is not None
    dtype = float_dtype(node)
    assert dtype is not None
    return Decision(
        key=str(key),
        op=key.op,
        aten=str(node.target),
        phase=key.phase,
        module=key.fqn,
        shapes=[],
        flops=0,
        bytes=0,
        compute=compute,
        recipe=recipe,
        accumulate="fp64" if compute == "fp64" else "fp32",
        output=output or FORMATS[dtype],
        reason=Reason(code="test", text="by hand"),
        time_us={},
    )


def decide_gemms(gm: fx.GraphModule, compute: str, *, output: str | None = None) -> dict[str, Decision]:
    """Every GEMM in one format without scales, everything else as traced."""
    found = {}
    for node in calls(gm):
        if key_of(node) is None:
            continue
        if gemm_op(node) is None:
            made = decision(node, FORMATS[float_dtype(node)])
        else:
            made = decision(node, compute, output=output)
        found[made.key] = made
    return found


def random_inputs(
    gm: fx.GraphModule,
    parameters: frozenset[fx.Node] = frozenset(),
    *,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> list[Any]:
    """Values for all placeholders: normal floats (parameters as layers are initialised), integers of 0 and 1, true
    masks; `sizes` for symbols, else their hints."""
    generator = torch.Generator().manual_seed(seed)
    values: list[Any] = []
    for node in placeholders(gm):
        fake = node.meta["val"]
        if isinstance(fake, torch.SymInt):
            values.append((sizes or {}).get(str(fake), concrete(fake)))
        elif not isinstance(fake, torch.Tensor):
            values.append(fake)
        else:
            shape = [(sizes or {}).get(str(s), concrete(s)) for s in fake.shape]
            if fake.dtype.is_floating_point:
                value = torch.randn(shape, generator=generator, dtype=torch.float64).to(fake.dtype)
                if node in parameters and value.dim() > 1:
                    value /= (value.numel() / value.shape[0]) ** 0.5  # as layers are initialised
                elif "running_var" in str(node.meta.get("desc", "")):
                    value = value.abs() + 1
            elif fake.dtype == torch.bool:
                value = torch.ones(shape, dtype=torch.bool)
            else:
                value = torch.randint(0, 2, shape, generator=generator).to(fake.dtype)
            values.append(value)
    return values


def run(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """What a graph returns for these inputs, flat, run node by node; the inputs are not changed."""
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.manual_seed(0)  # dropout
    result = fx.Interpreter(gm).run(*copies, enable_io_processing=False)
    return list(result) if isinstance(result, (list, tuple)) else [result]


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)

    def values(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        self.run(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs], enable_io_processing=False)
        return dict(self.env)


def signature(gm: fx.GraphModule) -> list[str]:
    """Every node as text: operator, arguments, name."""
    return [n.format_node() or f"output {n.args}" for n in gm.graph.nodes]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64; 0 when both are zero."""
    a, e = actual.double(), expected.double()
    return float((a - e).norm() / e.norm().clamp_min(1e-300))
