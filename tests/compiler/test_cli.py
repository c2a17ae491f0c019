"""The command line: what it prints where, what it refuses and with which words and exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dsmp.compiler.model_commands
from dsmp.compiler.cli import app
from dsmp.passes.plan import PrecisionPlan, load_plan, parse_plan

MODEL = """
import torch
from torch import nn

def factory():
    print("noise of the model's own")
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    return model, (torch.randn(4, 64),)

def without_inputs():
    return nn.Linear(4, 4)
"""


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def error_of(result) -> str:
    """The one line on standard error that a failed command leaves."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [text for text in result.stderr.splitlines() if text.strip()]
    assert line.startswith("error: ")
    assert "Traceback" not in result.stderr
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    (path / "model.py").write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return f"{folder / 'model.py'}:factory"


@pytest.fixture(scope="module")
def a100(folder: Path, model: str) -> Path:
    """A plan for an a100, written by `dsmp plan`."""
    result = run("plan", model, "-o", folder / "a100.json", "--hardware", "a100")
    assert result.exit_code == 0, result.output
    return folder / "a100.json"


@pytest.fixture(scope="module")
def h800(folder: Path, model: str) -> Path:
    run("plan", model, "-o", folder / "h800.json", "--hardware", "h800")
    return folder / "h800.json"


# ---- plan --------------------------------------------------------------------------------------------------


def test_plan_prints_the_summary(folder: Path, model: str) -> None:
    target = folder / "again.json"
    target.write_text("an old file")
    result = run("plan", model, "-o", target, "--hardware", "a100")
    assert result.exit_code == 0
    assert load_plan(target).hardware == "a100"
    assert f"written to {target}" in result.stdout
    for text in ("predicted time:", "saved activations:", "casts: ", "tf32", "capture ", "planning ", "peak memory"):
        assert text in result.stdout
    assert "noise" not in result.stdout
    assert "noise of the model's own" in result.stderr
    assert [p.name for p in folder.glob(".*")] == []  # nothing temporary is left


def test_plan_predicts_memory(a100: Path) -> None:
    prediction = load_plan(a100).prediction
    assert prediction.saved_bytes is not None
    assert prediction.saved_bytes == prediction.saved_bytes_fp32 > 0  # an a100 stores fp32


def test_plan_refuses_bad_targets(folder: Path, model: str) -> None:
    assert "folder" in error_of(run("plan", model, "-o", folder))
    assert "there is no" in error_of(run("plan", model, "-o", folder / "missing" / "plan.json"))
    assert "is a plan already" in error_of(run("plan", "plan.json", "-o", folder / "x.json"))
    assert run("plan", model).exit_code == 2  # no -o


def test_plan_for_inference(folder: Path, model: str) -> None:
    result = run("plan", model, "-o", folder / "infer.json", "--hardware", "h800", "--infer")
    plan = load_plan(folder / "infer.json")
    assert {d.phase for d in plan} == {"fprop"}
    assert plan.prediction.saved_bytes is None
    assert "saved activations" not in result.stdout
    assert re.search(r"casts: [1-9]", result.stdout)


def test_rules_and_inputs(folder: Path, model: str) -> None:
    options = ("--rule", "*=bf16", "--rule", "2|*=fp32", "--input", "float32[6,64]", "--hardware", "h800")
    result = run("report", model, *options, "--json")
    plan = parse_plan(result.stdout)
    linears = {d.module: d for d in plan if d.op == "linear" and d.phase == "fprop"}
    assert {m: d.compute for m, d in linears.items()} == {"0": "bf16", "2": "fp32"}
    assert linears["0"].shapes[0] == [6, 64]
    assert [(r.match, r.format) for r in plan.rules] == [("*", "bf16"), ("2|*", "fp32")]


# ---- report ------------------------------------------------------------------------------------------------


def test_report_json_is_the_plan(model: str, a100: Path) -> None:
    result = run("report", model, "--hardware", "a100", "--json")
    assert result.exit_code == 0
    assert parse_plan(result.stdout) == load_plan(a100)
    for text in ("capture ", "planning ", "casts: "):
        assert text in result.stderr


def test_report_json_of_a_part(a100: Path) -> None:
    result = run("report", a100, "--json", "--match", "2", "--phase", "wgrad")
    whole, part = load_plan(a100), parse_plan(result.stdout)
    assert [d.key for d in part] == ["2|wgrad|linear|0"]
    assert part.model == whole.model
    assert "1 of" in result.stderr


def test_report_of_a_plan(a100: Path) -> None:
    result = run("report", a100)
    assert result.exit_code == 0
    assert "0|fprop|linear|0" in result.stdout
    assert "4x64x32" in result.stdout
    assert "not known from a plan alone" in result.stdout
    assert "other nodes" in result.stdout
    everything = run("report", a100, "--all").stdout
    assert all(d.key in everything for d in load_plan(a100))


def test_report_does_not_break_lines_without_a_terminal(a100: Path) -> None:
    rows = [line for line in run("report", a100).stdout.splitlines() if "|linear|" in line]
    assert len(rows) == sum(d.op == "linear" for d in load_plan(a100))
    assert all("tier" in row for row in rows)  # the last column, on the same line
    assert "…" not in "".join(rows)


def test_report_of_an_archive(folder: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(8, 4), (torch.ones(2, 8),)), folder / "m.pt2")
    result = run("report", folder / "m.pt2", "--infer", "--hardware", "a100", "--json")
    assert [d.compute for d in parse_plan(result.stdout) if d.op == "linear"] == ["tf32"]


# ---- diff --------------------------------------------------------------------------------------------------


def test_diff(a100: Path, h800: Path) -> None:
    same = run("diff", a100, a100)
    assert (same.exit_code, "no difference" in same.stdout) == (0, True)
    other = run("diff", a100, h800, "--flat")
    assert other.exit_code == 1
    assert re.search(r"0\|fprop\|linear\|0 +1 +tf32 → fp32 +bf16 → bf16", other.stdout)
    modules = run("diff", a100, h800)
    assert modules.exit_code == 1
    assert re.search(r"^0 +\d+ of \d+", modules.stdout, re.MULTILINE)
    assert re.search(r"^  fprop linear +1 +tf32 → fp32 +bf16 → bf16", modules.stdout, re.MULTILINE)


def test_diff_json(a100: Path, h800: Path) -> None:
    result = run("diff", a100, h800, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["equal"] is False
    assert (found["before"]["hardware"], found["after"]["hardware"]) == ("a100", "h800")
    assert [n["key"] for n in found["nodes"]] == [d.key for d in load_plan(a100).diff(load_plan(h800))]
    assert found["nodes"][0]["before"]["compute"] == "tf32"
    assert sum(m["changed"] for m in found["modules"]) == len(found["nodes"])
    assert found["modules"][0]["before"]["drift"] is None
    same = run("diff", a100, a100, "--json")
    assert (same.exit_code, json.loads(same.stdout)["nodes"]) == (0, [])


# ---- errors ------------------------------------------------------------------------------------------------


def broken(path: Path, plan: Path, **change: object) -> Path:
    data = json.loads(plan.read_text())
    data["nodes"][0] |= change
    path.write_text(json.dumps(data))
    return path


def test_malformed_plans(tmp_path: Path, a100: Path) -> None:
    assert "field nodes.0.compute" in error_of(run("report", broken(tmp_path / "a.json", a100, compute="fp9")))
    assert "field nodes.0.phase" in error_of(run("diff", a100, broken(tmp_path / "b.json", a100, phase="sideways")))
    (tmp_path / "c.json").write_text("{")
    assert "no JSON" in error_of(run("report", tmp_path / "c.json"))
    assert "cannot be read" in error_of(run("report", tmp_path / "missing.json"))
    assert "cannot be read" in error_of(run("diff", tmp_path / "missing.json", a100))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hardware", "h80"), "unknown hardware 'h80'. Did you mean .*h800"),
        (("--input", "floaty[4,64]"), "unknown dtype 'floaty'"),
        (("--input", "float32[4"), "cannot read input"),
        (("--input", "float32[4,65]"), "failed on the example inputs"),
        (("--rule", "fp32"), r"cannot read rule 'fp32'; write GLOB=FORMAT"),
        (("--rule", "*=fp31"), "unknown numeric format 'fp31'"),
        (("--rule", "nowhere=fp32"), "matches no node"),
        (("--rule", "*linear*=fp8_e4m3", "--hardware", "a100"), "a100 cannot compute linear in fp8_e4m3"),
        (("--phase", "forward"), "'--phase' got 'forward'; allowed: .*fprop, dgrad, wgrad"),
        (("--match", "nowhere"), "'--match' got 'nowhere'"),
        (("--config", "c.json"), "config file goes with transformers"),
    ],
)
def test_bad_options(model: str, options: tuple[str, ...], words: str) -> None:
    result = run("report", model, *options)
    line = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(line) == 1
    assert re.search(words, line[0]), line[0]
    assert "Traceback" not in result.stderr


def test_bad_models(folder: Path) -> None:
    assert "unknown" in error_of(run("report", "torchvision:resnet19", "--hardware", "a100"))
    assert "there is no file" in error_of(run("report", f"{folder}/nothing.py:factory"))
    assert "MODEL is one of" in error_of(run("report", "resnet18"))
    assert "comes without inputs" in error_of(run("report", f"{folder}/model.py:without_inputs"))


def test_options_that_do_not_fit(a100: Path) -> None:
    assert "'--hardware'" in error_of(run("report", a100, "--hardware", "h800"))
    assert "'--rule'" in error_of(run("report", a100, "--rule", "*=fp32"))
    assert "'--hardware-file'" in error_of(run("report", a100, "--hardware-file", "mine.toml"))
    assert "'--infer' got 'no MODEL'" in error_of(run("report", "--infer"))
    assert "'--match' got 'no MODEL'" in error_of(run("report", "--match", "x"))


def test_debug_shows_the_traceback(model: str) -> None:
    result = run("report", model, "--hardware", "nothing", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: unknown hardware")


def test_interrupt(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dsmp.compiler.model_commands, "load_model", interrupt)
    result = run("report", model)
    assert (result.exit_code, result.stderr.strip()) == (130, "interrupted")


# ---- as a process ------------------------------------------------------------------------------------------


def process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsmp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, **options)  # type: ignore[call-overload, no-any-return]


def test_version_and_help_need_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['dsmp', *sys.argv[1:]]; from dsmp.compiler.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    for arguments, words in (
        (["--version"], "dsmp "),
        (["--help"], "hardware"),
        (["report", "--help"], "--hardware-file"),
        (["explain", "--help"], "--want"),
        (["pareto", "--help"], "--points"),
        (["hardware", "calibrate", "--help"], "--quick"),
    ):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert words in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def test_reader_goes_away(a100: Path) -> None:
    """`dsmp report ... | head` ends without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dsmp", "report", str(a100), "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_terminal_without_unicode(a100: Path) -> None:
    done = process("report", str(a100), env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0
    assert "0|fprop|linear|0" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_resnet18_on_a100() -> None:
    done = process("report", "torchvision:resnet18", "--hardware", "a100", "--json", "--input", "float32[2,3,64,64]")
    assert done.returncode == 0, done.stderr
    plan = PrecisionPlan.model_validate_json(done.stdout)
    counts = Counter((d.phase, d.compute, d.accumulate) for d in plan if d.op == "conv")
    # the first convolution's input is the image, which needs no gradient
    assert counts == {("fprop", "tf32", "fp32"): 20, ("dgrad", "tf32", "fp32"): 19, ("wgrad", "tf32", "fp32"): 20}
    assert {d.compute for d in plan if d.op == "linear"} == {"tf32"}
    assert {d.compute for d in plan if d.op == "norm"} == {"fp32"}
    assert "capture " in done.stderr
