"""Linears with narrow weights alone: who has them, and how long they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsmp.errors import UnknownRecipeError
from dsmp.hardware_db import resolve
from dsmp.hardware_db.formats import is_dynamic, is_static, join_recipe, keeps_wide, packs_weight, split_recipe
from dsmp.hardware_db.measurement import GemmPoint, Measurement
from dsmp.hardware_db.narrow_weights import narrow_weights_time, stores_weights
from dsmp.hardware_db.schema import recipe_accumulator
from dsmp.hardware_db.work import GemmShape, Work


@pytest.mark.parametrize("name", ["epyc-7763", "xeon-8480", "core-i9-12900k"])
def test_x86_cores_widen_weights(name):
    device = resolve(name)
    assert all(stores_weights(device, f).ok for f in ("fp16", "int8", "int4"))
    refused = stores_weights(device, "fp8_e4m3")
    assert not refused.ok and "it has: fp16, int8, int4" in refused.reason


@pytest.mark.parametrize("name", ["h800", "mi300x"])
def test_others_do_not(name):
    assert "it has: none" in stores_weights(resolve(name), "int8").reason


def test_a_token_is_limited_by_memory_and_many_rows_by_arithmetic():
    device = resolve("epyc-7763")
    times = {}
    for rows in (1, 256):
        shape = GemmShape(m=rows, n=4096, k=4096)
        for name, size in (("fp16", 2.0), ("int8", 1.0), ("int4", 0.5)):
            work = Work(flops=shape.flops, moved_bytes=size * 4096 * 4096 + 4 * rows * 8192, gemm=shape)
            times[name, rows] = narrow_weights_time(device, work, name)
        times["fp32", rows] = device.time(Work(flops=shape.flops, moved_bytes=4.0 * 4096 * 4096, gemm=shape), "fp32")
    assert times["int4", 1] < times["int8", 1] < times["fp16", 1] < times["fp32", 1]
    assert all(times[name, 256] >= times["fp32", 256] for name in ("fp16", "int8", "int4"))


def test_recipes_of_one_operand():
    assert keeps_wide("wide/row") and not keeps_wide("row/row") and is_static("static/row")
    assert is_dynamic("row/dynamic") and not is_dynamic("static/row") and not keeps_wide("dynamic/row")
    assert [packs_weight(r) for r in ("wide/row", "static/row", "row/dynamic", "row/row", "none")] == [True] * 3 + [
        False
    ] * 2
    assert join_recipe(*split_recipe("wide/1x128")) == "wide/1x128"
    assert recipe_accumulator("int8", "wide/row") == "fp32" and recipe_accumulator("int8", "static/row") == "int32"
    with pytest.raises(UnknownRecipeError, match="wide"):
        split_recipe("wide")


def test_what_was_measured_of_the_librarys_products_is_not_taken_for_theirs():
    device, shape = resolve("epyc-7763"), GemmShape(m=4, n=4096, k=4096)
    work = Work(flops=shape.flops, moved_bytes=4096.0 * 4096, gemm=shape)
    bandwidth = device.achieved_bandwidth
    slow = GemmPoint(format="fp32", accumulate="fp32", m=4, n=4096, k=4096, flop_per_s=1e9, operator="aten.mm")
    measured = Measurement(
        device=device.id, name="mine", units=device.units, date="2026-01-01", torch="2.14",
        memory_bandwidth_bytes_per_s=bandwidth, launch_overhead_s=device.launch_overhead_s, gemm=(slow,),
    )  # fmt: skip
    calibrated = replace(device, measured=measured)
    assert calibrated.time(work, "fp32") > 10 * device.time(work, "fp32")
    assert narrow_weights_time(calibrated, work, "int8") == pytest.approx(narrow_weights_time(device, work, "int8"))
