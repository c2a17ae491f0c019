"""Measurements as data files: TOML that people can read, and that is replaced in one step.

The text is written by hand rather than by a TOML library, so that every measured point is one line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import rtoml
from pydantic import BaseModel

from ...errors import InvalidOptionError
from ...hardware_db.measurement import Measurement

_OPTION = "--output"
_HEAD_LINES = 3
_HEAD = "# Written by `dsmp hardware calibrate`"


def to_toml(measurement: Measurement) -> str:
    """One [[measurement]] table; read as a data file it gives the same record."""
    lines = [
        f"{_HEAD} on {measurement.date}. Plans for the running device use it, and name",
        "# this file, as long as its id, name and number of units are those below. Rates are FLOP/s (a multiply-add",
        "# counts as two) and bytes/s (read and written), times are seconds.",
        "",
        "[[measurement]]",
    ]
    for key, value in measurement:
        if isinstance(value, tuple):
            lines += ["", f"{key} = [", *(f"  {_inline(record)}," for record in value), "]"] if value else []
        else:
            lines.append(f"{key} = {_scalar(value)}")
    return "\n".join(lines) + "\n"


def check_writable(path: Path) -> None:
    """Raise `InvalidOptionError` where `write` could not write, or would destroy other data than a measurement."""
    target, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path)).parent
    if target.is_dir():
        raise InvalidOptionError(_OPTION, str(path), "a file; this is a folder")
    if target.exists() and not target.is_file():
        raise InvalidOptionError(_OPTION, str(path), "a regular file; this is a device, pipe or socket")
    if not folder.is_dir():
        raise InvalidOptionError(_OPTION, str(path), f"a file in a folder that exists; there is no {folder}")
    try:
        probe = _beside(target)
        probe.touch(exist_ok=False)
        probe.unlink()
        held = rtoml.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    except rtoml.TomlParsingError:
        held = {"text that is no TOML": None}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(_OPTION, str(path), f"a file that can be read and replaced ({error})") from error
    if other := [key for key in held if key != "measurement"]:
        raise InvalidOptionError(
            _OPTION, str(path), f"a new file, or one with measurements only, to be replaced; this one has {other[0]}"
        )
    if len(held.get("measurement", [])) > 1 or (held and not _written_by_us(target)):
        raise InvalidOptionError(
            _OPTION, str(path), "a new file, or one that calibrate wrote; this one has been written or added to by hand"
        )


def write(measurement: Measurement, path: Path) -> None:
    """Write a data file, or leave what was there. A link stays a link: what it points to is replaced.

    Raises `InvalidOptionError` where it cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = _beside(target)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(to_toml(measurement))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise InvalidOptionError(_OPTION, str(path), f"a file that can be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _written_by_us(target: Path) -> bool:
    """Whether a file begins as ours do and has no comment of anybody else's."""
    lines = target.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.lstrip().startswith("#")]
    return bool(lines) and lines[0].startswith(_HEAD) and len(comments) == _HEAD_LINES


def _beside(target: Path) -> Path:
    """A name in the same folder that no reader of data files takes for one."""
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _inline(record: BaseModel) -> str:
    fields = [f"{key} = {_scalar(value)}" for key, value in record if value != type(record).model_fields[key].default]
    return f"{{ {', '.join(fields)} }}"


def _scalar(value: object) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's; JSON leaves one control character as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        short = f"{value:.6g}"
        return short if float(short) == value else repr(value)
    return str(value)
