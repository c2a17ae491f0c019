"""The one switch of the suite: `pytest --accept-golden` writes the golden files anew instead of comparing with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-golden", action="store_true", help="write golden files anew instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with the file of that name in the golden folder beside the test."""

    def compare(name: str, text: str) -> None:
        file = Path(request.path).parent / "golden" / name
        if request.config.getoption("--accept-golden"):
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"there is no {file}; run pytest --accept-golden and review what it writes"
        assert text == file.read_text(encoding="utf-8"), f"{file} differs; pytest --accept-golden accepts the new text"

    return compare
