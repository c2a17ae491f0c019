"""Differences by module: every differing node is counted once, repeated blocks are one entry, sums add up."""

from __future__ import annotations

import io
import re

import pytest
from plan_samples import edited, sample_plan, traced_plan

from dsmp.compiler.compare_modules import compare_modules
from dsmp.compiler.console import Printer
from dsmp.compiler.render_diff import print_module_diff
from dsmp.passes.node_figures import figures_of
from dsmp.passes.plan import PrecisionPlan

TIGHT, LOOSE = sample_plan(3, budget=5e-5), sample_plan(3, budget=1e-2)


def with_formats(plan: PrecisionPlan, keys: list[str], **changes: str) -> PrecisionPlan:
    for key in keys:
        plan = edited(plan, key, **changes)
    return plan


def rendered(before: PrecisionPlan, after: PrecisionPlan, width: int | None = None) -> str:
    stream = io.StringIO()
    print_module_diff(Printer(stream, width=width), before, after, compare_modules(before, after), "a.json", "b.json")
    return stream.getvalue()


@pytest.mark.parametrize("folded", [True, False])
def test_every_difference_is_counted_once(folded: bool) -> None:
    found, differences = compare_modules(TIGHT, LOOSE, folded=folded), TIGHT.diff(LOOSE)
    assert differences
    assert sum(m.changed for m in found) == len(differences)
    assert sum(c.count for m in found for c in m.changes) == len(differences)
    modules = [name for m in found for name in m.modules]
    assert sorted(modules) == sorted({d.key.rsplit("|", 3)[0] for d in differences})
    assert all(m.label == m.modules[0] for m in found) or folded


def test_sums_are_of_whole_modules() -> None:
    figures = figures_of(TIGHT), figures_of(LOOSE)
    for m in compare_modules(TIGHT, LOOSE):
        keys = [d.key for d in TIGHT if d.module in m.modules]
        assert m.nodes == len(keys)
        for side, known in zip((m.before, m.after), figures, strict=True):
            assert side.time_us == pytest.approx(sum(known[k].time_us for k in keys))
            assert side.drift == pytest.approx(sum(known[k].drift for k in keys))


def test_repeated_blocks_are_one_entry() -> None:
    ups = [f"layers.{i}.up|fprop|linear|0" for i in range(3)]
    before = with_formats(traced_plan(TIGHT.nodes, None), ups, compute="fp32", recipe="none", output="fp32")
    after = with_formats(before, ups, compute="bf16", output="bf16")
    (m,) = compare_modules(before, after)
    assert (m.label, m.modules) == ("layers.[0-2].up", ("layers.0.up", "layers.1.up", "layers.2.up"))
    assert (m.changed, m.nodes, len(m.changes), m.changes[0].count) == (3, 3, 1, 3)
    assert m.before.drift is None
    uneven = with_formats(after, ups[1:2], output="fp32")
    assert [m.label for m in compare_modules(before, uneven)] == ["layers.[0,2].up", "layers.1.up"]


def test_nodes_that_one_plan_lacks() -> None:
    fewer = traced_plan([d for d in TIGHT if d.module != "head"], None)
    whole = traced_plan(TIGHT.nodes, None)
    (m,) = compare_modules(whole, fewer)
    assert (m.label, m.changed, m.nodes, m.after.time_us) == ("head", 1, 1, 0.0)
    text = rendered(whole, fewer)
    assert re.search(r"fprop linear +1 +bf16 → bf16 +absent", text)


def test_text() -> None:
    text = rendered(TIGHT, LOOSE)
    count, modules = len(TIGHT.diff(LOOSE)), len({d.key.rsplit("|", 3)[0] for d in TIGHT.diff(LOOSE)})
    assert f"{count} of {len(TIGHT)} nodes differ in {modules} modules" in text
    assert re.search(r"predicted time: [\d,]+ → [\d,]+ µs \(-\d+\), casts [\d.]+ → [\d.]+ µs", text)
    assert re.search(r"predicted drift: \S+ → \S+ \(\+", text)
    assert "no difference" in rendered(TIGHT, TIGHT)
    plain = rendered(traced_plan(TIGHT.nodes, None), traced_plan(LOOSE.nodes, None))
    assert "drift" not in plain.splitlines()[0]
    other = LOOSE.model_copy(update={"model": LOOSE.model.model_copy(update={"fingerprint": "g"})})
    assert "different graphs" in rendered(TIGHT, other)


@pytest.mark.parametrize("width", [120, 80])
def test_fits(width: int) -> None:
    assert max(map(len, rendered(TIGHT, LOOSE, width).splitlines())) <= width
