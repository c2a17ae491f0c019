"""What `torch.compile(..., backend="dsmp", options={...})` accepts.

hardware       device to plan for: a name of the hardware database, "cpu" or "auto" (the running device; the default)
hardware_file  a TOML file, or a list of them, that add or correct devices
plan           a PrecisionPlan or the path of a plan.json; its decisions are replayed instead of being made anew
rules          {glob over node keys: format} or a list of {"match": glob, "format": name}; applied last
executor       "inductor" (default) or "eager" (the same graph, run op by op, without a C++ compiler)
strict         True: a GEMM that the plan does not know is an error instead of a warning
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ..errors import InvalidOptionError, UnknownOptionError
from ..passes.plan import PrecisionPlan, Rule, load_plan, parse_rules

Executor = Literal["inductor", "eager"]
_EXECUTORS = ("inductor", "eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Checked options of one compilation."""

    hardware: str | None = None
    hardware_file: tuple[Path, ...] = ()
    plan: PrecisionPlan | None = None
    rules: list[Rule] = field(default_factory=list)
    executor: Executor = "inductor"
    strict: bool = False


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Options from what the user passed to torch.compile.

    Raises UnknownOptionError, InvalidOptionError, RuleError or PlanSchemaError.
    """
    if options is not None and not isinstance(options, Mapping):
        raise InvalidOptionError("options", options, "a dict such as {'hardware': 'h800'}")
    given = dict(options or {})
    known = [f.name for f in fields(Options)]
    for name in given:
        if name not in known:
            raise UnknownOptionError(str(name), known)
    hardware = given.get("hardware")
    if hardware is not None and not isinstance(hardware, str):
        raise InvalidOptionError("hardware", hardware, "a device name such as 'h800', or 'auto'")
    executor = given.get("executor", "inductor")
    if executor not in _EXECUTORS:
        raise InvalidOptionError("executor", executor, " or ".join(repr(e) for e in _EXECUTORS))
    strict = given.get("strict", False)
    if not isinstance(strict, bool):
        raise InvalidOptionError("strict", strict, "True or False")
    return Options(
        hardware=hardware,
        hardware_file=_files(given.get("hardware_file")),
        plan=_plan(given.get("plan")),
        rules=parse_rules(given.get("rules")),
        executor=executor,
        strict=strict,
    )


def _files(value: Any) -> tuple[Path, ...]:
    given = (value,) if isinstance(value, (str, os.PathLike)) else value if value is not None else ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(f, (str, os.PathLike)) for f in given):
        raise InvalidOptionError("hardware_file", value, "the path of a TOML file, or a list of paths")
    return tuple(Path(f) for f in given)


@functools.lru_cache(maxsize=8)
def _plan_file(path: str, mtime_ns: int, size: int) -> PrecisionPlan:
    """A plan file, read once for all graphs of a model as long as it does not change."""
    return load_plan(path)


def _plan(value: Any) -> PrecisionPlan | None:
    if value is None or isinstance(value, PrecisionPlan):
        return value
    if isinstance(value, (str, os.PathLike)):
        with contextlib.suppress(OSError):
            state = os.stat(value)
            return _plan_file(os.fspath(value), state.st_mtime_ns, state.st_size)
        return load_plan(value)  # says what is wrong with the path
    raise InvalidOptionError("plan", value, "a PrecisionPlan or the path of a plan.json")
