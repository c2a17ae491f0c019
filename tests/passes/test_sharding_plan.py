from __future__ import annotations

import json

import pytest
from torch.distributed.tensor import Replicate, Shard

from dsmp.errors import ShardingPlanError
from dsmp.passes.sharding import ShardingPlan, ShardingRule, placement
from dsmp.passes.strategies import divides, shards_evenly

PLAN = ShardingPlan(
    mesh={"dp": 4, "tp": 2},
    parameters=(
        ShardingRule(pattern="*.weight", placements={"dp": "shard(1)"}),
        ShardingRule(pattern="layers.*.q.weight", placements={"tp": "shard(0)"}, gradients={"dp": "shard(1)"}),
        ShardingRule(pattern="layers.3.*", placements={"tp": "replicate"}),
    ),
    inputs=(ShardingRule(pattern="ids", placements={"dp": "shard(0)"}),),
    gathered=("dp",),
    sequence=("tp",),
)


def test_the_last_rule_that_matches_wins_per_mesh_dimension():
    assert PLAN.stored("layers.0.q.weight") == (Shard(1), Shard(0))
    assert PLAN.stored("layers.3.q.weight") == (Shard(1), Replicate())
    assert PLAN.stored("layers.0.q.bias") == (Replicate(), Replicate())
    assert PLAN.input("ids") == (Shard(0), Replicate())


def test_stored_shards_are_gathered_for_computing_on_gathered_dimensions_only():
    assert PLAN.computed("layers.0.q.weight") == (Replicate(), Shard(0))


def test_gradients_end_where_the_parameter_is_unless_a_rule_says_otherwise():
    plan = ShardingPlan(mesh={"dp": 2}, parameters=(ShardingRule(pattern="a", gradients={"dp": "shard(0)"}),))
    assert plan.stored("a") == (Replicate(),) and plan.gradient("a") == (Shard(0),)
    assert PLAN.gradient("layers.3.q.weight") == (Shard(1), Replicate())


def test_a_plan_survives_json_and_its_digest_tells_plans_apart():
    again = ShardingPlan.from_dict(json.loads(json.dumps(PLAN.to_dict())))
    assert again == PLAN and again.digest() == PLAN.digest()
    other = PLAN.with_rules([ShardingRule(pattern="head.weight", placements={"tp": "shard(0)"})])
    turned = ShardingPlan.from_dict({**PLAN.to_dict(), "mesh": {"tp": 2, "dp": 4}})
    assert len({PLAN.digest(), other.digest(), turned.digest()}) == 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mesh": {"tp": 2}, "sequnce": ["tp"]}, "no field sequnce"),
        ({}, "mesh"),
        ({"mesh": {"tp": 2}, "parameters": [{"glob": "*"}]}, "glob"),
        ({"mesh": {"tp": 2}, "gathered": ["dp"]}, "no dimension 'dp'"),
        ({"mesh": {"tp": 2}, "parameters": [{"pattern": "*", "placements": {"tp": "split(0)"}}]}, "split"),
    ],
)
def test_what_is_no_plan_is_refused(values, words):
    with pytest.raises(ShardingPlanError, match=words.replace("(", r"\(")):
        ShardingPlan.from_dict(values)


def test_a_rule_that_matches_nothing_is_an_error_with_a_hint():
    plan = ShardingPlan(mesh={"tp": 2}, parameters=(ShardingRule(pattern="layer.0.q.weight"),))
    with pytest.raises(ShardingPlanError, match=r"did you mean layers\.0\.q\.weight"):
        plan.check_names(["layers.0.q.weight"], [])


def test_placements_are_written_as_shard_or_replicate():
    assert placement("shard(-1)") == Shard(-1) and placement("replicate") == Replicate()
    with pytest.raises(ShardingPlanError, match="allowed"):
        placement("partial")


def test_verdicts_name_the_mesh_dimension_and_the_size():
    verdict = divides("the kv heads of 'k'", 4, "tp", 8)
    assert not verdict and "'tp'" in verdict.reason and "4" in verdict.reason and "8" in verdict.reason
    assert divides("x", 16, "tp", 8)


def test_uneven_missing_and_doubly_divided_dimensions_are_verdicts():
    mesh = (("dp", 4), ("tp", 2))
    assert all(shards_evenly("'w'", (8, 6), (Shard(0), Shard(1)), mesh))
    uneven, _ = shards_evenly("'w'", (6, 6), (Shard(0), Shard(1)), mesh)
    assert not uneven and "'dp'" in uneven.reason
    _, double = shards_evenly("'w'", (8, 6), (Shard(0), Shard(0)), mesh)
    assert not double and "'tp'" in double.reason and "already" in double.reason
    (missing,) = shards_evenly("'b'", (8,), (Replicate(), Shard(1)), mesh)
    assert not missing and "1 dimensions" in missing.reason


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ShardingPlan(mesh=["dp"]), "mesh is"),
        (lambda: ShardingPlan(mesh={"dp": -2}), "mesh is"),
        (lambda: ShardingPlan(mesh={"dp": True}), "mesh is"),
        (lambda: ShardingPlan(mesh={"dp": 2}, parameters=({"pattern": "a"},)), "list of dsmp.ShardingRule"),
        (lambda: ShardingPlan(mesh={"dp": 2}).with_rules(ShardingRule(pattern="a")), "list of dsmp.ShardingRule"),
        (lambda: ShardingPlan(mesh={"dp": 2}).with_rules("a"), "list of dsmp.ShardingRule"),
        (lambda: ShardingRule(pattern=3), "pattern 3"),
        (lambda: ShardingRule(pattern="a", placements=["dp"]), "placements by mesh dimension"),
        (lambda: placement(0), "0 is no placement"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(make, words):
    with pytest.raises(ShardingPlanError, match=words):
        make()


def test_a_local_glob_that_matches_nothing_is_an_error_with_a_hint():
    with pytest.raises(ShardingPlanError, match=r"'expert\.w' in local.*experts\.w"):
        ShardingPlan(mesh={"dp": 2}, local=("expert.w",)).check_names(["experts.w"], ["x"])
