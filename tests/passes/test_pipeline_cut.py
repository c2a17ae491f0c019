"""Cuts into stages against all cuts there are, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsmp.errors import LayerTooLargeError, PipelineMemoryError, TooFewLayersError
from dsmp.passes.pipeline_cut import busy_seconds, cut_stages, used_bytes
from dsmp.passes.pipeline_plan import LayerCost, PipelineDevice, Sending
from dsmp.passes.pipeline_timing import StageSeconds

SENDING = Sending(bytes_per_s=1.0, latency_s=0.0)


def layer(i, fast, slow, parameters=10, kept=5, border=0):
    seconds = {"fast": StageSeconds(fast, fast, fast), "slow": StageSeconds(slow, slow, slow)}
    return LayerCost(
        name=f"l{i}",
        seconds=seconds,
        activation_bytes={"fast": kept, "slow": 2 * kept},
        parameter_bytes=parameters,
        boundary_bytes=border,
    )


def best(layers, devices, placement, microbatches, moments):
    """The least time of the busiest device over all cuts that fit; infinite if none does."""
    found = math.inf
    for inner in itertools.combinations(range(1, len(layers)), len(placement) - 1):
        ends = (*inner, len(layers))
        used = used_bytes(layers, devices, placement, moments, ends)
        if all(u <= d.memory_bytes for u, d in zip(used, devices, strict=True)):
            found = min(found, max(busy_seconds(layers, devices, placement, microbatches, ends, SENDING)))
    return found


@st.composite
def problems(draw):
    numbers = st.integers(1, 9)
    count = draw(st.integers(2, 7))
    layers = [
        layer(
            i, draw(numbers), draw(numbers), draw(st.integers(0, 40)), draw(st.integers(0, 9)), draw(st.integers(0, 3))
        )
        for i in range(count)
    ]
    ranks = draw(st.integers(1, 3))
    turns = draw(st.integers(1, 2))
    placement = [
        p for t in range(turns) for p in (range(ranks) if t == 0 or draw(st.booleans()) else range(ranks)[::-1])
    ]
    placement = placement[:count]
    ranks = max(placement) + 1
    memory = st.sampled_from([30, 60, 120, 10**6])
    devices = [
        PipelineDevice(kind=draw(st.sampled_from(["fast", "slow"])), memory_bytes=draw(memory)) for _ in range(ranks)
    ]
    moments = [
        [
            {s: draw(st.integers(1, 3)) for s, p in enumerate(placement) if p == r}
            for _ in range(draw(st.integers(1, 2)))
        ]
        for r in range(ranks)
    ]
    return layers, devices, placement, draw(st.integers(1, 4)), moments


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_cut_is_the_best_of_all(problem):
    layers, devices, placement, microbatches, moments = problem
    wanted = best(*problem)
    try:
        cut = cut_stages(layers, devices, placement, microbatches, moments, SENDING)
    except (LayerTooLargeError, PipelineMemoryError):
        assert wanted == math.inf
        return
    assert cut.busiest_s == pytest.approx(wanted, rel=1e-6)
    used = used_bytes(layers, devices, placement, moments, cut.ends)
    assert all(u <= d.memory_bytes for u, d in zip(used, devices, strict=True))
    assert [i for part in cut.ranges for i in part] == list(range(len(layers)))  # every layer, once, in order
    assert all(len(part) for part in cut.ranges)


def device(kind, memory=10**6):
    return PipelineDevice(kind=kind, memory_bytes=memory)


def test_a_slower_device_gets_fewer_layers():
    layers = [layer(i, 1.0, 3.0) for i in range(8)]
    cut = cut_stages(layers, [device("fast"), device("slow")], [0, 1], 4, [[{0: 2}], [{1: 1}]])
    assert cut.ends == (6, 8)


def test_memory_moves_layers_away_from_the_rank_that_keeps_most_microbatches():
    layers = [layer(i, 1.0, 1.0, parameters=10, kept=10) for i in range(8)]
    devices = [device("fast", 150), device("fast", 150)]
    assert cut_stages(layers, [device("fast")] * 2, [0, 1], 4, [[{0: 4}], [{1: 1}]]).ends == (4, 8)
    assert cut_stages(layers, devices, [0, 1], 4, [[{0: 4}], [{1: 1}]]).ends == (3, 8)


def test_where_little_is_sent_is_preferred():
    layers = [layer(i, 1.0, 1.0, border=0 if i == 2 else 10) for i in range(5)]
    assert cut_stages(layers, [device("fast")] * 2, [0, 1], 1, [[{0: 1}], [{1: 1}]], SENDING).ends == (3, 5)


def test_a_layer_that_fits_nowhere_is_named():
    layers = [layer(i, 1.0, 1.0, parameters=2000 if i == 2 else 10) for i in range(4)]
    with pytest.raises(LayerTooLargeError, match=r"'l2' needs 2,005 bytes.*largest device, fast, has 1,000"):
        cut_stages(layers, [device("slow", 500), device("fast", 1000)], [0, 1], 4, [[{0: 1}], [{1: 1}]])


def test_what_fits_in_no_cut_says_where_and_by_how_much():
    layers = [layer(i, 1.0, 1.0, parameters=100, kept=0) for i in range(4)]
    with pytest.raises(PipelineMemoryError, match=r"rank \d \(fast, \d50 bytes\) by 50 bytes.*more ranks"):
        cut_stages(layers, [device("fast", 150), device("fast", 250)], [0, 1], 4, [[{0: 1}], [{1: 1}]])


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(TooFewLayersError, match=r"2 layers.*\(l0, l1\).*3 stages"):
        cut_stages([layer(0, 1, 1), layer(1, 1, 1)], [device("fast")] * 3, [0, 1, 2], 4, [[{}]] * 3)


def test_a_deep_model_on_eight_ranks():
    layers = [layer(i, 1.0 + i % 3, 1.0) for i in range(48)]
    cut = cut_stages(layers, [device("fast")] * 8, range(8), 16, [[{s: 8 - s}] for s in range(8)])
    assert cut.busiest_s == pytest.approx(16 * 3 * 12)  # 48 layers of 1, 2 and 3 in eight equal parts
