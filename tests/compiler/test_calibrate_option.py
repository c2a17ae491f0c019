"""`dsmp plan MODEL --calibrate`: where the example inputs come from, and that mistakes keep their own words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dsmp
from dsmp.compiler.cli import app
from dsmp.errors import InputSpecError
from dsmp.passes.plan import load_plan

CODE = """
import torch
from torch import nn

def bare():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()

def with_inputs():
    return bare(), (torch.zeros(3, 64),)

def on_meta():
    with torch.device("meta"):
        return bare()

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 8)

    def forward(self, *, x):
        return self.a(x)

def batches():
    return [torch.randn(5, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]

def named_batches():
    return [{"x": b} for b in batches()]

def pairs():
    return [(b, torch.zeros(5, dtype=torch.int64)) for b in batches()]

def wrong_size():
    return [torch.randn(5, 63)]

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "code.py").write_text(CODE)
    return str(tmp_path / "code.py")


def plan(code: str, factory: str, *options: str):
    target = Path(code).with_name("plan.json")
    arguments = ["plan", f"{code}:{factory}", "-o", str(target), "--hardware", "h800", "--infer"]
    return CliRunner().invoke(app, [*arguments, *options]), target


def error_of(code: str, factory: str, *options: str) -> str:
    result, _ = plan(code, factory, *options)
    assert result.exit_code == 2, result.output
    (line,) = [text for text in result.stderr.splitlines() if text.strip()]
    return line


@pytest.mark.parametrize(
    ("factory", "options", "rows"),
    [
        ("bare", ("--calibrate", "batches"), 5),
        ("Named", ("--calibrate", "named_batches"), 5),
        ("bare", ("--calibrate", "pairs", "--loss", "loss"), 5),
        ("with_inputs", ("--calibrate", "batches"), 3),
        ("bare", ("--calibrate", "batches", "--input", "float32[7,64]"), 7),
    ],
)
def test_the_first_batch_stands_for_missing_inputs(code: str, factory: str, options: tuple[str, ...], rows: int):
    names = [f"{code}:{o}" if o in ("batches", "named_batches", "pairs", "loss") else o for o in options]
    result, target = plan(code, factory, *names)
    assert result.exit_code == 0, result.output
    made = load_plan(target)
    assert made.solution is not None and made.solution.measured is not None
    assert next(d for d in made if d.op == "linear").shapes[0][0] == rows


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        ("bare", (), "comes without inputs"),
        ("bare", ("--scores", "nowhere.json"), "comes without inputs"),
        ("bare", ("--calibrate", "nothing"), "has no 'nothing'"),
        ("bare", ("--calibrate", "pairs"), "does not take calibration batch 1 (2 positional)"),
        ("Named", ("--calibrate", "batches"), "does not take calibration batch 1 (1 positional)"),
        ("bare", ("--calibrate", "wrong_size"), "failed on the example inputs"),
        ("on_meta", ("--calibrate", "batches"), "lies on the meta device"),
        ("nothing", ("--calibrate", "batches"), "has no 'nothing'"),
        ("bare", ("--calibrate", "batches", "--draws", "-1"), "option 'draws' got -1"),
        ("bare", ("--budget", "1%"), "with calibration batches, or scores"),
    ],
)
def test_other_mistakes_keep_their_words(code: str, factory: str, options: tuple[str, ...], words: str):
    names = {"batches", "nothing", "pairs", "wrong_size"}
    assert words in error_of(code, factory, *(f"{code}:{o}" if o in names else o for o in options))


def test_plans_without_inputs_say_what_is_missing():
    model = nn.Linear(4, 4)
    batch = [torch.randn(8, 4)]
    scores = dsmp.measure_scores(model, batch, hardware="h800", training=False)
    with pytest.raises(InputSpecError, match=r"Linear needs inputs \(input\) .* scores do not"):
        dsmp.plan(model, hardware="h800", training=False, scores=scores)
    with pytest.raises(InputSpecError, match="needs inputs"):
        dsmp.plan(model, hardware="h800")
    assert dsmp.plan(model, batch[0], hardware="h800", training=False, scores=scores).solution is not None


def test_models_that_need_no_inputs_are_planned_without():
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, scale: float = 2.0) -> torch.Tensor:
            return self.weight @ self.weight * scale

    assert len(dsmp.plan(Constant(), hardware="h800")) > 0
