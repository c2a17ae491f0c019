"""The example scripts, as users start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsmp.hardware_db.detect import resolve_hardware

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"step +\d+ +(?:on the mesh|in the pipeline) ([\d.]+) +in one process ([\d.]+)")


def run(ranks: int, *arguments: str, script: str = "sharded_gpt.py") -> subprocess.CompletedProcess[str]:
    """An example under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("ranks", "arguments", "tolerance"),
    [
        pytest.param(2, ["--mesh", "tp=2"], 1e-5, marks=pytest.mark.long),
        pytest.param(2, ["--mesh", "dp=2", "--zero", "3", "--wire", "int8"], 1e-3, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(ranks, arguments, tolerance):
    done = run(ranks, *arguments)
    assert done.returncode == 0, done.stderr
    losses = [(float(a), float(b)) for a, b in LINE.findall(done.stdout)]
    assert len(losses) == 10 and losses[-1][1] < losses[0][1] - 0.5
    assert all(abs(mesh - whole) < tolerance * whole for mesh, whole in losses)


@pytest.mark.slow
def test_a_mesh_that_is_not_what_was_started():
    done = run(2, "--mesh", "dp=2,tp=2")
    assert done.returncode != 0
    assert "--mesh has 4 ranks, torchrun started 2." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "tolerance", "sent"),
    [
        pytest.param(["--eager"], 1e-5, "32,768", marks=pytest.mark.long),
        pytest.param(["--dispatch", "fp8", "--combine", "bf16"], 1e-2, "8,448", marks=pytest.mark.slow),
    ],
)
def test_divided_experts_lose_as_one_process_does(arguments, tolerance, sent):
    done = run(2, *arguments, script="expert_parallel.py")
    assert done.returncode == 0, done.stderr
    losses = [(float(a), float(b)) for a, b in LINE.findall(done.stdout)]
    assert len(losses) == 10 and losses[-1][1] < losses[0][1] - 0.5
    assert all(abs(mesh - whole) < tolerance * whole for mesh, whole in losses), losses
    assert f": {sent} bytes a rank and layer, of 32,768 in fp32" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "tolerance", "stages"),
    [
        pytest.param(["--schedule", "1f1b"], 1e-5, 2, marks=pytest.mark.slow),
        pytest.param(
            ["--schedule", "interleaved", "--boundary", "bf16", "--no-compile"], 1e-3, 4, marks=pytest.mark.long
        ),
    ],
)
def test_losses_of_a_pipeline_are_those_of_one_process(arguments, tolerance, stages):
    done = run(2, *arguments, script="pipeline_gpt.py")
    assert done.returncode == 0, done.stderr
    assert f"pipeline of {stages} stages on 2 ranks" in done.stdout
    losses = [(float(a), float(b)) for a, b in LINE.findall(done.stdout)]
    assert len(losses) == 10 and losses[-1][1] < losses[0][1] - 0.5
    if resolve_hardware("cpu").storage != "fp32":
        tolerance = max(tolerance, 1e-2)  # stages round where the whole does not
    assert all(abs(staged - whole) < tolerance * whole for staged, whole in losses)
