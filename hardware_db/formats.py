"""Numeric formats and scaling recipes: the vocabulary in which every decision is written. Imports no torch.

**Format.** A float format with E exponent bits, m mantissa bits and bias b holds, besides the specials,

    (-1)^s * 2^(e - b) * (1 + f / 2^m)     for 1 <= e <= e_top,   0 <= f < 2^m      (normal)
    (-1)^s * 2^(1 - b) * (    f / 2^m)                            0 <= f < 2^m      (subnormal)

Hence smallest_normal = 2^(1-b), smallest_subnormal = 2^(1-b-m), epsilon = 2^-m and, by the kind of specials,

    IEEE        e_top = 2^E - 2 (an all-ones exponent is inf or NaN)       max = (2 - 2^-m) * 2^(e_top - b)
    NAN_ONLY    e_top = 2^E - 1, all ones in exponent and mantissa is NaN  max = (2 - 2^(1-m)) * 2^(e_top - b)
    SINGLE_NAN  e_top = 2^E - 1, the pattern of -0 is NaN: no -0, no inf   max = (2 - 2^-m) * 2^(e_top - b)
    NONE        e_top = 2^E - 1, neither inf nor NaN                       max = (2 - 2^-m) * 2^(e_top - b)

An int format is symmetric: it holds the integers in [-max, max], max = 2^(storage_bits - 1) - 1; the two's
complement value -max - 1 is never produced, so that negation is exact and one scale serves both signs.

Sources: IEEE 754-2019 (fp64, fp32, fp16); OCP 8-bit Floating Point Specification 1.0 (fp8_e4m3, fp8_e5m2);
OCP Microscaling Formats (MX) Specification 1.0 (fp6, fp4); Noune et al., arXiv:2206.02915 (the fnuz
flavours); NVIDIA A100 whitepaper (tf32: fp32's exponent, 10 mantissa bits, stored in 32 bits).

**Recipe.** How scales are attached to a narrow format. A GEMM node has one per operand, written `lhs/rhs`. An operand
whose recipe is `wide` is not rounded at all: `int8 wide/row` multiplies activations as they are traced by weights that
are stored in int8, one scale a row, and widened as they are read. One whose recipe is `static` has a scale and a zero
point that calibration fixed, in steps of 7 bits (passes/static_steps.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

from ..errors import HardwareDataError, UnknownFormatError, UnknownRecipeError


class InfNan(Enum):
    """Which values beside the finite ones a format has (see the module docstring for the encodings)."""

    IEEE = "ieee"
    NAN_ONLY = "fn"
    SINGLE_NAN = "fnuz"
    NONE = "none"

    @property
    def has_inf(self) -> bool:
        """True when overflow has an infinity to go to."""
        return self is InfNan.IEEE

    @property
    def has_nan(self) -> bool:
        """True when the format can say "not a number"."""
        return self is not InfNan.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One numeric format.

    `max`, `smallest_normal` and `smallest_subnormal` are magnitudes, written out and checked against the bits
    on construction (`HardwareDataError` on a contradiction). Int formats have exponent_bits 0, bias 0,
    mantissa_bits storage_bits - 1, and 1.0 for both smallest values. `torch_dtype` is the name of the torch
    dtype that stores the format with working casts (fp32's for tf32), None if there is none.
    """

    name: str
    kind: Literal["float", "int"]
    exponent_bits: int
    mantissa_bits: int
    bias: int
    storage_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    inf_nan: InfNan
    torch_dtype: str | None

    def __post_init__(self) -> None:
        expected = self._derive_int() if self.kind == "int" else self._derive_float()
        for field, value in expected.items():
            if getattr(self, field) != value:
                raise HardwareDataError(
                    f"format {self.name!r} contradicts itself: {field} is {getattr(self, field)!r}, its bits "
                    f"give {value!r}. Correct the field or the bit counts."
                )
        used = 1 + self.exponent_bits + self.mantissa_bits
        if used > self.storage_bits:
            raise HardwareDataError(
                f"format {self.name!r} contradicts itself: sign, exponent and mantissa take {used} bits, "
                f"storage_bits is {self.storage_bits}. Correct the bit counts."
            )

    def _derive_int(self) -> dict[str, object]:
        return {
            "exponent_bits": 0,
            "mantissa_bits": self.storage_bits - 1,
            "bias": 0,
            "max": float(2 ** (self.storage_bits - 1) - 1),
            "smallest_normal": 1.0,
            "smallest_subnormal": 1.0,
            "inf_nan": InfNan.NONE,
        }

    def _derive_float(self) -> dict[str, object]:
        m = self.mantissa_bits
        top = 2**self.exponent_bits - (2 if self.inf_nan is InfNan.IEEE else 1) - self.bias
        lost = 2.0 ** (1 - m) if self.inf_nan is InfNan.NAN_ONLY else 2.0**-m
        return {
            "max": math.ldexp(2.0 - lost, top),
            "smallest_normal": math.ldexp(1.0, 1 - self.bias),
            "smallest_subnormal": math.ldexp(1.0, 1 - self.bias - m),
        }

    @property
    def largest(self) -> float:
        """The largest finite value; the same as `max`."""
        return self.max

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value: smallest_normal = 2^min_exponent."""
        return math.frexp(self.smallest_normal)[1] - 1

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest value, emax in OCP MX: 2^emax <= max < 2^(emax + 1)."""
        return math.frexp(self.max)[1] - 1

    @property
    def significand_bits(self) -> int:
        """Significant bits: mantissa_bits + 1 (the hidden one) for floats, mantissa_bits for ints."""
        return self.mantissa_bits + (self.kind == "float")

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value: 2^-mantissa_bits; 1.0 for ints."""
        return 1.0 if self.kind == "int" else 2.0**-self.mantissa_bits

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a value in the normal range to nearest, epsilon / 2.

        For ints it is the largest *absolute* error, 0.5: a fixed-point format has no relative bound.
        """
        return self.epsilon / 2

    @property
    def bytes_per_element(self) -> float:
        """Bytes that one element takes when densely packed (0.5 for 4-bit formats, 0.75 for 6-bit)."""
        return self.storage_bits / 8

    def contains(self, other: Format) -> bool:
        """True when every finite value of `other` is one of this format: casting to it loses nothing."""
        return (
            self.significand_bits >= other.significand_bits
            and self.max >= other.max
            and self.smallest_subnormal <= other.smallest_subnormal
        )


def _float(
    name: str,
    layout: tuple[int, int, int, int],
    values: tuple[float, float, float],
    inf_nan: InfNan,
    torch_dtype: str | None,
) -> Format:
    """Layout: exponent bits, mantissa bits, bias, storage bits. Values: max, smallest normal, subnormal."""
    e, m, bias, storage = layout
    return Format(
        name=name,
        kind="float",
        exponent_bits=e,
        mantissa_bits=m,
        bias=bias,
        storage_bits=storage,
        max=values[0],
        smallest_normal=values[1],
        smallest_subnormal=values[2],
        inf_nan=inf_nan,
        torch_dtype=torch_dtype,
    )


def _int(name: str, bits: int, largest: float, torch_dtype: str | None) -> Format:
    return Format(
        name=name,
        kind="int",
        exponent_bits=0,
        mantissa_bits=bits - 1,
        bias=0,
        storage_bits=bits,
        max=largest,
        smallest_normal=1.0,
        smallest_subnormal=1.0,
        inf_nan=InfNan.NONE,
        torch_dtype=torch_dtype,
    )


_IEEE, _FN, _FNUZ, _NONE = InfNan.IEEE, InfNan.NAN_ONLY, InfNan.SINGLE_NAN, InfNan.NONE

_ALL_FORMATS = (
    _float(
        "fp64",
        (11, 52, 1023, 64),
        (1.7976931348623157e308, 2.2250738585072014e-308, 5e-324),
        _IEEE,
        "float64",
    ),
    _float(
        "fp32",
        (8, 23, 127, 32),
        (3.4028234663852886e38, 1.1754943508222875e-38, 1.401298464324817e-45),
        _IEEE,
        "float32",
    ),
    _float(
        "tf32",
        (8, 10, 127, 32),
        (3.4011621342146535e38, 1.1754943508222875e-38, 1.1479437019748901e-41),
        _IEEE,
        "float32",
    ),
    _float(
        "bf16",
        (8, 7, 127, 16),
        (3.3895313892515355e38, 1.1754943508222875e-38, 9.183549615799121e-41),
        _IEEE,
        "bfloat16",
    ),
    _float("fp16", (5, 10, 15, 16), (65504.0, 2.0**-14, 2.0**-24), _IEEE, "float16"),
    _float("fp8_e4m3", (4, 3, 7, 8), (448.0, 2.0**-6, 2.0**-9), _FN, "float8_e4m3fn"),
    _float("fp8_e5m2", (5, 2, 15, 8), (57344.0, 2.0**-14, 2.0**-16), _IEEE, "float8_e5m2"),
    _float("fp8_e4m3fnuz", (4, 3, 8, 8), (240.0, 2.0**-7, 2.0**-10), _FNUZ, "float8_e4m3fnuz"),
    _float("fp8_e5m2fnuz", (5, 2, 16, 8), (57344.0, 2.0**-15, 2.0**-17), _FNUZ, "float8_e5m2fnuz"),
    _float("fp6_e2m3", (2, 3, 1, 6), (7.5, 1.0, 0.125), _NONE, None),
    _float("fp6_e3m2", (3, 2, 3, 6), (28.0, 0.25, 0.0625), _NONE, None),
    # torch.float4_e2m1fn_x2 stores two values per byte and has no casts, so it is no carrier of single values
    _float("fp4_e2m1", (2, 1, 1, 4), (6.0, 1.0, 0.5), _NONE, None),
    _int("int32", 32, 2147483647.0, "int32"),
    _int("int8", 8, 127.0, "int8"),
    _int("int4", 4, 7.0, None),
)

FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in _ALL_FORMATS})
"""Every format by name, widest first within floats, then ints. Read-only."""


def get_format(name: str) -> Format:
    """The format called `name`; `UnknownFormatError` (with near matches) if there is none."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownFormatError(name, FORMATS) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How scales are attached to one operand.

    `block` is the extent of one scale as (elements along the operand's other dimension, elements along the
    contraction dimension K), or None when it does not depend on fixed numbers: "none" has no scale, "tensor"
    one, "row" one per vector along K; "wide" leaves the operand in its traced format. `power_of_two`: scales are E8M0,
    i.e. 2^k stored in 8 bits.
    """

    name: str
    block: tuple[int, int] | None
    power_of_two: bool

    @property
    def is_scaled(self) -> bool:
        """False for "none" and "wide"."""
        return self.name not in ("none", "wide")


_ALL_RECIPES = (
    Recipe(name="none", block=None, power_of_two=False),
    Recipe(name="tensor", block=None, power_of_two=False),
    Recipe(name="row", block=None, power_of_two=False),
    Recipe(name="1x128", block=(1, 128), power_of_two=False),
    Recipe(name="128x128", block=(128, 128), power_of_two=False),
    Recipe(name="mx32", block=(1, 32), power_of_two=True),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({r.name: r for r in _ALL_RECIPES})
"""Every recipe that rounds an operand by name. Read-only."""


WIDE = Recipe(name="wide", block=None, power_of_two=False)
"""The recipe of an operand that is not rounded; the other operand of its product is."""
STATIC = Recipe(name="static", block=None, power_of_two=False)
"""The recipe of an activation whose scale and zero point are fixed before it is known."""
DYNAMIC = Recipe(name="dynamic", block=None, power_of_two=False)
"""The recipe of an activation whose rows have a scale and a zero point each, of the values that they hold."""
_OPERAND_RECIPES = MappingProxyType({**RECIPES, **{r.name: r for r in (WIDE, STATIC, DYNAMIC)}})


def get_recipe(name: str) -> Recipe:
    """The operand recipe called `name`; `UnknownRecipeError` (with near matches) if there is none."""
    try:
        return RECIPES[name]
    except KeyError:
        raise UnknownRecipeError(name, RECIPES) from None


@functools.cache
def split_recipe(text: str) -> tuple[Recipe, Recipe]:
    """The (lhs, rhs) recipes of a GEMM written as "1x128/128x128"; a single name means both operands.

    Raises `UnknownRecipeError` when a part is no recipe or there are more than two parts.
    """
    parts = text.split("/")
    if len(parts) > 2 or parts == [WIDE.name]:
        raise UnknownRecipeError(text, RECIPES)
    left, right = (_operand_recipe(parts[i]) for i in (0, -1))
    return left, right


def _operand_recipe(name: str) -> Recipe:
    if name not in _OPERAND_RECIPES:
        raise UnknownRecipeError(name, _OPERAND_RECIPES)
    return _OPERAND_RECIPES[name]


def keeps_wide(text: str) -> bool:
    """Whether a recipe leaves one of the operands unrounded: only weights are narrow."""
    return WIDE in split_recipe(text)


def is_static(text: str) -> bool:
    """Whether a recipe fixes an operand's steps before it is known."""
    return STATIC in split_recipe(text)


def is_dynamic(text: str) -> bool:
    """Whether a recipe finds the steps of an operand's rows as they come."""
    return DYNAMIC in split_recipe(text)


def packs_weight(text: str) -> bool:
    """Whether a recipe is one of products whose weight is packed once, for inference on CPUs."""
    return not {WIDE, STATIC, DYNAMIC}.isdisjoint(split_recipe(text))


def join_recipe(lhs: Recipe | str, rhs: Recipe | str) -> str:
    """The inverse of `split_recipe`, in its shortest form: equal operands give one name ("none", "mx32")."""
    left, right = (_operand_recipe(r) if isinstance(r, str) else r for r in (lhs, rhs))
    return left.name if left.name == right.name else f"{left.name}/{right.name}"
