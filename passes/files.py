"""Writing files so that a reader never sees half of one and an error never loses the old one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import DsmpError


def write_atomically(path: str | os.PathLike[str], content: str | bytes, error: type[DsmpError], what: str) -> Path:
    """Replace a file in one step; a link stays a link, the mode stays what it was.

    Raises `error`, with `what` naming the kind of file, where no file can be written.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir() or not target.parent.is_dir():
        state = "is a folder" if target.is_dir() else "has no folder to lie in"
        raise error(f"{what} {os.fspath(path)!r}: {state}. Name a file in an existing folder.")
    try:
        _replace(target, content.encode() if isinstance(content, str) else content)
    except OSError as failure:
        raise error(
            f"{what} {os.fspath(path)!r}: cannot be written ({failure.strerror or failure}). Name a file you may write."
        ) from failure
    return target


def _replace(target: Path, content: bytes) -> None:
    if target.exists():
        mode = target.stat().st_mode & 0o777
    else:
        umask = os.umask(0)
        os.umask(umask)
        mode = 0o666 & ~umask
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
