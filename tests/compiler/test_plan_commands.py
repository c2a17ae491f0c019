"""`dsmp explain` and `dsmp pareto`: what they print and write, and what they refuse with which words."""

from __future__ import annotations

import csv
import gc
import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
from plan_samples import HEAD, sample_plan, traced_plan
from typer.testing import CliRunner

from dsmp.compiler import pareto_figure
from dsmp.compiler.cli import app
from dsmp.compiler.console import Printer
from dsmp.compiler.render_explain import print_explanation
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.passes.explain import explain
from dsmp.passes.pareto import pareto_front
from dsmp.passes.plan import load_plan

UP = "layers.0.up|fprop|linear|0"


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def error_of(result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_plan(2, budget=1e-4).save(tmp_path_factory.mktemp("plans") / "plan.json")


@pytest.fixture(scope="module")
def uncalibrated(file: Path) -> Path:
    return traced_plan(load_plan(file).nodes, None).save(file.with_name("tier.json"))


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain(file: Path) -> None:
    result = run("explain", file, "layers.0.up", "--want", "fp8_e4m3")
    assert result.exit_code == 0, result.output
    for words in (
        UP,
        "chosen: bf16 +fp32 → bf16, 49.03 µs, drift 3.61 % of the budget on h800",
        "asked for: fp8_e4m3:row/row->bf16: -15.1 µs (casts +5.08), drift +0.000516 (+258 % of the budget)",
        "why not: fp8_e4m3:row/row->bf16 would save 15.1 us but needs 258 % of the error budget, of which",
        "[error-budget]",
        "% of the loss or more: solved, not yet at 0.0",
        "a copy is made and paid once, however many read it",
        "not on h800 for linear: fp6_e2m3 (--want FORMAT says why)",
        "µs: with casts of weights, without those of activations, which nodes share; drift: of the error budget",
        "critical path 354 µs: on it",
    ):
        assert words in result.stdout
    assert gc.isenabled()


def test_options_are_not_widened_by_reasons(file: Path) -> None:
    text = run("explain", file, "layers.0.up").stdout
    table = text[text.index("option ") :].splitlines()
    assert max(map(len, table[: next(i for i, line in enumerate(table) if line.startswith("not on"))])) <= 80
    assert "no fp6_e2m3 units" not in text
    assert (
        "why not: no fp6_e2m3 units on this device" in run("explain", file, "layers.0.up", "--want", "fp6_e2m3").stdout
    )


def test_explain_json(file: Path) -> None:
    found = json.loads(run("explain", file, HEAD, "--want", "fp8_e4m3", "--json").stdout)
    assert found["constraint"]["code"] == "veto-head"
    assert found["flip"] is None
    assert list(found) == [
        "key", "op", "hardware", "reason", "chosen", "follows", "asked", "options", "tied", "alternative", "change",
        "change_share", "margin_us", "casts", "constraint", "flip", "slack_us", "critical_path_us", "missing",
    ]  # fmt: skip
    flip = json.loads(run("explain", file, UP, "--json").stdout)["flip"]
    assert list(flip) == ["budget", "value", "before", "amount", "amount_before", "exact"]


def test_explain_a_view(file: Path) -> None:
    text = run("explain", file, "layers.1.attn|fprop|view|2").stdout
    assert "a view: takes the format of what it reads, layers.1.attn.v|fprop|linear|0" in text
    assert "tied with layers.1.attn.q|fprop|linear|0, layers.1.attn.k|fprop|linear|0" in text


def test_explain_without_calibration(uncalibrated: Path) -> None:
    text = run("explain", uncalibrated, "layers.0.up", "--want", "int4").stdout
    assert "no int4 units" in text
    assert "not known: drift, casts, ties and data flow: the plan was made without calibration" in text


def test_explain_of_hardware_that_is_not_at_hand(file: Path, tmp_path: Path) -> None:
    other = load_plan(file).model_copy(update={"hardware": "lab-card"}).save(tmp_path / "lab.json")
    result = run("explain", other, UP, "--want", "int4")
    assert result.exit_code == 0
    assert "int4 is no candidate for this node (linear, traced in fp32) [no-candidate]" in result.stdout


@pytest.mark.parametrize("width", [120, 80])
def test_explain_fits(file: Path, width: int) -> None:
    plan = load_plan(file)
    stream = io.StringIO()
    found = explain(plan, plan.by_key["layers.0.attn.q|fprop|linear|0"])
    print_explanation(Printer(stream, width=width), plan, found)
    assert max(map(len, stream.getvalue().splitlines())) <= width
    assert "…" not in stream.getvalue()


def test_explain_refuses(file: Path) -> None:
    assert "Did you mean 'layers.0.up|fprop|linear|0'" in error_of(run("explain", file, "layers.0.upp"))
    assert "fits 2 nodes" in error_of(run("explain", file, "*.up"))
    assert "unknown numeric format 'fp9'" in error_of(run("explain", file, "head", "--want", "fp9"))
    assert "unknown scaling recipe 'rows'" in error_of(run("explain", file, "head", "--want", "int8:rows/row"))
    assert "cannot be read" in error_of(run("explain", file.with_name("missing.json"), "head"))


# ---- pareto ------------------------------------------------------------------------------------------------


def test_pareto_table(file: Path) -> None:
    result = run("pareto", file, "--points", "6")
    assert result.exit_code == 0, result.output
    rows = [re.split(r" {2,}", line) for line in result.stdout.splitlines()[2:] if line.strip()]
    names = [row[0] for row in rows]
    for name in ("optimum", "plan", "all fp32", "all fp8_e4m3:row/row", "autocast bf16", "h800 tier"):
        assert name in names
    drifts = [float(row[2]) for row in rows]
    assert drifts == sorted(drifts)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_figures(file: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"front{suffix}"
    result = run("pareto", file, "-o", target, "--points", "4")
    assert result.exit_code == 0, result.output
    assert f"written to {target}" in result.stdout
    assert target.read_bytes().startswith(magic)
    if suffix == ".svg":
        text = target.read_text()
        for words in ("predicted time", "predicted drift", "of the loss", "autocast bf16", "this plan", "its budget"):
            assert words in text


def test_a_figure_covers_nothing_and_repeats_no_colour(file: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = load_plan(file)
    assert plan.program is not None
    plan = plan.model_copy(update={"program": plan.program.model_copy(update={"default": {UP: "fp8_e4m3:row/row"}})})
    front = pareto_front(plan, points=4, device=resolve_hardware("h800"))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10.5, 6), layout="constrained")
    axes = figure.subplots()
    pareto_figure._draw(axes, front, plan)
    figure.draw_without_rendering()
    box, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert box.x0 >= inside.x1
    assert box.x1 <= figure.bbox.x1
    drawn = [c for c in axes.collections if c.get_label() in map(pareto_figure.name_of, front.others)]
    colours = {tuple(c.get_facecolor()[0]) for c in drawn}
    assert len(drawn) == len(colours) == len(front.others) >= 4
    many = pareto_figure._colours(24)
    assert len(set(many)) == 24


def test_csv(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "front.csv"
    assert run("pareto", file, "--csv", target, "--points", "5").exit_code == 0
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert {r["kind"] for r in rows} == {"front", "plan", "format", "autocast", "tier"}
    front = [(float(r["drift"]), float(r["time_us"])) for r in rows if r["kind"] == "front"]
    assert front == sorted(front)
    assert [t for _, t in front] == sorted((t for _, t in front), reverse=True)
    plan = load_plan(file).solution
    assert plan is not None
    (mine,) = [r for r in rows if r["kind"] == "plan"]
    assert float(mine["time_us"]) == pytest.approx(plan.time_us)
    assert float(mine["amount"]) == pytest.approx(plan.drift / 2)


def test_figures_need_matplotlib(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    target = tmp_path / "front.png"
    message = error_of(run("pareto", file, "-o", target, "--points", "3"))
    assert message == (
        "a figure needs matplotlib, which is not installed. Run pip install matplotlib (the extra [plots] of dsmp)."
    )
    assert not target.exists()
    assert run("pareto", file, "--csv", tmp_path / "front.csv", "--points", "3").exit_code == 0


def test_pareto_refuses(file: Path, uncalibrated: Path, tmp_path: Path) -> None:
    assert "ends in .png, .svg, .pdf" in error_of(run("pareto", file, "-o", tmp_path / "front.jpg"))
    assert "has no folder to lie in" in error_of(run("pareto", file, "--csv", tmp_path / "no" / "x.csv", "--points", 2))
    assert "is a folder" in error_of(run("pareto", file, "--csv", tmp_path, "--points", 2))
    assert "'--points' got 1; allowed" in error_of(run("pareto", file, "--points", "1"))
    assert "without calibration" in error_of(run("pareto", uncalibrated))


def test_an_old_file_stays_where_writing_fails(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "front.png"
    target.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    figure = importlib.import_module("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", fail)
    assert run("pareto", file, "-o", target, "--points", "3").exit_code == 130
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["front.png"]
