"""One timed call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(make: Callable[[], T]) -> tuple[T, float]:
    """A result and the seconds that making it took."""
    started = time.perf_counter()
    made = make()
    return made, time.perf_counter() - started
