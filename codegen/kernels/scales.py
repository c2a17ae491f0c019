"""Device functions of kernels that quantise: the scales of `passes.rounding`, bit for bit, and narrowing to 8 bits.

**Magnitudes.** Non-negative fp32 values are ordered as their bit patterns are, and NaN's pattern is above inf's. So the
largest magnitudes are found as int32: the order of reduction does not matter, and a NaN wins.

**Scales** (`block_scale`) are those of the module docstring of `passes.rounding`: amax / max by an IEEE division, at
least 2^-126, or 2^ceil(log2(amax / max)) from exponents and mantissas; 1 for a block of zeros or with a NaN or inf.

**Values** (`narrow_scaled`) are x / scale in fp32, clamped to the format's largest magnitude and rounded once, to
nearest even. Casts of Triton are not used: from fp32 they go through fp16 on sm_89 and round twice
(https://github.com/triton-lang/triton/pull/11753), sm_80 has none to e4m3, and the interpreter's round wrongly. Here
rounding is integer arithmetic on the fp32 pattern, or (NATIVE_CAST; sm_89 and up) PTX's `cvt.rn.satfinite`, which
rounds once. So fp8 tensors are written as bytes, on every target.

**NaN and inf** of the input stay: inf as inf in e5m2, fp16 and bf16, as NaN in e4m3 and the fnuz formats, which have
no inf. int8 has neither: there NaN becomes 0, inf the largest magnitude, and `stored_scale` makes the block's scale
NaN, so that what is dequantised is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import UnsupportedFormatError
from ...hardware_db.formats import get_format
from ..targets import Target
from .dot import narrow

INFINITE = tl.constexpr(0x7F800000)
"""The pattern of fp32's inf: magnitudes at or above it are not finite."""

QUANTIZED_DTYPES: dict[str, torch.dtype] = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
    "int8": torch.int8,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""The formats that kernels quantise to, and their storage."""

_NATIVE = frozenset({"fp8_e4m3", "fp8_e5m2"})


def storage(tensor: Tensor) -> Tensor:
    """The tensor as kernels take it: fp8 and E8M0 tensors as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype.is_floating_point else tensor


def native_cast(format: str, target: Target) -> bool:
    """Whether a target's own conversion from fp32 to a format rounds once, as PTX specifies it
    (https://docs.nvidia.com/cuda/parallel-thread-execution/, "cvt": `.e4m3x2` and `.e5m2x2` need sm_89)."""
    return format in _NATIVE and target.capability >= 89


def format_constants(format: str, power_of_two: bool | None = None) -> dict[str, Any]:
    """The constexprs FORMAT, MAX and POWER_OF_TWO of a quantising kernel.

    power_of_two: of the recipe; formats of 16 and more bits always have such scales. Raises UnsupportedFormatError.
    """
    fmt = get_format(format)
    if format not in QUANTIZED_DTYPES:
        allowed = ", ".join(QUANTIZED_DTYPES)
        raise UnsupportedFormatError(f"no kernel quantises to {format!r}; allowed: {allowed}.")
    return {"FORMAT": format, "MAX": fmt.max, "POWER_OF_TWO": bool(power_of_two) or fmt.storage_bits >= 16}


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """The pattern of |x|, int32, of fp32 x."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scale(amax: tl.tensor, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """fp32 scales of blocks whose largest magnitudes have the patterns `amax`.

    Power of two: with amax = (1 + f) 2^e and MAX = (1 + g) 2^d it is 2^(e - d), or twice that where f > g. A subnormal
    amax comes out below 2^-126, where the scale is clamped.
    """
    if POWER_OF_TWO:
        top = tl.full([], MAX, tl.float32).to(tl.int32, bitcast=True)
        above = ((amax & 0x7FFFFF) > (top & 0x7FFFFF)).to(tl.int32)
        exponent = (amax >> 23) - (top >> 23) + above + 127
        scale = (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(amax.to(tl.float32, bitcast=True), MAX), 1.1754943508222875e-38)
    return tl.where((amax > 0) & (amax < INFINITE), scale, 1.0)


@triton.jit
def stored_scale(scale: tl.tensor, amax: tl.tensor, FORMAT: tl.constexpr, E8M0: tl.constexpr) -> tl.tensor:
    """What is written for a scale: itself, or its E8M0 byte; NaN where an int8 block is not finite (E8M0: 255)."""
    if FORMAT == "int8":
        scale = tl.where(amax < INFINITE, scale, float("nan"))
    return (magnitude_bits(scale) >> 23).to(tl.uint8) if E8M0 else scale


@triton.jit
def divide(x: tl.tensor, scale: tl.tensor, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """x / scale, rounded to nearest even in fp32. Under POWER_OF_TWO (a normal 2^k) it is x * 2^-k, the same number."""
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        # 2^-127 is subnormal
        inverse = tl.where(bits == 0x7F000000, 0x00400000, 0x7F000000 - bits)
        result = x * inverse.to(tl.float32, bitcast=True)
    else:
        result = tl.div_rn(x, scale)
    return result


@triton.jit
def narrow_scaled(
    x: tl.tensor,
    scale: tl.tensor,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """x / scale in FORMAT: bytes of fp8 formats, else int8, fp16, bf16. x: fp32; scale broadcasts to it."""
    quotient = divide(x, scale, POWER_OF_TWO)
    # finite values saturate, even where the quotient overflows; NaN stays
    clamped = tl.minimum(quotient, MAX, propagate_nan=tl.PropagateNan.ALL)
    clamped = tl.maximum(clamped, -MAX, propagate_nan=tl.PropagateNan.ALL)
    if FORMAT == "int8":
        # adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits
        rounded = (clamped + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        result = tl.where(clamped == clamped, rounded, 0).to(tl.int8)
    elif FORMAT == "fp8_e4m3":
        result = _fp8_bytes(clamped, x, 3, 7, FORMAT, NATIVE_CAST and not INTERPRETED)
    elif FORMAT == "fp8_e5m2":
        result = _fp8_bytes(clamped, x, 2, 15, FORMAT, NATIVE_CAST and not INTERPRETED)
    elif FORMAT == "fp8_e4m3fnuz":
        result = _fp8_bytes(clamped, x, 3, 8, FORMAT, False)
    elif FORMAT == "fp8_e5m2fnuz":
        result = _fp8_bytes(clamped, x, 2, 16, FORMAT, False)
    else:
        kept = tl.where(tl.abs(x) == float("inf"), x, clamped)
        if FORMAT == "fp16":
            result = narrow(kept, tl.float16, False, INTERPRETED)
        else:
            tl.static_assert(FORMAT == "bf16", "no narrowing to this format")
            result = narrow(kept, tl.bfloat16, False, INTERPRETED)
    return result


@triton.jit
def _fp8_bytes(
    clamped: tl.tensor,
    x: tl.tensor,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE_CAST: tl.constexpr,
) -> tl.tensor:
    """`clamped`, fp32 within the range or NaN, to nearest even in an fp8 format of exponent bias BIAS; x: tells inf."""
    bits = clamped.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    if NATIVE_CAST:
        code = _ptx_bytes(clamped, FORMAT).to(tl.int32) & 0xFF
    else:
        CUT: tl.constexpr = 23 - MANTISSA
        magnitude = bits & 0x7FFFFFFF
        # half a unit, less one bit where the kept part is even; a carry into the exponent is right
        normal = (magnitude + ((magnitude >> CUT) & 1) + ((1 << (CUT - 1)) - 1)) >> CUT
        normal -= (127 - BIAS) << MANTISSA
        # below the normal range: fp32 numbers at OFFSET are spaced as the subnormals, and the sum rounds to them
        OFFSET: tl.constexpr = (128 - BIAS - MANTISSA + 23) << 23
        offset = tl.full([], OFFSET, tl.int32).to(tl.float32, bitcast=True)
        subnormal = (tl.abs(clamped) + offset).to(tl.int32, bitcast=True) - OFFSET
        code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
        if FORMAT == "fp8_e4m3" or FORMAT == "fp8_e5m2":
            code = tl.where(magnitude > INFINITE, 0x7F, code | sign)
        else:
            # the pattern of -0 is NaN
            code = tl.where(code == 0, 0, code | sign)
            code = tl.where(magnitude > INFINITE, 0x80, code)
    if FORMAT == "fp8_e5m2":
        code = tl.where(tl.abs(x) == float("inf"), 0x7C | sign, code)
    else:
        code = tl.where(tl.abs(x) == float("inf"), 0x7F if FORMAT == "fp8_e4m3" else 0x80, code)
    return code.to(tl.uint8)


@triton.jit
def _ptx_bytes(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Four values at a time by NVIDIA's conversion; NaN becomes 0x7F."""
    if FORMAT == "fp8_e4m3":
        result = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return result
