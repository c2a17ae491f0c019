"""`dsmp kernels` and `dsmp audit`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsmp.compiler.cli import app
from dsmp.passes.plan import load_plan

MODEL = """
import torch
from torch import nn

def factory():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), (torch.randn(256, 256),)
"""
RULE = ("--rule", "*linear*=fp8_e4m3")


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def error_of(result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [text for text in result.stderr.splitlines() if text.strip()]
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels")
    (path / "model.py").write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return f"{folder / 'model.py'}:factory"


@pytest.fixture(scope="module")
def plan(folder: Path, model: str) -> Path:
    path = folder / "plan.json"
    result = run("plan", model, "-o", path, "--hardware", "h800", *RULE)
    assert result.exit_code == 0, result.output
    return path


def test_kernels_of_a_plan_file(plan: Path, folder: Path) -> None:
    result = run("kernels", plan, "--target", "sm_90", "-o", folder / "out")
    assert result.exit_code == 0, result.output
    assert "100 % of the planned GEMM FLOPs are covered: 100.0 % by" in result.stdout
    assert "wgmma.m64n64k32.f32.e4m3.e4m3" in result.stdout
    assert "predicted, not measured" in result.stdout
    sources = list((folder / "out").glob("*.py"))
    assert f"{len(sources)} kernels written to" in result.stdout
    assert {d.key for d in load_plan(plan) if d.op == "linear"} <= {
        word.strip(",.") for s in sources for word in s.read_text().split()
    }


def test_kernels_as_json(model: str) -> None:
    result = run("kernels", model, "--target", "sm_80", "--rule", "*linear*=tf32", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["hardware"] == "a100"
    assert found["covered"] == 1.0
    assert found["kernels"]
    for kernel in found["kernels"]:
        assert kernel["spills"] == 0
        assert any("tf32" in i for i in kernel["matrix_instructions"])
        assert any(i.startswith("HMMA") and "TF32" in i for i in kernel["matrix_instructions"])
        assert 0 < kernel["peak_share"] <= 1
        assert kernel["file"] is None


def test_what_kernels_refuses(plan: Path, model: str, folder: Path) -> None:
    assert "unknown target 'sm_42'" in error_of(run("kernels", model, "--target", "sm_42"))
    assert "sm_90, which the plan was made for" in error_of(run("kernels", plan, "--target", "sm_80"))
    assert "leave it out" in error_of(run("kernels", plan, "--infer"))
    file = folder / "a_file"
    file.write_text("")
    assert "a folder; this is a file" in error_of(run("kernels", plan, "-o", file))
    assert "GLOB=NAME" in error_of(run("kernels", plan, "--use", "triton_gemm"))
    assert "did you mean triton_gemm" in error_of(run("kernels", plan, "--without", "triton_gem"))
    assert "cannot compute fp8_e4m3" in error_of(run("kernels", plan, "--use", "*=triton_gemm"))
    assert "the instruction set of h800" in error_of(run("kernels", model, "--target", "sm_80", "--hardware", "h800"))
    for asked in (("--hardware", "v100"), ("--target", "sm_70")):
        assert "no Triton kernels for sm_70" in error_of(run("kernels", model, *asked))
    assert "fp8_e4m3" in error_of(run("kernels", plan, "--hardware", "a100"))
    assert "cannot be made" in error_of(run("kernels", plan, "-o", "/proc/nothing"))


def test_audit(model: str) -> None:
    result = run("audit", model, "--hardware", "h800", *RULE)
    assert result.exit_code == 0, result.output
    assert "not on h800; there it would be triton_block_gemm" in result.stdout
    assert "GEMM FLOPs: 100.0% simulated (simulation)" in result.stdout
    every = run("audit", model, "--hardware", "h800", "--all", *RULE)
    assert "0|fprop|linear|0" in every.stdout
    found = json.loads(run("audit", model, "--hardware", "h800", "--json", *RULE).stdout)
    assert {e["ran"] for e in found if e["op"] == "linear"} == {"simulated"}
    assert "GLOB=NAME" in error_of(run("audit", model, "--use", "x"))
