"""Meshes one after the other in one process, planned and real ones."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from planned_ranks import wide_model
from rank_programs import tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import dsmp
from dsmp.codegen.collective_nodes import find_collectives
from dsmp.errors import RuleError


def test_a_plan_made_in_the_same_process_leaves_no_groups_behind():
    """DTensor remembers meshes by layout: names of groups that are gone, or that others have by now, must not return
    from there."""
    made = dsmp.plan(wide_model(), tokens(), hardware="h800", mesh={"dp": 2, "tp": 2}, zero=3)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        dist.new_group([0, 1])  # shifts the names of what comes after it
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharded = dsmp.parallelize(wide_model(), mesh, made, inputs=tokens())
        own = {mesh.get_group(dim).group_name: dim for dim in ("dp", "tp")}
        assert {c.group for c in find_collectives(sharded.graph.gm)} <= set(own)
        sent = {s.key.split("@")[1].split("|")[0] for s in sharded.sent}
        assert sent == {"dp", "tp"}
    finally:
        dist.destroy_process_group()


def test_a_rule_that_matches_nothing(tmp_path):
    with pytest.raises(RuleError, match=r"layer\.0"):
        dsmp.plan(
            wide_model(), tokens(), hardware="h800", mesh={"tp": 2}, zero=0, sequence=False, rules={"layer.0*": "bf16"}
        )
