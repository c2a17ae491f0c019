from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from rounding_reference import CARRIERS, INF, NAN, assert_same, exact_round, lively

from dsmp.errors import RoundingError
from dsmp.hardware_db.formats import FORMATS, RECIPES, InfNan
from dsmp.passes.rounding import fake_quantize, quantize, round_to


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small lose far more to waiting for a second thread on a busy machine than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slow_scale(block, fmt, recipe, work):
    """Scale of one block (any array), by rational arithmetic; `work` is np.float32 or np.float64."""
    amax = np.max(np.abs(block), initial=0)
    if amax == 0 or not np.isfinite(amax):
        return work(1)
    bound = {np.float32: FORMATS["fp32"].max, np.float64: FORMATS["fp64"].max}[work]
    top = min(fmt.max, bound)
    lowest = -1022 if work is np.float64 and not recipe.power_of_two else -126
    if recipe.power_of_two or fmt.storage_bits >= 16:
        k = max(lowest, int(np.log2(float(amax)) - np.log2(top)) - 3)
        while Fraction(float(amax)) > Fraction(top) * Fraction(2) ** k and not (recipe.power_of_two and k == 127):
            k += 1
        return work(2.0**k)
    return max(work(amax) / work(top), work(2.0**lowest))


def block_slices(shape, recipe, axis):
    """Index tuples that cut an array of this shape into the blocks of a recipe."""
    axis %= max(len(shape), 1)
    extent = [1] * len(shape)
    if recipe.name in ("none", "tensor"):
        extent = list(shape)
    elif shape and recipe.name == "row":
        extent[axis] = shape[axis]
    elif shape:
        rows, extent[axis] = recipe.block
        if rows > 1 and len(shape) > 1:
            other = ({len(shape) - 1, len(shape) - 2} - {axis}).pop()
            extent[other] = rows
    starts = product(*(range(0, n, max(e, 1)) for n, e in zip(shape, extent, strict=True)))
    for start in starts:
        yield tuple(slice(i, i + e) for i, e in zip(start, extent, strict=True))


def slow_quantize(x, name, recipe_name, axis):
    """The reference for fake_quantize: one block after the other, one value after the other."""
    fmt, recipe = FORMATS[name], RECIPES[recipe_name]
    work = np.float64 if x.dtype is torch.float64 else np.float32
    source = x.to(torch.float64 if work is np.float64 else torch.float32).numpy()
    out, scales = np.empty_like(source), []
    largest = work(torch.finfo(x.dtype).max)
    with np.errstate(over="ignore"):
        for where in block_slices(source.shape, recipe, axis):
            block = source[where]
            scale = slow_scale(block, fmt, recipe, work) if recipe.is_scaled else work(1)
            scales.append(float(scale))
            rounded = [exact_round(float(v), fmt, recipe.is_scaled) for v in (block / scale).flat]
            result = np.array(rounded, np.float64).reshape(block.shape).astype(work) * scale
            if recipe.is_scaled:
                result = np.clip(result, -largest, largest)
            keep = ~np.isfinite(block) & (recipe.is_scaled or fmt.inf_nan is InfNan.NONE)
            out[where] = np.where(keep, block, result)
    return torch.from_numpy(out).to(x.dtype), scales


CASES = [
    ((5, 70), -1),
    ((33, 7), 0),
    ((2, 131), 1),
    ((131, 2), -2),
    ((2, 3, 37), 1),
    ((2, 3, 33), 2),
    ((150,), 0),
    ((1, 1), 0),
    ((), -1),
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2fnuz", "fp4_e2m1", "int8", "fp16", "int32"])
def test_recipes_against_the_slow_reference(name, recipe):
    for seed, (shape, axis) in enumerate(CASES):
        dtype = list(CARRIERS.values())[seed % 4] if seed % 2 else torch.float32
        if name == "int32":  # its limit is no fp32 value
            dtype = torch.float64
        x = lively(shape, dtype, seed)
        want, scales = slow_quantize(x, name, recipe, axis)
        assert_same(fake_quantize(x, name, recipe, axis=axis), want)
        assert quantize(x, name, recipe, axis=axis).scale.flatten().tolist() == scales


@pytest.mark.parametrize("recipe", ["1x128", "128x128"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "bf16"])
def test_larger_blocks_and_partial_tiles_against_the_slow_reference(name, recipe):
    for axis, shape in enumerate([(260, 11), (9, 300), (2, 130, 5)]):
        x = lively(shape, torch.float32, axis)
        assert_same(fake_quantize(x, name, recipe, axis=axis), slow_quantize(x, name, recipe, axis)[0])


@pytest.mark.parametrize(
    ("recipe", "axis", "grid", "block"),
    [
        ("none", -1, (1, 1, 1), (2, 130, 300)),
        ("tensor", -1, (1, 1, 1), (2, 130, 300)),
        ("row", -1, (2, 130, 1), (1, 1, 300)),
        ("row", 0, (1, 130, 300), (2, 1, 1)),
        ("1x128", -1, (2, 130, 3), (1, 1, 128)),
        ("1x128", 1, (2, 2, 300), (1, 128, 1)),
        ("128x128", -1, (2, 2, 3), (1, 128, 128)),
        ("128x128", 1, (2, 2, 3), (1, 128, 128)),
        ("mx32", -1, (2, 130, 10), (1, 1, 32)),
    ],
)
def test_scale_grid_and_dequantize(recipe, axis, grid, block):
    x = lively((2, 130, 300), torch.bfloat16, 3)
    q = quantize(x, "fp8_e4m3", recipe, axis=axis)
    assert tuple(q.scale.shape) == grid and q.block == block and q.format is FORMATS["fp8_e4m3"]
    assert q.values.shape == x.shape and q.values.dtype == q.scale.dtype == torch.float32
    assert_same(round_to(q.values, "fp8_e4m3"), q.values)
    assert_same(q.dequantize(torch.bfloat16), fake_quantize(x, "fp8_e4m3", recipe, axis=axis))
    expanded = q.scale
    for d, (n, b) in enumerate(zip(x.shape, block, strict=True)):
        expanded = expanded.repeat_interleave(b, d).narrow(d, 0, n)
    assert_same(q.dequantize(), q.values * expanded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "none"])
@pytest.mark.parametrize("name", FORMATS)
def test_error_is_within_half_a_step_of_the_block(name, recipe, dtype):
    fmt = FORMATS[name]
    x = lively((96, 160), dtype, 7)
    q = quantize(x, name, recipe)
    y = fake_quantize(x, name, recipe)
    amax, scale = torch.empty(x.shape, dtype=torch.float64), torch.empty(x.shape, dtype=torch.float64)
    blocks = list(block_slices(x.shape, RECIPES[recipe], -1))
    for where, s in zip(blocks, q.scale.flatten().tolist(), strict=True):
        amax[where], scale[where] = x[where].double().abs().max(), s
    assert ((amax / scale) <= fmt.max * (1 + 1e-6)).all(), "nothing saturates"
    half = torch.maximum(x.double().abs() * fmt.unit_roundoff, scale * fmt.smallest_subnormal / 2)
    if fmt.kind == "int":
        half = scale / 2
    carrier = FORMATS[{v: k for k, v in CARRIERS.items()}[dtype]]
    slack = x.double().abs() * (1.1 * carrier.unit_roundoff + 2.0**-22) + carrier.smallest_subnormal / 2
    assert ((x.double() - y.double()).abs() <= half * (1 + 1e-6) + slack).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_blocks_have_scale_one(name, recipe):
    x = torch.zeros(4, 256)
    x[2] = 3.0
    q = quantize(x, name, recipe)
    if recipe in ("row", "1x128", "mx32"):
        assert (q.scale[[0, 1, 3]] == 1).all()
    zero = quantize(torch.zeros(4, 256), name, recipe)
    assert (zero.scale == 1).all() and (zero.values == 0).all()


@pytest.mark.parametrize("dtype", CARRIERS.values())
@pytest.mark.parametrize("name", FORMATS)
def test_power_of_two_scales(name, dtype):
    fmt = FORMATS[name]
    x = lively((64, 128), dtype, 11)
    recipes = [r for r in RECIPES if RECIPES[r].power_of_two or (fmt.storage_bits >= 16 and r != "none")]
    for recipe in recipes:
        q = quantize(x, name, recipe)
        mantissa, exponent = np.frexp(q.scale.double().numpy())
        assert (mantissa == 0.5).all(), recipe
        if RECIPES[recipe].power_of_two:
            assert ((exponent - 1 >= -127) & (exponent - 1 <= 127)).all()
        scaled_max = q.values.abs().amax(1)
        if recipe == "row" and fmt.name not in ("fp64", "int32"):  # the smallest power of two that fits
            assert (scaled_max <= fmt.max).all() and (scaled_max >= fmt.max / 2 * (1 - fmt.unit_roundoff)).all()


def test_power_of_two_scales_are_exact_at_the_boundary():
    for name, recipe in product(("fp8_e4m3", "fp4_e2m1", "int8", "fp16"), ("mx32",)):
        top = np.float32(FORMATS[name].max)
        for k in range(-100, 100, 7):
            edge = np.float32(top * 2.0**k)
            beyond = np.nextafter(edge, np.float32(INF))
            assert float(quantize(torch.tensor([edge]), name, recipe).scale) == 2.0**k
            assert float(quantize(torch.tensor([beyond]), name, recipe).scale) == 2.0 ** (k + 1)


@pytest.mark.parametrize("recipe", ["tensor", "row", "1x128", "128x128", "mx32"])
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_wide_formats_gain_range_and_lose_no_bit_to_the_scale(name, recipe):
    fmt = FORMATS[name]
    grid = round_to(torch.randn(32, 128, generator=torch.Generator().manual_seed(0)), name)
    for shift in (2.0**-100, 2.0**60, 2.0**100):
        assert_same(fake_quantize(grid * shift, name, recipe), grid * shift)
    assert fmt.max >= 65504


def test_an_outlier_spoils_its_own_block_only():
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    spoiled = x.clone()
    spoiled[1, 130] = 1e6
    for recipe, rows, columns in (
        ("row", [1], range(512)),
        ("1x128", [1], range(128, 256)),
        ("mx32", [1], range(128, 160)),
        ("128x128", range(4), range(128, 256)),
    ):
        clean, dirty = fake_quantize(x, "int8", recipe), fake_quantize(spoiled, "int8", recipe)
        inside = torch.zeros(4, 512, dtype=torch.bool)
        inside[np.ix_(list(rows), list(columns))] = True
        assert torch.equal(clean[~inside], dirty[~inside])
        inside[1, 130] = False
        assert (dirty[inside] == 0).all()
    assert (fake_quantize(spoiled, "int8", "tensor") == 0).sum() == x.numel() - 1


@pytest.mark.parametrize("dtype", CARRIERS.values())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FORMATS)
def test_inf_and_nan_are_never_hidden(name, recipe, dtype):
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[0, 3], x[1, 40], x[1, 200] = INF, -INF, NAN
    y = fake_quantize(x, name, recipe)
    assert torch.equal(y.isfinite(), x.isfinite())
    assert y[1, 200].isnan()
    if RECIPES[recipe].is_scaled:
        assert y[0, 3] == INF and y[1, 40] == -INF
        q = quantize(x, name, recipe)
        assert torch.equal(q.values.isfinite(), x.isfinite())
        hit = {"tensor": [0], "row": [0, 1], "1x128": [0, 2, 3], "128x128": [0, 1], "mx32": [0, 9, 14]}[recipe]
        assert (q.scale.flatten()[hit] == 1).all()
    if recipe in ("row", "1x128", "mx32"):
        assert torch.equal(y[2], fake_quantize(x[2:], name, recipe)[0]), "other blocks are as without"


@pytest.mark.parametrize("dtype", CARRIERS.values())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FORMATS)
def test_extreme_magnitudes_stay_finite(name, recipe, dtype):
    info = torch.finfo(dtype)
    step = float(torch.tensor(info.smallest_normal, dtype=torch.float64) * info.eps)
    for amax in (step, info.smallest_normal, 1e-40, 1e-30, info.max, info.max * 0.9):
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).mul(amax).to(dtype).reshape(2, 32)
        if recipe == "none" and float(x.abs().max()) > FORMATS[name].max:
            continue  # overflows by contract
        q, y = quantize(x, name, recipe), fake_quantize(x, name, recipe)
        assert q.values.isfinite().all() and q.scale.isfinite().all() and (q.scale > 0).all(), amax
        if not (recipe == "none" and name == "bf16" and dtype is torch.float16):
            assert y.isfinite().all(), amax
        if recipe in ("tensor", "row") and amax >= 1e-30 and x.abs().max() > 0:
            assert torch.allclose(y.abs().max().double(), x.abs().max().double(), rtol=0.3), amax


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_never_shows(recipe):
    x = torch.randn(100, 200, generator=torch.Generator().manual_seed(3)) * 1e-5
    part = fake_quantize(x[:70, :150], "fp8_e4m3", recipe)
    padded = torch.zeros(128, 256)
    padded[:70, :150] = x[:70, :150]
    assert torch.equal(part, fake_quantize(padded, "fp8_e4m3", recipe)[:70, :150])


@pytest.mark.parametrize("recipe", RECIPES)
def test_layout_is_that_of_empty_like_even_where_blocks_are_partial(recipe):
    base = torch.randn(150, 200, generator=torch.Generator().manual_seed(4))
    for x in (base, base.t(), base[:, ::2], base.reshape(3, 50, 200).transpose(0, 1)):
        y = fake_quantize(x, "fp8_e4m3", recipe)
        assert y.stride() == torch.empty_like(x).stride()
        assert torch.equal(y, fake_quantize(x.contiguous(), "fp8_e4m3", recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_and_scalar_tensors(recipe):
    for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
        for axis in range(-len(shape), len(shape)):
            if recipe == "128x128" and axis % len(shape) < len(shape) - 2:
                continue
            y = fake_quantize(torch.empty(shape), "fp8_e4m3", recipe, axis=axis)
            assert y.shape == shape
            assert quantize(torch.empty(shape), "int8", recipe, axis=axis).dequantize().shape == shape
    for axis in (0, -1):
        y = fake_quantize(torch.tensor(0.3), "fp8_e4m3", recipe, axis=axis)
        assert y.shape == () and abs(float(y) - 0.3) < 0.02


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), 2), ((2, 3), -3), ((), 1), ((4,), -2)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_axis_out_of_range_is_refused(shape, axis, recipe):
    with pytest.raises(RoundingError, match=f"axis {axis} is out of range"):
        fake_quantize(torch.ones(shape), "fp8_e4m3", recipe, axis=axis)


def test_tiles_need_the_contraction_among_the_last_two_dimensions():
    with pytest.raises(RoundingError, match=r"128x128.*last two.*movedim"):
        fake_quantize(torch.ones(2, 3, 4), "fp8_e4m3", "128x128", axis=0)
    batched = lively((3, 140, 20), torch.float32, 9)
    want = torch.stack([fake_quantize(b, "fp8_e4m3", "128x128") for b in batched])
    assert torch.equal(fake_quantize(batched, "fp8_e4m3", "128x128"), want)


def test_flush_to_zero_does_not_divide_by_zero():
    x = torch.tensor([1e-40, -1e-38, 2e-38, 0.0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        results = [fake_quantize(x, n, r) for n, r in product(FORMATS, RECIPES)]
    finally:
        torch.set_flush_denormal(False)
    assert all(y.isfinite().all() for y in results)
