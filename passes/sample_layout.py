"""Which rows of an intermediate value belong to which sample of a batch, found by changing one sample.

A flattened [rows, features] value may hold a batch sample by sample or time step by time step, and its shape does not
tell which. So the graph is run twice, the second time with the first sample replaced by another one: the rows that
move belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from .differentiable import run
from .drift import Metric
from .gemm import GEMM_OPS, gemm_op
from .graph import node_op


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the first dimension of a value is made of `samples`: `major` sample by sample, `minor` the other way round,
    `mixed` where rows hold several samples (each row is then a unit of its own)."""

    samples: int
    order: Literal["major", "minor", "mixed"]

    def sums(self, product: Tensor) -> Tensor:
        """Sums of a value of this layout over each sample."""
        rows = product.reshape(product.shape[0], -1).sum(1) if product.dim() else product.reshape(1)
        if self.order == "mixed" or rows.numel() % self.samples:
            return rows
        if self.order == "major":
            return rows.reshape(self.samples, -1).sum(1)
        return rows.reshape(-1, self.samples).sum(0)


def find_layouts(
    gm: fx.GraphModule, inputs: Sequence[Any], metric: Metric, varying: frozenset[int]
) -> Mapping[fx.Node, Layout]:
    """The layout of every GEMM's result in an inference graph whose `varying` inputs (by position) hold samples along
    their first dimension."""
    with torch.no_grad():
        before, outputs = _row_sums(gm, inputs)
        samples = metric.samples(outputs)
        if samples < 2:
            return {node: Layout(samples=1, order="major") for node in before}
        changed, _ = _row_sums(gm, [_swapped(x, samples) if i in varying else x for i, x in enumerate(inputs)])
    return {node: _layout(samples, rows, changed[node]) for node, rows in before.items()}


def _swapped(value: Any, samples: int) -> Any:
    """An input with its first sample replaced by its last."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != samples:
        return value
    other = value.clone()
    other[0] = value[-1]
    return other


def _row_sums(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[dict[fx.Node, Tensor], list[Any]]:
    """Sums of magnitudes of each row of each GEMM's result, and the graph's outputs."""
    found: dict[fx.Node, Tensor] = {}

    def look(node: fx.Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if gemm_op(node) is not None:
            products = GEMM_OPS[node_op(node)].results
            value = result if isinstance(result, Tensor) else result[products[0] if products else 0]
            if value is not None and value.dim():
                found[node] = value.detach().abs().reshape(value.shape[0], -1).sum(1)
        return result

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = run(gm, inputs, look, order=0)
    return found, outputs


def _layout(samples: int, before: Tensor, after: Tensor) -> Layout:
    rows = before.numel()
    if rows % samples:
        return Layout(samples=samples, order="mixed")
    moved = torch.nonzero(before != after).reshape(-1)
    per_sample = rows // samples
    if not moved.numel() or bool((moved < per_sample).all()):
        return Layout(samples=samples, order="major")
    if bool((moved % samples == 0).all()):
        return Layout(samples=samples, order="minor")
    return Layout(samples=samples, order="mixed")
