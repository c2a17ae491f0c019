"""A precision plan for a mesh, followed by real processes: its placements, its formats, what its collectives send."""

from __future__ import annotations

import numpy as np
import planned_ranks
import pytest
from planned_ranks import wide_model
from rank_programs import step, tokens

import dsmp
from dsmp.codegen.audit import Ran
from dsmp.errors import PlanSchemaError, ShardingPlanError, UnknownHardwareError
from dsmp.passes.plan_fields import GEMM_CLASSES

pytestmark = pytest.mark.slow  # real processes


@pytest.fixture(scope="module")
def plan():
    return dsmp.plan(wide_model(), tokens(), hardware="h800", mesh={"tp": 2}, sequence=False, wire="int8")


@pytest.fixture(scope="module")
def reference():
    return step(wide_model(), *tokens())


def errors(found, reference):
    return {
        name: float(np.linalg.norm(found[name] - value) / np.linalg.norm(value)) for name, value in reference.items()
    }


def test_ranks_follow_the_plan(plan, reference, two_ranks, tmp_path):
    path = str(plan.save(tmp_path / "plan.json"))
    first, second = two_ranks.run(planned_ranks.follow, path, {})
    narrow = {c.key: (c.wire, c.bytes) for c in plan.mesh.collectives if c.wire != "fp32"}
    assert first["sent"] == second["sent"] == narrow and len(narrow) >= 12
    assert {wire for wire, _ in narrow.values()} == {"int8"}
    products = {d.key: d.compute for d in plan if d.op in GEMM_CLASSES}
    ran = {key: compute for key, (compute, _) in first["ran"].items() if key in products}
    assert ran == products and "bf16" in products.values()
    assert {how for key, (_, how) in first["ran"].items() if products.get(key) == "bf16"} == {Ran.SIMULATED.value}
    wrong = errors(first["step"], reference)
    assert 1e-4 < max(wrong.values()) < 0.05, wrong  # int8 payloads and bf16 products, and nothing else


@pytest.mark.long
def test_wires_and_formats_can_be_overruled(plan, reference, two_ranks, tmp_path):
    path = str(plan.save(tmp_path / "plan.json"))
    options = {"wire": "fp32", "hardware": "cpu"}
    plain = dsmp.plan(wide_model(), tokens(), hardware="h800", mesh={"tp": 2}, sequence=False, rules={"*": "fp32"})
    wide = str(plain.save(tmp_path / "wide.json"))
    (found, _) = two_ranks.run(planned_ranks.follow, wide, options)
    assert found["sent"] == {}
    assert max(errors(found["step"], reference).values()) < 1e-5
    (kept, _) = two_ranks.run(planned_ranks.follow, path, {"wire": {"tp": "bf16"}})
    assert {wire for wire, _ in kept["sent"].values()} == {"bf16"}


def test_ranks_with_different_plans_do_not_start(plan, two_ranks, tmp_path):
    other = dsmp.plan(wide_model(), tokens(), hardware="h800", mesh={"tp": 2}, sequence=False, rules={"*": "fp32"})
    paths = [str(plan.save(tmp_path / "a.json")), str(other.save(tmp_path / "b.json"))]
    for said in two_ranks.run(planned_ranks.differ, paths):
        assert said.startswith("ranks hold different plans: ranks [0] have ")


def test_plans_that_are_none_for_a_mesh(plan, fake_mesh, tmp_path):
    mesh = fake_mesh(tp=2)
    single = dsmp.plan(wide_model(), tokens(), hardware="h800")
    with pytest.raises(ShardingPlanError, match=r"does not say where anything lies.*--mesh"):
        dsmp.parallelize(wide_model(), mesh, single, inputs=tokens())
    with pytest.raises(PlanSchemaError, match="cannot be read"):
        dsmp.parallelize(wide_model(), mesh, tmp_path / "none.json", inputs=tokens())
    with pytest.raises(ShardingPlanError, match="'best'; allowed: 'auto'"):
        dsmp.parallelize(wide_model(), mesh, "best", inputs=tokens())
    with pytest.raises(UnknownHardwareError, match="h8000"):
        dsmp.parallelize(wide_model(), mesh, inputs=tokens(), hardware="h8000")
    with pytest.raises(ShardingPlanError, match=r"the plan is for a mesh .*'tp': 2.* and the mesh is .*'tp': 4"):
        dsmp.parallelize(wide_model(), fake_mesh(tp=4), plan, inputs=tokens())
