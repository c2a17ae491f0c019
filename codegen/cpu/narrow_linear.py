"""A linear whose weight alone is narrow, on CPUs: `dsmp::narrow_linear`, an operator that compilers do not look into.

It takes the model's own parameter and multiplies by what was packed of it (packs.py): fp16, int8 with a scale a row,
or int4 with a scale for every 128 values of a row, rounded as `fake_quantize` rounds them under the plan's recipe; int4
somewhat finer, since it uses all 16 values (the farthest of a group is -8, where `fake_quantize` stops at 7).
Up to `ROWS` rows the C++ kernels of small_linear.cpp widen weights as they read them. For more rows they would widen
each weight again and again: the weight is widened once a call, and the product is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...hardware_db.capability import Verdict
from .extension import cpu_operators
from .packs import packed

ROWS = 64
"""Rows of activations up to which weights are widened inside of the product."""
GROUP = 128
"""Values along the contraction that share a scale in int4: recipe `1x128`."""
RECIPES = {"fp16": "none", "int8": "row", "int4": "1x128"}
"""How the scales of each format's weights lie."""

_LIBRARY: Any = torch.library.Library("dsmp", "FRAGMENT")  # type: ignore[no-untyped-call]


def narrow_linear_available(format: str, recipe: str) -> Verdict:
    """Whether linears with such weights run here: needs the C++ kernels, which the first call builds."""
    if RECIPES.get(format) != recipe:
        return Verdict(False, f"weights are stored in fp16, int8 by rows or int4 by 1x128, not in {format} by {recipe}")
    return cpu_operators()


def _pack_fp16(weight: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.dsmp_cpu.pack_fp16(weight),)


def _pack_int8(weight: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.ops.dsmp_cpu.pack_int8(weight))


def _pack_int4(weight: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.ops.dsmp_cpu.pack_int4(weight, GROUP, True, False))


PACK: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {"fp16": _pack_fp16, "int8": _pack_int8, "int4": _pack_int4}
"""What makes the packed tensors of a weight float32[N, K], by the weight's narrow format."""

# a16: rows of activations in 16-bit fixed point, products and sums exact; their error is far below that of the weights
_KERNELS = {"fp16": "linear_fp16", "int8": "linear_int8_a16", "int4": "linear_int4_a16"}


def _narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, transposed: bool) -> Tensor:
    """x float32[M, K] times a weight float32[N, K] (or [K, N] if `transposed`) stored in `format`, plus bias[N]."""
    pack = PACK[format]
    made = packed(weight, f"{format}-{transposed}", (lambda w: pack(w.t())) if transposed else pack)
    columns, depth = reversed(weight.shape) if transposed else weight.shape
    return narrow_product(x, made, bias, format, columns, depth)


def narrow_product(
    x: Tensor, made: Sequence[Tensor], bias: Tensor | None, format: str, columns: int, depth: int
) -> Tensor:
    """x float32[M, depth] times what was packed of a weight [columns, depth], plus bias[columns]."""
    if x.shape[0] > ROWS:
        return F.linear(x, widened(made, format, columns, depth), bias)
    kernels, group = torch.ops.dsmp_cpu, (GROUP,) if format == "int4" else ()
    product: Tensor = getattr(kernels, _KERNELS[format])(x, *made, bias, columns, *group)
    return product


def widened(made: Sequence[Tensor], format: str, columns: int, depth: int) -> Tensor:
    """float32[columns, depth]: the weight that products multiply by."""
    group = (GROUP,) if format == "int4" else ()
    wide: Tensor = getattr(torch.ops.dsmp_cpu, f"unpack_{format}")(*made, columns, depth, *group)
    return wide


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 0])


_LIBRARY.define("narrow_linear(Tensor x, Tensor weight, Tensor? bias, str format, bool transposed) -> Tensor")
_LIBRARY.impl("narrow_linear", _narrow_linear, "CPU")
torch.library.register_fake("dsmp::narrow_linear", _fake, lib=_LIBRARY)
