"""Static steps as an input of a graph instead of numbers in it, so that layers which differ in steps alone share what
was compiled for one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...passes.graph import calls, node_op
from ...passes.static_steps import Steps, steps_of

_NONE = -1
"""The row of values that are not bytes."""


def read_steps(gm: fx.GraphModule, table: fx.Node, rows: Mapping[Steps, int]) -> None:
    """Let every operator that has static steps read them from rows of `table`, float64 [rows, 2], in place.

    gm: a graph as it is executed, whatever of it was lowered. `rows` has all steps of its plan; raises KeyError for
    others.
    """
    changed = False
    for node in calls(gm):
        change = _CHANGES.get(node_op(node))
        if change is not None:
            node.target, node.args = change(list(node.args), table, rows)
            changed = True
    if changed:
        gm.graph.lint()
        gm.recompile()


_Changed = tuple[Any, tuple[Any, ...]]


def _row(rows: Mapping[Steps, int], scale: float, zero: int) -> int:
    return rows[Steps(scale, zero)] if scale else _NONE


def _rounded(args: list[Any], table: fx.Node, rows: Mapping[Steps, int]) -> _Changed:
    x, low, high = args
    return torch.ops.dsmp.fake_quantize_shared.default, (x, table, rows[steps_of(low, high)])


def _quantised(args: list[Any], table: fx.Node, rows: Mapping[Steps, int]) -> _Changed:
    *rest, scale, zero = args
    return torch.ops.dsmp_cpu.int8_quantise.shared, (*rest, table, _row(rows, scale, zero))


def _linear(name: str) -> Any:
    def change(args: list[Any], table: fx.Node, rows: Mapping[Steps, int]) -> _Changed:
        *rest, scale, zero, activation = args
        return getattr(torch.ops.dsmp_cpu, name).shared, (*rest, table, _row(rows, scale, zero), activation)

    return change


def _convolution(name: str) -> Any:
    def change(args: list[Any], table: fx.Node, rows: Mapping[Steps, int]) -> _Changed:
        *rest, x_scale, x_zero, other_scale, other_zero, activation, out_scale, out_zero = args
        read = (_row(rows, x_scale, x_zero), _row(rows, other_scale, other_zero))
        target = getattr(torch.ops.dsmp_cpu, name).shared
        return target, (*rest, table, *read, activation, _row(rows, out_scale, out_zero))

    return change


_CHANGES = {
    "dsmp.fake_quantize_static": _rounded,
    "dsmp_cpu.int8_quantise": _quantised,
    "dsmp_cpu.int8_linear": _linear("int8_linear"),
    "dsmp_cpu.int8_linear_packed": _linear("int8_linear_packed"),
    "dsmp_cpu.int8_convolution": _convolution("int8_convolution"),
    "dsmp_cpu.int8_convolution_packed": _convolution("int8_convolution_packed"),
}
