"""Device functions of kernels that multiply: operands to fp32 and back, the product itself, the order of tiles.

Triton's interpreter converts carelessly: fp32 to bf16 is cut off, not rounded, bf16's subnormals are wrong, fp8's
rounding does not carry into the exponent and its NaN and inf become numbers. Under `INTERPRETED` the conversions here
go through bits instead, so that an interpreted kernel gives what a GPU gives.

Rounding of an fp32 x to a grid of spacing u (a power of two) is (x + 1.5 * 2^23 * u) - 1.5 * 2^23 * u: the sum lies
where fp32's spacing is u, and is rounded to nearest, ties to even (for |x| <= 2^22 * u).
"""

# Triton looks up the names of annotations and finds but its own; constexpr parameters are no constants to compare with
# ruff: noqa: ANN001, ANN201, ANN202, SIM300
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def dot(
    a,
    b,
    acc,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr = "ieee",
    PROMOTE: tl.constexpr = None,
):
    """acc + a @ b, a: [M, K], b: [K, N], acc: [M, N] fp32, or int32 for int8 operands.

    PRECISION: of fp32 operands, "ieee" or "tf32" (operands then are `round_tf32`'s). PROMOTE: on sm_90, whose matrix
    units add fp8 products with about 14 bits, the contraction length after which partial sums are added up in fp32;
    it counts when it is at most K. None: never.
    """
    if acc.dtype == tl.int32:
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    elif INTERPRETED:
        acc = tl.dot(widen(a, INTERPRETED), widen(b, INTERPRETED), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=PROMOTE, out_dtype=tl.float32)
    return acc


@triton.jit
def round_tf32(x):
    """fp32 rounded to nearest even at 10 mantissa bits: add half a unit (less one bit for even), cut 13 bits.

    NaN is kept, and so is inf; a carry into the exponent is right. Bit-equal to `passes.rounding.round_to(x, "tf32")`.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & -0x2000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
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
def widen(x, INTERPRETED: tl.constexpr):
    """x, of any format up to 32 bits, in fp32: exact (int32 is rounded beyond 2^24)."""
    if not INTERPRETED:
        result = x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        result = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float8e4nv:
        result = _decode(x, 3, 7, 0x7F)
    elif x.dtype == tl.float8e5:
        result = _decode(x, 2, 15, 0x7C)
    elif x.dtype == tl.float8e4b8:
        result = _decode(x, 3, 8, 0x80)
    elif x.dtype == tl.float8e5b16:
        result = _decode(x, 2, 16, 0x80)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def narrow(x, DTYPE: tl.constexpr, SATURATE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 x rounded to nearest even in DTYPE: fp32, bf16, fp16, fp8 of any flavour, int8 (-127 ... 127).

    SATURATE clamps magnitudes beyond the format's largest value, inf too, to it; else they become inf, or NaN in
    formats without (as `passes.rounding.round_to`). NaN stays NaN. int8 always saturates and takes NaN for 0.
    """
    if DTYPE == tl.float32:
        result = x
    elif DTYPE == tl.int8:
        clamped = _clamp(tl.where(x == x, x, 0.0), 127.0)
        result = ((clamped + _MAGIC) - _MAGIC).to(tl.int8)
    elif DTYPE == tl.float8e4nv:
        # 464 lies halfway between 448 and the 480 that there is not; 448 is even, so what is above overflows
        result = _encode(x, DTYPE, 448.0, 464.0000305175781, 0x7F, 3, 7, SATURATE)
    elif DTYPE == tl.float8e5:
        result = _encode(x, DTYPE, 57344.0, 61440.0, 0x7C, 2, 15, SATURATE)
    elif DTYPE == tl.float8e4b8:
        result = _encode(x, DTYPE, 240.0, 248.0, 0x80, 3, 8, SATURATE)
    elif DTYPE == tl.float8e5b16:
        result = _encode(x, DTYPE, 57344.0, 61440.0, 0x80, 2, 16, SATURATE)
    elif DTYPE == tl.float16:
        result = (_clamp(x, 65504.0) if SATURATE else x).to(tl.float16)
    else:
        tl.static_assert(DTYPE == tl.bfloat16, "no conversion to this type")
        clamped = _clamp(x, 3.3895313892515355e38) if SATURATE else x
        if INTERPRETED:
            bits = clamped.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            result = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            result = clamped.to(tl.bfloat16)
    return result


@triton.jit
def swizzle(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile (m, n) of a program: GROUP rows of tiles are walked column by column, so that programs that run at the same
    time read few distinct tiles of both operands and find them in L2."""
    per_group = GROUP * tiles_n
    first = pid // per_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + pid % per_group % rows, pid % per_group // rows


@triton.jit
def _clamp(x, limit):
    """x within [-limit, limit]; NaN stays NaN, as both comparisons are false."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _decode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr):
    """fp8 to fp32 by bits: exponent and mantissa put in place are fp32 of value 2^(BIAS - 127) times the right one.

    SPECIAL: the lowest pattern that is no number: NaN, but for 0x7C, e5m2's inf.
    """
    bits = x.to(tl.uint8, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7F
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    if SPECIAL == 0x80:
        value = tl.where(bits == 0x80, float("nan"), value)
    elif SPECIAL == 0x7C:
        value = tl.where(magnitude == 0x7C, float("inf"), tl.where(magnitude > 0x7C, float("nan"), value))
    else:
        value = tl.where(magnitude == SPECIAL, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def _encode(
    x,
    DTYPE: tl.constexpr,
    MAX: tl.constexpr,
    OVERFLOW: tl.constexpr,
    SPECIAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SATURATE: tl.constexpr,
):
    """fp32 to fp8. OVERFLOW: the least magnitude that is beyond MAX when rounded; SPECIAL: the pattern it gets.

    Triton's own conversion rounds twice on some targets and saturates by mode bits on others: the bits are made here.
    """
    clamped = _clamp(x, MAX)
    result = _encode_bits(clamped, MANTISSA, BIAS, SPECIAL).to(tl.uint8)
    if not SATURATE:
        special = tl.where(x < 0.0, SPECIAL | 0x80, SPECIAL).to(tl.uint8)
        result = tl.where(tl.abs(x) >= OVERFLOW, special, result)
    return result.to(DTYPE, bitcast=True)


@triton.jit
def _encode_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr):
    """fp32 within the range, or NaN, to the bits of an fp8 format: `_decode`, and the rounding, backwards."""
    bits = x.to(tl.int32, bitcast=True)
    binade = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    offset = tl.maximum(binade, 2.0 ** (1 - BIAS)) * (_MAGIC * 2.0**-MANTISSA)
    magnitude = (tl.abs(x) + offset) - offset
    result = (magnitude * 2.0 ** (BIAS - 127)).to(tl.int32, bitcast=True) >> (23 - MANTISSA)
    # where the pattern of -0 is NaN there is no -0
    signed = (bits < 0) & (result > 0) if SPECIAL == 0x80 else bits < 0
    return tl.where(x == x, tl.where(signed, result | 0x80, result), 0x80 if SPECIAL == 0x80 else 0x7F)
