"""Packed weights of every format and their products, for the tests of the C++ linear kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from dsmp.codegen.cpu.extension import cpu_operators


def needs_kernels() -> None:
    """Skips, with the verdict's reason, where the kernels cannot be built."""
    verdict = cpu_operators()
    if not verdict:
        pytest.skip(verdict.reason)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed weight: the values that products multiply by, and the products by the name of their operator."""

    values: Tensor
    products: dict[str, Callable[[Tensor, Tensor | None], Tensor]]
    group: int


FORMATS = (
    *("fp32", "fp16", "int8"),
    *("int4 32 symmetric fp32", "int4 64 symmetric fp16", "int4 128 asymmetric fp32", "int4 32 asymmetric fp16"),
)


def pack(weight: Tensor, format: str) -> Packed:
    ops = torch.ops.dsmp_cpu
    n, k = weight.shape
    if format in ("fp32", "fp16"):
        payload = getattr(ops, f"pack_{format}")(weight)
        op = getattr(ops, f"linear_{format}")
        return Packed(
            values=getattr(ops, f"unpack_{format}")(payload, n, k),
            products={f"linear_{format}": lambda x, b: op(x, payload, b, n)},
            group=k,
        )
    if format == "int8":
        packed = ops.pack_int8(weight)
        return Packed(
            values=ops.unpack_int8(*packed, n, k),
            products={
                name: partial(_int8, getattr(ops, name), packed, n) for name in ("linear_int8", "linear_int8_a16")
            },
            group=k,
        )
    _, group, flavour, dtype = format.split()
    packed = ops.pack_int4(weight, int(group), flavour == "symmetric", dtype == "fp16")
    return Packed(
        values=ops.unpack_int4(*packed, n, k, int(group)),
        products={
            name: partial(_int4, getattr(ops, name), packed, n, int(group))
            for name in ("linear_int4", "linear_int4_a16", "linear_int4_a8")
        },
        group=int(group),
    )


def _int8(op: torch._ops.OpOverloadPacket, packed: list[Tensor], n: int, x: Tensor, bias: Tensor | None) -> Tensor:
    return op(x, *packed, bias, n)


def _int4(
    op: torch._ops.OpOverloadPacket, packed: list[Tensor], n: int, group: int, x: Tensor, bias: Tensor | None
) -> Tensor:
    return op(x, *packed, bias, n, group)


def bound(x: Tensor, values: Tensor, name: str, group: int) -> Tensor:
    """[m, n]: how far a product may be from the exact one, by its sums' rounding and that of x to fixed point.

    fp32 sums of k terms: k * 2^-24 of the sum of sizes at most, twice that with a zero point's terms, which are up to
    15/1 times as large as the weight's. Fixed point: half a step of the row's (or group's) largest value per entry.
    """
    x, w = x.double(), values.double()
    k = x.size(-1)
    sizes = x.abs() @ w.abs().t()
    grid = w.abs().amax() if w.numel() else torch.tensor(0.0, dtype=torch.float64)
    rounding = 2.0**-24 * (4 + k) * (sizes + (x.abs().sum(-1, keepdim=True) * grid * 4 if "int4" in name else 0))
    if name.endswith("_a16"):
        step = x.abs().amax(-1, keepdim=True) / 32767
        return rounding + step * 0.501 * w.abs().sum(-1)
    if name.endswith("_a8"):
        total = torch.zeros(len(x), len(w), dtype=torch.float64)
        for start in range(0, k, group):
            part, weights = x[:, start : start + group], w[:, start : start + group]
            total += part.abs().amax(-1, keepdim=True) / 127 * 0.501 * weights.abs().sum(-1)
        return rounding + total
    return rounding
