"""Process groups for the distributed tests, each started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes that form a gloo group."""
    group = Ranks(2)
    yield group
    group.close()
