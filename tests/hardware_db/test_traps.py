"""The traps of published hardware figures, each seen in some public table; one test for each."""

from __future__ import annotations

import pytest

from dsmp.errors import HardwareDataError, UnsupportedFormatError
from dsmp.hardware_db import load_catalog, resolve
from dsmp.hardware_db.checks import check_row
from dsmp.hardware_db.formats import get_format

CATALOG = load_catalog()
ROWS = CATALOG.rows
GIB = 2**30


def rated(profile):
    """Formats that a profile has any rate for."""
    return {k.partition("@")[0] for k in (*profile.vector, *profile.matrix)}


def tflops(name, format, accumulate=None):
    return resolve(name).peak(format, accumulate) / 1e12


@pytest.mark.parametrize(
    ("name", "format", "dense"),
    [
        ("h100", "bf16", 989.4),
        ("h100", "fp8_e4m3", 1978.9),
        ("h100", "int8", 1978.9),
        ("h100", "tf32", 494.7),
        ("h200", "bf16", 989.4),
        ("l4", "fp8_e4m3", 242),
        ("l4", "bf16", 121),
        ("rtx-4090", "fp16", 165.2),
        ("b200", "bf16", 2250),
        ("mi300x", "fp16", 1307.4),
    ],
)
def test_sparse_peaks_do_not_leak(name, format, dense):
    assert tflops(name, format) == pytest.approx(dense, rel=0.03)
    row = ROWS[name]
    key = f"{format}@{'int32' if format == 'int8' else 'fp32'}"
    sparse = row.model_copy(
        update={"stated_matrix_tflops_per_card": {key: 2 * dense}, "known_disagreements": {f"matrix.{key}": "sheet"}}
    )
    with pytest.raises(HardwareDataError, match="twice as much: state the dense peak"):
        check_row(sparse, CATALOG.architectures, "sheet.toml")


@pytest.mark.parametrize(
    ("name", "vector", "matrix"),
    [
        ("rtx-4090", 82.6, 165.2),
        ("rtx-3090", 35.6, 71),
        ("a40", 37.4, 149.7),
        ("rtx-a6000", 38.7, 154.8),
        ("titan-rtx", 32.6, 130.5),
    ],
)
def test_vector_rates_stand_in_no_matrix_column(name, vector, matrix):
    assert tflops(name, "fp16") == pytest.approx(matrix, rel=0.03)
    assert resolve(name).vector_peak("fp16") / 1e12 == pytest.approx(vector, rel=0.03)


def test_geforce_halves_fp32_accumulation_and_professional_boards_do_not():
    for name in ("rtx-2080-ti", "rtx-3090", "rtx-4090", "rtx-5090"):
        device = resolve(name)
        assert device.peak("fp16", "fp32") * 2 == device.peak("fp16", "fp16"), name
    for name in ("t4", "a40", "l40s", "rtx-6000-ada", "rtx-pro-6000"):
        device = resolve(name)
        assert device.peak("fp16", "fp32") == device.peak("fp16", "fp16"), name
    assert tflops("rtx-5090", "bf16") == pytest.approx(209.5, rel=0.03), "not the 419 of the PRO board"


def test_l40_is_half_rate_and_l40s_full_on_one_die():
    assert resolve("l40").units == resolve("l40s").units == 142
    assert tflops("l40", "bf16") == pytest.approx(181, rel=0.03)
    assert tflops("l40s", "bf16") == pytest.approx(366, rel=0.03)


def test_the_tensor_clock_is_not_the_boost_clock():
    h100, pcie = resolve("h100"), resolve("H100 PCIe")
    assert (h100.vector_clock_mhz, h100.matrix_clock_mhz) == (1980, 1830)
    assert (pcie.vector_clock_mhz, pcie.matrix_clock_mhz) == (1755, 1620)
    assert h100.peak("fp64") == 132 * 256 * 1980e6, "fp64 tensor cores run at the vector clock"


def test_clocks_are_the_ones_that_hold():
    assert resolve("b580").vector_clock_mhz == 2850, "Arc's stated TOPS use the maximal clock"
    assert resolve("rtx-2080-ti").vector_clock_mhz == 1635, "the Founders' clock, which NVIDIA's tensor figures use"
    assert "70 W" in ROWS["t4"].note, "power-capped: never holds its boost"
    server = resolve("rtx-pro-6000-server")
    assert server.vector_clock_mhz == 2430


@pytest.mark.parametrize(
    ("name", "devices", "memory"),
    [
        ("k80", 2, 12),
        ("m60", 2, 8),
        ("a16", 4, 16),
        ("mi250x", 2, 64),
        ("mi250", 2, 64),
        ("flex-140", 2, 6),
        ("max-1550", 2, 64),
    ],
)
def test_rows_are_logical_devices_not_cards(name, devices, memory):
    row = ROWS[name]
    assert row.logical_devices == devices
    assert row.memory_bytes == pytest.approx(memory * GIB, rel=0.08)


def test_an_mi250x_card_is_two_devices_of_110_units():
    device, row = resolve("mi250x"), ROWS["mi250x"]
    assert (device.units, device.memory_bytes) == (110, 65520 * 2**20)
    assert device.peak("fp16") * 2 == pytest.approx(row.stated_matrix_tflops_per_card["fp16@fp32"] * 1e12, rel=0.01)


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("a10g", 22587 * 2**20),
        ("l40s", 45589 * 2**20),
        ("h20", 97285 * 2**20),
        ("mi300x", 196592 * 2**20),
        ("b200", 191514411008),
    ],
)
def test_memory_is_what_the_runtime_reports(name, reported):
    assert resolve(name).memory_bytes == pytest.approx(reported, rel=0.002)


def test_links_are_stored_both_ways_and_halved_for_one():
    assert ROWS["h100"].interconnect.bidirectional_bytes_per_s == 900e9
    assert resolve("h100").link_bandwidth == 450e9
    assert ROWS["b200"].interconnect.bidirectional_bytes_per_s == 1800e9


def test_copied_rows_are_corrected():
    assert (resolve("l4").units, resolve("a10g").units) == (58, 80)
    assert resolve("mi300a").units == 228 and resolve("mi300x").units == 304
    assert resolve("mi300x").memory_bandwidth == pytest.approx(5.3e12, rel=0.01)
    assert resolve("mi325x").memory_bytes < 258 * GIB, "256 GB were shipped, not 288"
    assert resolve("A100-PCIE-40GB").l2_bytes == 40 * 2**20
    assert resolve("rtx-4090").memory_bandwidth == pytest.approx(1008e9, rel=1e-3), "384 bit x 21 Gbit/s, not 1010"
    assert ROWS["l40s"].tdp_w_per_card == 350
    assert ROWS["mi308x"].units != ROWS["mi300x"].units


def test_mi100_multiplies_bf16_at_half_the_rate_of_fp16():
    assert resolve("mi100").peak("bf16") * 2 == resolve("mi100").peak("fp16")
    assert tflops("mi100", "fp16") == pytest.approx(184.6, rel=0.03)


@pytest.mark.parametrize("name", ["b300", "gb300"])
def test_blackwell_ultra_lost_int8_and_fp64(name):
    device = resolve(name)
    assert not device.supports("linear", 0, "int8") or device.peak("int8") < 0.05 * resolve("b200").peak("int8")
    assert "fp64@fp64" not in device.matrix_peaks and device.peak("fp64") < 2e12
    assert device.peak("fp4_e2m1") / device.peak("fp8_e4m3") == pytest.approx(3)
    assert device.peak("bf16") == pytest.approx(resolve("b200").peak("bf16"), rel=0.1)


def test_unresolved_devices_are_not_verified():
    for name in ("gb10", "mi308x"):
        assert not resolve(name).verified and ROWS[name].note, name
        assert any("not verified" in c for c in resolve(name).caveats)


def test_gfx950_rates_are_the_isas_not_a_profilers_typing_errors():
    profile = CATALOG.profile("mi355x")
    assert profile.matrix["fp8_e4m3@fp32"] == 2 * profile.matrix["bf16@fp32"] == 8192
    assert CATALOG.profile("mi300x").matrix["bf16@fp32"] == 2048


def test_a10g_is_no_a10():
    a10, a10g = resolve("a10"), resolve("a10g")
    assert (a10.units, a10g.units) == (72, 80)
    assert a10g.peak("bf16") / a10g.units < a10.peak("bf16") / a10.units


def test_devices_that_toolchains_dropped_say_so():
    for name in ("k80", "m60", "p100", "v100"):
        assert CATALOG.profile(name).toolchain, name
    assert not CATALOG.profile("h100").toolchain


def test_fp8_needs_promotion_on_ada_and_hopper_only():
    for name in ("rtx-4090", "l40s", "h100", "h800", "h20"):
        device = resolve(name)
        assert device.promote_every_k("fp8_e4m3") == 128 and device.accumulator_mantissa_bits("fp8_e4m3") <= 14, name
    for name in ("b200", "b300"):
        assert resolve(name).promote_every_k("fp8_e4m3") is None, name


def test_fnuz_exists_on_gfx94x_only_and_flavours_are_named():
    for profile in CATALOG.architectures.values():
        fp8 = {f for f in rated(profile) if f.startswith("fp8")}
        if fp8:
            assert profile.fp8_flavour is not None, profile.key
        assert any(f.endswith("fnuz") for f in fp8) == profile.isa.startswith("gfx94"), profile.key
    for name in ("mi350x", "mi355x", "rx-9070-xt"):
        assert resolve(name).supports("linear", 0, "fp8_e4m3") and not resolve(name).supports(
            "linear", 0, "fp8_e4m3fnuz"
        )


@pytest.mark.parametrize(
    "name", ["v100", "t4", "p100", "rtx-2080-ti", "mi50", "rx-6900-xt", "ascend-910a", "epyc-7763"]
)
def test_bf16_is_not_offered_where_it_is_emulated(name):
    with pytest.raises(UnsupportedFormatError):
        resolve(name).peak("bf16")
    assert resolve(name).storage != "bf16"


def test_fp16_on_gtx_10_is_for_storage_only():
    device = resolve("gtx-1080-ti")
    assert device.ladder("linear")[0].format == "fp32"
    assert device.peak("fp16", "fp16") < device.peak("fp32") / 50


def test_tf32_is_native_on_few_devices():
    having = {p.isa for p in CATALOG.architectures.values() if "tf32" in rated(p)}
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942", "intel_gpu_pvc"} <= having
    assert not having & {"sm_70", "sm_75", "gfx90a", "gfx950", "gfx908", "gfx1100", "gfx1201"}


def test_int4_tensor_cores_left_with_ada_and_int8_came_after_volta():
    for name, has in (
        ("t4", True),
        ("a100", True),
        ("rtx-4090", True),
        ("h100", False),
        ("b200", False),
        ("rtx-5090", False),
    ):
        assert bool(resolve(name).supports("linear", 0, "int4")) is has, name
    assert not resolve("v100").supports("linear", 0, "int8")
    assert resolve("jetson-agx-xavier-32gb").supports("linear", 0, "int8")


def test_block_scaled_formats_exist_from_blackwell_and_cdna4_on():
    having = {p.isa for p in CATALOG.architectures.values() if p.mx_formats and not p.totals_only}
    assert having <= {"sm_100", "sm_103", "sm_110", "sm_120", "sm_121", "gfx950", "ascend950"}
    assert {"sm_100", "sm_103", "sm_120", "gfx950"} <= having


def test_fp8_buys_no_speed_on_gaudi_3_and_is_another_format_on_tpu_v6e():
    assert resolve("gaudi-3").peak("fp8_e4m3") == resolve("gaudi-3").peak("bf16")
    verdict = resolve("tpu-v6e").supports("linear", 0, "fp8_e4m3")
    assert not verdict and "no faster than bf16" in verdict.reason


def test_gfx90a_flushes_denormals_of_16_bit_inputs():
    assert resolve("mi250x").flushes_denormals("fp16") and resolve("mi210").flushes_denormals("bf16")
    assert not resolve("mi300x").flushes_denormals("fp16")
    assert resolve("cpu-amx").flushes_denormals("bf16"), "tdpbf16ps reads subnormals as zero"


def test_capability_numbers_are_no_order():
    assert "fp64@fp64" in resolve("b200").matrix_peaks
    assert "fp64@fp64" not in resolve("rtx-5090").matrix_peaks, "sm_120 is not an sm_100 with more"


def test_export_parts_do_not_inherit_what_was_cut():
    for name, whole in (("h800", "h100"), ("h20", "h100")):
        assert "fp64@fp64" not in resolve(name).matrix_peaks
        assert resolve(name).peak("fp64") < 0.05 * resolve(whole).peak("fp64")
    assert resolve("h800").link_bandwidth == 200e9
    assert resolve("a800").link_bandwidth == 200e9 and resolve("a100").link_bandwidth == 300e9
    assert resolve("rtx-4090-d").units == 114 and resolve("rtx-4090").units == 128
    assert resolve("h20").peak("bf16") / resolve("h20").units < 0.3 * resolve("h100").peak("bf16") / 132


def test_every_format_with_a_rate_exists():
    for device in CATALOG.devices():
        for key in (*device.vector_peaks, *device.matrix_peaks):
            format, _, accumulate = key.partition("@")
            assert get_format(format) and get_format(accumulate)
