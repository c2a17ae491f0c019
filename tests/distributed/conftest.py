"""Process groups: of real processes, started once, and a mesh over a fake group that communicates nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from gloo import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes that form a gloo group."""
    group = Ranks(2)
    yield group
    group.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four of them."""
    group = Ranks(4)
    yield group
    group.close()


@pytest.fixture(scope="module")
def fake_mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """`fake_mesh(dp=256, tp=8)`: a mesh of that many ranks, as rank 5 (or the last) of it sees it; one at a time."""

    made: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}

    def make(**sizes: int) -> DeviceMesh:
        key = tuple(sizes.items())
        if key not in made:
            made.clear()
            close()
            ranks = math.prod(sizes.values())
            dist.init_process_group("fake", store=FakeStore(), rank=min(5, ranks - 1), world_size=ranks)
            made[key] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return made[key]

    yield make
    close()


def close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
