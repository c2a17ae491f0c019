"""Sharded modules on real processes (gloo) against the same model in one process."""

from __future__ import annotations

import launch
import numpy as np
import pytest
import rank_programs

CASES = {
    "tied": ({"tp": 2}, {}),
    "sequence": ({"tp": 2}, {"sequence": True}),
}
SLOW_CASES = {
    "tensor": ({"tp": 2}, {}),
    "zero 1": ({"dp": 2}, {"zero": 1}),
    "zero 2": ({"dp": 2}, {"zero": 2}),
    "zero 3": ({"dp": 2}, {"zero": 3}),
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def whole():
    return rank_programs.step(rank_programs.model(), *rank_programs.tokens())


@pytest.fixture(scope="module")
def tied():
    return rank_programs.step(rank_programs.model(tied=True), *rank_programs.tokens())


@pytest.fixture(scope="module")
def two_ranks():
    return launch.run_ranks(rank_programs.everything, 2, CASES)


def check(ranks, case, whole):
    for found in ranks:
        assert found[case].keys() == whole.keys()
        for name, value in whole.items():
            worst = np.abs(found[case][name] - value).max() / np.abs(value).max()
            assert worst < TOLERANCE, f"{case}: {name} is off by {worst:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(case, two_ranks, whole, tied):
    check([found["train"] for found in two_ranks], case, tied if case == "tied" else whole)


def test_different_plans_and_different_models_refuse_to_start_on_every_rank(two_ranks):
    for plans, models in (found["disagree"] for found in two_ranks):
        assert "different sharding plans" in plans and "ranks [0]" in plans and "ranks [1]" in plans
        assert "different collectives" in models


def test_a_sharded_module_is_used_as_a_module(two_ranks, whole):
    for found in (ranks["uses"] for ranks in two_ranks):
        check([{"zero 3": found["step"]}], "zero 3", whole)
        assert found["names"] and found["state"]
        assert found["local"] == (32, 32)
        assert "ids" in found["refused"] and "(2, 16)" in found["refused"] and "(4, 16)" in found["refused"]
        np.testing.assert_allclose(found["sharded"], found["whole"], rtol=1e-5)
        assert found["whole"][-1] < found["whole"][0]
        assert found["result"] < 1e-5 and found["buffer"] < 1e-6


@pytest.mark.slow
def test_every_stage_alone(whole):
    ranks = launch.run_ranks(rank_programs.train, 2, SLOW_CASES)
    for case in SLOW_CASES:
        check(ranks, case, whole)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"zero": 3}], ids=["plain", "sequence", "zero 3"])
def test_data_and_tensor_parallel_together(options, whole):
    ranks = launch.run_ranks(rank_programs.train, 4, {"both": ({"dp": 2, "tp": 2}, options)})
    check(ranks, "both", whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor", "zero 3"])
def test_inductor_runs_both_halves(case, whole):
    sizes, options = SLOW_CASES[case]
    ranks = launch.run_ranks(rank_programs.train, 2, {case: (sizes, {**options, "executor": "inductor"})})
    check(ranks, case, whole)
