"""Files that take a while to make and are kept between runs, in `bench` of the user's cache folder for dsmp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from bench.tasks.sources import TaskDataError
from dsmp.passes.files import write_atomically


def cached_file(name: str, make: Callable[[], bytes]) -> Path:
    """The cached file of that name; if there is none, it is written with what `make` returns, whole or not at all.

    Raises TaskDataError when it cannot be written.
    """
    folder = user_cache_path("dsmp") / "bench"
    file = folder / name
    if not file.exists():
        content = make()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content, TaskDataError, "cache file")
    return file
