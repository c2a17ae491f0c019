"""Tests in this folder run on the machine's GPU. Without one, or with one that no kernels are written for, they are
skipped: `pytest -m gpu` says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsmp.codegen.targets import Target, target_of
from dsmp.errors import DsmpError
from dsmp.hardware_db.capability import Device
from dsmp.hardware_db.detect import resolve_hardware

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why nothing can run here; None where it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        device = resolve_hardware()
    except DsmpError as error:
        return str(error)
    return None if target_of(device) else f"there are no kernels for {device.name} ({device.isa})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    reason = why_not() if mine else None
    for item in mine if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(scope="session")
def hardware() -> Device:
    """The running device."""
    return resolve_hardware()


@pytest.fixture(scope="session")
def target(hardware: Device) -> Target:
    """Its instruction set."""
    found = target_of(hardware)
    assert found is not None
    return found
