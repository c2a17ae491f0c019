"""Bad hardware data is refused with the file, the record and the key."""

from __future__ import annotations

import copy
import tomllib

import pytest
from sample_records import ARCHITECTURE, DEVICE

from dsmp.errors import HardwareDataError
from dsmp.hardware_db.catalog import build_catalog
from dsmp.hardware_db.parsing import parse_architectures, parse_devices
from dsmp.hardware_db.schema import OP_CLASSES, Choice, canonical_rate_key, natural_accumulator


def _edited(text: str, path: str, value: object) -> dict:
    data = copy.deepcopy(tomllib.loads(text))
    *parents, last = path.split("/")
    table = data
    for key in parents:
        table = table[key]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return data


def parse_architecture(table: dict, file: str):
    return parse_architectures({table["key"]: (file, table)})[table["key"]]


def parse_device(table: dict, file: str):
    return parse_devices({table["id"]: (file, table)})[table["id"]]


def test_the_valid_records_pass():
    assert parse_architecture(tomllib.loads(ARCHITECTURE), "a.toml").matrix == {"fp16@fp32": 1024}
    assert parse_device(tomllib.loads(DEVICE), "d.toml").units == 10


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vectr", {}, "vectr: unknown key (did you mean vector or vendor?)"),
        ("zzz", {}, "zzz: unknown key; allowed: accumulation, cpu_family"),
        ("family", None, "family: Field required"),
        ("vector/fp33", 1.0, "unknown format 'fp33'"),
        ("matrix/fp16@fp8_e4m3", 1.0, "is not one of fp64, fp32"),
        ("vector/fp32", -1, "vector.fp32: Input should be greater than 0"),
        ("vector/fp32", "128", "vector.fp32: Input should be a valid number"),
        ("vector", {"fp64": 2}, "every architecture computes fp32"),
        ("io_formats", ["fp16"], "io_formats must hold fp32"),
        ("totals_only", True, "totals_only profiles have no vector or matrix rates"),
        ("isa_default", True, "reference is missing"),
        ("single_unit_bandwidth_bytes_per_s", 1e9, "belongs to CPU profiles"),
        ("vendor", "nvidea", "vendor: Input should be 'nvidia', 'amd'"),
        ("sparsity_factor", 3, "sparsity_factor: Input should be 1, 2 or 4"),
        ("lanes_per_unit", 0, "lanes_per_unit: Input should be greater than or equal to 1"),
        ("matrix/fp8_e4m3@fp32", 2048, "fp8_flavour is None, but ['ocp']"),
        ("io_formats", ["fp32", "bf17"], "unknown format 'bf17'"),
        ("efficiency/memory", 9.2, "efficiency.memory: Input should be less than or equal to 1.2"),
        ("launch_overhead_s", 7.0, "launch_overhead_s: Input should be less than or equal to"),
        ("tier/storage", "bf16", "tier.storage 'bf16' is not in io_formats"),
        ("tier/linear", [{"format": "fp16"}], "ladder 'linear' must end with fp32"),
        ("tier/linear", [{"format": "fp32"}, {"format": "fp32"}], "names a choice twice"),
        ("tier/linear", [{"format": "bf16"}, {"format": "fp32"}], "tier names 'bf16@fp32', which has no rate"),
        (
            "tier/linear",
            [{"format": "fp16", "recipe": "1x127"}, {"format": "fp32"}],
            "unknown scaling recipe '1x127'",
        ),
        ("tier/linear", [{"format": "fp16", "recipe": "mx32"}, {"format": "fp32"}], "not in mx_formats"),
        ("tier/linear", [{"format": "fp16", "scale": "row"}, {"format": "fp32"}], "tier.linear.0.scale"),
        ("tier/other", [{"format": "fp16"}, {"format": "fp32"}], "ladder 'other' is fp32 alone"),
        ("refusals", {"fp16": "no such units"}, "both rated and refused: fp16"),
        ("limits", {"int8": {"op_classes": ["linear"], "reason": "because"}}, "formats without a rate: ['int8']"),
        ("limits", {"fp16": {"op_classes": ["lineer"], "reason": "because"}}, "limits.fp16.op_classes.0"),
        ("cpu_flags", ["avx2"], "cpu_flags belong to CPU profiles"),
    ],
)
def test_bad_architectures_name_file_record_and_key(path, value, message):
    with pytest.raises(HardwareDataError) as caught:
        parse_architecture(_edited(ARCHITECTURE, path, value), "a.toml")
    assert str(caught.value).startswith("a.toml: architecture 'nv.sm_1': ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("units", 0, "units: Input should be greater than or equal to 1 (got 0)"),
        ("units", "10", "units: Input should be a valid integer"),
        ("vector_clock_mhz", 1.5, "vector_clock_mhz: Input should be greater than or equal to 200"),
        ("memory_bandwidth_bytes_per_s", 900, "memory_bandwidth_bytes_per_s: Input should be greater"),
        ("memory_bandwidth_bytes_per_s", 5.3e13, "memory_bandwidth_bytes_per_s: Input should be less"),
        ("memory_bandwidth_bytes_per_s", float("nan"), "memory_bandwidth_bytes_per_s"),
        ("memory_gb", 80, "memory_gb: unknown key (did you mean memory_bytes or memory_type?); allowed: aliases, arch"),
        ("confidence/all", "D", "confidence.all: Input should be 'A', 'B' or 'C'"),
        (
            "confidence",
            {"clocks": "A"},
            "nothing is said of structure, memory, link, power, peaks; give them, or 'all'",
        ),
        ("sources/all", [], "sources.all: Tuple should have at least 1 item"),
        ("sources/clock", ["x y"], "sources.clock"),
        ("pci_ids", ["0x74A1"], "pci_ids.0: String should match pattern"),
        ("segment", "server", "segment: Input should be 'datacenter', 'workstation'"),
        ("matrix_clock_mhz", 90, "matrix_clock_mhz: Input should be greater than or equal to 200"),
        ("id", "X 1", "id: String should match pattern"),
        ("stated_matrix_tflops_per_card", {"fp17": 1.0}, "unknown format 'fp17'"),
        ("interconnect", {"kind": "NVLink"}, "interconnect.bidirectional_bytes_per_s: Field required"),
    ],
)
def test_bad_devices_name_file_record_and_key(path, value, message):
    data = _edited(DEVICE, path, value)
    with pytest.raises(HardwareDataError) as caught:
        parse_device(data, "d.toml")
    assert str(caught.value).startswith(f"d.toml: device {data['id']!r}: ")
    assert message in str(caught.value)


def test_fnuz_fp8_exists_on_gfx94x_only():
    fnuz = _edited(ARCHITECTURE, "matrix/fp8_e4m3fnuz@fp32", 2048) | {"fp8_flavour": "fnuz"}
    with pytest.raises(HardwareDataError, match="'fnuz' exists on gfx94x only, not on sm_1"):
        parse_architecture(fnuz, "a.toml")
    assert parse_architecture(fnuz | {"isa": "gfx942"}, "a.toml").fp8_flavour == "fnuz"
    with pytest.raises(HardwareDataError, match=r"fp8_flavour is 'ocp', but \['fnuz'\]"):
        parse_architecture(fnuz | {"isa": "gfx950", "fp8_flavour": "ocp"}, "a.toml")


def _files(architectures: str, devices: str = "") -> dict[str, str]:
    head = "[[architecture]]\n" + ARCHITECTURE
    return {"a.toml": head + architectures, "d.toml": devices}


def test_inheritance_overrides_merges_and_deletes():
    catalog = build_catalog(
        _files(
            '\n[[architecture]]\nkey = "nv.sm_2"\nparent = "nv.sm_1"\nisa = "sm_2"\nsource = ["own"]\n'
            "[architecture.vector]\nfp64 = 64\nfp32 = 256\n[architecture.tier]\n"
            'linear = [{ format = "fp32" }]\n[architecture.matrix]\n"fp16@fp32" = 0\n'
        )
    )
    child = catalog.architectures["nv.sm_2"]
    assert child.vector == {"fp32@fp32": 256, "fp64@fp64": 64}
    assert child.matrix == {}
    assert child.tier.linear == (Choice("fp32"),)
    assert (child.source, child.family, child.efficiency.memory) == (("own",), "Test", 0.9)
    assert catalog.architectures["nv.sm_1"].matrix == {"fp16@fp32": 1024}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('key = "nv.sm_2"\nparent = "nv.sm_7"\n', "architecture 'nv.sm_2': parent: no profile 'nv.sm_7'; did you mean"),
        ('key = "nv.sm_2"\nparent = "nv.sm_2"\n', "parent: circle through 'nv.sm_2'"),
        (
            'key = "nv.sm_2"\nparent = "nv.sm_1"\n[architecture.matrix]\n"bf16@fp32" = 0\n',
            "matrix.bf16@fp32: 0 deletes an inherited value, but none is inherited",
        ),
        ('key = "nv.sm_2"\nparent = "nv.sm_1"\n[architecture.matrix]\nbf17 = 4\n', "matrix.bf17: unknown format"),
        ('key = "nv.sm_2"\nparent = "nv.sm_1"\n', "source: Field required"),
        ('key = "nv.sm_1"\n', "architecture 'nv.sm_1' is already in a.toml"),
    ],
)
def test_bad_inheritance_is_refused(extra, message):
    with pytest.raises(HardwareDataError) as caught:
        build_catalog(_files("\n[[architecture]]\n" + extra))
    assert message in str(caught.value) and "a.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('stated_matrix_tflops_per_card = { "fp16@fp32" = 10.8 }', "derived 10.24 TFLOPS, stated 10.8. Correct it"),
        ('stated_matrix_tflops_per_card = { "fp16@fp32" = 20.48 }', "twice as much: state the dense peak"),
        ('stated_matrix_tflops_per_card = { "bf16@fp32" = 10 }', "matrix.bf16@fp32: a peak is stated, but no rate"),
        ('known_disagreements = { "vector.fp32@fp32" = "reason" }', "agree or are not stated"),
        ("cores = 641", "cores: 641 are not 10 units of 64 lanes (640)"),
        ("assumed_fp32_share = 0.5", "assumed_fp32_share: nv.sm_1 has rates, nothing needs assuming"),
        ('arch = "nv.sm_2"', "arch: no profile 'nv.sm_2'; did you mean nv.sm_1"),
    ],
)
def test_devices_that_contradict_their_profile_are_refused(extra, message):
    device = "\n".join(x for x in DEVICE.splitlines() if not (extra.startswith("arch") and x.startswith("arch")))
    with pytest.raises(HardwareDataError) as caught:
        build_catalog(_files("", f"[[device]]\n{device}\n{extra}\n"))
    assert "d.toml: device 'x1': " in str(caught.value) and message in str(caught.value)


def test_a_sparse_number_cannot_be_excused():
    extra = (
        'stated_matrix_tflops_per_card = { "fp16@fp32" = 20.5 }\n'
        'known_disagreements = { "matrix.fp16@fp32" = "marketing" }'
    )
    with pytest.raises(HardwareDataError, match="state the dense peak"):
        build_catalog(_files("", f"[[device]]\n{DEVICE}\n{extra}\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[device]\n", "bad.toml: not valid TOML"),
        ("[[gadget]]\n", "bad.toml: gadget: allowed are"),
        ("device = 3\n", "bad.toml: device: allowed are"),
        (f"[[device]]\n{DEVICE}\n[[device]]\n{DEVICE}", "bad.toml: device 'x1' is already in bad.toml"),
    ],
)
def test_malformed_files_are_refused(text, message):
    with pytest.raises(HardwareDataError) as caught:
        build_catalog({**_files(""), "bad.toml": text})
    assert message in str(caught.value)


def test_rate_keys_and_accumulators():
    assert canonical_rate_key("fp64") == "fp64@fp64"
    assert canonical_rate_key("fp8_e5m2@fp16") == "fp8_e5m2@fp16"
    assert [natural_accumulator(f) for f in ("fp64", "int4", "tf32", "fp8_e4m3", "fp32")] == [
        "fp64",
        "int32",
        "fp32",
        "fp32",
        "fp32",
    ]
    assert len(OP_CLASSES) == 15
