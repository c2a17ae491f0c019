"""The bench of linear layers on the CPU runs on a tiny layer, and its rows say what they are named for."""

from __future__ import annotations

import math

import pytest
import torch

from bench import cpu_linears
from dsmp.codegen.cpu.extension import cpu_operators

ERRORS = {"fp32": 1e-5, "fp16": 1e-3, "int8": 3e-2, "int8_a16": 3e-2}


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linears, "COLD_BYTES", 1)
    weight = torch.randn(40, 130, generator=torch.Generator().manual_seed(0))
    found = list(cpu_linears.implementations(weight))
    rows = {str(row["implementation"]): row for row in cpu_linears.rows_of(weight, found, 3, repeats=3)}
    assert rows["torch fp32"]["x torch fp32"] == 1
    assert all(row["ms"] > 0 and row["fastest"] <= row["ms"] for row in rows.values())
    if cpu_operators():
        assert rows["dsmp fp32"]["x our fp32"] == 1
        for name, row in rows.items():
            if name.startswith("dsmp"):
                assert row["error"] < ERRORS.get(name.split()[1], 0.2)
    else:
        assert math.isnan(rows["torch fp32"]["x our fp32"])


def test_copies_outgrow_caches() -> None:
    assert cpu_linears.copies_of(64_000_000) == 3
    assert cpu_linears.copies_of(500_000_000) == 2
