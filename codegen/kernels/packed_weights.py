"""Weights of 8 and 4 bits with a scale per group of K.

8 bits: int8 [N, K], no zero points. 4 bits: uint8 [N, ceil(K / 2)], a byte's low nibble is k = 2j, its high one
k = 2j + 1; a nibble u is offset binary, q = u - 8, or with zero points (uint8 [N, groups], 0 ... 15) q = u - zero.
A weight is scale[n, k // group] times its integer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...hardware_db.formats import Recipe, get_format
from ...passes.rounding import quantize, round_to


def quantize_weight(
    w: Tensor, bits: int, group: int, *, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(packed, scale) of w [N, K], symmetric: scale = amax / qmax of each group of a row (`passes.rounding.quantize`),
    rounded to scale_dtype; values are rounded with the scale as it is stored. qmax is 127 or 7.

    Raises ValueError for weights that are not finite: integers cannot hold them.
    """
    if bits not in (4, 8) or group < 1:
        raise ValueError(f"weights have 4 or 8 bits and groups of at least 1, not {bits} and {group}.")
    if not bool(w.isfinite().all()):
        raise ValueError("the weight has values that are inf or NaN, which integers cannot hold.")
    fmt = get_format(f"int{bits}")
    wide = w.float()
    if w.numel() == 0:
        shape = (w.size(0), -(-w.size(1) // group))
        empty = torch.empty(w.size(0), w.size(1) if bits == 8 else -(-w.size(1) // 2), device=w.device)
        return empty.to(torch.int8 if bits == 8 else torch.uint8), torch.ones(shape, dtype=scale_dtype, device=w.device)
    exact = quantize(wide, fmt, Recipe(name=f"1x{group}", block=(1, group), power_of_two=False)).scale
    limits = torch.finfo(scale_dtype)
    # fp16 has neither the smallest nor the largest scales
    scale = exact.clamp(limits.smallest_normal, limits.max).to(scale_dtype)
    spread = scale.float().repeat_interleave(group, 1)[:, : w.size(1)]
    values = round_to(wide / spread, fmt, saturate=True).to(torch.int8)
    return (values if bits == 8 else pack_nibbles(values + 8)), scale


def pack_nibbles(values: Tensor) -> Tensor:
    """uint8 [N, ceil(K / 2)] of values 0 ... 15 [N, K]; where K is odd, the last high nibble is 8."""
    pairs = pad(values, (0, values.size(1) % 2), value=8).to(torch.uint8)
    return pairs[:, 0::2] | (pairs[:, 1::2] << 4)


def dequantize_weight(packed: Tensor, scale: Tensor, k: int, group: int, zero: Tensor | None = None) -> Tensor:
    """The weight [N, k] in fp64, exact."""
    groups = torch.arange(k, device=packed.device) // group
    if packed.dtype is torch.int8:
        values = packed.double()
    else:
        nibbles = torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)[:, :k].double()
        values = nibbles - (zero.double()[:, groups] if zero is not None else 8.0)
    return values * scale.double()[:, groups]
