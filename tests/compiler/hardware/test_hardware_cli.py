"""`dsmp hardware show` and `compare`: what they say of devices and nodes, with units and sources."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hardware_commands import data_of, error_of, run

import dsmp.compiler.calibration.commands
from dsmp.compiler.console import Printer
from dsmp.compiler.hardware.facts import device_facts
from dsmp.compiler.hardware.figures import fact_text, significant, value_text
from dsmp.compiler.hardware.node_facts import node_facts
from dsmp.compiler.hardware.render import print_comparison, print_device, print_list, print_node, print_nodes
from dsmp.compiler.hardware.table import compare, listed
from dsmp.hardware_db import load_catalog

CATALOG = load_catalog()


# ---- show --------------------------------------------------------------------------------------------------


def test_show_golden(own: Path, golden: Callable[[str, str], None]) -> None:
    result = run("show", "test-100", "--hardware-file", own)
    assert result.exit_code == 0, result.output
    golden("hardware_show.txt", result.stdout)


def test_show_json(own: Path) -> None:
    d = data_of("show", "T-One-Hundred", "--hardware-file", own)
    assert (d["id"], d["verified"], d["overlays"]) == ("test-100", True, ["own.toml"])
    assert d["trust"].startswith("verified: ")
    assert d["trust"].endswith("secondary sources, not in the vendor's text; recalled or disputed: power")
    clocks, memory = d["groups"]["clocks"], d["groups"]["memory"]
    assert clocks["values"] == {"vector_clock_hz": 2e9, "matrix_clock_hz": 1e9}
    assert (clocks["confidence"], clocks["sources"]) == ("B", ["a photograph of the sheet", "the sheet"])
    assert (memory["confidence"], memory["sources"]) == ("A", ["the sheet"])
    rates = {(r["engine"], r["format"]): r for r in d["rates"]}
    bf16, int8 = rates["matrix", "bf16"], rates["matrix", "int8"]
    assert bf16["peak_flop_per_s"] == 100 * 1024 * 1e9
    assert bf16["stated_peak_flop_per_s_per_card"] == 206e12
    assert bf16["deviation"] == pytest.approx(204.8 / 206 - 1)
    assert bf16["remarks"] == ["denormal inputs read as zero"]
    assert (int8["disagreement"], bf16["disagreement"]) == ("the sheet says so", None)
    assert rates["matrix", "fp8_e4m3"]["remarks"] == [
        "sums keep 13 mantissa bits, promote partial sums to fp32 every 128"
    ]
    assert d["groups"]["efficiency"]["values"] == {
        "peak_share": 0.8, "peak_share.fp8_e4m3": 0.7, "bandwidth_share": 0.9,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("a100", ("bf16", "fp32", 312e12, 2.039e12)),
        ("mi250x", ("fp16", "fp32", 191.5e12, 1.638e12)),
        ("h800", ("fp8_e4m3", "fp32", 1979e12, 3.35e12)),
        ("rtx-4090", ("bf16", "fp32", 165.2e12, 1.008e12)),
        ("b300", ("bf16", "fp32", 2250e12, 8e12)),
        ("epyc-7763", ("fp32", "fp32", 5e12, 0.2048e12)),
    ],
)
def test_show_agrees_with_the_data_sheets(name: str, figures: tuple[str, str, float, float]) -> None:
    format, accumulate, peak, bandwidth = figures
    d = data_of("show", name)
    rates = {(r["format"], r["accumulate"]): r["peak_flop_per_s"] for r in d["rates"]}  # matrix units come last
    assert rates[format, accumulate] == pytest.approx(peak, rel=0.15 if name == "epyc-7763" else 0.03)
    assert d["groups"]["memory"]["values"]["memory_bandwidth_bytes_per_s"] == pytest.approx(bandwidth, rel=0.03)
    text = run("show", name).stdout
    assert f"({name})" in text.splitlines()[0]
    assert all(f"[{i}] " in text for i in range(1, 4))


def test_facts_of_every_device_are_complete() -> None:
    for device in CATALOG.devices():
        facts = device_facts(CATALOG, device)
        assert facts.rates, facts.id
        assert {r.format for r in facts.rates} >= {"fp32"}, facts.id
        for name, group in facts.groups.items():
            assert group.sources, (facts.id, name)
            assert (group.confidence is None) == (name in ("rates", "storage", "efficiency", "launch"))
        derived = not device.profile.totals_only
        for rate in facts.rates:
            assert (rate.flop_per_clock_per_unit is not None) == derived
            if rate.deviation is not None and abs(rate.deviation) > 0.03:
                assert rate.disagreement, (facts.id, rate)


@pytest.mark.parametrize("width", [60, 100, 200])
def test_everything_fits_any_width(width: int) -> None:
    def text(show: Callable[[Printer], None]) -> str:
        stream = io.StringIO()
        show(Printer(stream, width=width))
        assert max(map(len, stream.getvalue().splitlines())) <= width
        assert "…" not in stream.getvalue()
        return stream.getvalue()

    devices = {d.vendor: d for d in CATALOG.devices()}.values()
    for device in devices:
        facts = device_facts(CATALOG, device)
        assert device.id in text(lambda printer, facts=facts: print_device(printer, facts))
    node = node_facts(CATALOG, next(iter(CATALOG.nodes.values())))
    assert node.name in text(lambda printer: print_node(printer, node))
    rows = compare([device_facts(CATALOG, CATALOG.device(i)) for i in ("a100", "mi300x", "epyc-9654")])
    assert "mi300x" in text(lambda printer: print_comparison(printer, ["a100", "mi300x", "epyc-9654"], rows))
    if width >= 100:
        text(lambda printer: print_nodes(printer, [node]))
        text(lambda printer: print_list(printer, [listed(CATALOG, d) for d in devices]))


def test_show_unverified_in_plain_words() -> None:
    recalled = next(d for d in CATALOG.devices() if not d.verified)
    lines = run("show", recalled.id).stdout.splitlines()
    assert lines[1].startswith("not verified: ")


def test_show_node() -> None:
    node = data_of("show", "DGX H100")
    assert (node["device"], node["count"]) == ("h100", 8)
    assert node["links"]["one_way_bytes_per_s_per_device"] == pytest.approx(450e9)
    cost = node["collectives"]["all_reduce"]
    assert cost["gigabyte_s"] == pytest.approx(cost["latency_s"] + 2 * 7 / 8 * 1e9 / cost["bus_bytes_per_s"])
    assert node["sources"]
    text = run("show", "dgx-h100").stdout
    for words in ("all_reduce", "450 GB/s", "latency", "data: "):
        assert words in text


def test_show_suggests_devices_and_nodes() -> None:
    assert re.search(r"unknown hardware 'h80'\. Did you mean .*'h800'", error_of("show", "h80"))
    assert re.search(r"Did you mean .*'hgx-h100'", error_of("show", "hgx-h10"))
    assert re.search(r"'hopper' is ambiguous\. Name one of: .*h100", error_of("show", "hopper"))


# ---- compare -----------------------------------------------------------------------------------------------


def test_compare() -> None:
    found = data_of("compare", "a100", "h800", "mi250x")
    assert found["devices"] == ["a100", "h800", "mi250x"]
    facts = {f["fact"]: f for f in found["facts"]}
    bf16 = facts["matrix_peak_flop_per_s.bf16@fp32"]
    assert bf16["ratios"] == pytest.approx([1, 3.17, 0.614], rel=0.01)
    assert bf16["differs"]
    assert facts["kind"] == {"fact": "kind", "values": ["gpu"] * 3, "ratios": [None] * 3, "differs": False}
    fp8 = facts["matrix_peak_flop_per_s.fp8_e4m3@fp32"]
    assert (fp8["values"][0], fp8["ratios"]) == (None, [None] * 3)  # there is no ratio to nothing
    assert "matrix_peak_flop_per_s.fp4_e2m1@fp32" not in facts  # none of them has it
    names = list(facts)
    assert names.index("vector_peak_flop_per_s.fp64@fp64") < names.index("matrix_peak_flop_per_s.int8@int32")


def test_compare_as_text() -> None:
    text = run("compare", "a100", "h800").stdout
    assert re.search(r"^≠ +memory bandwidth +2\.039 TB/s +3\.35 TB/s \(1\.64x\)$", text, re.MULTILINE)
    assert re.search(r"^ +kind +gpu +gpu$", text, re.MULTILINE)
    assert re.search(r"^≠ +matrix peak int8@int32 .* TOPS", text, re.MULTILINE)
    marked, total = map(int, re.search(r"≠ (\d+) of (\d+) facts differ; ratios are to a100", text).groups())
    assert len(re.findall(r"^≠  ", text, re.MULTILINE)) == marked < total


def test_compare_refuses() -> None:
    assert "at least two devices" in error_of("compare", "a100")
    assert "'a100' is a100 too" in error_of("compare", "a100", "A100-SXM")
    assert "unknown hardware 'h80'" in error_of("compare", "a100", "h80")


def test_compare_the_running_cpu_with_a_product() -> None:
    found = data_of("compare", "cpu", "epyc-9654")
    assert found["devices"][0].endswith(" (cpu)")
    units = next(f for f in found["facts"] if f["fact"] == "units")
    assert units["values"][1] == 96


# ---- the user's own files ----------------------------------------------------------------------------------


def test_files_can_correct_a_device(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[device]]\nid = "a100"\nmemory_bandwidth_bytes_per_s = 1555e9\n')
    d = data_of("show", "a100", "--hardware-file", file)
    assert d["groups"]["memory"]["values"]["memory_bandwidth_bytes_per_s"] == 1555e9
    (caveat,) = d["caveats"]
    assert "mine.toml" in caveat
    assert f"{caveat[1:]}." in run("show", "a100", "--hardware-file", file).stdout
    assert data_of("show", "a100")["caveats"] == []


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('[[device]]\nid = "a100"\nmemory_gb = 80\n')
    assert re.search(r"wrong\.toml.*'a100'.*memory_gb: unknown key", error_of("show", "a100", "--hardware-file", file))


# ---- calibrate ------------------------------------------------------------------------------------------


def test_calibrate_is_wired(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    calls = []
    monkeypatch.setattr(dsmp.compiler.calibration.commands, "calibrate", lambda **options: calls.append(options))
    assert run("calibrate").exit_code == 0
    options = ("-o", "x.toml", "--quick", "--format", "bf16", "--format", "fp32", "--json", "--hardware-file", own)
    assert run("calibrate", *options).exit_code == 0
    assert calls == [
        {"output": None, "quick": False, "formats": None, "files": [], "as_json": False},
        {"output": Path("x.toml"), "quick": True, "formats": ["bf16", "fp32"], "files": [own], "as_json": True},
    ]


# ---- words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "value", "text"),
    [
        ("memory_bytes", 85_017_755_648, "memory 85 GB = 79.18 GiB"),
        ("memory_bandwidth_bytes_per_s", 3.352e12, "memory bandwidth 3.352 TB/s"),
        ("l2_bytes", 52_428_800, "L2 50 MiB"),
        ("scratchpad_bytes_per_unit", 233_472, "scratchpad per unit 228 KiB"),
        ("vector_clock_hz", 1.98e9, "vector clock 1,980 MHz"),
        ("tdp_w_per_card", 700.0, "power limit per card 700 W"),
        ("launch_overhead_s", 7e-6, "launch overhead 7 µs"),
        ("peak_share.fp8_e4m3", 0.78, "peak share fp8_e4m3 78 %"),
        ("matrix_peak_flop_per_s.fp8_e4m3@fp32", 1.979e15, "matrix peak fp8_e4m3@fp32 1,979 TFLOPS"),
        ("matrix_peak_flop_per_s.int8@int32", 6.24e14, "matrix peak int8@int32 624 TOPS"),
        ("sparsity_factor", 1, "structured sparsity none"),
        ("mx_formats", (), "mx formats none"),
        ("year", 2022, "year 2022"),
        ("cores", 16896, "cores 16,896"),
        ("llc_bytes", None, "last-level cache –"),
    ],
)
def test_figures(fact: str, value: object, text: str) -> None:
    assert f"{fact_text(fact)} {value_text(fact, value)}" == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.000012345, "0.000012345"), (0.05, "0.05"), (0, "0"), (989.43, "989.4"), (1978.9, "1,979")]
)
def test_significant(value: float, text: str) -> None:
    assert significant(value) == text


# ---- as a process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["list"], ["list", "--json"], ["show", "h800"], ["compare", "a100", "h800"], ["--help"]], ids=str
)
def test_the_data_needs_no_torch(arguments: list[str]) -> None:
    script = (
        "import sys; sys.argv = ['dsmp', 'hardware', *sys.argv[1:]]; from dsmp.compiler.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
