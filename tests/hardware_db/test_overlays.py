"""The user's own data files: they add and correct devices, and wrong ones are refused with file, key and what is
allowed."""

from __future__ import annotations

import os

import pytest
from platformdirs import user_config_path

from dsmp.errors import HardwareDataError, UnknownHardwareError
from dsmp.hardware_db import resolve
from dsmp.hardware_db.catalog import load_catalog
from dsmp.hardware_db.overlays import overlay_files, user_folder

NEW_DEVICE = """
[[device]]
id = "lab-card"
name = "Lab Card"
arch = "nv.sm_80"
segment = "datacenter"
year = 2024
units = 54
vector_clock_mhz = 1410
memory_bytes = 20000000000
memory_type = "HBM2e"
memory_bandwidth_bytes_per_s = 1e12
stated_matrix_tflops_per_card = { "bf16@fp32" = 156 }
sources.all = ["own data sheet"]
confidence.all = "B"
"""


@pytest.fixture
def overlay(tmp_path):
    """`overlay(text)`: the path of a file with that text."""

    def write(text: str, name: str = "mine.toml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_an_overlay_adds_a_device(overlay):
    catalog = load_catalog([overlay(NEW_DEVICE)])
    device = catalog.resolve("Lab Card")
    assert device.peak("bf16") == 54 * 2048 * 1410e6
    assert device.overlays == ("mine.toml",)
    assert device.caveats == ["uses data of mine.toml"]
    assert len(catalog.rows) == len(load_catalog().rows) + 1
    with pytest.raises(UnknownHardwareError):
        resolve("lab-card")


def test_an_overlay_corrects_single_values_and_keeps_the_rest(overlay):
    text = '[[device]]\nid = "a100"\nmemory_bandwidth_bytes_per_s = 1.9e12\nsources.memory = ["own run"]\n'
    catalog = load_catalog([overlay(text)])
    before, after = resolve("a100"), catalog.resolve("a100")
    assert (before.memory_bandwidth, after.memory_bandwidth) == (2039e9, 1.9e12)
    assert after.units == before.units and after.peak("bf16") == before.peak("bf16")
    row = catalog.rows["a100"]
    assert row.source_of("memory") == ("own run",)
    assert row.source_of("clocks") == load_catalog().rows["a100"].source_of("clocks")
    assert (before.overlays, after.overlays) == ((), ("mine.toml",))


def test_an_overlay_corrects_a_profile_for_all_its_devices(overlay):
    text = '[[architecture]]\nkey = "nv.sm_80"\nlaunch_overhead_s = 4e-6\nlaunch_overhead_source = "own run"\n'
    catalog = load_catalog([overlay(text)])
    assert catalog.resolve("a100").launch_overhead_s == 4e-6
    assert catalog.resolve("a100").overlays == ("mine.toml",)
    heir = catalog.resolve("rtx-3090")
    assert heir.launch_overhead_s == 4e-6 and heir.overlays == ("mine.toml",), "what inherits from it changes with it"
    assert catalog.resolve("mi300x").launch_overhead_s == resolve("mi300x").launch_overhead_s
    assert catalog.resolve("mi300x").overlays == ()


def test_later_files_win_over_earlier_ones(overlay):
    second = overlay('[[device]]\nid = "lab-a"\n' + NEW_DEVICE.split("\n", 3)[3], "second.toml")
    third = overlay('[[device]]\nid = "lab-a"\nyear = 2025\n', "third.toml")
    catalog = load_catalog([second, third])
    assert catalog.rows["lab-a"].year == 2025
    assert catalog.changed_by["lab-a"] == ("second.toml", "third.toml")


def test_zero_deletes_what_an_overlay_corrects_however_it_is_spelled(overlay):
    stated = "".join(
        f'[[device]]\nid = "{i}"\nstated_matrix_tflops_per_card = {{ "tf32@fp32" = 0 }}\n'
        for i, r in load_catalog().rows.items()
        if r.arch == "nv.sm_90.h20" and "tf32@fp32" in r.stated_matrix_tflops_per_card
    )
    text = '[[architecture]]\nkey = "nv.sm_90.h20"\nmatrix = { "tf32@fp32" = 0 }\nvector = { fp64 = 0 }\n'
    fp64 = '[[device]]\nid = "h20"\nstated_vector_tflops_per_card = { fp64 = 0 }\n'
    stated = stated.replace('[[device]]\nid = "h20"\n', fp64, 1)
    device = load_catalog([overlay(text + stated)]).resolve("h20")
    assert "tf32@fp32" not in device.matrix_peaks and "fp64@fp64" not in device.vector_peaks
    assert resolve("h20").peak("tf32") > 0 and resolve("h20").peak("fp64") > 0


def test_an_overlay_that_breaks_shipped_records_is_named(overlay):
    file = overlay('[[architecture]]\nkey = "nv.sm_90"\nmatrix = { "bf16@fp32" = 2048 }\n')
    with pytest.raises(HardwareDataError, match="twice as much") as caught:
        load_catalog([file])
    assert str(file) in str(caught.value)


def test_a_file_named_again_counts_where_it_is_named_last(overlay):
    first = overlay('[[device]]\nid = "a100"\nyear = 2021\n', "first.toml")
    second = overlay('[[device]]\nid = "a100"\nyear = 2022\n', "second.toml")
    assert load_catalog([first, second]).rows["a100"].year == 2022
    assert load_catalog([first, second, first]).rows["a100"].year == 2021


def test_files_of_the_users_folder_count_without_being_named():
    folder = user_folder()
    assert folder == user_config_path("dsmp") / "hardware"
    folder.mkdir(parents=True)
    file = folder / "own.toml"
    try:
        file.write_text(NEW_DEVICE, encoding="utf-8")
        (folder / "notes.txt").write_text("no data", encoding="utf-8")
        assert [s.path for s in overlay_files()] == [file]
        assert resolve("lab-card").units == 54
        os.utime(file, ns=(1, 1))
        file.write_text(NEW_DEVICE.replace("units = 54", "units = 55").replace("= 156", "= 159"), encoding="utf-8")
        assert resolve("lab-card").units == 55, "an edited file is read again"
    finally:
        file.unlink()
    with pytest.raises(UnknownHardwareError):
        resolve("lab-card")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            NEW_DEVICE.replace("1e12", "1000"),
            "memory_bandwidth_bytes_per_s: Input should be greater than or equal to 1",
        ),
        (NEW_DEVICE.replace("1410", "1.41"), "vector_clock_mhz: Input should be greater than or equal to 200"),
        (NEW_DEVICE.replace("20000000000", "20"), "memory_bytes: Input should be greater than or equal to 100000000"),
        (NEW_DEVICE.replace('memory_type = "HBM2e"\n', ""), "memory_type: Field required"),
        (NEW_DEVICE.replace("memory_bytes", "memory_gb"), "memory_gb: unknown key (did you mean memory_bytes"),
        (NEW_DEVICE.replace("156", "312"), "derived 155.9 TFLOPS, stated 312, twice as much: state the dense peak"),
        (NEW_DEVICE.replace("156", "170"), "derived 155.9 TFLOPS, stated 170. Correct it, or add a reason"),
        (NEW_DEVICE.replace("nv.sm_80", "nv.sm_8"), "arch: no profile 'nv.sm_8'; did you mean nv.sm_8"),
        (
            '[[architecture]]\nkey = "nv.own"\nparent = "nv.sm_99"\n',
            "parent: no profile 'nv.sm_99'; did you mean nv.sm_",
        ),
        ('[[architecture]]\nkey = "nv.sm_80"\nmatrix = { "bf16@fp8_e4m3" = 1 }\n', "is not one of fp64, fp32"),
        ('[[device]]\nid = "a100"\nunits = 54\n', "cores: 6912 are not 54 units of 64 lanes"),
        ("[[device]]\nunits = 3\n", "device '?'"),
        (NEW_DEVICE.replace('"lab-card"', '"auto"'), "id: auto, cpu mean the running device"),
        ('[[architecture]]\nkey = "nv.own"\nparent = ["nv.sm_80"]\n', "parent: the key of a profile in quotes"),
        (NEW_DEVICE + NEW_DEVICE, "device 'lab-card' is already in"),
        (
            "[[devices]]\n",
            "devices: allowed are [[architecture]], [[device]], [[link]], [[node]], [[measurement]] tables",
        ),
        ("device = 1\n", "device: allowed are"),
        ("[[device]\n", "not valid TOML"),
    ],
)
def test_wrong_overlays_are_refused_with_file_and_key(overlay, text, message):
    file = overlay(text)
    with pytest.raises(HardwareDataError) as caught:
        load_catalog([file])
    assert str(file) in str(caught.value) and message in str(caught.value)
    assert resolve("a100").overlays == (), "a refused file leaves nothing behind"


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(HardwareDataError, match="no such hardware data file"):
        load_catalog([tmp_path / "absent.toml"])
    with pytest.raises(HardwareDataError, match="cannot be read as a hardware data file"):
        load_catalog([tmp_path])
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HardwareDataError, match=r"binary\.toml: cannot be read"):
        load_catalog([binary])
