"""Kernels that quantise give the simulator's values and scales bit for bit, interpreted, and compile offline."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks.quantize import FORMAT_NAMES, assert_same, bits, sample

from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.quantize import (
    allocate_blocks,
    quantize_rows,
    quantize_rows_call,
    quantize_rows_configs,
    quantize_tiles,
    quantize_tiles_call,
    quantize_tiles_configs,
)
from dsmp.codegen.kernels.quantize_vectors import (
    amax_call,
    quantize_tensor,
    quantize_tensor_call,
    quantize_tensor_configs,
    quantize_vectors,
    quantize_vectors_call,
    quantize_vectors_configs,
)
from dsmp.codegen.kernels.scales import QUANTIZED_DTYPES, native_cast
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS
from dsmp.errors import UnsupportedFormatError
from dsmp.hardware_db.formats import FORMATS
from dsmp.passes.rounding import quantize

NARROW = [f for f in FORMAT_NAMES if FORMATS[f].storage_bits == 8]
FLOAT8 = [f for f in NARROW if f != "int8"]
SHAPES = [(1, 1), (2, 17), (127, 128), (128, 129), (1, 300), (300, 2)]


@pytest.mark.parametrize(
    ("format", "shape"),
    [(f, (130, 300)) for f in FORMAT_NAMES] + [(f, s) for f in ("fp8_e4m3", "int8") for s in SHAPES],
)
def test_rows_and_columns(format, shape):
    x = sample(*shape)
    found = quantize_rows(x, format, columns=True)
    assert_same(found.rows, found.row_scale, quantize(x, format, "1x128"), format)
    assert_same(found.columns, found.column_scale, quantize(x, format, "1x128", axis=0), format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "fp16"])
def test_narrow_inputs(dtype, format):
    x = sample(130, 300, dtype=dtype)
    x[3, 5] = 1e-7 if dtype is torch.float16 else 1e-39  # subnormal there
    found = quantize_rows(x, format, columns=True)
    assert_same(found.rows, found.row_scale, quantize(x, format, "1x128"), format)
    assert_same(found.columns, found.column_scale, quantize(x, format, "1x128", axis=0), format)
    assert_same(*quantize_tiles(x, format), quantize(x, format, "128x128"), format)
    assert_same(*quantize_tensor(x, format)[:2], quantize(x, format, "tensor"), format)


def test_what_is_asked_for_is_written_and_no_more():
    x = sample(130, 300)
    both = quantize_rows(x, "fp8_e4m3", columns=True)
    only = quantize_rows(x, "fp8_e4m3", rows=False, columns=True, transposed=True)
    assert only.rows is None and only.row_scale is None
    assert only.columns.T.is_contiguous() and not only.columns.is_contiguous()
    assert torch.equal(bits(only.columns), bits(both.columns)) and torch.equal(only.column_scale, both.column_scale)
    assert quantize_rows(x, "fp8_e4m3").columns is None
    assert quantize_rows(x, "fp8_e4m3", rows=False).rows is None


def test_strides_do_not_matter():
    x = sample(130, 400)[:, ::2]
    for view in (x.T, x[::3], x[:1].expand(130, 200)):
        assert_same(*quantize_tiles(view, "fp8_e4m3"), quantize(view, "fp8_e4m3", "128x128"), "fp8_e4m3")
        found = quantize_rows(view, "fp8_e4m3", columns=True, transposed=True)
        assert_same(found.rows, found.row_scale, quantize(view, "fp8_e4m3", "1x128"), "fp8_e4m3")
        assert_same(found.columns, found.column_scale, quantize(view, "fp8_e4m3", "1x128", axis=0), "fp8_e4m3")
        assert_same(*quantize_vectors(view, "int8", axis=0), quantize(view, "int8", "row", axis=0), "int8")
        assert_same(*quantize_tensor(view, "fp8_e5m2")[:2], quantize(view, "fp8_e5m2", "tensor"), "fp8_e5m2")


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_tiles_vectors_tensor(format):
    for shape in ((130, 200), (1, 1)):
        x = sample(*shape)
        assert_same(*quantize_tiles(x, format), quantize(x, format, "128x128"), format)
        for axis in (0, 1):
            assert_same(*quantize_vectors(x, format, axis=axis), quantize(x, format, "row", axis=axis), format)
        values, scale, amax = quantize_tensor(x, format)
        assert_same(values, scale, quantize(x, format, "tensor"), format)
        assert float(amax) == float(x.abs().max())


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_mx(format):
    x = sample(130, 300)
    x[0, :32] = 0.0
    x[1, 3] = math.inf if format != "int8" else 1e38
    found = quantize_rows(x, format, columns=True, group=32, power_of_two=True)
    expected = quantize(x, format, "mx32")
    assert_same(found.rows, found.row_scale, expected, format)
    assert_same(found.columns, found.column_scale, quantize(x, format, "mx32", axis=0), format)
    packed = quantize_rows(x, format, group=32, power_of_two=True, e8m0=True)
    assert torch.equal(packed.row_scale.view(torch.float8_e8m0fnu).float(), expected.scale)
    assert torch.equal(bits(packed.rows), bits(found.rows))


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_inf_and_nan_stay(format):
    x = sample(3, 384)
    x[0, 5], x[1, 200], x[2, 300] = math.inf, math.nan, -math.inf
    x[0, 6], x[0, 7] = 1e6, -1e6  # saturate beside the inf
    found = quantize_rows(x, format)
    expected = quantize(x, format, "1x128")
    assert_same(found.rows, found.row_scale, expected, format)
    special = torch.zeros(3, 3, dtype=torch.bool)
    special[0, 0] = special[1, 1] = special[2, 2] = True
    if format == "int8":
        assert torch.equal(found.row_scale.isnan(), special)
        assert torch.equal(found.row_scale[~special], expected.scale[~special])
        assert found.rows[0, 5] == 127 and found.rows[1, 200] == 0 and found.rows[2, 300] == -127
    else:
        assert bool((found.row_scale[special] == 1.0).all())
        assert torch.equal(found.rows.float().isfinite(), x.isfinite())
        assert found.rows[0, 6].float() == min(1e6, FORMATS[format].max) or FORMATS[format].max > 1e6
    values, scale, amax = quantize_tensor(x, format)
    assert bool(amax.isnan()) and bool(scale.isnan()) == (format == "int8")
    dequantized = values.float() * scale
    assert not bool(dequantized[~x.isfinite()].isfinite().any())


def between(format):
    """Every fp8 or int8 value, the halves between neighbours, and their fp32 neighbours, exact in fp32."""
    patterns = torch.arange(256).to(torch.uint8)
    stored = patterns.view(torch.int8) if format == "int8" else patterns.view(QUANTIZED_DTYPES[format])
    values = stored.float()
    values = values[values.isfinite()].unique()
    halves = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, halves, halves / 2**5])
    around = [points, torch.nextafter(points, torch.tensor(math.inf)), torch.nextafter(points, torch.tensor(-math.inf))]
    return torch.cat([*around, torch.tensor([-0.0, 1e-30, -1e-30, 1e-45])])


@pytest.mark.parametrize("format", NARROW)
def test_every_tie_and_its_neighbours(format):
    x = between(format).clamp(-FORMATS[format].max, FORMATS[format].max)[None]
    one = torch.ones(())
    values, _, _ = quantize_tensor(x, format, scale=one)
    expected = quantize(x, format, "none")
    assert_same(values, one, expected, format)
    # and beyond the range they saturate
    big = torch.tensor([[1.0, 1.0001, 1.5, 1e30, -1.0001, -1e30]]) * FORMATS[format].max
    values, _, amax = quantize_tensor(big, format, scale=one)
    assert torch.equal(values.float(), big.clamp(-FORMATS[format].max, FORMATS[format].max))
    assert float(amax) == float(big.abs().max())


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_scales_at_the_ends_of_fp32(format):
    values = [[3.4028234663852886e38, 1e38], [1e-45, 0.0], [2.0**-126, 1e-40], [1e-37, 1e-38], [2.0**127, 3.0]]
    x = torch.tensor(values)
    top = FORMATS[format].max
    x = torch.cat([x, torch.tensor([[top * 2.0**k, 1.0] for k in (-20, 0, 3) if top * 2.0**k < 3e38])])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(math.inf)).clamp(max=3.4028234663852886e38)])
    found = quantize_rows(x, format)
    assert_same(found.rows, found.row_scale, quantize(x, format, "1x128"), format)
    found = quantize_rows(x, format, group=32, power_of_two=True)
    assert_same(found.rows, found.row_scale, quantize(x, format, "mx32"), format)


def test_a_given_scale():
    x = sample(20, 40)
    x[0, 0], x[0, 1] = math.inf, math.nan
    scale = torch.tensor(0.37)
    values, same, amax = quantize_tensor(x, "fp8_e5m2", scale=scale)
    assert same is scale and bool(amax.isnan())
    expected = (x / scale).clamp(-57344.0, 57344.0).to(torch.float8_e5m2)
    assert torch.equal(bits(values).flatten()[2:], bits(expected).flatten()[2:])
    assert float(values[0, 0]) == math.inf and bool(values[0, 1].float().isnan())
    # x / s beyond fp32: finite values saturate still
    tiny, _, _ = quantize_tensor(torch.tensor([[1.0, -1.0]]), "fp8_e4m3", scale=torch.tensor(1e-39))
    assert tiny.float().tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape):
    x = torch.empty(shape)
    found = quantize_rows(x, "fp8_e4m3", columns=True)
    assert found.rows.shape == x.shape and found.columns.shape == x.shape
    assert quantize_tiles(x, "int8")[0].shape == x.shape
    values, scale, amax = quantize_tensor(x, "int8")
    assert values.shape == x.shape and float(scale) == 1.0 and float(amax) == 0.0
    for axis in (0, 1):
        expected = quantize(x, "int8", "row", axis=axis)
        values, scale = quantize_vectors(x, "int8", axis=axis)
        assert values.shape == x.shape and torch.equal(scale, expected.scale)


def test_small_tiles_many_programs_and_rows_read_twice():
    x = sample(130, 700)
    config = Config(blocks={"BLOCK_M": 64, "BLOCK_N": 256, "NATIVE_CAST": 0})
    blocks = allocate_blocks(x, "fp8_e4m3")
    quantize_rows_call(
        x, blocks.rows, blocks.row_scale, None, None, format="fp8_e4m3", power_of_two=False, config=config
    ).run()
    assert_same(blocks.rows, blocks.row_scale, quantize(x, "fp8_e4m3", "1x128"), "fp8_e4m3")
    values, scale = torch.empty_like(x, dtype=torch.int8), torch.empty(130)
    quantize_vectors_call(x, values, scale, format="int8", config=config).run()
    assert_same(values, scale, quantize(x, "int8", "row"), "int8")
    partial, amax, scale = torch.empty(4, dtype=torch.int32), torch.zeros(()), torch.zeros(())
    amax_call(x, partial, config=config).run()
    quantize_tensor_call(x, values, scale, amax, partial, format="int8", config=config).run()
    assert_same(values, scale, quantize(x, "int8", "tensor"), "int8")


@settings(max_examples=15, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    format=st.sampled_from(FORMAT_NAMES),
    recipe=st.sampled_from(["tensor", "1x128", "mx32"]),
)
def test_any_values(values, format, recipe):
    x = torch.tensor([values], dtype=torch.float32)
    expected = quantize(x, format, recipe)
    if recipe == "tensor":
        found, scale, _ = quantize_tensor(x, format)
    else:
        blocks = quantize_rows(
            x, format, group=int(recipe[2:]) if recipe == "mx32" else 128, power_of_two=recipe == "mx32"
        )
        found, scale = blocks.rows, blocks.row_scale
    assert_same(found, scale, expected, format)


def test_a_format_without_kernel():
    with pytest.raises(UnsupportedFormatError, match="fp6_e2m3"):
        quantize_rows_call(
            torch.ones(1, 1), None, None, None, None, format="fp6_e2m3",
            config=Config(blocks={"BLOCK_M": 1, "BLOCK_N": 128, "NATIVE_CAST": 0}),
        )  # fmt: skip


def offline_calls(isa, format, dtype=torch.bfloat16):
    """First configurations of every kernel of the family."""
    M = N = 4096
    target = TARGETS[isa]
    x, one = meta(M, N, dtype=dtype), meta(dtype=torch.float32)
    blocks = allocate_blocks(x, format, columns=True, transposed=True)
    rows, row_scale, columns, column_scale = blocks.rows, blocks.row_scale, blocks.columns, blocks.column_scale
    vector = meta(M, dtype=torch.float32)
    partial = meta(1024, dtype=torch.int32)
    tensor_config = quantize_tensor_configs(M, N, format, target)[0]
    both = quantize_rows_configs(M, N, format, target, columns=True)[0]
    bytes_scale = meta(M, N // 32, dtype=torch.uint8)
    return {
        "rows": quantize_rows_call(
            x, rows, row_scale, None, None, format=format, config=quantize_rows_configs(M, N, format, target)[0]
        ),
        "both": quantize_rows_call(x, rows, row_scale, columns, column_scale, format=format, config=both),
        "columns": quantize_rows_call(
            *(x, None, None, rows, column_scale),
            format=format,
            config=quantize_rows_configs(M, N, format, target, rows=False, columns=True)[0],
        ),
        "mx": quantize_rows_call(
            *(x, rows, bytes_scale, None, None),
            format=format,
            group=32,
            power_of_two=True,
            config=quantize_rows_configs(M, N, format, target, group=32)[0],
        ),
        "tiles": quantize_tiles_call(
            x, rows, meta(32, 32, dtype=torch.float32), format=format,
            config=quantize_tiles_configs(M, N, format, target)[0],
        ),
        "vectors": quantize_vectors_call(
            x, rows, vector, format=format, config=quantize_vectors_configs(M, N, format, target)[0]
        ),
        "vectors of axis 0": quantize_vectors_call(
            x.T, rows.T, vector, format=format, config=quantize_vectors_configs(N, M, format, target, axis=0)[0]
        ),
        "amax": amax_call(x, partial, config=tensor_config),
        "tensor": quantize_tensor_call(x, rows, one, one, partial, format=format, config=tensor_config),
        "given": quantize_tensor_call(x, rows, one, one, None, format=format, config=tensor_config),
    }  # fmt: skip


def offline_cases():
    """(target, format, kernel): every kernel where targets differ, every format in the kernel that does most."""
    everything = list(offline_calls("sm_80", "fp8_e4m3"))
    differ = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx1100")
    cases = [(isa, "fp8_e4m3", name) for isa in differ for name in everything]
    cases += [(isa, "fp8_e4m3", name) for isa in TARGETS if isa not in differ for name in ("both", "vectors", "given")]
    others = [f for f in FORMAT_NAMES if f != "fp8_e4m3"]
    # no NVIDIA GPU multiplies fnuz formats
    return cases + [
        (isa, format, "both")
        for isa in ("sm_90", "gfx90a", "gfx950", "gfx1200")
        for format in others
        if not (isa == "sm_90" and format.endswith("fnuz"))
    ]


def check_offline(isa, format, name):
    target = TARGETS[isa]
    compiled = compile_call(offline_calls(isa, format)[name], target)
    assert compiled.code.spills == 0
    assert compiled.shared_bytes <= target.shared_bytes
    text = compiled.assembly.get("ptx") or compiled.assembly["amdgcn"]
    if target.backend == "cuda":
        assert ".ftz" not in text
        assert ("cvt.rn.satfinite" in text) == (native_cast(format, target) and name != "amax")
        divides = name not in ("mx", "amax") and FORMATS[format].storage_bits == 8
        assert ("div.rn.f32" in text) == divides and "div.full" not in text
    else:
        # 3: subnormal numbers of fp32 are numbers, in and out; div_fixup ends the exact division
        assert ".amdhsa_float_denorm_mode_32 3" in text
        assert ("v_div_fixup_f32" in text) == (name not in ("mx", "amax") and FORMATS[format].storage_bits == 8)


@pytest.mark.parametrize(
    "case", [("sm_90", "fp8_e4m3", "rows"), ("sm_80", "int8", "tiles"), ("gfx942", "fp8_e4m3fnuz", "given")], ids=str
)
def test_compiles_without_spills(case):
    check_offline(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", offline_cases(), ids=str)
def test_every_target(case):
    check_offline(*case)
