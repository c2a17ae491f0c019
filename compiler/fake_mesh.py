"""A mesh of as many ranks as wanted in one process: nothing is communicated, graphs and shapes are those of a rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..errors import InvalidOptionError

MOST_RANKS = 1 << 17


@contextlib.contextmanager
def fake_mesh(sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """A mesh with ranks by dimension name, outermost first, as its rank 0 sees it.

    Raises InvalidOptionError for sizes that no mesh has, and inside a process group, of which there can be one only.
    """
    bad = [d for d, n in sizes.items() if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if bad or not sizes or math.prod(sizes.values()) > MOST_RANKS:
        allowed = f"ranks by dimension, 1 or more each and {MOST_RANKS:,} at most together: dp=256,tp=8"
        raise InvalidOptionError("mesh", dict(sizes), allowed)
    if dist.is_initialized():
        raise InvalidOptionError(
            "mesh", dict(sizes),
            "outside a process group: plan before torch.distributed.init_process_group, or let every rank call "
            "dsmp.parallelize with its mesh",
        )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes.values()))
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
