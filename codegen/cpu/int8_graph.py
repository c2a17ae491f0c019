"""Put int8 convolutions and linears into an inference graph, given how their inputs are quantised.

Each chosen convolution becomes one operator with its batch norm, residual and activation (`int8_patterns`). Where all
readers of a result are int8 operators that quantise it alike, it is handed on in bytes, through max-pools too; else it
is fp32 and is quantised once for all readers that do it alike. A gate [N, C, 1, 1] that multiplies a chosen
convolution's input is applied while quantising. Everything else stays as it is.

Results of int8 operators lie in channels_last order: values after them are traced again, views that no longer fit
become reshapes, and outputs of the graph are put back into the order that they had, as is what readers want that would
not take the new one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...passes.graph import aten, concrete, node_op, value_of
from ...passes.insertion import fake_result, insert_call
from ...passes.static_steps import Steps
from .extension import cpu_operators
from .held_weights import is_held
from .int8_patterns import Fused, Pool, following_activation, fused, gated
from .int8_patterns import max_pool as matched_pool

_LONGEST = 2**18
"""Values in a row of a weight up to which no sum leaves int32 (int8_weights.cpp)."""
_BEFORE = "dsmp_before"
"""Where a node's meta holds the value that it had before it came to lie otherwise in memory."""
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """What became of a chosen node: `reason` says why it stayed, and is empty where it became an int8 operator that
    ends in `activation`, adds a residual (`residual`) and hands on bytes (`bytes`)."""

    node: str
    reason: str
    activation: str = "none"
    residual: bool = False
    bytes: bool = False


def lower_int8(gm: fx.GraphModule, steps: Mapping[fx.Node, Steps], *, narrow_residuals: bool = True) -> list[Lowered]:
    """Rewrite the convolutions and linears that are keys of `steps`, in place; an entry for each, in the graph's order.

    `steps` says how a node's first operand is quantised. Without `narrow_residuals` no residual is read from bytes:
    more accurate, and more memory traffic.
    """
    return _Rewriting(gm, steps, narrow_residuals).run()


def why_not(node: fx.Node) -> str:
    """Why a node cannot become an int8 operator, empty if it can."""
    if node_op(node) == "aten.convolution":
        x, weight, bias, *_, transposed, _, _ = node.args
        if transposed:
            return "a transposed convolution"
        operands, rank = [x, weight], 4
    elif node_op(node) in ("aten.mm", "aten.addmm"):
        bias, x, weight = node.args if node_op(node) == "aten.addmm" else (None, *node.args)
        if not isinstance(weight, fx.Node) or node_op(weight) not in ("aten.permute", "aten.t") or node.kwargs:
            return "the second factor is no transposed weight"
        weight = weight.args[0]
        operands, rank = [x, weight], 2
    else:
        return "neither a convolution nor a linear layer"
    if not isinstance(weight, fx.Node) or (weight.op not in ("placeholder", "get_attr") and not is_held(weight)):
        return "its weight is computed in the graph"
    for operand, dims in (*((o, rank) for o in operands), (bias, 1)):
        value = value_of(operand) if isinstance(operand, fx.Node) else None
        if operand is None:
            continue
        if value is None or value.dim() != dims or value.dtype != torch.float32 or value.device.type != "cpu":
            return f"operands are not fp32 of {rank} axes on a CPU"
    out, *row = _shape(weight)
    if math.prod(row) > _LONGEST:
        return f"sums over {math.prod(row)} values may leave int32"
    if bias is not None and _shape(bias) != [out]:
        return "the bias is not a number for each channel"
    return ""


def _shape(operand: Any) -> list[int]:
    value = value_of(operand)
    return [] if value is None else [concrete(size) for size in value.shape]


class _Rewriting:
    """One run over one graph."""

    def __init__(self, gm: fx.GraphModule, steps: Mapping[fx.Node, Steps], narrow_residuals: bool) -> None:
        self.gm, self.graph = gm, gm.graph
        self.narrow_residuals = narrow_residuals
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        chosen = sorted(steps, key=self.order.__getitem__)
        verdict = cpu_operators()
        self.reasons = {n: why_not(n) if verdict.ok else verdict.reason for n in chosen}
        self.steps = {n: s for n, s in steps.items() if not self.reasons[n]}
        self.fused: dict[fx.Node, Fused] = {}
        self.adders: dict[fx.Node, Fused] = {}  # by the addition that belongs to it
        self.by_last: dict[fx.Node, Fused] = {}
        for node in reversed(chosen):  # of two convolutions that are added the later one adds
            if node in self.steps and node_op(node) == "aten.convolution":
                self._add(fused(node, self.adders))
        self.pools = {p.values: p for n in self.graph.nodes if (p := matched_pool(n)) is not None}
        self.pool_of = {next(iter(p.values.all_input_nodes)): p for p in self.pools.values()}
        self.narrow = self._narrow()
        self.new: dict[fx.Node, fx.Node] = {}
        self.quantised: dict[tuple[fx.Node, Steps], fx.Node] = {}

    def _add(self, found: Fused) -> None:
        self.fused[found.conv] = self.by_last[found.last] = found
        if found.addition is not None:
            self.adders[found.addition] = found

    # decisions

    def _narrow(self) -> dict[fx.Node, Steps]:
        """Which results are handed on in bytes, and in what steps."""
        possible: dict[fx.Node, Steps] = {}
        for node in reversed(self.graph.nodes):
            if (node in self.by_last or node in self.pools) and (found := self._readers_agree(node, possible)):
                possible[node] = found
        return {
            n: s for n, s in possible.items() if n in self.by_last or possible.get(self._source(n)) == s
        }  # a pool works on bytes if it is given some

    def _source(self, pooled: fx.Node) -> fx.Node:
        return self.pools[pooled].source

    def _readers_agree(self, node: fx.Node, possible: Mapping[fx.Node, Steps]) -> Steps | None:
        """The steps in which all readers quantise a value, None if they differ or any needs fp32."""
        wanted: set[Steps | None] = set()
        for user in node.users:
            if user in self.fused and user.args[0] is node and user.args[1] is not node:
                wanted.add(self.steps[user])
            elif user in self.pool_of:
                wanted.add(possible.get(self.pool_of[user].values))
            elif not (self.narrow_residuals and user in self.adders and self.adders[user].residual is node):
                return None
        return next(iter(wanted)) if len(wanted) == 1 else None

    # rewriting

    def run(self) -> list[Lowered]:
        report = [self._lowered(node, reason) for node, reason in self.reasons.items()]
        for node in list(self.graph.nodes):
            if node in self.by_last:
                self._convolution(self.by_last[node])
            elif node in self.pools and node in self.narrow:
                self._pool(self.pools[node])
            elif node in self.steps and node not in self.fused:
                self._linear(node)
        self._replace()
        self._trace_again()
        self.graph.lint()
        self.gm.recompile()
        return report

    def _lowered(self, node: fx.Node, reason: str) -> Lowered:
        found = self.fused.get(node)
        if found is None:
            return Lowered(node=node.name, reason=reason, activation="" if reason else following_activation(node)[0])
        return Lowered(node=node.name, reason="", activation=found.activation, residual=found.residual is not None,
                       bytes=found.last in self.narrow)  # fmt: skip

    def _convolution(self, found: Fused) -> None:
        x, weight, bias, stride, padding, dilation, _, _, groups = found.conv.args
        assert isinstance(x, fx.Node)
        steps, norm = self.steps[found.conv], found.norm
        vectors = (None,) * 4 if norm is None else (norm.mean, norm.variance, norm.gain, norm.shift)
        residual, residual_steps = found.residual, Steps(0.0, 0)
        if residual is not None:
            residual_steps = self.narrow.get(residual, residual_steps)
            residual = self.new.get(residual, residual)
        out = self.narrow.get(found.last, Steps(0.0, 0))
        epsilon = 0.0 if norm is None else norm.epsilon
        packed, held = _as_read(weight)
        args = (self._operand(x, steps, found.last), *held, bias, *vectors, epsilon, residual, stride, padding,
                dilation, groups, *steps, *residual_steps, found.activation, *out)  # fmt: skip
        self.new[found.last] = self._call(f"int8_convolution{packed}", args, found.conv, found.last)

    def _operand(self, x: fx.Node, steps: Steps, before: fx.Node) -> fx.Node:
        """What a convolution reads: bytes that were handed on or made once, or fp32 if it alone makes bytes of it."""
        if x in self.narrow:
            return self.new[x]
        readers = [u for u in x.users if self.steps.get(u) == steps and u in self.fused]
        gate = gated(x)
        if gate is None and len(readers) == 1:
            return self.new.get(x, x)
        if (x, steps) not in self.quantised:
            source, factor = gate or (x, None)
            args = (self.new.get(source, source), factor, *steps)
            self.quantised[x, steps] = self._call("int8_quantise", args, x, before)
        return self.quantised[x, steps]

    def _pool(self, pool: Pool) -> None:
        args = (self.new[pool.source], pool.kernel, pool.stride, pool.padding, pool.dilation)
        self.new[pool.values] = self._call("int8_max_pool", args, pool.values, pool.values)

    def _linear(self, node: fx.Node) -> None:
        bias, x, transposed = node.args if node_op(node) == "aten.addmm" else (None, *node.args)
        assert isinstance(transposed, fx.Node)
        activation, last = following_activation(node)
        packed, held = _as_read(transposed.args[0])
        args = (x, *held, bias, *self.steps[node], activation)
        self.new[last] = self._call(f"int8_linear{packed}", args, node, last)

    def _call(self, name: str, args: tuple[Any, ...], like: fx.Node, before: fx.Node) -> fx.Node:
        target = getattr(torch.ops.dsmp_cpu, name).default
        return insert_call(self.graph, target, args, {}, like=like, joint=False, before=before)

    # what is left to do

    def _replace(self) -> None:
        """Readers of fp32 results read the new ones; what nobody reads any more goes."""
        for old, new in self.new.items():
            new.meta[_BEFORE] = old.meta.get("val")
            if old not in self.narrow:
                old.replace_all_uses_with(new)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and not node.is_impure():
                self.graph.erase_node(node)

    def _fresh(self) -> set[fx.Node]:
        return {*self.new.values(), *self.quantised.values()}

    def _trace_again(self) -> None:
        """Give nodes after new ones the values that they have now, as far as these lie otherwise in memory."""
        moved = self._fresh()
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._restore(node)
            elif node not in moved and any(n in moved for n in node.all_input_nodes):
                if node.target is aten.as_strided.default:
                    self._restore(node)
                    continue
                before = node.meta.get("val")
                try:
                    node.meta["val"] = fake_result(node.target, node.args, dict(node.kwargs))
                except (RuntimeError, ValueError):
                    if node.target not in _VIEWS:
                        self._restore(node)
                        continue
                    node.target = aten.reshape.default  # a view of what used to lie in another order
                    node.meta["val"] = fake_result(node.target, node.args, dict(node.kwargs))
                if not _lies_alike(before, node.meta["val"]):
                    node.meta[_BEFORE] = before
                    moved.add(node)

    def _restore(self, reader: fx.Node) -> None:
        """Let `reader` see its operands in the order that they had."""
        for operand in reader.all_input_nodes:
            value, before = value_of(operand), operand.meta.get(_BEFORE)
            if value is None or not isinstance(before, torch.Tensor) or _lies_alike(before, value):
                continue
            strides = [concrete(step) for step in before.stride()]
            outer_first = sorted(range(before.dim()), key=strides.__getitem__, reverse=True)
            back = sorted(range(before.dim()), key=outer_first.__getitem__)
            copied = self._turned(reader, operand, outer_first)
            copied = self._before(reader, aten.clone.default, copied, memory_format=torch.contiguous_format)
            reader.replace_input_with(operand, self._turned(reader, copied, back))

    def _turned(self, reader: fx.Node, operand: fx.Node, order: list[int]) -> fx.Node:
        if order == sorted(order):
            return operand
        return self._before(reader, aten.permute.default, operand, order)

    def _before(self, reader: fx.Node, target: Any, operand: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self.graph, target, (operand, *args), kwargs, like=operand, joint=False, before=reader)


def _as_read(weight: Any) -> tuple[str, tuple[Any, ...]]:
    """How an operator's name goes on, and what it takes for its weight: the parameter, or what was packed of it."""
    if not is_held(weight):
        return "", (weight,)
    packed, _, size, _ = weight.args
    return "_packed", (*packed, size)


def _lies_alike(a: Any, b: Any) -> bool:
    """Whether two traced results are alike in shapes and strides."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.stride() == b.stride()
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_lies_alike(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b)
