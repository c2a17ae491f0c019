"""The mesh of a plan for one: ranks of every dimension, as numbers."""

from __future__ import annotations

import pytest

from dsmp.passes.mesh_plan import MeshPlan


@pytest.mark.parametrize("mesh", [{}, {"dp": True}, {"dp": 0}, {"dp": "2"}, None])
def test_sizes_that_no_mesh_has_are_refused(mesh):
    with pytest.raises(ValueError, match=r"sharding\.mesh gives the ranks"):
        MeshPlan.model_construct(sharding={"mesh": mesh})._has_a_mesh()
