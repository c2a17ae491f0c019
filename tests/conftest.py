"""What all tests share: captures of the zoo's models, each made once, and golden files.

`pytest --accept-golden` writes the golden files anew instead of comparing with them.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zoo

from dsmp.compiler.capture import Capture, capture


class _RootIsNoTestPackage:
    """The root is the package dsmp, but not one whose `__init__` pytest should import by the checkout's name."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config: pytest.Config) -> None:
    # what somebody has calibrated on this machine must not change what tests see
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="dsmp-config-")
    config.pluginmanager.register(_RootIsNoTestPackage())


@pytest.fixture(scope="session")
def captured() -> Callable[..., Capture]:
    """`captured(name, training=True)`: the graphs of a zoo model, made once; tests change copies only."""

    @functools.cache
    def of(name: str, training: bool = True) -> Capture:
        case = zoo.build(name)
        return capture(case.model, case.args, case.kwargs, training=training, source=name)

    return of


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
