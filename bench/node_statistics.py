"""What simple methods know of a GEMM: how large its operands' largest values are, how well a format keeps its weight
and its result, and the gradient score of NVIDIA ModelOpt's auto_quantize.

The gradient score is sum over output elements of (g * (op(Q(A), Q(B)) - op(A, B)))^2, g the gradient of the loss there
(`AutoQuantizeGradientSearcher` in modelopt/torch/quantization/algorithms.py). The gradients are those of the drift's
own cotangents, so no labels are needed and the scale is right; ModelOpt differentiates a loss that the user gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from dsmp.compiler.recording import RecordedCall
from dsmp.passes.differentiable import run
from dsmp.passes.drift import Metric
from dsmp.passes.gemm import gemm_op, operand_slots, takes_recipe
from dsmp.passes.graph import FLOAT_DTYPES
from dsmp.passes.keys import key_of
from dsmp.passes.labels import gemm_label
from dsmp.passes.sensitivity import round_operands, weight_operands

Arithmetic = tuple[str, str]
"""A format and a recipe (activation/weight)."""


@dataclass(kw_only=True, slots=True)
class NodeStatistics:
    """Of one GEMM over all calibration batches, SQNRs in the format that rankings use.

    `peak` is the larger of its operands' amax / rms, both over everything that was seen. Signal and noise are sums of
    squares; `gradient` holds gradient scores by label.
    """

    amax: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    squares: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    counts: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    weight_signal: float = 0.0
    weight_noise: float = 0.0
    output_signal: float = 0.0
    output_noise: float = 0.0
    gradient: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def peak(self) -> float:
        """The larger of the operands' amax / rms."""
        means = {i: (self.squares[i] / max(1, self.counts[i])) ** 0.5 for i in self.amax}
        return max((self.amax[i] / rms for i, rms in means.items() if rms > 0), default=0.0)

    @property
    def weight_sqnr(self) -> float:
        """Signal over quantisation noise of the right operand; infinite where it is exact."""
        return self.weight_signal / self.weight_noise if self.weight_noise else float("inf")

    @property
    def output_sqnr(self) -> float:
        """Signal over noise of the result of rounded operands."""
        return self.output_signal / self.output_noise if self.output_noise else float("inf")


def gather(
    calls: Iterable[RecordedCall],
    metric: Metric,
    *,
    ranking: Arithmetic,
    scored: Mapping[str, Collection[Arithmetic]],
    draws: int = 2,
    seed: int = 0,
) -> dict[str, NodeStatistics]:
    """Statistics by node key. `ranking` is the format of the SQNRs, `scored` says which formats of which node get a
    gradient score; nodes that cannot take a recipe are left out of it."""
    found: defaultdict[str, NodeStatistics] = defaultdict(NodeStatistics)
    generator = torch.Generator().manual_seed(seed)
    for call in calls:
        tap = _Tap(call, found, ranking, scored)
        leaves = [_leaf(x) for x in call.inputs]
        with torch.enable_grad():
            outputs = run(call.graph.gm, leaves, tap)
        for draw in range(draws):
            cotangents = metric.cotangents(outputs, generator)
            pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if u is not None]
            torch.autograd.backward([y for y, _ in pairs], [u for _, u in pairs], retain_graph=draw + 1 < draws)
    return dict(found)


def _leaf(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES
    return value.detach().requires_grad_() if floating else value


class _Tap:
    """Looks at the GEMMs of one run."""

    def __init__(
        self, call: RecordedCall, found: defaultdict[str, NodeStatistics], ranking: Arithmetic,
        scored: Mapping[str, Collection[Arithmetic]],
    ) -> None:  # fmt: skip
        self.parameters = call.graph.parameters
        self.found = found
        self.ranking = ranking
        self.scored = scored

    def __call__(
        self, node: fx.Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        result = function(*args, **kwargs)
        key = key_of(node)
        if key is None or gemm_op(node) is None:
            return result
        statistics = self.found[str(key)]
        plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
        weights = weight_operands(node, self.parameters)
        exact = _product(result)
        with torch.no_grad():
            self._operands(node, plain, statistics)
            if takes_recipe(node, self.ranking[1]):
                self._noise(node, function, plain, kwargs, weights, exact.detach(), statistics)
        formats = [pair for pair in self.scored.get(str(key), ()) if takes_recipe(node, pair[1])]
        if formats and exact.requires_grad:
            kept = exact.detach()

            def score(gradient: Tensor) -> None:
                with torch.no_grad():
                    for compute, recipe in formats:
                        rounded = round_operands(node, plain, compute, recipe, weights)
                        error = gradient.detach() * (_product(function(*rounded, **kwargs)) - kept)
                        statistics.gradient[gemm_label(compute, recipe)] += float(error.square().sum())

            exact.register_hook(score)
        return result

    def _operands(self, node: fx.Node, args: Sequence[Any], statistics: NodeStatistics) -> None:
        for place, (index, _) in enumerate(operand_slots(node)):
            value = args[index]
            statistics.amax[place] = max(statistics.amax[place], float(value.abs().max()))
            statistics.squares[place] += float(value.double().square().sum())
            statistics.counts[place] += value.numel()

    def _noise(
        self, node: fx.Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
        weights: Sequence[bool], exact: Tensor, statistics: NodeStatistics,
    ) -> None:  # fmt: skip
        rounded = round_operands(node, args, *self.ranking, weights)
        index = operand_slots(node)[1][0]
        statistics.weight_signal += float(args[index].double().square().sum())
        statistics.weight_noise += float((rounded[index] - args[index]).double().square().sum())
        error = _product(function(*rounded, **kwargs)) - exact
        statistics.output_signal += float(exact.double().square().sum())
        statistics.output_noise += float(error.double().square().sum())


def _product(result: Any) -> Tensor:
    """The tensor that a GEMM multiplied out: of a fused attention the first of its results."""
    tensor = result if isinstance(result, Tensor) else result[0]
    assert isinstance(tensor, Tensor)
    return tensor
