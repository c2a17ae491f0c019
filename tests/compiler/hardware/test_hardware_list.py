"""`dsmp hardware list`: every device once, in SI units, and filters that combine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hardware_commands import data_of, error_of, run

from dsmp.compiler.hardware.selection import Selection, multiplies, parse_size, parse_years
from dsmp.errors import InvalidOptionError
from dsmp.hardware_db import load_catalog
from dsmp.hardware_db.schema import VENDORS

CATALOG = load_catalog()


def test_list_has_every_device_in_si_units() -> None:
    devices = {d["id"]: d for d in data_of("list")}
    assert sorted(devices) == CATALOG.names()
    assert len(devices) >= 220
    for d in devices.values():
        assert d["vendor"] in VENDORS
        assert 1e8 < d["memory_bytes"] < 1e13
        assert 1e9 < d["memory_bandwidth_bytes_per_s"] < 1e14
        assert d["dense_peak_flop_per_s"], d["id"]
        assert all(1e9 < peak < 1e18 for peak in d["dense_peak_flop_per_s"].values()), d["id"]
        assert d["verified"] == (d["confidence"] != "C")
    a100, mi250x = devices["a100"], devices["mi250x"]
    assert a100["dense_peak_flop_per_s"]["bf16@fp32"] == pytest.approx(312e12, rel=0.01)
    assert a100["dense_peak_flop_per_s"]["fp64@fp64"] == pytest.approx(19.5e12, rel=0.01)  # the matrix units'
    assert (mi250x["units"], mi250x["logical_devices_per_card"]) == (110, 2)


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        (("--vendor", "AMD"), lambda d: d["vendor"] == "amd"),
        (("--kind", "cpu"), lambda d: d["kind"] == "cpu"),
        (("--segment", "consumer"), lambda d: d["segment"] == "consumer"),
        (("--min-memory", "80GB"), lambda d: d["memory_bytes"] >= 0.95 * 80e9),
        (("--min-memory", "80GiB"), lambda d: d["memory_bytes"] >= 0.95 * 80 * 2**30),
        (("--min-bandwidth", "3TB/s"), lambda d: d["memory_bandwidth_bytes_per_s"] >= 3e12),
        (("--year", "2020-2022"), lambda d: 2020 <= d["year"] <= 2022),
        (("--verified",), lambda d: d["verified"]),
        (("--vendor", "apple", "--vendor", "aws"), lambda d: d["vendor"] in ("apple", "aws")),
        (("--vendor", "nvidia", "--min-memory", "79GB", "--year", "-2022"),
         lambda d: d["vendor"] == "nvidia" and d["memory_bytes"] >= 0.95 * 79e9 and d["year"] <= 2022),
    ],
)  # fmt: skip
def test_list_filters(options: tuple[str, ...], holds: Callable[[dict], bool]) -> None:
    everything = data_of("list")
    expected = [d["id"] for d in everything if holds(d)]
    assert 0 < len(expected) < len(everything)
    assert [d["id"] for d in data_of("list", *options)] == expected


def test_cards_sold_with_that_much_memory_are_listed() -> None:
    found = {d["id"] for d in data_of("list", "--format", "fp8", "--min-memory", "48GB")}
    assert {"l40s", "l40", "rtx-6000-ada", "h100"} <= found and "rtx-4090" not in found
    assert {"t4", "v100"} <= {d["id"] for d in data_of("list", "--min-memory", "16GB")}


def test_formats_given_twice_must_both_be_there() -> None:
    found = {d["id"] for d in data_of("list", "--format", "fp8", "--format", "fp4")}
    assert {"b200", "mi355x"} <= found and not found & {"h100", "mi300x"}


def test_list_by_format_asks_for_products_not_for_rates() -> None:
    def having(name: str) -> set[str]:
        return {d["id"] for d in data_of("list", "--format", name)}

    assert {"h800", "b200", "rtx-4090"} <= having("fp8_e4m3")
    assert "mi300x" not in having("fp8_e4m3")
    assert "a100" not in having("fp8_e4m3")
    assert having("fp8") == having("fp8_e4m3") | having("fp8_e5m2") | having("fp8_e4m3fnuz") | having("fp8_e5m2fnuz")
    assert not having("int8") & {"v100", "b300"}  # dp4a serves no GEMM; cut out
    assert not multiplies(CATALOG.device("v100"), "bf16")


def test_list_as_text() -> None:
    text = run("list", "--vendor", "apple").stdout
    head, line, *rows = text.splitlines()
    assert head.split()[:4] == ["device", "name", "vendor", "family"]
    assert set(line) == {"─"}
    assert text.count("\n") == len(data_of("list", "--vendor", "apple")) + 4
    assert len({len(row) for row in (head, rows[0])}) <= 2
    assert re.search(r"^\d+ devices\. Dense TFLOPS.*unverified", rows[-1])


def test_list_marks_what_a_reader_must_know(own: Path) -> None:
    text = run("list", "--hardware-file", own, "--year", "2030").stdout
    assert re.search(r"test-100 .* 2 x 100 SM .* B\*$", text, re.MULTILINE)
    assert "* defined or changed by your files" in text
    assert "2 x: that many devices a card" in text
    totals = run("list", "--vendor", "google").stdout
    assert re.search(r"[ABC]\+$", totals, re.MULTILINE)
    assert "+ peaks are the vendor's totals" in totals


def test_nothing_found_says_so() -> None:
    text = run("list", "--vendor", "apple", "--min-memory", "10TB")
    assert (text.exit_code, text.stderr) == (0, "")
    assert re.fullmatch(r"none of \d+ devices passes all filters\.\n", text.stdout)
    found = run("list", "--vendor", "apple", "--min-memory", "10TB", "--json")
    assert (found.exit_code, json.loads(found.stdout)) == (0, [])
    assert "none of" in found.stderr
    nodes = run("list", "--nodes", "--vendor", "apple")
    assert (nodes.exit_code, nodes.stdout.startswith("the device of none of")) == (0, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--vendor", "nvdia"), r"'--vendor' got 'nvdia'; allowed: nvidia, amd, "),
        (("--kind", "card"), r"'--kind' got 'card'; allowed: gpu, cpu, npu"),
        (("--segment", "gaming"), r"'--segment' got 'gaming'; allowed: datacenter, .*consumer"),
        (("--format", "bf17"), r"unknown numeric format 'bf17'. Did you mean 'bf16'"),
        (("--min-memory", "48"), r"'--min-memory' got '48'; allowed: a number with its unit"),
        (("--min-memory", "much"), r"'--min-memory' got 'much'; allowed: .*80GB"),
        (("--min-bandwidth", "-1"), r"'--min-bandwidth' got '-1'"),
        (("--year", "22"), r"'--year' got '22'; allowed: .*2020-2023"),
        (("--hardware-file", "nowhere.toml"), r"nowhere.toml: no such hardware data file"),
    ],
)
def test_list_refuses(options: tuple[str, ...], words: str) -> None:
    assert re.search(words, error_of("list", *options))


def test_nodes_are_listed_by_their_device() -> None:
    nodes = data_of("list", "--nodes", "--vendor", "nvidia")
    assert {CATALOG.device(n["device"]).vendor for n in nodes} == {"nvidia"}
    assert len(data_of("list", "--nodes")) == len(CATALOG.nodes) > len(nodes)
    text = run("list", "--nodes").stdout
    assert all(node in text for node in CATALOG.nodes)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80e9),
        ("80 gb", 80e9),
        ("64GiB", 2**36),
        ("1.5TB/s", 1.5e12),
        ("2T", 2e12),
        ("8MiB", 2**23),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size("--x", text) == size


@pytest.mark.parametrize("text", ["", "GB", "80XB", "-80GB", "1e9", "80GB/h", "nan"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="--x"):
        parse_size("--x", text)


@pytest.mark.parametrize(
    ("text", "years"),
    [("2022", (2022, 2022)), ("2020-2023", (2020, 2023)), ("2022-", (2022, 9999)), ("-2018", (0, 2018))],
)
def test_years(text: str, years: tuple[int, int]) -> None:
    assert parse_years("--x", text) == years


@pytest.mark.parametrize("text", ["", "-", "22", "20222023", "2022-23", "2022-2023-2024"])
def test_no_years(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="--x"):
        parse_years("--x", text)


def test_selection_is_checked() -> None:
    with pytest.raises(InvalidOptionError, match="--kind"):
        Selection(kind="board")
    assert all(Selection().admits(CATALOG, d) for d in CATALOG.devices())
