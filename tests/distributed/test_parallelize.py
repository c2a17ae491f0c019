"""Sharded modules on real processes (gloo) against the same model in one process."""

from __future__ import annotations

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
def found(two_ranks):
    return two_ranks.run(rank_programs.everything, CASES)


def check(ranks, case, whole):
    for found in ranks:
        assert found[case].keys() == whole.keys()
        for name, value in whole.items():
            worst = np.abs(found[case][name] - value).max() / np.abs(value).max()
            assert worst < TOLERANCE, f"{case}: {name} is off by {worst:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(case, found, whole, tied):
    check([rank["train"] for rank in found], case, tied if case == "tied" else whole)


def test_different_plans_and_different_models_refuse_to_start_on_every_rank(found):
    for plans, models in (rank["disagree"] for rank in found):
        assert "different plans" in plans and "ranks [0]" in plans and "ranks [1]" in plans
        assert "different collectives" in models


def test_a_sharded_module_is_used_as_a_module(found, whole):
    for used in (rank["uses"] for rank in found):
        check([{"zero 3": used["step"]}], "zero 3", whole)
        assert used["names"] and used["state"]
        assert used["local"] == (32, 32)
        assert "ids" in used["refused"] and "(2, 16)" in used["refused"] and "(4, 16)" in used["refused"]
        np.testing.assert_allclose(used["sharded"], used["whole"], rtol=1e-5)
        assert used["whole"][-1] < used["whole"][0]
        assert used["result"] < 1e-5 and used["buffer"] < 1e-6


WIRES = {
    # case: (mesh, options), the share of fp32's bytes, the relative error of gradients
    "tp bf16": ({"tp": 2}, {"wire": "bf16"}, 0.51, 1e-2),
    "tp int8": ({"tp": 2}, {"wire": {"tp": "int8"}}, 0.27, 5e-2),
    "zero 3 int8": ({"dp": 2}, {"zero": 3, "wire": "int8"}, 0.27, 6e-2),
    "zero 2 int4": ({"dp": 2}, {"zero": 2, "wire": {"dp": "int4"}}, 0.14, 0.3),
}


def test_collectives_send_in_wire_formats(two_ranks, whole):
    for found in two_ranks.run(rank_programs.wires, {name: case[:2] for name, case in WIRES.items()}):
        for name, (_, _, share, bound) in WIRES.items():
            written, sent = found[name]["sent"]
            assert 0 < sent <= share * written and not any(found[name]["reasons"])
            step = found[name]["step"]
            errors = [np.linalg.norm(step[n] - v) / np.linalg.norm(v) for n, v in whole.items()]
            assert 1e-5 < max(errors) < bound, (name, max(errors))


@pytest.mark.slow
def test_a_second_mesh_of_the_same_layout(four_ranks):
    losses = {loss for found in four_ranks.run(rank_programs.twice) for loss in found}
    assert len(losses) == 1


@pytest.mark.slow
def test_every_stage_alone(two_ranks, whole):
    ranks = two_ranks.run(rank_programs.train, SLOW_CASES)
    for case in SLOW_CASES:
        check(ranks, case, whole)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"zero": 3}], ids=["plain", "sequence", "zero 3"])
def test_data_and_tensor_parallel_together(options, four_ranks, whole):
    ranks = four_ranks.run(rank_programs.train, {"both": ({"dp": 2, "tp": 2}, options)})
    check(ranks, "both", whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor", "zero 3"])
def test_inductor_runs_both_halves(case, two_ranks, whole):
    sizes, options = SLOW_CASES[case]
    ranks = two_ranks.run(rank_programs.train, {case: (sizes, {**options, "executor": "inductor"})})
    check(ranks, case, whole)
