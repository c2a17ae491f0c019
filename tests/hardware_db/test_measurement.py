"""Measured rates: which device they are of, how they are read between the points, and what devices make of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsmp.errors import HardwareDataError
from dsmp.hardware_db import resolve
from dsmp.hardware_db.catalog import load_catalog
from dsmp.hardware_db.parsing import parse_measurement
from dsmp.hardware_db.work import GemmShape, Work

SQUARE, LARGE = {"m": 256, "n": 256, "k": 256}, {"m": 1024, "n": 1024, "k": 1024}
TABLE = {
    "device": "cpu-avx2",
    "name": "EPYC 7763",
    "units": 64,
    "date": "2026-11-29",
    "torch": "2.14.1",
    "memory_bandwidth_bytes_per_s": 3e10,
    "launch_overhead_s": 2e-6,
    "gemm": [
        {"format": "fp32", "accumulate": "fp32", **SQUARE, "flop_per_s": 1e11, "operator": "aten.mm"},
        {"format": "fp32", "accumulate": "fp32", **LARGE, "flop_per_s": 1.4e11, "operator": "aten.mm"},
        {"format": "bf16", "accumulate": "fp32", **SQUARE, "flop_per_s": 2e9, "operator": "aten.mm"},
        {
            "format": "int8",
            "accumulate": "int32",
            **LARGE,
            "flop_per_s": 2.8e11,
            "operator": "quantized.linear_dynamic",
        },
    ],
    "conversion": [
        {"source": "fp32", "target": "bf16", "bytes_per_s": 1e10},
        {"source": "fp32", "target": "fp8_e4m3", "recipe": "1x128", "bytes_per_s": 2e9},
    ],
    "collective": [{"op": "all_reduce", "backend": "gloo", "ranks": 2, "latency_s": 2e-4, "bytes_per_s": 1e9}],
}


def edited(**changes):
    return {**TABLE, **changes}


@pytest.fixture
def measured(tmp_path):
    """The class device of AVX2 CPUs with TABLE measured on it."""
    file = tmp_path / "run.toml"
    rows = ",\n".join(
        "{ " + ", ".join(f"{k} = {v!r}" for k, v in p.items()).replace("'", '"') + " }" for p in TABLE["gemm"]
    )
    casts = ",\n".join(
        "{ " + ", ".join(f"{k} = {v!r}" for k, v in p.items()).replace("'", '"') + " }" for p in TABLE["conversion"]
    )
    file.write_text(
        '[[measurement]]\ndevice = "cpu-avx2"\nname = "EPYC 7763"\nunits = 64\ndate = "2026-11-29"\ntorch = "2.14.1"\n'
        "memory_bandwidth_bytes_per_s = 3e10\nlaunch_overhead_s = 2e-6\n"
        f"gemm = [\n{rows}\n]\nconversion = [\n{casts}\n]\n"
    )
    catalog = load_catalog([file])
    return catalog.calibrated(catalog.resolve("cpu-avx2"))


def test_a_measurement_replaces_assumed_fractions(measured):
    plain = resolve("cpu-avx2")
    assert plain.measured is None
    assert measured.achieved_bandwidth == 3e10 and measured.launch_overhead_s == 2e-6
    assert measured.peak("fp32") == plain.peak("fp32"), "peaks are what they were"
    assert measured.overlays == ("run.toml",)
    assert {"rates measured on 2026-11-29 with torch 2.14.1", "uses data of run.toml"} <= set(measured.caveats)
    shape = GemmShape(**LARGE)
    assert measured.achievable("fp32", shape) == 1.4e11
    work = Work(flops=shape.flops, moved_bytes=12 * 1024**2, gemm=shape)
    assert measured.time(work, "fp32") == pytest.approx(shape.flops / 1.4e11 + 2e-6)
    small = Work(flops=1.0, moved_bytes=3e6)
    assert measured.time(small, "fp32") == pytest.approx(3e6 / 3e10 + 2e-6)


def test_conversions_cost_what_was_measured(measured):
    assert measured.conversion_time("fp32", "bf16", "none", 1000) == pytest.approx(6000 / 1e10 + 2e-6)
    assert measured.conversion_time("fp32", "fp8_e4m3", "1x128", 1000) == pytest.approx(5000 / 2e9 + 2e-6)
    assert measured.conversion_time("fp32", "fp16", "none", 1000) == pytest.approx(6000 / 3e10 + 2e-6), "by bandwidth"


def test_slow_formats_are_refused_with_the_measured_ratio(measured):
    assert measured.slower_than_fp32("bf16") == pytest.approx(0.02)
    assert measured.slower_than_fp32("int8") is None, "int8 was measured faster"
    assert measured.slower_than_fp32("fp16") is None, "fp16 was not measured"
    near = GemmShape(m=250, n=260, k=256)
    assert measured.slower_than_fp32("bf16", shape=near) == pytest.approx(0.02)
    verdict = measured.supports("linear", 0, "bf16")
    assert not verdict and "measured 0.02 times as fast as fp32's here" in verdict.reason


@pytest.mark.parametrize("other", [{"units": 2}, {"name": "another CPU"}, {"device": "cpu-amx"}])
def test_a_measurement_is_of_one_device_only(other):
    measurement = parse_measurement(edited(**other), "m.toml")
    device = resolve("cpu-avx2")
    assert not measurement.applies_to(device.id, device.name, device.units)
    assert parse_measurement(TABLE, "m.toml").applies_to(device.id, device.name, device.units)


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096), st.floats(1e6, 1e15)), min_size=1
    ),
    st.integers(1, 8192),
    st.integers(1, 8192),
    st.integers(1, 8192),
)
def test_rates_between_points_stay_within_them(points, m, n, k):
    gemm = [
        {"format": "fp32", "accumulate": "fp32", "m": a, "n": b, "k": c, "flop_per_s": r, "operator": "aten.mm"}
        for a, b, c, r in points
    ]
    measurement = parse_measurement(edited(gemm=gemm), "m.toml")
    rates = [r for *_, r in points]
    found = measurement.rate("fp32@fp32", GemmShape(m=m, n=n, k=k))
    assert min(rates) * (1 - 1e-9) <= found <= max(rates) * (1 + 1e-9)
    a, b, c, _ = points[0]
    at_point = measurement.rate("fp32@fp32", GemmShape(m=a, n=b, k=c))
    assert at_point in [r for *shape, r in points if shape == [a, b, c]]
    assert measurement.rate("bf16@fp32", GemmShape(m=m, n=n, k=k)) is None


def test_the_ratio_is_a_geometric_mean_over_common_shapes():
    gemm = [
        *TABLE["gemm"],
        {"format": "bf16", "accumulate": "fp32", **LARGE, "flop_per_s": 1.4e11 * 0.5, "operator": "aten.mm"},
        {"format": "bf16", "accumulate": "fp32", "m": 1, "n": 9, "k": 9, "flop_per_s": 1e15, "operator": "aten.mm"},
    ]
    ratio = parse_measurement(edited(gemm=gemm), "m.toml").ratio_to_fp32("bf16@fp32")
    assert ratio == pytest.approx(math.sqrt(0.02 * 0.5))


def test_the_ratio_near_a_shape_is_that_shapes():
    one_row = {"m": 1, "n": 1024, "k": 1024}
    gemm = [
        *TABLE["gemm"],
        {"format": "fp32", "accumulate": "fp32", **one_row, "flop_per_s": 1e9, "operator": "aten.mm"},
        {"format": "bf16", "accumulate": "fp32", **one_row, "flop_per_s": 2e9, "operator": "aten.mm"},
    ]
    measurement = parse_measurement(edited(gemm=gemm), "m.toml")
    assert measurement.ratio_to_fp32("bf16@fp32", GemmShape(**one_row)) == 2
    assert measurement.ratio_to_fp32("bf16@fp32", GemmShape(**SQUARE)) == pytest.approx(0.02)
    assert measurement.ratio_to_fp32("fp16@fp32", GemmShape(**SQUARE)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gemm": []}, "gemm: Tuple should have at least 1 item"),
        ({"launch_overhead_s": 0.0}, "launch_overhead_s: Input should be greater than 0"),
        ({"date": "today"}, "date: String should match pattern"),
        ({"date": "2026-99-99"}, "date: "),
        ({"memory_bandwidth_bytes_per_s": 25.0}, "memory_bandwidth_bytes_per_s: Input should be greater"),
        ({"bandwidth": 1.0}, "bandwidth: unknown key"),
        ({"gemm": [{**TABLE["gemm"][0], "format": "fp33"}]}, "gemm.0.format: unknown format 'fp33'"),
        ({"gemm": [{**TABLE["gemm"][0], "m": 0}]}, "gemm.0.m: Input should be greater than or equal to 1"),
        ({"gemm": [{**TABLE["gemm"][0], "flop_per_s": float("inf")}]}, "gemm.0.flop_per_s"),
        ({"conversion": [{**TABLE["conversion"][0], "recipe": "1x127"}]}, "conversion.0.recipe"),
        ({"collective": [{**TABLE["collective"][0], "op": "gossip"}]}, "collective.0.op"),
    ],
)
def test_bad_measurements_name_file_record_and_key(change, message):
    with pytest.raises(HardwareDataError) as caught:
        parse_measurement(edited(**change), "m.toml")
    assert str(caught.value).startswith("m.toml: measurement of 'cpu-avx2': ") and message in str(caught.value)
