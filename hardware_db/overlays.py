"""The user's own data files: those of the per-user folder, and those named on a command or in an option.

The folder is `hardware` in the user's configuration folder (platformdirs; `~/.config/dsmp/hardware` on Linux). All its
`*.toml` files count, in the order of their names; files named explicitly come after them and win.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_config_path

from ..errors import HardwareDataError

SUFFIX = ".toml"
HardwareFile = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A data file, or several of them in order."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file as it was found, so that an edited one is read again."""

    path: Path
    modified_ns: int
    size: int


def user_folder() -> Path:
    """Where the user's own data files lie; need not exist."""
    return user_config_path("dsmp") / "hardware"


def overlay_files(named: HardwareFile = ()) -> tuple[Stamp, ...]:
    """The user's files, then the named ones. Raises `HardwareDataError` for a named file that is none."""
    folder = user_folder()
    named = (named,) if isinstance(named, str | os.PathLike) else named
    try:
        own = sorted(p for p in folder.iterdir() if p.suffix == SUFFIX) if folder.exists() else []
    except OSError as error:
        raise HardwareDataError(f"{folder}: the folder of your own data files cannot be read: {error}.") from None
    return tuple(_stamp(Path(p)) for p in (*own, *named))


def read_overlay(path: Path) -> str:
    """The text of a data file. Raises `HardwareDataError` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareDataError(f"{path}: cannot be read as a hardware data file: {error}.") from None


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise HardwareDataError(
            f"{path}: no such hardware data file ({error}). Give a TOML file of [[device]] tables."
        ) from None
    return Stamp(path.absolute(), found.st_mtime_ns, found.st_size)
