"""What people read of a plan: folding loses nothing, sums add up, tables fit and keep what they say."""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dsmp.compiler.capture import Capture, capture
from dsmp.compiler.console import Printer, bytes_text, digits
from dsmp.compiler.pipeline import make_plan
from dsmp.compiler.render import print_report
from dsmp.compiler.render_diff import print_diff
from dsmp.compiler.report import (
    RunFacts,
    choose,
    flop_shares,
    fold_decisions,
    fold_differences,
    make_report,
    peak_memory_bytes,
    shape_text,
    short_reason,
    totals,
)
from dsmp.errors import InvalidOptionError
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.hardware_db.schema import OP_CLASSES
from dsmp.passes.plan import Decision, ModelInfo, PrecisionPlan, Prediction
from dsmp.passes.plan_fields import GEMM_CLASSES, Reason


def decision(key: str, **changes: object) -> Decision:
    """A linear's decision in bf16, with changes."""
    fqn, phase, op, _ = key.split("|")
    fields: dict[str, object] = {
        "key": key, "op": op, "aten": "aten.mm.default", "phase": phase, "module": fqn,
        "shapes": [[8, 4], [4, 2], [8, 2]], "flops": 128, "bytes": 100,
        "compute": "bf16", "accumulate": "fp32", "output": "bf16",
        "reason": Reason(code="tier", text="h800 tier for linear: bf16"), "time_us": {"bf16": 2.0, "fp32": 5.0},
    }  # fmt: skip
    return Decision.model_validate({**fields, **changes})


def plan_of(decisions: list[Decision], hardware: str = "h800") -> PrecisionPlan:
    return PrecisionPlan(
        dsmp="0", torch="2", hardware=hardware, model=ModelInfo(source="test", fingerprint="f", nodes=len(decisions)),
        prediction=Prediction(time_us=10.0, time_us_fp32=20.0, saved_bytes=600, saved_bytes_fp32=1000), nodes=decisions,
    )  # fmt: skip


def linears(*fqns: str) -> list[Decision]:
    return [decision(f"{fqn}|fprop|linear|0") for fqn in fqns]


def labels(decisions: list[Decision]) -> list[str]:
    return [row.label.split("|")[0] for row in fold_decisions(decisions)]


# ---- folding -----------------------------------------------------------------------------------------------


def test_fold_layers() -> None:
    rows = fold_decisions(linears(*(f"model.layers.{i}.mlp.up" for i in range(32))))
    assert [(r.label, r.count) for r in rows] == [("model.layers.[0-31].mlp.up|fprop|linear|0", 32)]
    assert rows[0].flops == 32 * 128
    assert rows[0].time_us == 32 * 2.0


def test_fold_backward_order() -> None:
    assert labels(linears(*(f"layers.{i}" for i in (3, 2, 1, 0)))) == ["layers.[0-3]"]


def test_fold_holes() -> None:
    assert labels(linears("l.0.w", "l.1.w", "l.2.w", "l.5.w", "l.7.w", "l.8.w")) == ["l.[0-2,5,7-8].w"]


def test_fold_two_indices() -> None:
    grid = [f"layers.{i}.experts.{j}.w" for i in range(3) for j in range(4)]
    assert labels(linears(*grid)) == ["layers.[0-2].experts.[0-3].w"]
    ragged = [f for f in grid if f != "layers.1.experts.2.w"]
    assert labels(linears(*ragged)) == ["layers.[0,2].experts.[0-3].w", "layers.1.experts.[0-1,3].w"]


def test_fold_what_is_no_index() -> None:
    assert labels(linears("layer1.conv", "layer2.conv")) == ["layer1.conv", "layer2.conv"]
    assert labels(linears("l.01.w", "l.1.w")) == ["l.01.w", "l.1.w"]
    assert labels(linears("l.\u0663.w", "l.4.w")) == ["l.\u0663.w", "l.4.w"]
    assert labels(linears("")) == [""]


def test_fold_keeps_phases_and_ordinals_apart() -> None:
    keys = ["l.0|fprop|linear|0", "l.1|fprop|linear|1", "l.1|dgrad|linear|0"]
    assert [r.label for r in fold_decisions(map(decision, keys))] == keys


@pytest.mark.parametrize(
    "change",
    [
        {"compute": "fp16"},
        {"recipe": "row/row"},
        {"accumulate": "bf16"},
        {"output": "fp32"},
        {"shapes": [[8, 4], [4, 3], [8, 3]]},
        {"aten": "aten.addmm.default"},
        {"reason": Reason(code="cost", text="h800 tier for linear: bf16")},
        {"reason": Reason(code="tier", text="another sentence")},
    ],
)
def test_fold_needs_agreement(change: dict[str, object]) -> None:
    assert len(fold_decisions([decision("l.0|fprop|linear|0"), decision("l.1|fprop|linear|0", **change)])) == 2


def test_fold_forgives_costs() -> None:
    cheap = decision("l.0|fprop|linear|0", reason=Reason(code="cost", text="fp8 does not pay: 21.3 us, bf16 14 us"))
    dear = decision(
        "l.1|fprop|linear|0", reason=Reason(code="cost", text="fp8 does not pay: 9 us, bf16 8.1 us"),
        flops=7, bytes=7, time_us={"bf16": 7.0},
    )  # fmt: skip
    (row,) = fold_decisions([cheap, dear])
    assert (row.count, row.flops, row.time_us) == (2, 135, 9.0)


def spelled_out(label: str) -> list[str]:
    """The keys that a folded label stands for."""
    axes = []
    for part in re.split(r"(\[[\d,-]+\])", label):
        if not part.startswith("["):
            axes.append([part])
            continue
        bounds = [run.split("-") for run in part[1:-1].split(",")]
        axes.append([str(i) for run in bounds for i in range(int(run[0]), int(run[-1]) + 1)])
    return ["".join(parts) for parts in itertools.product(*axes)]


parts = st.lists(st.sampled_from(["layers", "mlp", "w", *"0123456", "10", "11"]), min_size=0, max_size=4).map(".".join)
keys = st.builds("{}|{}|linear|{}".format, parts, st.sampled_from(["fprop", "dgrad"]), st.integers(0, 1))


@given(st.lists(st.tuples(keys, st.sampled_from(["bf16", "fp16"])), unique_by=lambda item: item[0], max_size=40))
def test_fold_loses_no_node(items: list[tuple[str, str]]) -> None:
    given_nodes = [decision(key, compute=name, flops=i) for i, (key, name) in enumerate(items)]
    rows = fold_decisions(given_nodes)
    assert Counter(k for r in rows for k in spelled_out(r.label)) == Counter(d.key for d in given_nodes)
    assert sum(r.count for r in rows) == len(given_nodes)
    assert sum(r.flops for r in rows) == sum(d.flops for d in given_nodes)
    for row in rows:
        assert sorted(spelled_out(row.label)) == sorted(d.key for d in row.decisions)
        assert len({d.compute for d in row.decisions}) == 1
    firsts = [given_nodes.index(r.first) for r in rows]
    assert firsts == sorted(firsts)


def test_fold_differences() -> None:
    before = plan_of(linears("l.0.a", "l.1.a", "l.0.b", "only.before"))
    after = plan_of(
        [decision(f"l.{i}.a|fprop|linear|0", compute="fp32", output="fp32") for i in range(2)] + linears("l.0.b", "new")
    )
    rows = fold_differences(before.diff(after))
    assert [(r.label.split("|")[0], len(r.differences)) for r in rows] == [
        ("l.[0-1].a", 2),
        ("only.before", 1),
        ("new", 1),
    ]
    assert rows[1].after is None
    assert rows[2].before is None


# ---- sums and words ----------------------------------------------------------------------------------------


def test_totals_add_up() -> None:
    nodes = [
        decision("a|fprop|relu|0", op="pointwise", compute="fp32", output="fp32", bytes=5, time_us={"fp32": 1.0}),
        decision("b|fprop|relu|0", op="pointwise", compute="fp32", output="bf16", bytes=6, time_us={"fp32": 2.0}),
        decision("c|fprop|mean|0", op="norm", compute="fp32", output="fp32", bytes=7, time_us={"fp32": 9.0}),
    ]
    norm, pointwise = totals(nodes)
    assert (norm.op, norm.count, norm.bytes, norm.time_us) == ("norm", 1, 7, 9.0)
    assert (pointwise.count, pointwise.bytes, pointwise.time_us) == (2, 11, 3.0)
    assert dict(pointwise.formats) == {"fp32": 1, "fp32→bf16": 1}


def test_flop_shares() -> None:
    plan = plan_of(
        [
            decision("a|fprop|linear|0", flops=300),
            decision("b|fprop|linear|0", flops=100, compute="fp16"),
            decision("a|wgrad|linear|0", flops=400),
            decision("a|fprop|relu|0", op="pointwise", flops=10**9),
        ]
    )
    assert flop_shares(plan) == {
        "fprop": {"bf16": 0.75, "fp16": 0.25}, "wgrad": {"bf16": 1.0}, "all": {"bf16": 0.875, "fp16": 0.125},
    }  # fmt: skip
    assert flop_shares(plan_of([])) == {}


def test_choose() -> None:
    plan = plan_of(
        [decision("l.0.up|fprop|linear|0"), decision("l.0.up|wgrad|linear|0"), decision("l.1.up|fprop|linear|0")]
    )
    assert [d.key for d in choose(plan, match="l.0.up")] == ["l.0.up|fprop|linear|0", "l.0.up|wgrad|linear|0"]
    assert [d.key for d in choose(plan, match="*|fprop|*", phase="fprop")] == [
        "l.0.up|fprop|linear|0", "l.1.up|fprop|linear|0",
    ]  # fmt: skip
    with pytest.raises(InvalidOptionError, match=r"--match.*l\.0\.up\|fprop"):
        choose(plan, match="nowhere")
    with pytest.raises(InvalidOptionError, match=r"--phase.*fprop, wgrad"):
        choose(plan, phase="dgrad")


@pytest.mark.parametrize(
    ("op", "phase", "shapes", "text"),
    [
        ("linear", "fprop", [[256, 128], [128, 512], [256, 512]], "256x128x512"),
        ("matmul", "fprop", [[32, 16, 8], [32, 8, 4], [32, 16, 4]], "32·16x8x4"),
        ("conv", "fprop", [[8, 3, 32, 32], [16, 3, 3, 3], [8, 16, 32, 32]], "8x3x32x32, 16x3x3x3"),
        ("sdpa", "fprop", [[1, 4, 64, 32], [1, 4, 64, 32], [1, 4, 64, 32], [1, 4, 64, 32]], "1x4x64x32"),
        ("sdpa", "fprop", [[1, 4, 1, 32], [1, 2, 64, 32], [1, 2, 64, 32]], "1x4x1x32, keys 1x2x64x32"),
        ("sdpa", "bwd", [[1, 4, 64, 8], [1, 4, 64, 32], [1, 4, 64, 32], [1, 4, 64, 8]], "1x4x64x32"),
        ("norm", "fprop", [[4, 64], [4, 1]], "4x64, 4x1"),
        ("loss", "fprop", [[]], "scalar"),
    ],
)
def test_shape_text(op: str, phase: str, shapes: list[list[int]], text: str) -> None:
    assert shape_text(decision(f"m|{phase}|{op}|0", op=op, shapes=shapes)) == text


def test_short_reason() -> None:
    assert short_reason(Reason(code="tier", text="h800 tier for linear: bf16")) == "h800 tier for linear"
    assert (
        short_reason(Reason(code="cost", text="h800 tier for linear: bf16; fp8 does not pay; x"))
        == "fp8 does not pay; x"
    )
    assert (
        short_reason(Reason(code="policy", text="sums many terms: stops growing")) == "sums many terms: stops growing"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00001, "<0.0001"), (0.0025, "0.0025"), (21.3, "21.30"), (99.996, "100"), (1234567.8, "1,234,568")],
)
def test_digits(value: float, text: str) -> None:
    assert digits(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2540036, "2.54 MB"), (999_999, "1 MB"), (17.6e9, "17.6 GB")],
)
def test_bytes_text(value: float, text: str) -> None:
    assert bytes_text(value) == text


def test_peak_memory_is_in_bytes() -> None:
    peak = peak_memory_bytes()
    assert peak is None or 50e6 < peak < 1e12  # torch alone is larger than 50 MB


# ---- rendering ---------------------------------------------------------------------------------------------

FACTS = RunFacts(seconds={"capture": 1.25, "planning": 0.5}, casts=12, peak_bytes=1_000_000_000)


def rendered(plan: PrecisionPlan, width: int | None = None, **options: object) -> str:
    stream = io.StringIO()
    print_report(Printer(stream, width=width), make_report(plan, facts=FACTS, **options))
    return stream.getvalue()


def long_plan() -> PrecisionPlan:
    reason = Reason(
        code="veto-head", text="tier; no fp8_e4m3: output head: its result is the model's answer, so barred"
    )
    return plan_of(
        [
            *linears(*(f"model.layers.{i}.mlp.up_proj" for i in range(40))),
            decision("head|fprop|linear|0", reason=reason),
        ]
    )


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60])
def test_report_fits_any_width(width: int) -> None:
    text = rendered(long_plan(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "model.layers.[0-39].mlp.up_proj|fprop|linear|0" in text
    assert "…" not in text
    # the reason is there, in the row or below the table
    assert "output head: its result is the model's answer" in " ".join(text.split())


def test_report_without_terminal_breaks_no_line() -> None:
    text = rendered(plan_of(linears("a" * 230)))
    assert "a" * 230 + "|fprop|linear|0" in text
    assert not re.search(r" $", text, re.MULTILINE)
    assert "\x1b" not in text


def test_report_is_literal() -> None:
    """Brackets and colons in names are no markup."""
    text = rendered(plan_of(linears("[bold]x[/bold]", "a:smile:b", "[red]")).model_copy(update={"hardware": "[dim]"}))
    assert all(name in text for name in ("[bold]x[/bold]", "a:smile:b", "[red]", "on [dim]"))


def test_report_summary() -> None:
    text = rendered(long_plan())
    assert "41 nodes, 41 of them GEMM-class" in text
    assert "casts: 12 inserted" in text
    assert "10 µs, fp32 20 µs (2.00x as fast)" in text
    assert "600 B, fp32 1 kB (-40 %)" in text
    assert "capture 1.2 s, planning 0.5 s; peak memory of this process 1 GB" in text


def test_report_says_what_to_know_of_the_figures() -> None:
    plan = long_plan()
    assert "hardware data" not in rendered(plan)
    told = plan.model_copy(update={"hardware_data": ["figures are recalled", "changed by mine.toml"]})
    assert "hardware data: figures are recalled; changed by mine.toml\n" in rendered(told)


def test_report_of_every_node() -> None:
    plan = plan_of([*linears("l.0", "l.1"), decision("l.0|fprop|relu|0", op="pointwise")])
    text = rendered(plan, every_node=True)
    assert all(d.key in text for d in plan)
    assert "other nodes" not in text


def test_report_of_a_part_says_so() -> None:
    assert "1 of 2 nodes shown" in rendered(plan_of(linears("l.0", "l.1")), match="l.0")
    assert "nodes shown" not in rendered(plan_of(linears("l.0", "l.1")))


def test_diff_text() -> None:
    before, after = (
        plan_of(linears("l.0", "l.1")),
        plan_of([decision(f"l.{i}|fprop|linear|0", output="fp32") for i in range(2)]),
    )

    def text(a: PrecisionPlan, b: PrecisionPlan) -> str:
        stream = io.StringIO()
        print_diff(Printer(stream), a, b, fold_differences(a.diff(b)))
        return stream.getvalue()

    assert re.search(r"l\.\[0-1\]\|fprop\|linear\|0 +2 +bf16 → bf16 +bf16 → fp32", text(before, after))
    assert "2 of 2 nodes differ" in text(before, after)
    assert "no difference" in text(before, before)
    other = after.model_copy(update={"model": after.model.model_copy(update={"fingerprint": "g"})})
    assert "different graphs" in text(before, other)


# ---- the table of a real model -----------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(F.relu(y))


class SmallModel(nn.Module):
    """A convolution, three layers with attention, and a head: wide enough that 8-bit formats pay on an h800."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean()


@pytest.fixture(scope="module")
def captured() -> Capture:
    with torch.device("meta"):
        model, images = SmallModel(), torch.randn(32, 3, 224, 224)
    return capture(model, (images,), source="small model")


@pytest.mark.parametrize("hardware", ["h800", "a100"])
def test_golden_table(captured: Capture, hardware: str, golden: Callable[[str, str], None]) -> None:
    plan = make_plan(captured, resolve_hardware(hardware), predict_memory=False)
    golden(f"report_{hardware}.txt", "".join(f"{normalised(line)}\n" for line in rendered(plan).splitlines()))


def normalised(line: str) -> str:
    """A line with its blanks squeezed and what torch's version or the cost model changes masked.

    Costs, times and shares go, and how many primitive nodes there are; shapes, formats, reasons and GEMM counts stay.
    """
    if set(line) == {"─"}:
        return ""
    cells = re.split(r" {2,}", line)
    if cells[0] in OP_CLASSES:
        return re.sub(r"\b[\d,.]+\b", "#", "  ".join(cells))
    number = re.compile(r"[\d,]*\d(\.\d+)?( %| [kMGT]?B| s)?")
    cells = ["#" if i != 1 and number.fullmatch(cell) else cell for i, cell in enumerate(cells)]
    costs = r"\d[\d,]*(\.\d+)?(?= us| µs| [kMGT]?B\b| s\b|x as fast| nodes| inserted)|\d+\.\d+(?= %)"
    return re.sub(costs, "#", "  ".join(cells))


def test_rows_of_a_plan_add_up(captured: Capture) -> None:
    plan = make_plan(captured, resolve_hardware("h800"), predict_memory=False)
    report = make_report(plan)
    assert sum(r.count for r in report.rows) + sum(t.count for t in report.rest) == len(plan) == report.shown
    assert sum(r.flops for r in report.rows) == sum(d.flops for d in plan if d.op in GEMM_CLASSES)
    time_us = sum(r.time_us for r in report.rows) + sum(t.time_us for t in report.rest)
    assert time_us == pytest.approx(plan.prediction.time_us, rel=1e-3)
    for shares in flop_shares(plan).values():
        assert sum(shares.values()) == pytest.approx(1)
