"""DistributedDataParallel's own reductions in wire formats, with and without error feedback, on two ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ddp_ranks import accumulated, beside_compress_gradients, means, mistakes, resumed
from gloo import Ranks

pytestmark = pytest.mark.slow  # real processes

STEPS = 12
ERRORS = {"fp32": 1e-6, "bf16": 1e-2, "int8": 3e-2, "int4": 0.4}
SHARES = {"fp32": 1.0, "bf16": 0.51, "int8": 0.28, "int4": 0.16}


@pytest.mark.parametrize("wire", [w if w == "int8" else pytest.param(w, marks=pytest.mark.long) for w in ERRORS])
def test_gradients_have_the_error_of_the_format(wire: str, two_ranks: Ranks) -> None:
    first, second = two_ranks.run(means, wire, False, 3, None)
    assert first["rebuilt"] and second["rebuilt"]
    for found in (first, second):
        assert (ERRORS["fp32"] if wire != "fp32" else 0) <= found["last"] < ERRORS[wire]
        assert found["errors"][-1] > 0.5 * found["errors"][0], "without feedback the error stays"
        assert found["bytes"]["measured"] == found["bytes"]["planned"] <= SHARES[wire] * found["bytes"]["written"]
    for name, gradient in first["gradients"].items():
        np.testing.assert_array_equal(gradient, second["gradients"][name])


@pytest.mark.parametrize(
    ("wire", "options"),
    [
        pytest.param("int4", None, marks=pytest.mark.long),
        pytest.param("topk:0.3", None, marks=pytest.mark.long),
        ("int4", {"executor": "eager"}),
    ],
)
def test_with_feedback_the_error_falls_as_one_over_n(wire: str, options: dict[str, str], two_ranks: Ranks) -> None:
    for found in two_ranks.run(means, wire, True, STEPS, options):
        errors, largest = found["errors"], (2 if wire == "int4" else 4) * found["errors"][0]
        assert errors[0] > 0.02 and errors[-1] < errors[0] / 3
        assert all(n * error <= largest for n, error in enumerate(errors, start=1)), errors
        if wire == "int4":
            assert found["bytes"]["measured"] <= SHARES[wire] * found["bytes"]["written"]


def test_it_is_what_compress_gradients_computes(two_ranks: Ranks) -> None:
    for same in two_ranks.run(beside_compress_gradients, "int4", 4):
        assert len(same) == 16 and all(same)


def test_residuals_are_saved_for_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, found in enumerate(two_ranks.run(resumed, tmp_path)):
        assert f"rank{rank}.local.up.weight" in found["names"] and f"rank{rank}.owner.up.bias" in found["names"]
        assert found["same"] and found["file"] and not found["fresh"]
        missing, unknown, shapes = found["refused"]
        assert "missing" in missing and f"rank {rank} of 2" in missing
        assert "rank7.local" in unknown and "is (3,), not (" in shapes


def test_gradients_are_accumulated_without_sending(two_ranks: Ranks) -> None:
    for error in two_ranks.run(accumulated):
        assert error < ERRORS["int8"]


def test_mistakes_have_remedies(two_ranks: Ranks) -> None:
    found = two_ranks.run(mistakes)[0]
    hooked, builtin, native, twice, averaged, inner, plain, unknown, block = found
    assert all(m.startswith("GradientOwnerError: ") for m in (hooked, builtin, native, twice, averaged))
    assert "fp16_compress_hook is registered" in hooked and "fp16_compress_hook is registered" in builtin
    assert "built into torch" in native and "compressed already" in twice
    assert "compress_gradients averages" in averaged
    assert inner.startswith("FeedbackError: ") and "compressed already" in inner
    assert "DistributedDataParallel module" in plain and "int7" in unknown and "int8:3" in block
