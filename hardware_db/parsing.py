"""From tables of a data file to validated records. A violation raises `HardwareDataError` naming the file, the record,
the key and what is allowed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..errors import HardwareDataError, did_you_mean
from .device_row import DeviceRow
from .measurement import Measurement
from .schema import Architecture
from .topology import Link, Node

_ModelT = TypeVar("_ModelT", bound=BaseModel)

Tables = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Tables by key, each with the file to name in errors."""


def parse_architectures(tables: Tables) -> dict[str, Architecture]:
    """Validate merged profile tables."""
    return _parse_all(Architecture, tables, "architecture")


def parse_devices(tables: Tables) -> dict[str, DeviceRow]:
    """Validate device tables."""
    return _parse_all(DeviceRow, tables, "device")


def parse_links(tables: Tables) -> dict[str, Link]:
    """Validate link tables."""
    return _parse_all(Link, tables, "link")


def parse_nodes(tables: Tables) -> dict[str, Node]:
    """Validate node tables."""
    return _parse_all(Node, tables, "node")


def parse_measurement(table: Mapping[str, Any], file: str) -> Measurement:
    """Validate a measurement table."""
    return _parse(Measurement, table, f"{file}: measurement of {table.get('device', '?')!r}")


def _parse_all(model: type[_ModelT], tables: Tables, kind: str) -> dict[str, _ModelT]:
    """All tables of a kind in one go, which is fast; one by one only to tell which of them is wrong."""
    try:
        # through JSON: strict types, while arrays may still fill tuples and tables may fill nested models
        records = _adapter(model).validate_json(json.dumps([t for _, t in tables.values()], default=str))
    except ValidationError:
        records = [_parse(model, t, f"{file}: {kind} {key!r}") for key, (file, t) in tables.items()]
    return dict(zip(tables, records, strict=True))


@functools.cache
def _adapter(model: type[BaseModel]) -> TypeAdapter[Any]:
    return TypeAdapter(list[model])  # type: ignore[valid-type]


def _parse(model: type[_ModelT], table: Mapping[str, Any], where: str) -> _ModelT:
    try:
        return model.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise HardwareDataError(f"{where}: {'; '.join(_explain(model, error))}.") from None


def _explain(model: type[BaseModel], error: ValidationError) -> list[str]:
    sentences = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "the record as a whole"
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = "unknown key"
            if len(item["loc"]) == 1:
                hint = did_you_mean(key, model.model_fields)
                text += f"{f' ({hint})' if hint else ''}; allowed: {', '.join(sorted(model.model_fields))}"
        elif item["type"] != "missing" and not isinstance(item["input"], dict | list):
            text = f"{text} (got {item['input']!r})"
        sentences.append(f"{key}: {text}")
    return sentences
