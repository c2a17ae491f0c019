"""Independent references for rounding: rational arithmetic, ml_dtypes, integer arithmetic on bit patterns."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

from dsmp.hardware_db.formats import FORMATS, InfNan

ML_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}
FLOATS = [n for n in FORMATS if FORMATS[n].kind == "float"]
INTS = ["int8", "int4", "int32"]
NARROW = [n for n in FORMATS if FORMATS[n].storage_bits <= 8]
CARRIERS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INF, NAN = math.inf, math.nan


def exact_round(value, fmt, saturate=False):
    """One value rounded with rational arithmetic; NaN in gives NaN out, whatever the format."""
    if math.isnan(value):
        return NAN
    no_minus_zero = fmt.kind == "int" or fmt.inf_nan is InfNan.SINGLE_NAN
    saturate = saturate or fmt.inf_nan is InfNan.NONE
    overflow = fmt.max if saturate else INF if fmt.inf_nan is InfNan.IEEE else NAN
    sign = math.copysign(1.0, value)
    if math.isinf(value):
        return sign * overflow
    a = abs(Fraction(value))
    if fmt.kind == "int":
        step = Fraction(1)
    else:
        exponent = max(math.frexp(value)[1] - 1, 1 - fmt.bias)
        step = Fraction(2) ** (exponent - fmt.mantissa_bits)
    rounded = round(a / step) * step  # Fraction's round is to nearest even
    if rounded > Fraction(fmt.max):
        return sign * overflow
    return 0.0 if rounded == 0 and no_minus_zero else sign * float(rounded)


def bits(array):
    """Bit patterns of a float array, all NaNs made one."""
    array = np.array(array)
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize]
    return np.where(np.isnan(array), np.array(NAN, array.dtype).view(kind), array.view(kind))


def assert_same(got, want):
    """Equal to the bit, signs of zero included, NaN equal to NaN."""
    with np.errstate(invalid="ignore"):
        got, want = (
            t.double().numpy() if isinstance(t, torch.Tensor) else np.asarray(t, np.float64) for t in (got, want)
        )
    assert got.shape == want.shape
    wrong = np.flatnonzero(bits(got) != bits(want))
    assert not wrong.size, f"{wrong.size} differ, e.g. {got.flat[wrong[0]]!r} for {want.flat[wrong[0]]!r}"


def through_ml_dtypes(x, name):
    """fp32 array cast to the format and back by ml_dtypes; NaN stays where the format has none."""
    with np.errstate(all="ignore"):
        out = x.astype(np.float32).astype(ML_DTYPES[name]).astype(np.float32)
    return np.where(np.isnan(x), np.float32(NAN), out) if FORMATS[name].inf_nan is InfNan.NONE else out


def through_tf32(x):
    """fp32 array to tf32 by integer arithmetic on the bit pattern, half-way cases told apart."""
    u = np.asarray(x, np.float32).view(np.uint32)
    kept, cut = u >> np.uint32(13), u & np.uint32(0x1FFF)
    up = (cut > 0x1000) | ((cut == 0x1000) & (kept & np.uint32(1) == 1))
    out = ((kept + up.astype(np.uint32)) << np.uint32(13)).view(np.float32)
    return np.where(np.isnan(x), np.float32(NAN), out)


def every_16_bit(carrier):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(CARRIERS[carrier])


def values_of(name):
    """All finite values of a format of at most 8 bits, ascending, as fp64."""
    fmt = FORMATS[name]
    if fmt.kind == "int":
        return np.arange(-fmt.max, fmt.max + 1)
    codes = np.arange(2**fmt.storage_bits, dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float64)
    return np.unique(codes[np.isfinite(codes)])


def hard_floats(name):
    """Values, their midpoints, and the fp64 neighbours of both, around the whole range of a narrow format."""
    v = values_of(name)
    step = v[-1] - v[-2]
    points = np.concatenate([v, (v[1:] + v[:-1]) / 2, [v[-1] + step / 2, v[-1] + step, v[-1] * 2, v[1] / 4]])
    points = np.concatenate([points, -points])
    return np.concatenate([points, np.nextafter(points, INF), np.nextafter(points, -INF)])


def lively(shape, dtype, seed):
    """Values over many binades with zeros and outliers."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x = x * 2.0 ** torch.randint(-12, 6, shape, generator=g)
    x = torch.where(torch.rand(shape, generator=g) < 0.05, 0.0, x)
    x = torch.where(torch.rand(shape, generator=g) < 0.01, 900 * x, x)
    return x.clamp(-60000, 60000).to(dtype)
