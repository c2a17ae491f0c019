"""Measurements as files: what is written is read again, and nothing else is ever lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import rtoml

from dsmp.compiler.calibration import overlay_file
from dsmp.compiler.calibration.overlay_file import check_writable, to_toml, write
from dsmp.errors import InvalidOptionError
from dsmp.hardware_db.catalog import build_catalog
from dsmp.hardware_db.measurement import CollectivePoint, Conversion, GemmPoint, Measurement


def record(**changes):
    """A measurement with all kinds of points."""
    points = (
        GemmPoint(format="fp32", accumulate="fp32", m=1, n=4096, k=4096, flop_per_s=5.5e9, operator="aten.mm"),
        GemmPoint(format="int8", accumulate="int32", batch=48, m=128, n=64, k=32, flop_per_s=1e11, operator="a, b"),
    )
    fields = {
        "device": "cpu-avx2", "name": "AMD EPYC", "units": 2, "date": "2026-11-29", "torch": "2.14.1+cu130",
        "memory_bandwidth_bytes_per_s": 3.1e10, "launch_overhead_s": 2.6e-06, "gemm": points,
        "conversion": (
            Conversion(source="fp32", target="bf16", bytes_per_s=1.7e10),
            Conversion(source="bf16", target="fp8_e4m3", recipe="1x128", bytes_per_s=100.0),
        ),
        "collective": (CollectivePoint(op="all_reduce", backend="gloo", ranks=2, latency_s=1e-3, bytes_per_s=8e8),),
    }  # fmt: skip
    return Measurement(**fields | changes)


def read(text):
    """The record of a data file that holds one measurement, as the catalogue reads it."""
    [(file, measurement)] = build_catalog({}, {"/somewhere/mine.toml": text}).measurements
    assert file == "mine.toml"
    return measurement


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"conversion": (), "collective": ()},
        {"name": 'a "quoted" \\ name, µ = 5 # no comment\n\t\x7f'},
        {"memory_bandwidth_bytes_per_s": 1.2345678901234567e13, "launch_overhead_s": 1e-9},
        {"memory_bandwidth_bytes_per_s": 7e7, "launch_overhead_s": 0.1 + 0.2},
    ],
)
def test_what_is_written_is_read_again(changes):
    assert read(to_toml(record(**changes))) == record(**changes)


def test_people_can_read_it():
    lines = to_toml(record()).splitlines()
    assert lines[0].startswith("# Written by `dsmp hardware calibrate` on 2026-11-29.")
    assert sum(line.startswith("  { format = ") for line in lines) == 2
    assert '  { source = "fp32", target = "bf16", bytes_per_s = 1.7e+10 },' in lines  # the default recipe is left out
    assert max(map(len, lines)) <= 150
    assert list(rtoml.loads("\n".join(lines))) == ["measurement"]


def test_a_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    file = tmp_path / "rates.toml"
    write(record(), file)
    monkeypatch.setattr(overlay_file, "to_toml", lambda m: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(record(units=3), file)
    assert read(file.read_text()) == record()
    assert [f.name for f in tmp_path.iterdir()] == ["rates.toml"]
    monkeypatch.undo()
    check_writable(file)
    write(record(units=3), file)
    assert read(file.read_text()).units == 3
    assert [f.name for f in tmp_path.iterdir()] == ["rates.toml"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "rates.toml", tmp_path / "link.toml"
    link.symlink_to(target)
    check_writable(link)
    write(record(), link)
    assert link.is_symlink()
    assert read(target.read_text()) == record()


@pytest.mark.parametrize(
    ("text", "named"),
    [('[[device]]\nid = "mine"\n', "device"), ("x = [1,", "no TOML"), ("[[measurement]]\n[[node]]\n", "node")],
)
def test_other_data_is_not_destroyed(tmp_path, text, named):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InvalidOptionError, match=named):
        check_writable(file)
    assert file.read_text() == text


def test_places_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(InvalidOptionError, match="folder that exists"):
        check_writable(tmp_path / "nowhere" / "rates.toml")
    with pytest.raises(InvalidOptionError, match="this is a folder"):
        check_writable(tmp_path)
    with pytest.raises(InvalidOptionError, match="can be written"):
        write(record(), tmp_path / "nowhere" / "rates.toml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_protected_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidOptionError, match="replaced"):
        check_writable(tmp_path / "rates.toml")


def test_what_is_no_regular_file_or_not_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="a regular file; this is a device"):
        check_writable(Path("/dev/null"))
    measured = tmp_path / "measured.toml"
    write(record(), measured)
    check_writable(measured)
    measured.write_text(measured.read_text() + "# my notes\n")
    with pytest.raises(InvalidOptionError, match="has notes or measurements that were added"):
        check_writable(measured)
    assert "# my notes" in measured.read_text()
