"""What tests of `dsmp hardware` share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware_commands import OWN


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data file with a device of its own."""
    path = tmp_path_factory.mktemp("hardware") / "own.toml"
    path.write_text(OWN)
    return path
