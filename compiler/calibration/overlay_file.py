"""Measurements as data files: TOML that people can read, and that is replaced in one step.

The text is written by hand rather than by a TOML library, so that every measured point is one line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import rtoml
from pydantic import BaseModel

from ...errors import InvalidOptionError
from ...hardware_db.measurement import Measurement

_OPTION = "--output"


def to_toml(measurement: Measurement) -> str:
    """One [[measurement]] table; read as a data file it gives the same record."""
    lines = [*_head(measurement.date), "", "[[measurement]]"]
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
        foreign = _foreign(target.read_text(encoding="utf-8")) if target.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(_OPTION, str(path), f"a file that can be read and replaced ({error})") from error
    if foreign:
        allowed = f"a new file, or one that calibrate wrote, to be replaced; this one has {foreign}"
        raise InvalidOptionError(_OPTION, str(path), allowed)


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


def _head(date: str) -> list[str]:
    """What a file says of itself."""
    return [
        f"# Written by `dsmp hardware calibrate` on {date}. Plans for the running device use it, and name",
        "# this file, as long as its id, name and number of units are those below. Rates are FLOP/s (a multiply-add",
        "# counts as two) and bytes/s (read and written), times are seconds.",
    ]


def _foreign(text: str) -> str:
    """What a file holds beside the one measurement and the comments that `to_toml` writes; "" if nothing."""
    if not text.strip():
        return ""
    try:
        held: dict[str, Any] = rtoml.loads(text)
    except rtoml.TomlParsingError:
        return "text that is no TOML"
    if other := [f"a {key}" for key in held if key != "measurement"]:
        return other[0]
    tables = held.get("measurement", [])
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    if len(tables) == 1 and comments == _head(str(tables[0].get("date"))):
        return ""
    return "notes or measurements that were added"


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
