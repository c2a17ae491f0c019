"""Convolutions and fused attention of libraries in scaled fp16, as operators for lowered graphs.

Each has the signature of the operator of torch that it stands for, takes operands of any float dtype as they are, and
returns fp32. Scales are found on the device, inside; `half_convolution` and `half_attention` say how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import half_attention
from .half_convolution import convolution, convolution_backward

aten = torch.ops.aten

_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
_ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
_LIBRARY: Any = torch.library.Library("dsmp", "FRAGMENT")  # type: ignore[no-untyped-call]


def _attention(op: Any, compute: Any) -> Any:
    """An attention operator's arguments, by position or name, handed to `compute` by name."""
    parameters = op._schema.arguments

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {p.name: p.default_value for p in parameters if p.has_default_value()}
        given |= dict(zip((p.name for p in parameters), args, strict=False))
        return compute(op, given | kwargs)

    return run


def _define(op: Any, run: Any) -> Any:
    """`dsmp::NAME_half`, of an operator's own signature. Fake tensors take the same way through `run`, so that layouts
    agree."""
    name = f"{op._schema.name.split('::')[1].lstrip('_')}_half"
    _LIBRARY.define(f"{name}{str(op._schema)[len(op._schema.name) :]}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsmp::{name}", run, lib=_LIBRARY)
    return getattr(torch.ops.dsmp, name).default


def _all() -> dict[str, Any]:
    runs = {aten.convolution.default: convolution, aten.convolution_backward.default: convolution_backward}
    runs |= {p.default: _attention(p.default, half_attention.forward) for p in _ATTENTION}
    runs |= {p.default: _attention(p.default, half_attention.backward) for p in _ATTENTION_BACKWARD}
    return {f"aten.{op._schema.name.split('::')[1]}": _define(op, run) for op, run in runs.items()}


HALF_OPS: Mapping[str, Any] = _all()
"""The operator in scaled fp16 for the name of each traced operator that has one."""
