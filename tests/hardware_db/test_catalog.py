"""The shipped catalogue: its numbers agree with the vendors', its names with what people type."""

from __future__ import annotations

import pytest

from dsmp.errors import AmbiguousHardwareError, UnknownHardwareError
from dsmp.hardware_db import load_catalog, names, resolve
from dsmp.hardware_db.catalog import normalise, strip_vendor

CATALOG = load_catalog()
FIRST_DOZEN = ["v100", "t4", "a100", "h100", "h800", "h200", "h20", "b200", "mi250x", "mi300x", "cpu-avx2", "cpu-amx"]

# (device, format, accumulator) -> published dense TFLOPS per logical device, typed in from the data sheets
PUBLISHED = {
    ("v100", "fp32", None): 15.7,
    ("v100", "fp16", None): 125.0,
    ("t4", "fp16", None): 65.0,
    ("t4", "int8", None): 130.0,
    ("a100", "tf32", None): 156.0,
    ("a100", "bf16", None): 312.0,
    ("a100", "fp64", None): 19.5,
    ("a100", "int8", None): 624.0,
    ("h100", "fp32", None): 66.9,
    ("h100", "tf32", None): 494.7,
    ("h100", "bf16", None): 989.4,
    ("h100", "fp8_e4m3", None): 1978.9,
    ("h100", "fp64", None): 66.9,
    ("h800", "bf16", None): 989.0,
    ("h200", "fp8_e5m2", "fp32"): 1978.9,
    ("h20", "bf16", None): 148.0,
    ("h20", "fp8_e4m3", None): 296.0,
    ("b200", "bf16", None): 2250.0,
    ("b200", "fp8_e4m3", None): 4500.0,
    ("b200", "fp4_e2m1", None): 9000.0,
    ("mi250x", "fp16", None): 191.5,
    ("mi250x", "fp64", None): 47.9,
    ("mi300x", "fp8_e4m3fnuz", None): 2614.9,
    ("mi300x", "tf32", None): 653.7,
}


def _stated():
    for row in CATALOG.rows.values():
        for domain, stated in (
            ("vector", row.stated_vector_tflops_per_card),
            ("matrix", row.stated_matrix_tflops_per_card),
        ):
            for key, tflops in stated.items():
                yield pytest.param(row, domain, key, tflops, id=f"{row.id}-{domain}.{key}")


@pytest.mark.parametrize(("row", "domain", "key", "tflops"), list(_stated()))
def test_derived_peaks_agree_with_stated_ones(row, domain, key, tflops):
    profile = CATALOG.architectures[row.arch]
    matrix_clock = row.matrix_clock_mhz or row.vector_clock_mhz
    clock = matrix_clock if domain == "matrix" and not key.startswith("fp64") else row.vector_clock_mhz
    derived = row.logical_devices * row.units * getattr(profile, domain)[key] * clock / 1e6
    off = abs(derived / tflops - 1) > 0.03
    assert off == (f"{domain}.{key}" in row.known_disagreements), f"{derived} against {tflops}"


def test_the_only_known_disagreement_is_h20_fp32():
    known = {(r.id, k) for r in CATALOG.rows.values() for k in r.known_disagreements}
    assert known == {("h20", "vector.fp32@fp32")}
    assert resolve("h20").peak("fp32") == pytest.approx(39.5e12, rel=0.003)


@pytest.mark.parametrize(("device", "format", "accumulate"), list(PUBLISHED))
def test_peaks_are_the_published_dense_ones(device, format, accumulate):
    published = PUBLISHED[device, format, accumulate] * 1e12
    assert resolve(device).peak(format, accumulate) == pytest.approx(published, rel=0.03)


def test_sparse_rates_are_never_stored():
    # published 2:4 sparse peaks, each twice the dense one
    sparse = {"a100": 624e12, "h100": 1979e12, "h200": 1979e12, "b200": 4500e12, "mi300x": 2615e12}
    for name, peak in sparse.items():
        device = resolve(name)
        assert device.profile.sparsity_factor == 2
        assert device.peak("bf16") * device.profile.sparsity_factor == pytest.approx(peak, rel=0.03)
    assert resolve("v100").profile.sparsity_factor == 1


@pytest.mark.parametrize("name", ["h800", "h20"])
def test_export_parts_do_not_inherit_fp64(name):
    device = resolve(name)
    assert "fp64@fp64" not in device.profile.matrix
    assert device.peak("fp64") == pytest.approx(1e12, rel=0.01)
    assert resolve("h100").peak("fp64") > 60e12
    assert device.profile.parent == "nv.sm_90"


def test_export_parts_differ_where_they_were_cut_and_only_there():
    h100, h800, h20 = resolve("h100"), resolve("h800"), resolve("h20")
    assert h800.peak("fp8_e4m3") == h100.peak("fp8_e4m3")
    assert (h800.link_bandwidth, h100.link_bandwidth, h20.link_bandwidth) == (200e9, 450e9, 450e9)
    assert h20.peak("bf16") / h20.units == pytest.approx(h100.peak("bf16") / h100.units / 4)


def test_an_mi250x_is_one_of_two_logical_devices():
    device, row = resolve("mi250x"), CATALOG.rows["mi250x"]
    assert (device.logical_devices, device.units) == (2, 110)
    assert device.peak("fp16") * 2 == pytest.approx(383e12, rel=0.01)
    assert row.stated_matrix_tflops_per_card["fp16@fp32"] == 383
    assert device.memory_bytes == 65520 * 2**20
    assert all(resolve(n).logical_devices == 1 for n in names() if n != "mi250x")


def test_only_gfx94x_has_fnuz_formats():
    for profile in CATALOG.architectures.values():
        rated = {k.partition("@")[0] for k in (*profile.vector, *profile.matrix)}
        fp8 = {f for f in rated if f.startswith("fp8")}
        if profile.isa.startswith("gfx94"):
            assert fp8 == {"fp8_e4m3fnuz", "fp8_e5m2fnuz"}
        else:
            assert not any(f.endswith("fnuz") for f in fp8)


def test_narrower_formats_are_not_slower_on_matrix_units():
    ladder = ("fp64", "tf32", "fp16", "fp8_e4m3", "fp4_e2m1")
    for profile in CATALOG.architectures.values():
        rates = [
            max(r for k, r in profile.matrix.items() if k.startswith(f"{f}@"))
            for f in ladder
            if any(k.startswith(f"{f}@") for k in profile.matrix)
        ]
        assert rates == sorted(rates), profile.key


def test_the_first_dozen_are_there_and_sourced():
    assert set(FIRST_DOZEN) <= set(names())
    for name in names():
        row = CATALOG.rows[name]
        assert row.source and (row.confidence == "A" or name.startswith("cpu-"))
        assert not resolve(name).estimated


def test_every_isa_has_exactly_one_default_profile_and_every_cpu_profile_one_row():
    gpu = [p for p in CATALOG.architectures.values() if p.kind == "gpu"]
    for isa in {p.isa for p in gpu}:
        assert sum(p.isa_default for p in gpu if p.isa == isa) == 1, isa
    for profile in CATALOG.architectures.values():
        if profile.kind == "cpu":
            assert sum(r.arch == profile.key for r in CATALOG.rows.values()) == 1, profile.key


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((n, n) for n in FIRST_DOZEN),
        ("H800-SXM", "h800"),
        ("NVIDIA H800", "h800"),
        ("nvidia-h800", "h800"),
        ("nvidia_h800", "h800"),
        ("  H100 ", "h100"),
        ("H100-SXM5-80GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100 80GB", "a100"),
        ("sm_80", "a100"),
        ("SM_100", "b200"),
        ("volta", "v100"),
        ("gfx90a", "mi250x"),
        ("GFX942", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Instinct MI250X", "mi250x"),
        ("epyc 7763", "cpu-avx2"),
        ("Xeon Platinum 8480+", "cpu-amx"),
        ("CPU_AMX", "cpu-amx"),
    ],
)
def test_names_people_type(name, device):
    assert resolve(name).id == device


@pytest.mark.parametrize(
    ("name", "fitting"),
    [("sm_90", "h100, h20, h200, h800"), ("Hopper", "h100, h20, h200, h800"), ("cpu", "cpu-amx, cpu-avx2")],
)
def test_names_that_fit_several_devices_are_ambiguous(name, fitting):
    with pytest.raises(AmbiguousHardwareError, match=f"'{name}' is ambiguous. Name one of: {fitting}"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "hint"), [("h8000", "'h800'"), ("mi300", "'mi300x'"), ("A100-SXMM", "'A100-SXM'"), ("v10", "'v100'")]
)
def test_unknown_names_get_near_matches(name, hint):
    with pytest.raises(UnknownHardwareError) as caught:
        resolve(name)
    assert "Did you mean" in str(caught.value) and hint in str(caught.value)


@pytest.mark.parametrize("name", ["L4", "T400", "A1000", "h", "", "sm_9", "nvidia"])
def test_no_name_matches_by_substring(name):
    with pytest.raises(UnknownHardwareError):
        resolve(name)


def test_normalising_names():
    assert normalise("NVIDIA A100-SXM4_80GB") == "nvidiaa100sxm480gb"
    assert strip_vendor("amdinstinctmi300x") == "mi300x"
    assert strip_vendor("nvidia") == "nvidia"


def test_the_catalogue_is_read_once():
    assert load_catalog() is load_catalog()
    assert names() == sorted(names())
