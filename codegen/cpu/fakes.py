"""What the operators of `torch.ops.dsmp_cpu` return, in shapes and dtypes: for tracing, and for compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import int8_ops

_ROWS = 16
"""Rows of a weight in one panel (layout.h)."""
_GROUP = 128
"""Values that share a scale in int4 (narrow_linear.cpp)."""
_STEPS = {"fp32": (4, 256), "fp16": (4, 128), "int8": (4, 64), "int4": (8, 64)}
"""Columns of a weight that a step of a panel holds, and the bytes that it takes (layout.h)."""


def payload_shape(format: str, out_features: int, in_features: int) -> tuple[int, int]:
    """(panels, bytes of one) of a packed weight [out_features, in_features]."""
    columns, size = _STEPS[format]
    return -(-out_features // _ROWS), -(-in_features // columns) * size


def register_fakes() -> None:
    """Tell torch what each operator returns. The operators must have been loaded; to be called once."""
    for format in ("fp32", "fp16"):
        _register(f"pack_{format}", _pack(format))
    _register("pack_int8", _pack_int8)
    _register("pack_int4", _pack_int4)
    for format in ("fp32", "fp16"):
        _register(f"unpack_{format}", _unpack)
        _register(f"linear_{format}", _linear)
    _register("unpack_int8", _unpack_int8)
    _register("unpack_int4", _unpack_int4)
    for name in ("linear_int8", "linear_int8_a16"):
        _register(name, _linear_int8)
    for name in ("linear_int4", "linear_int4_a16", "linear_int4_a8"):
        _register(name, _linear_int4)
    _register("narrow_linear", _narrow_linear)
    _register("narrow_linear_packed", _narrow_linear_packed)
    _register("narrow_pack", _narrow_pack)
    _register("narrow_unpack", _narrow_unpack)
    for name, fake in int8_ops.FAKES.items():
        _register(name, fake)


def _register(name: str, fake: Callable[..., Any]) -> None:
    torch.library.register_fake(f"dsmp_cpu::{name}", fake)


def _pack(format: str) -> Callable[[Tensor], Tensor]:
    def fake(weight: Tensor) -> Tensor:
        return weight.new_empty(payload_shape(format, *weight.shape), dtype=torch.uint8)

    return fake


def _pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    panels, size = payload_shape("int8", *weight.shape)
    return weight.new_empty((panels, size), dtype=torch.uint8), weight.new_empty((panels, _ROWS))


def _pack_int4(weight: Tensor, group: int, symmetric: bool, half_scales: bool) -> tuple[Tensor, Tensor, Tensor]:
    panels, size = payload_shape("int4", *weight.shape)
    dtype = torch.float16 if half_scales else torch.float32
    scales = weight.new_empty((panels, -(-weight.size(1) // group), _ROWS), dtype=dtype)
    zeros = scales.new_empty(0) if symmetric else torch.empty_like(scales)
    return weight.new_empty((panels, size), dtype=torch.uint8), scales, zeros


def _unpack(payload: Tensor, out_features: int, in_features: int) -> Tensor:
    return payload.new_empty((out_features, in_features), dtype=torch.float32)


def _unpack_int8(payload: Tensor, scales: Tensor, out_features: int, in_features: int) -> Tensor:
    return _unpack(payload, out_features, in_features)


def _unpack_int4(
    payload: Tensor, scales: Tensor, zeros: Tensor, out_features: int, in_features: int, group: int
) -> Tensor:
    return _unpack(payload, out_features, in_features)


def _linear(x: Tensor, payload: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _linear_int8(x: Tensor, payload: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return _linear(x, payload, bias, out_features)


def _linear_int4(
    x: Tensor, payload: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, out_features: int, group: int
) -> Tensor:
    return _linear(x, payload, bias, out_features)


def _narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 0])


def _narrow_linear_packed(
    x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, format: str, out_features: int, in_features: int
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _narrow_pack(weight: Tensor, format: str) -> list[Tensor]:
    if format == "fp16":
        return [_pack("fp16")(weight)]
    return list(_pack_int8(weight) if format == "int8" else _pack_int4(weight, _GROUP, True, False))


def _narrow_unpack(packed: Sequence[Tensor], format: str, out_features: int, in_features: int) -> Tensor:
    return _unpack(packed[0], out_features, in_features)
