"""The demonstration: what it measures is right, it fits one screen, and it works without a C++ compiler."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict

import pytest
import torch
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from typer.testing import CliRunner

import dsmp.compiler.demo
from dsmp.compiler.cli import app
from dsmp.compiler.console import Printer
from dsmp.compiler.demo import DEMO_DEVICES, Demo, _compiler_failure, _no_compiler, run_demo
from dsmp.compiler.render_demo import print_demo
from dsmp.hardware_db.detect import detect, resolve_hardware


def no_compiler() -> str:
    raise InvalidCxxCompiler


@pytest.fixture(scope="module")
def demo() -> Demo:
    """The demonstration on a machine without a C++ compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsmp.compiler.demo, "get_cpp_compiler", no_compiler)
        return run_demo([resolve_hardware(h) for h in DEMO_DEVICES])


def screen(demo: Demo, width: int | None = None) -> str:
    stream = io.StringIO()
    print_demo(Printer(stream, width=width), demo)
    return stream.getvalue()


def test_errors_against_fp64(demo: Demo) -> None:
    eager, autocast, planned = demo.runs
    assert 0 < eager.gradient_error < 1e-5
    assert 1e-3 < autocast.gradient_error < 2e-2
    assert planned.gradient_error < 1.5 * autocast.gradient_error
    errors = {d.hardware: d.simulated.gradient_error for d in demo.devices if d.simulated is not None}
    # ten mantissa bits (tf32, scaled fp16) are eight times finer than bf16's seven
    for hardware in ("a100", "mi250x"):
        assert 10 * eager.gradient_error < errors[hardware] < autocast.gradient_error / 3
    assert errors["a100"] < errors["h800"] < 1.5 * autocast.gradient_error
    assert all(r.loss_error < 1e-3 for r in demo.runs)


def test_decisions_of_the_devices(demo: Demo) -> None:
    formats = {d.hardware: d.formats["linear"] for d in demo.devices}
    assert formats == {"a100": "tf32", "mi250x": "fp16", "h800": "bf16"}
    assert {d.formats["norm, softmax, loss"] for d in demo.devices} == {"fp32"}
    h800 = next(d for d in demo.devices if d.hardware == "h800")
    assert len(h800.examples) == 6
    assert "fp8_e4m3 does not pay" in h800.examples[0].reason
    assert h800.saved_bytes is not None and h800.saved_bytes_fp32 is not None
    assert h800.saved_bytes < 0.7 * h800.saved_bytes_fp32
    # wide enough, 8-bit formats pay
    wide = next(d for d in demo.large if d.hardware == "h800")
    assert wide.shares["fp8_e4m3"] > 0.8
    assert wide.time_us < wide.time_us_fp32 / 5


def test_one_screen(demo: Demo) -> None:
    lines = screen(demo).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for words in (detect().id, *DEMO_DEVICES, "autocast bf16", "dsmp, eager", "fp8_e4m3 does not pay", "output head"):
        assert words in text
    assert "…" not in text


def test_as_json(demo: Demo) -> None:
    facts = json.loads(json.dumps(asdict(demo)))
    assert [d["hardware"] for d in facts["devices"]] == list(DEMO_DEVICES)
    assert facts["devices"][0]["simulated"]["gradient_error"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="Inductor needs no C++ compiler for a GPU")
def test_without_cpp_compiler(demo: Demo) -> None:
    assert (demo.executor, demo.runs[-1].name) == ("eager", "dsmp, eager")
    assert "there is no working C++ compiler" in screen(demo).splitlines()[1]


def test_which_failures_are_the_compilers() -> None:
    """A compiler that is there but cannot compile is told from a defect, which is not hidden."""
    cause = CppCompileError(["g++", "x.cpp"], "x.cpp:1: fatal error: Python.h: No such file\n1 | ...")
    wrapped = RuntimeError("while compiling")
    wrapped.__cause__ = cause
    assert _compiler_failure(wrapped) is cause
    assert _compiler_failure(ValueError("a defect")) is None
    assert "Python.h: No such file), so the plan runs op by op" in _no_compiler(cause)


@pytest.mark.slow
def test_with_inductor() -> None:
    result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 0, result.output
    assert re.search(r"dsmp, inductor .* \d+ s$", result.stdout, re.MULTILINE)
    assert len(result.stdout.splitlines()) <= 45
    facts = json.loads(CliRunner().invoke(app, ["report", "--hardware", "h800", "--json"]).stdout)
    assert [d["hardware"] for d in facts["devices"]] == ["h800"]
    assert facts["runs"][2]["gradient_error"] < 1.5 * facts["runs"][1]["gradient_error"]
