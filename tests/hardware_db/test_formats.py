from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

from dsmp.errors import HardwareDataError, UnknownFormatError, UnknownRecipeError
from dsmp.hardware_db.formats import (
    FORMATS,
    RECIPES,
    InfNan,
    get_format,
    get_recipe,
    join_recipe,
    split_recipe,
)

ML_DTYPES = {
    "fp64": np.float64,
    "fp32": np.float32,
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


def decode(fmt, code):
    """Finite value of one bit pattern of a small float format, None for specials."""
    m, e_bits = fmt.mantissa_bits, fmt.exponent_bits
    sign = -1 if code >> (m + e_bits) else 1
    e, f = (code >> m) & (2**e_bits - 1), code & (2**m - 1)
    if fmt.inf_nan is InfNan.IEEE and e == 2**e_bits - 1:
        return None
    if fmt.inf_nan is InfNan.NAN_ONLY and e == 2**e_bits - 1 and f == 2**m - 1:
        return None
    if fmt.inf_nan is InfNan.SINGLE_NAN and sign < 0 and e == f == 0:
        return None
    fraction = Fraction(f, 2**m) + (1 if e else 0)
    return sign * fraction * Fraction(2) ** (max(e, 1) - fmt.bias)


def values(fmt):
    """All finite values of a format of at most 8 bits."""
    if fmt.kind == "int":
        return {Fraction(i) for i in range(-int(fmt.max), int(fmt.max) + 1)}
    return {v for v in (decode(fmt, c) for c in range(2**fmt.storage_bits)) if v is not None}


def test_the_formats_are_exactly_these():
    floats = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"}
    assert set(FORMATS) == floats | {"fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "int32", "int8", "int4"}
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("name", ML_DTYPES)
def test_numbers_agree_with_ml_dtypes(name):
    fmt, info = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    assert fmt.max == fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.epsilon == float(info.eps)
    assert fmt.storage_bits == info.bits
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.iexp, info.nmant)
    assert fmt.unit_roundoff == float(info.eps) / 2
    assert fmt.bytes_per_element == info.bits / 8


def test_tf32_has_the_range_of_fp32_and_the_mantissa_of_fp16():
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert (tf32.exponent_bits, tf32.bias, tf32.storage_bits, tf32.torch_dtype) == (8, 127, 32, "float32")
    assert tf32.mantissa_bits == fp16.mantissa_bits and tf32.smallest_normal == fp32.smallest_normal
    assert tf32.max == np.array([0x7F7FE000], dtype=np.uint32).view(np.float32)[0]


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].torch_dtype and n != "tf32"])
def test_torch_dtypes_exist_and_have_the_same_limits(name):
    fmt = FORMATS[name]
    dtype = getattr(torch, fmt.torch_dtype)
    assert float((torch.finfo if fmt.kind == "float" else torch.iinfo)(dtype).max) == fmt.max
    assert dtype.itemsize * 8 == fmt.storage_bits
    assert torch.tensor([1.0, -2.0]).to(dtype).float().tolist() == [1.0, -2.0]


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].storage_bits <= 8])
def test_limits_are_those_of_the_enumerated_values(name):
    fmt, all_values = FORMATS[name], values(FORMATS[name])
    assert max(all_values) == Fraction(fmt.max) and min(all_values) == -Fraction(fmt.max)
    assert min(v for v in all_values if v > 0) == Fraction(fmt.smallest_subnormal)
    assert min(v for v in all_values if v > 1) - 1 == Fraction(fmt.epsilon)
    assert 2**fmt.max_exponent <= fmt.max < 2 ** (fmt.max_exponent + 1)
    assert math.ldexp(1, fmt.min_exponent) == fmt.smallest_normal


def test_contains_means_every_value():
    small = [f for f in FORMATS.values() if f.storage_bits <= 8]
    for a, b in product(small, small):
        assert a.contains(b) == (values(b) <= values(a)), (a.name, b.name)
    wide = {n: {o for o in FORMATS if FORMATS[n].contains(FORMATS[o])} for n in ("fp64", "fp32", "bf16", "fp16")}
    assert wide["fp64"] == set(FORMATS)
    assert wide["fp32"] == set(FORMATS) - {"fp64", "int32"}
    narrow = {n for n in FORMATS if FORMATS[n].storage_bits <= 8}
    assert wide["bf16"] == narrow | {"bf16"} and wide["fp16"] == narrow | {"fp16"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fp8_e4m3", {"max": 240.0}),
        ("fp8_e4m3", {"inf_nan": InfNan.IEEE}),
        ("fp8_e4m3", {"bias": 8}),
        ("fp16", {"smallest_normal": 2.0**-15}),
        ("fp16", {"smallest_subnormal": 2.0**-25}),
        ("fp16", {"storage_bits": 15}),
        ("int8", {"max": 128.0}),
        ("int8", {"inf_nan": InfNan.IEEE}),
        ("int8", {"storage_bits": 4}),
    ],
)
def test_a_format_that_contradicts_itself_is_refused(name, change):
    with pytest.raises(HardwareDataError, match=f"{name}.*contradicts itself"):
        replace(FORMATS[name], **change)


def test_kinds_of_specials():
    assert {n: f.inf_nan.has_inf for n, f in FORMATS.items() if n.startswith("fp8")} == {
        "fp8_e4m3": False,
        "fp8_e5m2": True,
        "fp8_e4m3fnuz": False,
        "fp8_e5m2fnuz": False,
    }
    assert {n for n, f in FORMATS.items() if not f.inf_nan.has_nan} == {
        "fp6_e2m3",
        "fp6_e3m2",
        "fp4_e2m1",
        "int32",
        "int8",
        "int4",
    }


def test_formats_and_recipes_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        FORMATS["fp16"].max = 1.0
    with pytest.raises(FrozenInstanceError):
        RECIPES["row"].block = (1, 1)
    with pytest.raises(TypeError):
        FORMATS["fp3"] = FORMATS["fp16"]
    with pytest.raises(TypeError):
        RECIPES["none"] = RECIPES["row"]


def test_unknown_names_are_refused_with_a_suggestion():
    assert get_format("bf16") is FORMATS["bf16"]
    with pytest.raises(UnknownFormatError, match="'fp8_e4m3'"):
        get_format("fp8e4m3")
    assert get_recipe("128x128") is RECIPES["128x128"]
    with pytest.raises(UnknownRecipeError, match="'128x128'"):
        get_recipe("128x12")


def test_recipes():
    assert {r.name: (r.block, r.power_of_two) for r in RECIPES.values()} == {
        "none": (None, False),
        "tensor": (None, False),
        "row": (None, False),
        "1x128": ((1, 128), False),
        "128x128": ((128, 128), False),
        "mx32": ((1, 32), True),
    }
    assert [r.name for r in RECIPES.values() if not r.is_scaled] == ["none"]


def test_operand_recipes_split_and_join():
    assert [r.name for r in split_recipe("1x128/128x128")] == ["1x128", "128x128"]
    assert [r.name for r in split_recipe("none")] == ["none", "none"]
    assert [r.name for r in split_recipe("mx32")] == ["mx32", "mx32"]
    assert join_recipe("1x128", RECIPES["128x128"]) == "1x128/128x128"
    assert join_recipe("mx32", "mx32") == "mx32"
    for pair in product(RECIPES.values(), repeat=2):
        assert split_recipe(join_recipe(*pair)) == pair


@pytest.mark.parametrize("text", ["", "/", "1x128/", "row/row/row", "1x128/128x127", "1x128 / 128x128"])
def test_malformed_operand_recipes_are_refused(text):
    with pytest.raises(UnknownRecipeError, match="Known: 128x128"):
        split_recipe(text)


def test_joining_an_unknown_recipe_is_refused():
    with pytest.raises(UnknownRecipeError):
        join_recipe("none", "rows")


def test_importing_formats_does_not_import_torch():
    code = "import sys, dsmp.hardware_db.formats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
