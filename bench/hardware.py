"""How long the whole hardware database takes to load, and what it holds in memory.

    python -m bench.hardware [--json FILE]

`catalogue` reads all data files, applies inheritance, validates every record and checks records against each other,
with imports done; `tomllib alone` only parses the same text with the standard library, for scale; `fresh process` is
`dsmp hardware list` up to the catalogue: interpreter, imports (no torch) and loading.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from bench.table import show
from dsmp.hardware_db.catalog import build_catalog

REPEATS = 15
FRESH = "from dsmp.hardware_db.catalog import load_catalog; load_catalog()"


def milliseconds(run: Callable[[], object]) -> float:
    """The least disturbed of REPEATS runs."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def texts() -> dict[str, str]:
    """The shipped data files."""
    folder = resources.files("dsmp.hardware_db").joinpath("data")
    return {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".toml")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    catalog = build_catalog(texts())
    load = milliseconds(lambda: build_catalog(texts()))
    parse = milliseconds(lambda: [tomllib.loads(t) for t in texts().values()])
    fresh = milliseconds(lambda: subprocess.run([sys.executable, "-c", FRESH], check=True))
    bare = milliseconds(lambda: subprocess.run([sys.executable, "-c", "import pydantic"], check=True))
    tracemalloc.start()
    held = build_catalog(texts())
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    rows = [
        {
            "devices": len(catalog.rows),
            "profiles": len(catalog.architectures),
            "nodes": len(catalog.nodes),
            "text kB": sum(len(t) for t in texts().values()) / 1e3,
            "catalogue ms": load,
            "tomllib alone ms": parse,
            "catalogue / tomllib": load / parse,
            "fresh process ms": fresh,
            "import pydantic ms": bare,
            "memory MB": memory / 1e6,
        }
    ]
    assert len(held.rows) == len(catalog.rows)
    show("the hardware database", rows, arguments.json_file)


if __name__ == "__main__":
    main()
