"""The bench of models on the CPU: its figures say what they are named for, and its smallest run has all rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import cpu, cpu_models, cpu_variants
from bench.cpu_variants import AUTOCAST, BASELINE, DYNAMIC, EAGER, WIDE
from bench.interleaved import Measured, measure
from dsmp.codegen.cpu.extension import cpu_operators


class Clock:
    """A variant that takes a set time a call, and notes when it was called."""

    def __init__(self, name: str, taking: float, log: list[str]) -> None:
        self.name, self.taking, self.log = name, taking, log

    def turn(self, case: str, calls: int) -> list[float]:
        self.log.append(self.name)
        return [self.taking] * calls


def test_turns_rotate_and_slow_variants_take_few() -> None:
    log: list[str] = []
    workers = {name: Clock(name, t, log) for name, t in {"base": 1.0, "fast": 0.5, "slow": 9.0}.items()}
    times = measure(workers, "", baseline="base", rounds=5)  # type: ignore[arg-type]
    assert {name: len(found) for name, found in times.items()} == {"base": 5, "fast": 5, "slow": 3}
    once, turns = log[:3], log[3:]
    assert once == ["base", "fast", "slow"]
    letters = "".join(name[0] for name in turns)
    assert letters == "bfs" + "fsb" + "sbf" + "bf" + "fb"


def figures(times: list[float], output: float = 1.0, code: str = "") -> Measured:
    made = torch.tensor([output, 0.0])
    return Measured(times=times, output=made, compile_s=2.0, weights_mb=1.0, peak_mb=3.0, code=code)


def test_figures() -> None:
    base, slow = figures([2.0, 4.0, 6.0]), figures([8.0, 10.0])
    assert base.median == 4.0 and base.spread == 0.5
    assert slow.times_as_fast_as(base) == pytest.approx((2 / 8 + 4 / 10) / 2)
    assert figures([1.0]).spread == 0.0


def test_rows_and_what_is_too_slow() -> None:
    work = cpu_models.workload("tiny", cpu_models.Sizes(rows=(1,)))
    found = {
        EAGER: figures([2.0, 2.0]), BASELINE: figures([1.0, 1.0], code="a"),
        "dsmp 1%": figures([2.0, 2.0], 1.25, code="b"), WIDE: figures([1.25, 1.25], code="a"),
    }  # fmt: skip
    rows = list(cpu.rows_of(work, {"1 rows": found}, 1, "0.1-0.2"))
    ours = next(r for r in rows if r["variant"] == "dsmp 1%")
    assert (ours["ms"], ours["x compile"], ours["x best fp32"], ours["drift"]) == (2000.0, 0.5, 0.5, 0.25)
    assert next(r for r in rows if r["variant"] == EAGER)["drift"] == 0
    assert cpu.slower(rows, {("tiny", "dsmp 1%", "1 rows"): "2 int8 row"}) == [
        "slower than torch.compile: tiny, 1 rows, 1 threads, dsmp 1%: 0.5 times as fast (2 int8 row)",
        "slower than torch.compile: tiny, 1 rows, 1 threads, dsmp in fp32: 0.8 times as fast (all fp32, the same code)",
    ]
    rows = [{**r, "x": 1.25} for r in rows]
    assert cpu.overheads(rows) == ["compile time over torch.compile's: tiny, 1 rows, 1 threads: +25%"]


def test_held_bytes() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32))
    assert cpu_variants.held_bytes(model) == 4 * (64 * 32 + 4 * 32) + 8
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    assert cpu_variants.held_bytes(tied) == 4 * 64


def test_formats() -> None:
    assert cpu_variants.formats([("fp32", "none"), ("int8", "static/row"), ("int8", "static/row")]) == (
        "2 int8 static/row, 1 fp32"
    )


@pytest.mark.parametrize("name", cpu_models.NAMES)
def test_workloads_are_what_they_say(name: str) -> None:
    work = cpu_models.workload(name, cpu_models.Sizes(rows=(1, 4), batches=(1, 2), layers=1))
    assert len(work.cases) == (1 if name == "decoder" else 2)
    if name in ("tiny", "decoder"):
        model = work.model()
        for module in work.alone:
            model.get_submodule(module)
        with torch.no_grad():
            outputs = [model(*inputs) for inputs in work.cases.values()]
            assert torch.equal(outputs[0], work.model()(*next(iter(work.cases.values()))))


@pytest.mark.long
def test_the_smallest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    cpu.main(["--models", "tiny", "--threads", "1", "--rounds", "2", "--rows", "2", "--json", str(file)])
    rows = {r["variant"]: r for r in json.loads(file.read_text())["rows"]}
    assert {EAGER, BASELINE, AUTOCAST, DYNAMIC, WIDE, "dsmp 1%"} <= set(rows)
    assert rows[EAGER]["drift"] == 0 and rows[BASELINE]["drift"] < 1e-6 and rows[WIDE]["drift"] < 1e-6
    assert all(r["ms"] > 0 and r["rounds"] == 2 for r in rows.values())
    assert rows[WIDE]["same code"] and not rows["dsmp 1%"]["same code"] and not rows[EAGER]["same code"]
    assert rows[BASELINE]["x compile"] == 1 and rows[BASELINE]["compile s"] > 0
    if cpu_operators():
        assert 0 < rows["dsmp 1%"]["drift"] < 0.01
        assert rows["dsmp 1%"]["weights MB"] > rows[EAGER]["weights MB"]
    assert "torch.compile fp32" in capsys.readouterr().out
