"""Device functions of kernels that multiply: operands to fp32 and back, the product itself, the order of tiles.

Triton's interpreter converts carelessly: fp32 to bf16 is cut off, not rounded, bf16's subnormals are wrong, fp8's
rounding does not carry into the exponent and its NaN and inf become numbers. Under `INTERPRETED` the conversions here
go through bits instead, so that an interpreted kernel gives what a GPU gives.

Rounding of an fp32 x to a grid of spacing u (a power of two) is (x + 1.5 * 2^23 * u) - 1.5 * 2^23 * u: the sum lies
where fp32's spacing is u, and is rounded to nearest, ties to even (for |x| <= 2^22 * u).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def dot(  # noqa: ANN201
    a: Any,
    b: Any,
    acc: Any,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr = "ieee",
    PROMOTE: tl.constexpr = None,
):
    """acc + a @ b, a: [M, K], b: [K, N], acc: [M, N] fp32, or int32 for int8 operands.

    PRECISION: of fp32 operands, "ieee" or "tf32" (operands then are `round_tf32`'s). PROMOTE: on sm_90, whose matrix
    units add fp8 products with about 14 bits, the contraction length after which partial sums are added up in fp32;
    it counts when it is at most K. None: never.
    """
    if INTERPRETED and acc.dtype == tl.float32:
        return tl.dot(widen(a, INTERPRETED), widen(b, INTERPRETED), acc)
    if acc.dtype == tl.int32:
        return tl.dot(a, b, acc, out_dtype=tl.int32)
    return tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=PROMOTE, out_dtype=tl.float32)


@triton.jit
def round_tf32(x: Any):  # noqa: ANN201
    """fp32 rounded to nearest even at 10 mantissa bits: add half a unit (less one bit for even), cut 13 bits.

    NaN is kept, and so is inf; a carry into the exponent is right. Bit-equal to `passes.rounding.round_to(x, "tf32")`.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & -0x2000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def activate(x: Any, ACTIVATION: tl.constexpr):  # noqa: ANN201
    """An activation of fp32 x by name: none, relu, gelu (erf), gelu_tanh, silu. NaN stays NaN.

    tanh(u) = 2 sigmoid(2u) - 1, hence x (1 + tanh u) / 2 = x sigmoid(2u); gelu_tanh has u = sqrt(2/pi) (x + 0.044715
    x^3) (Hendrycks and Gimpel, arXiv:1606.08415).
    """
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION == "none", "unknown activation")
    return x


@triton.jit
def widen(x: Any, INTERPRETED: tl.constexpr):  # noqa: ANN201
    """x, of any format up to 32 bits, in fp32: exact (int32 is rounded beyond 2^24)."""
    if not INTERPRETED:
        return x.to(tl.float32)
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if x.dtype == tl.float8e4nv:
        return _decode(x, 3, 7, 0x7F, 0x80)
    if x.dtype == tl.float8e5:
        return _decode(x, 2, 15, 0x7C, 0x80)
    if x.dtype == tl.float8e4b8:
        return _decode(x, 3, 8, 0x80, 0x80)
    if x.dtype == tl.float8e5b16:
        return _decode(x, 2, 16, 0x80, 0x80)
    return x.to(tl.float32)


@triton.jit
def narrow(x: Any, DTYPE: tl.constexpr, SATURATE: tl.constexpr, INTERPRETED: tl.constexpr):  # noqa: ANN201
    """fp32 x rounded to nearest even in DTYPE: fp32, bf16, fp16, fp8 of any flavour, int8 (-127 ... 127).

    SATURATE clamps magnitudes beyond the format's largest value, inf too, to it; else they become inf, or NaN in formats
    without (as `passes.rounding.round_to`). NaN stays NaN. int8 always saturates and takes NaN for 0.
    """
    if DTYPE == tl.float32:
        return x
    if DTYPE == tl.int8:
        x = _clamp(tl.where(x == x, x, 0.0), 127.0)
        return ((x + _MAGIC) - _MAGIC).to(tl.int8)
    if DTYPE == tl.float8e4nv:
        # 464 lies halfway between 448 and the 480 that there is not; it is a tie, and 448 is even
        return _encode(x, DTYPE, 448.0, 464.0000305175781, 0x7F, 3, 7, SATURATE, INTERPRETED)
    if DTYPE == tl.float8e5:
        return _encode(x, DTYPE, 57344.0, 61440.0, 0x7C, 2, 15, SATURATE, INTERPRETED)
    if DTYPE == tl.float8e4b8:
        return _encode(x, DTYPE, 240.0, 248.0, 0x80, 3, 8, SATURATE, INTERPRETED)
    if DTYPE == tl.float8e5b16:
        return _encode(x, DTYPE, 57344.0, 61440.0, 0x80, 2, 16, SATURATE, INTERPRETED)
    if DTYPE == tl.float16:
        return (_clamp(x, 65504.0) if SATURATE else x).to(tl.float16)
    tl.static_assert(DTYPE == tl.bfloat16, "no conversion to this type")
    if SATURATE:
        x = _clamp(x, 3.3895313892515355e38)
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, rounded, 0x7FC0 | (bits >> 31 << 15)).to(tl.uint16)
        return bits.to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def swizzle(pid: Any, tiles_m: Any, tiles_n: Any, GROUP: tl.constexpr):  # noqa: ANN201
    """Tile (m, n) of a program: GROUP rows of tiles are walked column by column, so that programs that run at the same
    time read few distinct tiles of both operands and find them in L2."""
    per_group = GROUP * tiles_n
    first = pid // per_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + pid % per_group % rows, pid % per_group // rows


@triton.jit
def _clamp(x: Any, limit: Any):  # noqa: ANN201
    """x within [-limit, limit]; NaN stays NaN, as both comparisons are false."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _decode(x: Any, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, SIGN: tl.constexpr):  # noqa: ANN201
    """fp8 to fp32 by bits: exponent and mantissa put in place are fp32 of value 2^(BIAS - 127) times the right one.

    SPECIAL: the lowest pattern that is no number: NaN, but for 0x7C, e5m2's inf.
    """
    bits = x.to(tl.uint8, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7F
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    if SPECIAL == 0x80:
        return tl.where(bits == 0x80, float("nan"), tl.where(bits >= SIGN, -value, value))
    if SPECIAL == 0x7C:
        value = tl.where(magnitude == 0x7C, float("inf"), value)
        value = tl.where(magnitude > 0x7C, float("nan"), value)
    else:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(bits >= SIGN, -value, value)


@triton.jit
def _encode(  # noqa: ANN201
    x: Any,
    DTYPE: tl.constexpr,
    MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    SPECIAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SATURATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """fp32 to fp8. OVERFLOW: the least magnitude that is beyond MAX when rounded; SPECIAL: the pattern it gets.

    GPUs' conversions saturate, some by mode bits: what overflows is set here, before or after them.
    """
    clamped = _clamp(x, MAX)
    if INTERPRETED:
        result = _encode_bits(clamped, MANTISSA, BIAS, SPECIAL).to(tl.uint8)
    else:
        result = clamped.to(DTYPE).to(tl.uint8, bitcast=True)
    if not SATURATE:
        special = tl.where(x < 0.0, SPECIAL | 0x80, SPECIAL).to(tl.uint8)
        result = tl.where(tl.abs(x) >= OVERFLOW, special, result)
    return result.to(DTYPE, bitcast=True)


@triton.jit
def _encode_bits(x: Any, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr):  # noqa: ANN201
    """fp32 within the range, or NaN, to the bits of an fp8 format: `_decode`, and the rounding, backwards."""
    bits = x.to(tl.int32, bitcast=True)
    binade = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    offset = tl.maximum(binade, 2.0 ** (1 - BIAS)) * (_MAGIC * 2.0**-MANTISSA)
    magnitude = (tl.abs(x) + offset) - offset
    result = (magnitude * 2.0 ** (BIAS - 127)).to(tl.int32, bitcast=True) >> (23 - MANTISSA)
    if SPECIAL == 0x80:
        return tl.where(x == x, tl.where((bits < 0) & (result > 0), result | 0x80, result), 0x80)
    result = tl.where(bits < 0, result | 0x80, result)
    return tl.where(x == x, result, 0x7F)
