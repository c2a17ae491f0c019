"""Shapes of matrix products: distance and occupancy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsmp.hardware_db.work import GemmShape

SIZES = st.integers(1, 1 << 16)
SHAPES = st.builds(GemmShape, batch=st.integers(1, 4096), m=SIZES, n=SIZES, k=SIZES)


@given(SHAPES, st.integers(1, 512))
def test_occupancy_is_a_share(shape, units):
    assert 0 < shape.occupancy(units) <= 1


@given(SHAPES, SHAPES, SHAPES)
def test_distance_is_a_metric(a, b, c):
    assert a.distance(a) == 0
    assert a.distance(b) == pytest.approx(b.distance(a))
    assert a.distance(c) <= a.distance(b) + b.distance(c) + 1e-9


@pytest.mark.parametrize(
    ("shape", "units", "share"),
    [
        (GemmShape(m=128, n=128, k=64), 1, 1.0),
        (GemmShape(m=128, n=128, k=64), 108, 1 / 108),  # one tile for 108 units
        (GemmShape(m=1408, n=1152, k=64), 108, 99 / 108),  # 11 x 9 tiles in one wave
        (GemmShape(m=1280, n=1408, k=64), 108, 110 / 216),  # two tiles too many cost a second wave
        (GemmShape(m=129, n=128, k=64), 2, 129 / 256),  # the second tile is padding but for one row
        (GemmShape(m=1, n=128, k=64), 1, 1 / 16),  # the smallest tile has 16 rows
        (GemmShape(batch=108, m=128, n=128, k=64), 108, 1.0),
        (GemmShape(m=128, n=128, k=108 * 1024), 108, 1.0),  # a long contraction is split
    ],
)
def test_tile_and_wave_quantisation(shape, units, share):
    assert shape.occupancy(units) == pytest.approx(share)


def test_flops_count_a_multiply_add_as_two():
    assert GemmShape(batch=3, m=4, n=5, k=6).flops == 2 * 3 * 4 * 5 * 6


@given(SHAPES, st.sampled_from(["m", "n", "k", "batch"]), st.integers(1, 512))
def test_a_larger_product_never_takes_less_time(shape, axis, units):
    larger = dataclasses.replace(shape, **{axis: 2 * getattr(shape, axis)})
    assert larger.flops / larger.occupancy(units) >= shape.flops / shape.occupancy(units) * (1 - 1e-9)
