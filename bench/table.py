"""How a bench shows what it measured: a table on the screen and, with --json, the same rows in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dsmp.hardware_db.detect import detect

Row = Mapping[str, str | int | float | bool]


def show(title: str, rows: Sequence[Row], json_file: Path | None = None) -> None:
    """Print rows as a table, columns in the order of the first row's keys; write them as JSON if a file is given."""
    table = Table(title=title, title_justify="left", caption=_machine(rows), caption_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=140).print(table)
    if json_file is not None:
        save(title, rows, json_file)


def save(title: str, rows: Sequence[Row], json_file: Path) -> None:
    """Write rows as JSON."""
    data = {"title": title, "machine": _machine(rows), "rows": [dict(r) for r in rows]}
    json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _machine(rows: Sequence[Row]) -> str:
    device = detect()
    parts = [f"{device.name} ({device.architecture})", f"torch {torch.__version__}", f"dsmp {version('dsmp')}"]
    if "threads" not in rows[0]:
        parts.insert(1, f"{torch.get_num_threads()} threads")
    return ", ".join(parts)
