"""`dsmp hardware detect`: what this machine's devices are taken for, by what, and whether they were measured."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hardware_commands import data_of, run

from dsmp.compiler.console import Printer
from dsmp.compiler.hardware.detection_facts import detection
from dsmp.compiler.hardware.render import print_device
from dsmp.hardware_db import load_catalog
from dsmp.hardware_db.matching import Properties

CATALOG = load_catalog()
MEASURED = """
[[measurement]]
device = "test-100"
name = "Test 100"
units = 100
date = "2030-01-02"
torch = "9.0"
memory_bandwidth_bytes_per_s = 3e12
launch_overhead_s = 4e-6

[[measurement.gemm]]
format = "fp32"
accumulate = "fp32"
m = 64
n = 64
k = 64
flop_per_s = 1e13
operator = "mm.default"

[[measurement.gemm]]
format = "bf16"
accumulate = "fp32"
m = 64
n = 64
k = 64
flop_per_s = 5e12
operator = "mm.default"
"""


def test_detect_this_machine() -> None:
    found = data_of("detect")
    assert found["devices"][0]["default"]
    cpu = found["devices"][-1]
    assert cpu["said"]["backend"] == "cpu"
    assert cpu["said"]["units"] >= 1
    assert cpu["estimated"]
    assert cpu["device"]["groups"]["structure"]["values"]["units"] == cpu["said"]["units"]
    assert Path(found["user_folder"]).parts[-2:] == ("dsmp", "hardware")
    assert found["user_files"] == []
    text = run("detect").stdout
    for words in ("the runtime says: ", f"taken for: {cpu['device']['id']}", "calibration: none", found["user_folder"]):
        assert words in text


H100 = {"backend": "cuda", "isa": "sm_90", "units": 132, "memory_bytes": 85_017_755_648}


@pytest.mark.parametrize(
    ("properties", "device", "estimated", "how"),
    [
        ({**H100, "name": "NVIDIA H100 80GB HBM3"}, "h100", False, "by its name"),
        ({**H100, "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "units": 60, "memory_bytes": 42_000_000_000},
         "h100", True, "by its name, with 60 of its 132 units"),
        ({"backend": "rocm", "name": "AMD Radeon Graphics", "isa": "gfx942", "pci_id": "74a1", "units": 304}, "mi300x",
         False, "by its PCI product id"),
        ({"backend": "cuda", "name": "NVIDIA Something", "isa": "sm_90", "units": 40, "memory_bytes": 2**35},
         "nv-sm-90", True, "as a product that is not in the data: profile nv.sm_90, scaled from h100"),
    ],
)  # fmt: skip
def test_detection_says_how(properties: dict, device: str, estimated: bool, how: str) -> None:
    found = detection(Properties(**properties), CATALOG, default=True)
    assert found.device is not None
    assert (found.device.id, found.estimated) == (device, estimated)
    assert how in found.how
    assert found.said["isa"] == properties["isa"]
    assert 0 not in found.said.values()
    assert "dsmp hardware calibrate" in found.calibration


def test_detection_of_the_unknown() -> None:
    found = detection(Properties(backend="cuda", name="Mystery", isa="sm_12", units=1), CATALOG, default=True)
    assert found.device is None
    assert "Mystery (sm_12) is no known product" in found.how


@pytest.mark.parametrize(("units", "calibrated"), [(100, True), (50, False)])
def test_detection_and_calibration(own: Path, tmp_path: Path, units: int, calibrated: bool) -> None:
    measured = tmp_path / "measured.toml"
    measured.write_text(MEASURED)
    properties = Properties(backend="cuda", name="NVIDIA Test 100", isa="sm_199", units=units)
    found = detection(properties, load_catalog([own, measured]), default=True)
    assert found.device is not None
    assert found.calibrated == calibrated
    if calibrated:
        assert found.calibration == "measured on 2030-01-02 with torch 9.0 (measured.toml)"
        assert found.device.measured is not None
        assert found.device.measured.gemm_speed_over_fp32 == pytest.approx({"fp32@fp32": 1, "bf16@fp32": 0.5})
        stream = io.StringIO()
        print_device(Printer(stream), found.device)
        assert "memory 3 TB/s, launch 4 µs" in stream.getvalue()
        assert (
            "measured GEMMs in bf16@fp32 at best 5 TFLOPS; 0.5 times as fast as fp32 in the mean" in stream.getvalue()
        )
    else:
        assert found.calibration.startswith("none for 50 units; there is one for 100 units (measured.toml)")


def test_show_the_running_device() -> None:
    assert data_of("show", "cpu")["kind"] == "cpu"
    assert data_of("show", "auto")["id"] == data_of("detect")["devices"][0]["device"]["id"]
