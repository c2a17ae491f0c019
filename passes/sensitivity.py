"""Sensitivity of every node from one backward pass: how much a model's outputs drift when one node is rounded.

For a GEMM Y = op(A, B) with operands rounded to a format p, and a cotangent u of the outputs (drift.py),

    s[n] = sum over elements i of Y that belong to sample n of  g_Y[i] * (op(Q_p A, Q_p B) - op(A, B))[i]
    drift(v, p) = kappa * mean over samples and draws of u of  s[n]^2                                        (measured)

where g_Y is the gradient of (u . outputs). This keeps what the errors of one sample have in common: a weight's rounding
moves every token the same way. It costs one more GEMM per format. The estimate that costs only elementwise work treats
the roundings of elements as independent,

    drift(v, p) = kappa / samples * sum over both operands of  g^2 * step_p(x)^2 / 12                       (estimated)

with g the gradient at this use of the operand and step_p(x) the distance between neighbours of p at x, its subnormals
and the scales of its recipe included. The same estimate serves results that are stored narrower.

A training step has no samples: its outputs are gradients, and rows of Y take the place of samples. Roundings that go
the same way in every row, such as small values that are all flushed to zero, show in the sum over all rows, so the
larger of the two counts.

Gradients are consumed node by node while the backward pass runs, so memory stays that of a training step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..hardware_db.formats import packs_weight, split_recipe
from .differentiable import run
from .drift import Metric
from .gemm import gemm_op, operand_slots, scaling, takes_recipe
from .graph import FLOAT_DTYPES, root
from .keys import key_of
from .labels import SCORED_ARITHMETIC, gemm_label, stored_label
from .op_rules import Policy, rule_of
from .ranges import Range, range_of
from .regions import rounds_for_others
from .rounding_noise import Rows, Spread
from .rounding_ops import fake_quantize_op
from .sample_layout import Layout, find_layouts
from .static_steps import fake_quantize_dynamic, rounded_over_own_range

SCORED_STORAGE = ("bf16", "fp16")
"""Formats that every stored result is scored for."""

Measure = Callable[[str, str], bool]
"""Whether a label of a node is worth measuring with its own rounding."""


@dataclass(kw_only=True, slots=True)
class _NodeSums:
    """Running sums at one node, over batches and draws."""

    lhs: Spread = field(default_factory=Spread)
    rhs: Spread = field(default_factory=Spread)
    rhs_is_weight: bool = False
    lhs_is_weight: bool = False
    result: Spread = field(default_factory=Spread)
    scored: frozenset[tuple[str, str]] = frozenset()
    measured: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    measured_batches: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    weight: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ranges: dict[str, Range] = field(default_factory=dict)

    def estimate(self, compute: str, recipe: str) -> float:
        """Sum of (g * error)^2 that rounding both operands is expected to give."""
        activation, weight = (r.name for r in split_recipe(recipe))
        left = self.lhs.variance(compute, weight if self.lhs_is_weight else activation)
        return left + self.rhs.variance(compute, weight if self.rhs_is_weight else activation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Drifts of one node by label, which of them were measured, and the ranges of its tensors."""

    drifts: Mapping[str, float]
    measured: frozenset[str]
    ranges: Mapping[str, Range]


class SensitivityScorer:
    """Accumulates scores over batches of one model; graphs of several batches may differ in shapes, not in keys.

    `measure` chooses what is measured; everything is estimated.
    """

    def __init__(self, *, measure: Measure | None = None, draws: int = 1, seed: int = 0) -> None:
        self.measure = measure
        self.draws = draws
        self.samples = 0
        self._weight = 0.0
        self._sums: defaultdict[str, _NodeSums] = defaultdict(_NodeSums)
        self._generator = torch.Generator().manual_seed(seed)
        self._layouts: dict[fx.GraphModule, Mapping[fx.Node, Layout]] = {}

    def add(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        metric: Metric,
        parameters: frozenset[fx.Node],
        *,
        varying: frozenset[int] = frozenset(),
        ranges: bool = False,
    ) -> list[Any]:
        """Score one batch on a keyed graph; returns its outputs (detached).

        `inputs` belong to the graph's placeholders; nothing is written to them and no gradient is left on them.
        `varying` are the positions of those that hold samples, the rest are parameters and buffers.
        `ranges`: look at the values of all tensors as well.
        """
        if gm not in self._layouts:
            self._layouts[gm] = {} if metric.kind == "gradients" else find_layouts(gm, inputs, metric, varying)
        batch = _Batch(self, gm, metric, parameters, self._layouts[gm], ranges)
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [_leaf(x) for x in inputs]
            outputs = run(gm, leaves, batch.tap, order=2 if metric.kind == "gradients" else 1)
            samples = metric.samples(outputs)
            for draw in range(self.draws):
                cotangents = metric.cotangents(outputs, self._generator)
                pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if u is not None and y.requires_grad]
                if pairs:
                    torch.autograd.backward(
                        [y for y, _ in pairs], [u for _, u in pairs], retain_graph=draw + 1 < self.draws
                    )
        self.samples += samples
        self._weight += samples * self.draws
        for sums, labels in batch.measured:  # a product that no gradient reaches was measured, too: it does nothing
            for label in labels:
                sums.weight[label] += samples * self.draws
        return [y.detach() if isinstance(y, Tensor) else y for y in outputs]

    def results(self, metric: Metric) -> dict[str, Sensitivity]:
        """Scores by node key, in the order in which nodes were met."""
        found = {}
        for key, sums in self._sums.items():
            per_unit = metric.kappa / self._weight
            formats = [pair for pair in SCORED_ARITHMETIC if pair in sums.scored]
            drifts = {gemm_label(f, r): per_unit * sums.estimate(f, r) for f, r in formats}
            drifts |= {stored_label(f): per_unit * sums.result.variance(f, "none") for f in SCORED_STORAGE}
            for label, total in sums.measured.items():
                total = max(total, sums.measured_batches[label])
                drifts[label] = metric.kappa * total / sums.weight[label]
            found[key] = Sensitivity(drifts=drifts, measured=frozenset(sums.measured), ranges=dict(sums.ranges))
        return found


class _Batch:
    """What is done at the nodes of one run over one batch."""

    def __init__(
        self,
        scorer: SensitivityScorer,
        gm: fx.GraphModule,
        metric: Metric,
        parameters: frozenset[fx.Node],
        layouts: Mapping[fx.Node, Layout],
        ranges: bool,
    ) -> None:
        self.scorer = scorer
        self.metric = metric
        self.parameters = parameters
        self.layouts = layouts
        self.ranges = ranges
        self.measured: list[tuple[_NodeSums, list[str]]] = []

    def tap(self, node: fx.Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one call and have its gradients looked at when they come."""
        key = key_of(node)
        if key is None or rule_of(node).policy is Policy.VIEW:
            return function(*args, **kwargs)
        sums = self.scorer._sums[str(key)]
        if gemm_op(node) is None:
            result = function(*args, **kwargs)
            if isinstance(result, Tensor) and result.dtype is torch.float32 and rounds_for_others(node):
                self._watch_storage(sums, result)
            return result
        return self._gemm(node, str(key), sums, function, list(args), kwargs)

    def _gemm(
        self, node: fx.Node, key: str, sums: _NodeSums, function: Callable[..., Any], args: list[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        slots = operand_slots(node)
        is_weight = weight_operands(node, self.parameters)
        if not sums.scored:
            sums.scored = frozenset(
                (f, r) for f, r in SCORED_ARITHMETIC
                if takes_recipe(node, r) and (not packs_weight(r) or has_one_weight(is_weight))
            )  # fmt: skip
            sums.lhs_is_weight, sums.rhs_is_weight = is_weight[0], len(is_weight) > 1 and is_weight[1]
        for place, (index, axis) in enumerate(slots):
            operand = args[index]
            if operand.dtype not in FLOAT_DTYPES:
                continue
            use = operand.view_as(operand) if operand.requires_grad else _leaf(operand)
            args[index] = use
            name, spread = ("rhs", sums.rhs) if place == 1 else ("lhs", sums.lhs)
            kept = scaling(node, place, "row")
            rows = Rows(kept=kept[1]) if kept[0] == "channel" else Rows(summed=axis)
            maxima = rows.maxima(operand.detach())
            _see(sums.ranges, name, operand, maxima, self.ranges)
            use.register_hook(_adder(spread, operand.detach(), maxima, rows))
        result = function(*args, **kwargs)
        measured = self._labels_to_measure(key, sums)
        if measured:
            self.measured.append((sums, [gemm_label(f, r) for f, r in measured]))
        for part, y in _products(node, result):
            self._watch_storage(sums, y)
            if measured:
                arguments = [a.detach() if isinstance(a, Tensor) else a for a in args]
                hook = self._product_hook(
                    node, sums, measured, function, arguments, is_weight, kwargs, part, y.detach()
                )
                y.register_hook(hook)  # type: ignore[no-untyped-call]
        return result

    def _labels_to_measure(self, key: str, sums: _NodeSums) -> list[tuple[str, str]]:
        measure = self.scorer.measure
        if measure is None:
            return []
        return [(f, r) for f, r in SCORED_ARITHMETIC if (f, r) in sums.scored and measure(key, gemm_label(f, r))]

    def _watch_storage(self, sums: _NodeSums, result: Tensor) -> None:
        if not result.requires_grad or result.dtype is not torch.float32:
            return
        value = result.detach()
        if self.ranges:
            _see(sums.ranges, "out", value, None, in_full=True)
        result.register_hook(_adder(sums.result, value, None, None))  # type: ignore[no-untyped-call]

    # measurements

    def _product_hook(
        self, node: fx.Node, sums: _NodeSums, formats: list[tuple[str, str]], function: Callable[..., Any],
        args: list[Any], is_weight: list[bool], kwargs: Mapping[str, Any], part: int | None,
        exact: Tensor,
    ) -> Callable[[Tensor | None], None]:  # fmt: skip
        op = gemm_op(node)
        row_axis = 1 if op is not None and op.kind == "conv" else -1
        layout = self.layouts.get(node)

        def look(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            with torch.no_grad():
                for compute, recipe in formats:
                    rounded = round_operands(node, args, compute, recipe, is_weight)
                    result = function(*rounded, **kwargs)
                    delta = (result if part is None else result[part]) - exact
                    self._project(sums, gemm_label(compute, recipe), gradient.detach() * delta, layout, row_axis)

        return look

    def _project(self, sums: _NodeSums, label: str, product: Tensor, layout: Layout | None, row_axis: int) -> None:
        if self.metric.kind == "gradients":
            rows = (product.sum(row_axis) if product.dim() > 1 else product).double()  # a bias has one row an element
            sums.measured[label] += float(rows.square().sum())
            sums.measured_batches[label] += float(rows.sum() ** 2)
        else:
            per_sample = product.sum() if layout is None else layout.sums(product)
            sums.measured[label] += float(per_sample.double().square().sum())


def round_operands(
    node: fx.Node, args: Sequence[Any], compute: str, recipe: str, is_weight: Sequence[bool]
) -> list[Any]:
    """The arguments of a GEMM with its operands rounded to a format; `recipe` is activation/weight, `is_weight` tells
    which operands (in the order of `operand_slots`) are weights."""
    recipes = split_recipe(recipe)
    rounded = list(args)
    for position, (index, _) in enumerate(operand_slots(node)):
        name = recipes[1 if is_weight[position] else 0].name
        if name == "wide":
            continue
        if name == "static":
            rounded[index] = rounded_over_own_range(args[index].detach())
            continue
        if name == "dynamic":
            rounded[index] = fake_quantize_dynamic(args[index].detach(), scaling(node, position, "row")[1])
            continue
        rounded[index] = fake_quantize_op(args[index].detach(), compute, *scaling(node, position, name))
    return rounded


def weight_operands(node: fx.Node, parameters: frozenset[fx.Node]) -> list[bool]:
    """Which operands of a GEMM are parameters, in the order of `operand_slots`."""
    operands = (node.args[index] for index, _ in operand_slots(node))
    return [isinstance(n, fx.Node) and root(n, through_casts=True) in parameters for n in operands]


def has_one_weight(is_weight: Sequence[bool]) -> bool:
    """Whether a product is one of an activation and a weight, so that the weight alone may be narrow."""
    return len(is_weight) == 2 and is_weight.count(True) == 1


def _products(node: fx.Node, result: Any) -> Iterable[tuple[int | None, Tensor]]:
    """(position in the result, tensor) of the tensors that a GEMM multiplied out and that carry a gradient."""
    op = gemm_op(node)
    assert op is not None
    if isinstance(result, Tensor):
        return [(None, result)] if result.requires_grad else []
    wanted = op.results if op.results is not None else range(len(result))
    return [(i, result[i]) for i in wanted if isinstance(result[i], Tensor) and result[i].requires_grad]


def _leaf(value: Any) -> Any:
    """An input as a leaf of its own that takes part in differentiation and keeps no gradient."""
    if not isinstance(value, Tensor):
        return value
    detached = (value.clone() if value.is_inference() else value).detach()
    if detached.dtype in FLOAT_DTYPES:
        detached.requires_grad_().register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
    return detached


def _forget(leaf: Tensor) -> None:
    leaf.grad = None


def _adder(spread: Spread, value: Tensor, maxima: Tensor | None, rows: Rows | None) -> Callable[[Tensor | None], None]:
    def add(gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd tells a gradient of zero that way at some operators
            spread.add(gradient.detach(), value, maxima, rows)

    return add


def _see(ranges: dict[str, Range], name: str, value: Tensor, maxima: Tensor | None, in_full: bool) -> None:
    """Take a tensor into the ranges of a node: its histogram if asked for, its largest magnitude always."""
    if in_full:
        seen = range_of(value)
        ranges[name] = ranges[name].merged(seen) if name in ranges else seen
    elif name in ranges and maxima is not None and maxima.numel():
        largest = float(maxima.max())
        if largest > ranges[name].absmax and math.isfinite(largest):
            ranges[name] = ranges[name].model_copy(update={"absmax": largest})
        if name == "lhs":  # what static steps have to reach over
            low, high = (float(end) for end in torch.aminmax(value.detach()))
            ranges[name] = ranges[name].reaching(low, high)
