"""Exact rounding to any format, and scaled (fake) quantisation: what every simulated value goes through.

**Rounding.** `round_to` returns the carrier (the input's dtype) with every value replaced by the nearest
value of the format, ties to even: *one* rounding of the exact input. Casts of torch and ml_dtypes from fp64
go through fp32 and round twice (1 + 2^-8 + 2^-40 -> 1 in bf16); this module does not.

The arithmetic: with m mantissa bits and e = clamp(floor(log2 |x|), e_min, e_max), the format's spacing at x is
u = 2^(e - m), and the result is roundeven(x / u) * u. Division and product are exact, u being a power of two and
|x / u| < 2^(m + 1), so the one rounding is the integer one; the clamp at e_min gives subnormals. 2^e is x with its
mantissa bits masked out. Above the range u stays at the top binade's spacing: such x give results > max, for
which the overflow test stands. Where torch's own cast is bit-exact and faster it is used. e4m3fn is not among
those: since https://github.com/pytorch/pytorch/pull/178817 it saturates on the CPU, while ml_dtypes and earlier
releases give NaN.

Overflow with saturate=False, i.e. a rounded magnitude above max: inf for IEEE formats, NaN for fn and fnuz
(as ml_dtypes; inf too), +-max for formats with neither (fp6, fp4, ints). NaN stays NaN in the carrier for
*every* format: ml_dtypes turns NaN into -0 in fp6 and fp4, which would hide it. -0 stays -0, except in fnuz
and int formats, which have none.

**Scaling.** `quantize` gives each block of a recipe one scale s, and values round_to(x / s, saturate=True);
dequantised is values * s. With amax the block's largest magnitude and max the format's:

* s = amax / max, or for formats of 16 and more storage bits and for recipes with power-of-two scales
  s = 2^ceil(log2(amax / max)), computed exactly from exponents and mantissas.
* Formats of >= 16 bits always get a power of two since what they need is range alone: dividing by amax / max
  would add one rounding of x / s (relative 2^-24 in fp32) and shift every value off its grid, where 2^k is
  exact.
* mx32: OCP MX 1.0 (6.3) takes 2^(floor(log2 amax) - emax), under which scaled values between max and
  2^(emax + 1) saturate. The ceiling rule used here is that of `ceil_to_ue8m0` in DeepGEMM
  (https://github.com/deepseek-ai/DeepGEMM, deep_gemm/utils/math.py): nothing saturates.
* s is a normal number, so that flush-to-zero hardware does not divide by zero: at least 2^-126 (2^-1022 in
  fp64). In power-of-two recipes it is within 2^-126 ... 2^127, the E8M0 range but for its lowest value, as in
  DeepGEMM; an fp64 block beyond that range saturates. An all-zero block has s = 1.
* A block with an inf or NaN has s = 1 and keeps these values as they are, in every format: a gradient scaler
  has to see them (under "none", inf is NaN in fn and fnuz, as in `round_to`). Scales keep finite values finite.

Internally everything is fp32, or fp64 for fp64 tensors. Nothing here is differentiable: results carry no
gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import RoundingError
from ..hardware_db.formats import FORMATS, Format, InfNan, Recipe, get_format, get_recipe

_CARRIERS = {
    torch.float64: FORMATS["fp64"],
    torch.float32: FORMATS["fp32"],
    torch.bfloat16: FORMATS["bf16"],
    torch.float16: FORMATS["fp16"],
}

# casts of torch that are bit-exact from fp32, fp16 and bf16 and faster than arithmetic (the tests check that)
_NATIVE = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}

# integer dtype, exponent mask and mantissa bits of the dtypes in which arithmetic rounding works
_BITS = {
    torch.float32: (torch.int32, 0x7F800000, 23),
    torch.float64: (torch.int64, 0x7FF0000000000000, 52),
}


def round_to(tensor: Tensor, format: str | Format, *, saturate: bool = False) -> Tensor:
    """Every value of `tensor` rounded to nearest even in `format`.

    Args:
        tensor: any shape; fp64, fp32, bf16 or fp16.
        format: a name of `FORMATS` or one of its values.
        saturate: clamp to the largest magnitude instead of overflowing to inf or NaN; inf is clamped too.

    Returns:
        A new tensor of the input's shape, dtype, device and (as `torch.empty_like`) strides. A value of the
        format that the carrier does not have (bf16's 65536 in fp16) becomes inf, or under `saturate` the
        largest magnitude that both have.

    Raises:
        RoundingError: the tensor's dtype is not one of the four.
        UnknownFormatError: no such format.
    """
    fmt = get_format(format) if isinstance(format, str) else format
    _check_dtype(tensor)
    with torch.no_grad():
        return _like(tensor, _round(tensor, fmt, saturate or fmt.inf_nan is InfNan.NONE))


def _round(tensor: Tensor, fmt: Format, saturate: bool) -> Tensor:
    carrier = _CARRIERS[tensor.dtype]
    # the limit is a value of the format: clamping first is the same as clamping last, and nothing overflows
    x = tensor.clamp(*_bounds(fmt, carrier)) if saturate else tensor
    if fmt.contains(carrier):
        return x if saturate else x.clone()
    if fmt.kind == "int":
        return x.round().add_(0.0)  # -0 + 0 = 0
    wide = tensor.dtype is torch.float64
    if fmt.name in _NATIVE and (not wide or fmt.name == "fp32"):
        return _converted(_converted(x, _NATIVE[fmt.name]), tensor.dtype)
    if wide or tensor.dtype is torch.float32:
        rounded = _round_bits(x) if fmt.name == "tf32" and not wide else _round_arithmetic(x, fmt)
        return rounded if saturate else _overflow(rounded, fmt)
    return _round(x.float(), fmt, saturate).to(tensor.dtype)


def _round_arithmetic(x: Tensor, fmt: Format) -> Tensor:
    """x (fp32 or fp64) rounded to fmt's spacing, range unlimited above: see the module docstring."""
    integer, mask, _ = _BITS[x.dtype]
    u = x.view(integer).bitwise_and(_constant(mask, integer)).view(x.dtype)
    u.clamp_(2.0**fmt.min_exponent, 2.0**fmt.max_exponent).mul_(_constant(fmt.epsilon, x.dtype))
    rounded = (x / u).round_().mul_(u)
    return rounded.add_(0.0) if fmt.inf_nan is InfNan.SINGLE_NAN else rounded  # -0 + 0 = 0


def _round_bits(x: Tensor) -> Tensor:
    """fp32 rounded to tf32: add half a unit (less one bit for even) to the pattern and cut 13 bits.

    u of `_round_arithmetic` is no normal number at tf32's smallest exponents, which flush-to-zero modes would
    turn into 0 / 0. A carry into the exponent is right, up to inf.
    """
    bits = x.view(torch.int32)
    shift, one, half, kept = (_constant(value, torch.int32) for value in (13, 1, 0x0FFF, ~0x1FFF))
    rounded = (bits >> shift).bitwise_and_(one).add_(bits).add_(half).bitwise_and_(kept).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


def _overflow(rounded: Tensor, fmt: Format) -> Tensor:
    """Values beyond fmt.max replaced by the special of the format, in place."""
    if rounded.device.type == "cpu" and rounded.numel():  # looking is free here and usually saves three passes
        low, high = torch.aminmax(rounded)
        if -fmt.max <= float(low) and float(high) <= fmt.max:
            return rounded
    if fmt.inf_nan.has_inf:
        return rounded.masked_fill_(rounded > fmt.max, math.inf).masked_fill_(rounded < -fmt.max, -math.inf)
    return rounded.masked_fill_(rounded.abs() > fmt.max, math.nan)


def _bounds(fmt: Format, carrier: Format) -> tuple[float, float]:
    """The interval of saturation: the largest magnitude that is a value of the format and of the carrier."""
    mantissa, exponent = math.frexp(min(fmt.max, carrier.max))
    bits = min(fmt.significand_bits, carrier.significand_bits)
    limit = math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits)
    return -limit, limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A tensor in the scaled domain of a format.

    values: the tensor's shape, fp32 (fp64 for fp64 tensors); every finite value is one of `format`.
    scale: dtype and rank of values, one entry per block: scale.size(d) = ceil(values.size(d) / block[d]).
    format: the format of the values.
    block: extent of one scale in each dimension. Blocks start at index 0; the last one may be partial.
    """

    values: Tensor
    scale: Tensor
    format: Format
    block: tuple[int, ...]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """values * scale, rounded to `dtype` (default: that of values).

        A finite value that overflows `dtype` is clamped (under a power-of-two scale amax may round past it).
        """
        dtype = dtype or self.values.dtype
        if self.values.numel() == 0:
            return self.values.to(dtype)
        with torch.no_grad():
            tiles = _tile(self.values, self.block)
            result = tiles * _per_tile(self.scale)
            largest = torch.finfo(dtype).max
            # the test would synchronise an accelerator; on the CPU it is free and saves two passes
            if result.device.type != "cpu" or float(self.scale.max()) * self.format.max > largest:
                result = torch.where(tiles.isfinite(), result.clamp_(-largest, largest), tiles)
            return _untile(result, self.values.shape).to(dtype)


def quantize(
    tensor: Tensor, format: str | Format, recipe: str | Recipe, *, axis: int | Sequence[int] = -1
) -> Quantized:
    """`tensor` scaled by `recipe` and rounded (saturating) to `format`; the module docstring has the scales.

    Args:
        tensor: any shape; fp64, fp32, bf16 or fp16.
        format: a name of `FORMATS` or one of its values.
        recipe: "none" (scale 1, overflow as in `round_to`, inf kept), "tensor" (one scale), "row" (one per
            vector along `axis`), "1x128" and "mx32" (one per 128 or 32 consecutive elements along `axis`),
            "128x128" (one per tile of `axis` and the other one of the last two dimensions, leading ones are
            batch; a vector counts as 1 x K); or a `Recipe`.
        axis: the contraction dimension K; for "row" there may be several, which then share a scale.

    Raises:
        RoundingError: dtype not one of the four, axis out of range, or not of the last two under "128x128".
        UnknownFormatError, UnknownRecipeError: no such name.
    """
    fmt = get_format(format) if isinstance(format, str) else format
    rec = get_recipe(recipe) if isinstance(recipe, str) else recipe
    _check_dtype(tensor)
    block = _block(tuple(tensor.shape), rec, axis)
    compute = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    with torch.no_grad():
        x = tensor.detach().to(compute)
        if not rec.is_scaled or x.numel() == 0:
            grid = [-(-n // b) for n, b in zip(x.shape, block, strict=True)]
            values = round_to(x, fmt)
            if fmt.inf_nan is InfNan.NONE:
                values = _keep_nonfinite(values, x, x.abs().amax() if x.numel() else x)
            return Quantized(values=values, scale=x.new_ones(grid), format=fmt, block=block)
        tiles = _tile(x, block)
        inner = tuple(range(1, tiles.dim(), 2))
        amax = torch.maximum(tiles.amax(inner, keepdim=True), tiles.amin(inner, keepdim=True).neg_())
        scale = _scale(amax, fmt, rec)
        values = _round(tiles / scale, fmt, saturate=True)
        values = _keep_nonfinite(values, tiles, amax)
        return Quantized(values=_untile(values, x.shape), scale=scale.reshape(amax.shape[::2]), format=fmt, block=block)


def fake_quantize(
    tensor: Tensor, format: str | Format, recipe: str | Recipe, *, axis: int | Sequence[int] = -1
) -> Tensor:
    """`tensor` as it looks after quantisation to `format` under `recipe`: `quantize` and back.

    Arguments and errors are those of `quantize`. Returns a new tensor of the input's shape, dtype, device and
    (as `torch.empty_like`) strides. Recipe "none" is `round_to`, save that inf stays inf in formats without
    inf and NaN.
    """
    quantized = quantize(tensor, format, recipe, axis=axis)
    scaled = (get_recipe(recipe) if isinstance(recipe, str) else recipe).is_scaled
    result = quantized.dequantize(tensor.dtype) if scaled else quantized.values.to(tensor.dtype)
    return _like(tensor, result)


def _scale(amax: Tensor, fmt: Format, recipe: Recipe) -> Tensor:
    """One scale per entry of amax (fp32 or fp64), in amax's dtype; 1 where amax is zero or not finite."""
    integer, _, mantissa_bits = _BITS[amax.dtype]
    top = _bounds(fmt, _CARRIERS[amax.dtype])[1]
    bias = _CARRIERS[amax.dtype].bias
    lowest, highest = (-126, 127) if recipe.power_of_two else (1 - bias, bias)
    if recipe.power_of_two or fmt.storage_bits >= 16:
        # amax / top = (mantissa / top_mantissa) * 2^(exponent - top_exponent), both mantissas in [0.5, 1);
        # a log2 could land on the wrong side of an integer
        top_mantissa, top_exponent = math.frexp(top)
        mantissa, exponent = torch.frexp(amax)
        below, above = (_constant(k - top_exponent, torch.int32) for k in (0, 1))
        exponent = exponent + torch.where(mantissa > _constant(top_mantissa, amax.dtype), above, below)
        biased = exponent.clamp_(lowest, highest).to(integer) + _constant(bias, integer)
        scale = biased.bitwise_left_shift_(_constant(mantissa_bits, integer)).view(amax.dtype)
    else:
        scale = (amax / _constant(top, amax.dtype)).clamp_(min=2.0**lowest)
    zero, one, infinite = (_constant(value, amax.dtype) for value in (0.0, 1.0, math.inf))
    return torch.where((amax > zero) & (amax < infinite), scale, one)


def _keep_nonfinite(values: Tensor, original: Tensor, amax: Tensor) -> Tensor:
    """values with the non-finite ones of the original restored; amax tells whether there are any."""
    # as in dequantize: look first only where looking is free
    if original.device.type == "cpu" and bool((amax < _constant(math.inf, amax.dtype)).all()):
        return values
    return torch.where(original.isfinite(), values, original)


def _block(shape: tuple[int, ...], recipe: Recipe, axes: int | Sequence[int]) -> tuple[int, ...]:
    """The extent of one scale in each dimension, at least 1 and at most the dimension's size."""
    rank = len(shape)
    if not isinstance(axes, int):
        if recipe.name in ("none", "tensor", "row"):
            return tuple(max(1, n) if recipe.name != "row" or d in axes else 1 for d, n in enumerate(shape))
        raise RoundingError(
            f"recipe {recipe.name!r} runs along one dimension, axis names {list(axes)}. Pass the contraction dimension."
        )
    axis = axes
    if not -max(rank, 1) <= axis < max(rank, 1):
        allowed = f"{-max(rank, 1)} to {max(rank, 1) - 1}"
        raise RoundingError(
            f"axis {axis} is out of range for a tensor of shape {list(shape)}; allowed: {allowed}. "
            "Pass the contraction dimension."
        )
    k = axis % max(rank, 1)
    extents = list(shape) if recipe.name in ("none", "tensor") else [1] * rank
    if rank and recipe.name == "row":
        extents[k] = shape[k]
    elif rank and recipe.block is not None:
        rows, extents[k] = recipe.block
        if rows > 1 and rank > 1:
            if k < rank - 2:
                raise RoundingError(
                    f"recipe {recipe.name!r} tiles the last two dimensions, axis {axis} of a tensor of shape "
                    f"{list(shape)} is none of them. Move the contraction dimension there, e.g. with movedim."
                )
            extents[2 * rank - 3 - k] = rows
    return tuple(max(1, min(e, n)) for e, n in zip(extents, shape, strict=True))


def _tile(x: Tensor, block: Sequence[int]) -> Tensor:
    """x [n0, n1, ...] as [blocks0, block[0], blocks1, block[1], ...]; partial blocks are filled with zeros.

    Zeros change no amax and no scale: they are cut off again by `_untile`.
    """
    missing = [-n % b for n, b in zip(x.shape, block, strict=True)]
    if any(missing):
        x = pad(x, [side for m in reversed(missing) for side in (0, m)])
    return x.reshape([size for n, b in zip(x.shape, block, strict=True) for size in (n // b, b)])


def _untile(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_tile`."""
    sizes = tiles.shape
    whole = tiles.reshape([sizes[d] * sizes[d + 1] for d in range(0, len(sizes), 2)])
    for d, n in enumerate(shape):
        whole = whole.narrow(d, 0, n)
    return whole


def _per_tile(scale: Tensor) -> Tensor:
    """scale [blocks0, blocks1, ...] as [blocks0, 1, blocks1, 1, ...], to broadcast over tiles."""
    return scale.reshape([size for n in scale.shape for size in (n, 1)])


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype).copy_(x)


@functools.cache
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor without dimensions: a Python scalar would be converted anew by every operator it meets."""
    with _disable_current_modes():
        return torch.tensor(value, dtype=dtype)


def _like(tensor: Tensor, result: Tensor) -> Tensor:
    """result in the layout of torch.empty_like(tensor): callers' operators promise it to compilers."""
    if result.stride() == torch.empty_like(tensor, device="meta").stride():
        return result
    return torch.empty_like(tensor).copy_(result)


def _check_dtype(tensor: Tensor) -> None:
    if tensor.dtype not in _CARRIERS:
        allowed = ", ".join(str(d) for d in _CARRIERS)
        raise RoundingError(
            f"cannot round a tensor of dtype {tensor.dtype}; allowed: {allowed}. Convert it to one of these."
        )
