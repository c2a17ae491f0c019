"""What `torch.compile(..., backend="dsmp", options={...})` accepts.

hardware       device to plan for: a name of the hardware database, "cpu" or "auto" (the running device; the default)
hardware_file  a TOML file, or a list of them, that add or correct devices
plan           a PrecisionPlan or the path of a plan.json; its decisions are replayed instead of being made anew
budget         a share such as 0.005 or '0.5%': measure the model on the first batch while it is compiled, then choose
               the fastest formats within it (see `dsmp.plan`)
memory         with a budget: saved activations, an amount ('2GB') or a share of what the model saves as written ('60%')
drift          with a budget: how outputs are compared: "kl", "bernoulli", "l2"; by default what they call for
save_plan      path of a file to write the plan to that was made while compiling
rules          {glob over node keys: format} or a list of {"match": glob, "format": name}; applied last
executor       "inductor" (default) or "eager" (the same graph, run op by op, without a C++ compiler)
kernels        "auto" (default): Triton kernels on a GPU that was planned for, exact simulation elsewhere; "interpret":
               Triton's interpreter runs the planned device's kernels on CPU tensors (slow, for checking); "off": none
implementations  {glob over node keys: name}: what computes these products (see `codegen/registry.py`); an error where
               it cannot
without        list of implementations not to use
wire           how collectives in the model's own code send floating-point tensors: "fp32" (the default: as written),
               "bf16", "fp16", "fp8", "int8", "int4" or "topk", with a block or share as in "int8:64", "topk:0.05"; or
               {glob over node keys: format}, of which the last match counts. What is sent so is summed in fp32
strict         True: a GEMM that the plan does not know, or a planned narrow node that would run wide on the device it
               was planned for, is an error instead of a warning
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ..codegen.registry import check_names
from ..errors import InvalidOptionError, UnknownOptionError
from ..passes.budget_text import parse_budget, parse_memory
from ..passes.plan import PrecisionPlan, load_plan
from ..passes.program import DriftKind
from ..passes.rules import Rule, parse_rules
from ..passes.wire_formats import WireFormat, parse_wire
from .calibrated import DRIFTS

Executor = Literal["inductor", "eager"]
Kernels = Literal["auto", "interpret", "off"]
_EXECUTORS = ("inductor", "eager")
_KERNELS = ("auto", "interpret", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Checked options of one compilation."""

    hardware: str | None = None
    hardware_file: tuple[Path, ...] = ()
    plan: PrecisionPlan | None = None
    rules: list[Rule] = field(default_factory=list)
    executor: Executor = "inductor"
    strict: bool = False
    kernels: Kernels = "auto"
    implementations: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    budget: float | None = None
    memory: Any = None
    drift: DriftKind | None = None
    save_plan: Path | None = None
    wire: Mapping[str, WireFormat] = field(default_factory=dict)


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Options from what the user passed to torch.compile.

    Raises UnknownOptionError, InvalidOptionError, UnknownWireFormatError, InvalidWireFormatError, RuleError or
    PlanSchemaError.
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
    kernels = given.get("kernels", "auto")
    if kernels not in _KERNELS:
        raise InvalidOptionError("kernels", kernels, " or ".join(repr(k) for k in _KERNELS))
    _check_calibration(given)
    save_plan = given.get("save_plan")
    if save_plan is not None and not isinstance(save_plan, (str, os.PathLike)):
        raise InvalidOptionError("save_plan", save_plan, "the path of a file such as 'plan.json'")
    return Options(
        budget=None if given.get("budget") is None else parse_budget(given["budget"]),
        memory=given.get("memory"),
        drift=given.get("drift"),
        save_plan=None if save_plan is None else Path(save_plan),
        hardware=hardware,
        hardware_file=_files(given.get("hardware_file")),
        plan=_plan(given.get("plan")),
        rules=parse_rules(given.get("rules")),
        executor=executor,
        strict=strict,
        kernels=kernels,
        implementations=_implementations(given.get("implementations")),
        without=_without(given.get("without")),
        wire=_wire(given.get("wire")),
    )


def _check_calibration(given: Mapping[str, Any]) -> None:
    """Refuse calibration options that would have no effect, and values that none of them has."""
    if given.get("budget") is not None and given.get("plan") is not None:
        raise InvalidOptionError("budget", given["budget"], "without a plan: a plan has its decisions already")
    for name in ("memory", "drift"):
        if given.get(name) is not None and given.get("budget") is None:
            raise InvalidOptionError(name, given[name], "with a budget, such as {'budget': 0.005}")
    parse_memory(given.get("memory"), 1)
    if given.get("drift") not in (None, *DRIFTS):
        raise InvalidOptionError("drift", given["drift"], " or ".join(repr(d) for d in DRIFTS))


def _implementations(value: Any) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for item in value.items() for x in item):
        raise InvalidOptionError("implementations", value, "a dict such as {'*mlp*': 'triton_block_gemm'}")
    check_names("implementations", value.values())
    return dict(value)


def _without(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) for x in value):
        raise InvalidOptionError("without", value, "a list of implementations such as ['torch_scaled_mm']")
    check_names("without", value)
    return tuple(value)


def _wire(value: Any) -> Mapping[str, WireFormat]:
    """Wire formats by glob; one format alone is for all collectives."""
    globs = {"*": value} if isinstance(value, str) else value if value is not None else {}
    if not isinstance(globs, Mapping) or not all(isinstance(x, str) for item in globs.items() for x in item):
        raise InvalidOptionError("wire", value, "a format such as 'int8', or a dict such as {'*|all_reduce|*': 'int8'}")
    return {glob: parse_wire(text) for glob, text in globs.items()}


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
