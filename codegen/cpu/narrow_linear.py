"""A linear whose weight alone is narrow, on CPUs: `dsmp_cpu::narrow_linear`, into which compilers do not look.

    narrow_linear(x, weight, bias, format, transposed)  x fp32 [M, K] times a weight fp32 [N, K], or [K, N] if
                                                        `transposed`, stored in `format`, plus bias [N]: fp32 [M, N]
    narrow_pack(weight, format)                         the packed tensors of a weight fp32 [N, K]
    narrow_unpack(packed, format, N, K)                 fp32 [N, K]: what products multiply by
    narrow_linear_packed(x, packed, bias, format, N, K) the product for whoever holds a weight packed alone

It takes the model's own parameter and multiplies by what was packed of it (packed_weights.h): fp16, int8 with a scale a
row, or int4 with a scale for every 128 values of a row, rounded as `fake_quantize` rounds them under the plan's recipe;
int4 somewhat finer, since it uses all 16 values (the farthest of a group is -8, where `fake_quantize` stops at 7).
"""

from __future__ import annotations

from ...hardware_db.capability import Verdict
from .extension import cpu_operators

RECIPES = {"fp16": "none", "int8": "row", "int4": "1x128"}
"""How the scales of each format's weights lie."""


def narrow_linear_available(format: str, recipe: str) -> Verdict:
    """Whether linears with such weights run here: needs the C++ kernels, which the first call builds."""
    if RECIPES.get(format) != recipe:
        return Verdict(False, f"weights are stored in fp16, int8 by rows or int4 by 1x128, not in {format} by {recipe}")
    return cpu_operators()
