"""The shipped catalogue: its numbers agree with the vendors', its names with what people type."""

from __future__ import annotations

import pytest

from dsmp.errors import AmbiguousHardwareError, NodeIsNoDeviceError, UnknownHardwareError
from dsmp.hardware_db import load_catalog, names, resolve
from dsmp.hardware_db.device_row import GROUPS
from dsmp.hardware_db.names import normalise, strip_vendor

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
        if CATALOG.profile(row.id).totals_only:
            continue
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


def test_known_disagreements_have_reasons_and_are_few():
    known = {(r.id, k): reason for r in CATALOG.rows.values() for k, reason in r.known_disagreements.items()}
    assert ("h20", "vector.fp32@fp32") in known
    assert all(len(reason) > 20 for reason in known.values())
    assert len(known) < 0.1 * sum(
        len(r.stated_vector_tflops_per_card) + len(r.stated_matrix_tflops_per_card) for r in CATALOG.rows.values()
    )
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


# (profile prefix, wider, narrower): where the narrower format really is slower, or no faster is all that is claimed
SLOWER_WHEN_NARROWER = {
    ("amd.gfx908", "fp16", "bf16"): "MI100's bf16 matrix instructions run at half rate",
}


def test_narrower_formats_are_not_slower_on_matrix_units():
    ladder = ("fp64", "tf32", "fp16", "fp8_e4m3", "fp4_e2m1")
    for profile in CATALOG.architectures.values():
        rates = [
            max(r for k, r in profile.matrix.items() if k.startswith(f"{f}@"))
            for f in ladder
            if any(k.startswith(f"{f}@") for k in profile.matrix)
        ]
        assert rates == sorted(rates), profile.key


def test_bf16_is_as_fast_as_fp16_but_where_listed():
    for profile in CATALOG.architectures.values():
        bf16, fp16 = (profile.matrix.get(f"{f}@fp32") for f in ("bf16", "fp16"))
        if bf16 and fp16 and bf16 != fp16:
            assert bf16 > fp16 or (profile.key, "fp16", "bf16") in SLOWER_WHEN_NARROWER, profile.key


def test_the_list_is_long_and_every_value_group_is_sourced():
    products = {n for n in FIRST_DOZEN if not n.startswith("cpu-")}
    assert {*products, "rtx-4090", "b300", "epyc-7763"} <= set(names())
    assert len(names()) >= 300
    for row in CATALOG.rows.values():
        for group in GROUPS:
            assert row.source_of(group) and row.confidence_of(group) in "ABC", (row.id, group)
        assert row.stated_matrix_tflops_per_card or not CATALOG.profile(row.id).totals_only, row.id
    assert sum(r.worst_confidence != "C" for r in CATALOG.rows.values()) >= 220


def test_units_times_lanes_are_the_vendors_cores():
    checked = [r for r in CATALOG.rows.values() if r.cores is not None and CATALOG.profile(r.id).lanes_per_unit]
    assert len(checked) >= 100
    for row in checked:
        assert row.cores == row.units * CATALOG.profile(row.id).lanes_per_unit, row.id


def test_figures_are_plausible():
    for device in CATALOG.devices():
        assert 0.02e12 < device.peak("fp32") < 1.5e15, device.id
        assert device.memory_bytes > 1e9 and 2e9 <= device.memory_bandwidth <= 2.4e13, device.id
        # no GPU computes fewer than 2 or more than 3,000 fp32 operations a byte
        assert 1 < device.peak("fp32") / device.memory_bandwidth < 3000, device.id
        if device.link_bandwidth is not None and device.kind == "gpu":
            assert device.link_bandwidth <= device.memory_bandwidth, device.id
        if device.l2_bytes is not None:
            assert device.l2_bytes < device.memory_bytes / 4, device.id


def test_every_isa_has_exactly_one_default_profile_and_every_cpu_profile_a_reference():
    accelerators = [p for p in CATALOG.architectures.values() if p.kind != "cpu"]
    for isa in {p.isa for p in accelerators}:
        assert sum(p.isa_default for p in accelerators if p.isa == isa) == 1, isa
    for profile in CATALOG.architectures.values():
        if profile.kind == "cpu" or profile.isa_default:
            assert CATALOG.class_device(profile).profile is profile


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
        ("gfx90a", "mi250x"),
        ("GFX942", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Instinct MI250X", "mi250x"),
        ("epyc 7763", "epyc-7763"),
        ("Xeon Platinum 8480+", "xeon-8480"),
        ("CPU_AMX", "cpu-amx"),
        ("cpu.avx2", "cpu-avx2"),
        ("nv-sm-86-half", "nv-sm-86-half"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("L4", "l4"),
        ("T400", "t400"),
        ("AMD Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("sm_90", "h100"),
        ("gfx1100", "rx-7900-xtx"),
    ],
)
def test_names_people_type(name, device):
    assert resolve(name).id == device


@pytest.mark.parametrize(
    ("name", "fitting"), [("Hopper", ("h100", "h20", "more")), ("CDNA3", ("mi300x",)), ("cpu", ("and", "more"))]
)
def test_names_that_fit_several_devices_are_ambiguous(name, fitting):
    with pytest.raises(AmbiguousHardwareError, match=f"'{name}' is ambiguous. Name one of: ") as caught:
        resolve(name)
    assert all(f in str(caught.value) for f in fitting)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h8000", "'h800'"),
        ("mi300y", "'mi300x'"),
        ("A100-SXMM", "'a100'"),
        ("v10", "'v100'"),
        ("rtx4009", "'rtx-4090'"),
    ],
)
def test_unknown_names_get_near_matches(name, hint):
    with pytest.raises(UnknownHardwareError) as caught:
        resolve(name)
    assert "Did you mean" in str(caught.value) and hint in str(caught.value)


@pytest.mark.parametrize("name", ["h", "", "sm_9", "4090x2", "RTX"])
def test_no_name_matches_by_substring(name):
    with pytest.raises(UnknownHardwareError):
        resolve(name)


def test_a_number_is_completed_and_a_node_is_told_from_a_device():
    with pytest.raises(UnknownHardwareError, match="Did you mean 'rtx-4090'"):
        resolve("4090")
    with pytest.raises(NodeIsNoDeviceError, match="'hgx-h800' is a node of 8 h800, not a device"):
        resolve("hgx-h800")


def test_normalising_names():
    assert normalise("NVIDIA A100-SXM4_80GB") == "nvidiaa100sxm480gb"
    assert strip_vendor("amdinstinctmi300x") == "mi300x"
    assert strip_vendor("nvidia") == "nvidia"


def test_the_catalogue_is_read_once():
    assert load_catalog() is load_catalog()
    assert names() == sorted(names())
