"""`dsmp report --hardware a,b,c`: one line for the same nodes on all devices, and nothing lost or invented."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsmp.compiler.cli import app
from dsmp.compiler.compare_plans import ComparedPlans, Planned, compare_plans
from dsmp.compiler.console import Printer
from dsmp.compiler.model_commands import EMBEDDED_MODEL, named_devices
from dsmp.compiler.render_plans import print_plans
from dsmp.compiler.report import RunFacts
from dsmp.errors import InvalidOptionError, UnknownHardwareError
from dsmp.passes.plan import Decision, ModelInfo, PrecisionPlan, Prediction, parse_plan
from dsmp.passes.plan_fields import Reason

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def factory():
    return Net(), (torch.randn(8, 64),)
"""


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def decision(key: str, compute: str = "bf16", **changes: object) -> Decision:
    """A linear's decision with a reason that names its format."""
    fqn, phase, op, _ = key.split("|")
    fields: dict[str, object] = {
        "key": key, "op": op, "aten": "aten.mm.default", "phase": phase, "module": fqn,
        "shapes": [[8, 4], [4, 2], [8, 2]], "flops": 128, "bytes": 100,
        "compute": compute, "accumulate": "fp32", "output": "bf16",
        "reason": Reason(code="tier", text=f"tier for linear: {compute}"), "time_us": {compute: 2.0, "fp32": 5.0},
    }  # fmt: skip
    return Decision.model_validate({**fields, **changes})


def planned(hardware: str, decisions: list[Decision], data: tuple[str, ...] = ()) -> Planned:
    plan = PrecisionPlan(
        dsmp="0", torch="2", hardware=hardware, hardware_data=list(data),
        model=ModelInfo(source="test", fingerprint="f", nodes=len(decisions)),
        prediction=Prediction(time_us=10.0, time_us_fp32=20.0, saved_bytes=600, saved_bytes_fp32=1000),
        nodes=decisions,
    )  # fmt: skip
    return Planned(plan=plan, facts=RunFacts(seconds={"planning": 0.5}, casts=7, peak_bytes=10**9))


KEYS = [f"layers.{i}.up|fprop|linear|0" for i in range(6)]


def two_plans() -> list[Planned]:
    """Six layers and a norm: fp8 but for layer 3 on one device, bf16 but for layer 5 on the other."""
    norm = decision("norm|fprop|norm|0", "fp32", op="norm", output="fp32")
    cost = Reason(code="cost", text="tier for linear: bf16; fp8_e4m3 does not pay: 21.3 us, bf16 takes 14.3 us")
    fp8 = {"recipe": "1x128/128x128", "time_us": {"fp8_e4m3": 1.5}}
    first = [decision(k, reason=cost) if k == KEYS[3] else decision(k, "fp8_e4m3", **fp8) for k in KEYS]
    second = [decision(k, "fp16" if k == KEYS[5] else "bf16", output="fp32", accumulate="fp32") for k in KEYS]
    data = ("figures of other are recalled, not verified (confidence C)",)
    return [planned("h800", [*first, norm]), planned("other", [*second, norm], data)]


def rendered(compared: ComparedPlans, width: int | None = None) -> str:
    stream = io.StringIO()
    print_plans(Printer(stream, width=width), compared)
    return stream.getvalue()


# ---- folding -----------------------------------------------------------------------------------------------


def test_lines_are_alike_on_every_device() -> None:
    compared = compare_plans(two_plans())
    assert [(line[0].label, [row.first.compute for row in line]) for line in compared.lines] == [
        ("layers.[0-2,4].up|fprop|linear|0", ["fp8_e4m3", "bf16"]),
        ("layers.3.up|fprop|linear|0", ["bf16", "bf16"]),
        ("layers.5.up|fprop|linear|0", ["fp8_e4m3", "fp16"]),
    ]
    for line in compared.lines:
        assert [d.key for d in line[0].decisions] == [d.key for d in line[1].decisions]
        assert len({(d.compute, d.output) for d in line[1].decisions}) == 1
    assert sum(line[0].count for line in compared.lines) == 6
    assert [row.time_us for row in compared.lines[0]] == [4 * 1.5, 4 * 2.0]


def test_other_nodes_are_added_up_per_device() -> None:
    (totals,) = compare_plans(two_plans()).rest
    assert [t.op for t in totals if t is not None] == ["norm", "norm"]
    assert [t.count for t in totals if t is not None] == [1, 1]


def test_nodes_are_chosen_on_all_devices() -> None:
    compared = compare_plans(two_plans(), match="layers.[35].up")
    assert [row.first.key for line in compared.lines for row in line] == [KEYS[3], KEYS[3], KEYS[5], KEYS[5]]
    assert (compared.shown, compared.nodes) == (2, 7)
    assert "2 of 7 nodes shown" in rendered(compared)
    everything = compare_plans(two_plans(), every_node=True)
    assert [line[0].label for line in everything.lines] == [*KEYS, "norm|fprop|norm|0"]
    assert everything.rest == ()
    with pytest.raises(InvalidOptionError, match="--match"):
        compare_plans(two_plans(), match="nowhere")


# ---- rendering ---------------------------------------------------------------------------------------------


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("report_devices.txt", rendered(compare_plans(two_plans())))


@pytest.mark.parametrize("width", [200, 120, 80, 60])
def test_any_width(width: int) -> None:
    text = rendered(compare_plans(two_plans()), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    flat = " ".join(text.split())
    for words in (
        "layers.[0-2,4].up|fprop|linear|0",
        "fp8_e4m3 1x128/128x128 → bf16",
        "fp16 → fp32",
        "hardware data of other: figures of other are recalled",
        "h800: cost: fp8_e4m3 does not pay",
    ):
        assert words in flat


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("devices") / "model.py"
    path.write_text(MODEL)
    return f"{path}:factory"


def test_report_for_three_devices(model: str) -> None:
    result = run("report", model, "--hardware", "a100,h800, mi250x")
    assert result.exit_code == 0, result.output
    head, *lines = result.stdout.splitlines()
    assert re.match(r"key +n +shape +GFLOP +a100 +µs +reason +h800 +µs +reason +mi250x +µs +reason", head)
    up = next(line for line in lines if line.startswith("layers.[0-1].up|fprop|linear|0"))
    assert re.search(r"tf32 → fp32 .* bf16 → bf16 .* fp16 \S+ → fp32", up)
    assert re.search(r"^mi250x: tier: mi250x tier for linear$", result.stdout, re.MULTILINE)
    summary = re.findall(r"^(\w+) +100\.0 % (\w+) .*x as fast .* kB \(", result.stdout, re.MULTILINE)
    assert summary == [("a100", "tf32"), ("h800", "bf16"), ("mi250x", "fp16")]
    assert result.stdout.count("capture ") == 1


def test_json_has_the_plan_of_each_device(model: str) -> None:
    both = run("report", model, "--hardware", "a100,h800", "--json")
    plans = {name: parse_plan(json.dumps(plan)) for name, plan in json.loads(both.stdout)["plans"].items()}
    assert list(plans) == ["a100", "h800"]
    alone = parse_plan(run("report", model, "--hardware", "h800", "--json").stdout)
    assert plans["h800"] == alone
    assert plans["a100"].model == alone.model
    assert "casts: " in both.stderr
    part = json.loads(run("report", model, "--hardware", "a100,h800", "--json", "--phase", "wgrad").stdout)["plans"]
    assert {n["phase"] for plan in part.values() for n in plan["nodes"]} == {"wgrad"}


def test_without_model_the_embedded_one_is_planned(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr("dsmp.compiler.model_commands.EMBEDDED_MODEL", model)
    result = run("report", "--hardware", "a100,v100")
    assert result.exit_code == 0, result.output
    assert "on 2 devices: " in result.stdout
    assert "--match" in run("report", "--hardware", "a100,v100", "--match", "x").stderr
    assert EMBEDDED_MODEL == "dsmp.compiler.small_gpt:demo_model"


def test_own_devices_can_be_planned_for(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[device]]\nid = "a100"\nmemory_bandwidth_bytes_per_s = 1555e9\n')
    result = run("report", model, "--hardware", "a100,h800", "--hardware-file", file)
    assert re.search(r"^hardware data of a100: .*mine\.toml", result.stdout, re.MULTILINE)
    assert "hardware data of h800" not in result.stdout
    single = run("plan", model, "-o", tmp_path / "plan.json", "--hardware", "a100", "--hardware-file", file)
    assert re.search(r"^hardware data: .*mine\.toml", single.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ("a100,h80", "unknown hardware 'h80'. Did you mean .*'h800'"),
        ("a100,", "'--hardware' got 'a100,'; allowed: names of devices"),
        ("a100,A100-SXM", "'--hardware' got 'A100-SXM'; allowed: different devices; 'a100' is a100 too"),
    ],
)
def test_wrong_lists_of_devices(model: str, hardware: str, words: str) -> None:
    result = run("report", model, "--hardware", hardware)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(words, result.stderr)
    with pytest.raises((InvalidOptionError, UnknownHardwareError), match=words):
        named_devices(hardware, ())


def test_plan_is_for_one_device(model: str, tmp_path: Path) -> None:
    result = run("plan", model, "-o", tmp_path / "plan.json", "--hardware", "a100,h800")
    assert result.exit_code == 2
    assert "'--hardware' got 'a100,h800'; allowed: one device" in result.stderr
    assert not (tmp_path / "plan.json").exists()
