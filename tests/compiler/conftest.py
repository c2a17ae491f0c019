"""Every compiler test starts with fresh caches and random numbers, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compiling import Seen, watch


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """One thread: operations this small wait for other threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The keys of every graph that the dsmp backend compiles in this test."""
    return watch(monkeypatch)
