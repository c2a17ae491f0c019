"""Names of modules of experts that are no list of names."""

from __future__ import annotations

import pytest
from torch import nn

from dsmp.compiler.expert_modules import find_experts
from dsmp.errors import ExpertsError


@pytest.mark.parametrize("names", ["experts", []])
def test_names_are_a_list_with_names(names):
    with pytest.raises(ExpertsError, match="allowed: a list of names"):
        find_experts(nn.Linear(2, 2), names)
