"""`dsmp.compile_modules`: modules of a model that are compiled alone, each by its part of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ..errors import InvalidOptionError, PlanMismatchError, did_you_mean
from ..passes.module_plan import module_plan
from ..passes.plan import PrecisionPlan, load_plan
from .identity import module_names
from .options import parse_options
from .shared_steps import alike_but_steps, with_steps


def compile_modules(
    model: nn.Module,
    plan: PrecisionPlan | str | PathLike[str],
    modules: str | Sequence[str],
    *,
    dynamic: bool | None = None,
    **options: Any,
) -> list[list[str]]:
    """Compile modules of a model in place, alone, each by its part of `plan`; equal ones once, whatever their static
    steps are.

    modules: names or globs over names, such as `"layers.*"`; of modules that lie in one another the outer one is
    compiled, and containers that are never called are passed over. `dynamic` is torch.compile's, `options` are those
    of the backend "dsmp" besides the plan and what decides anew.

    Returns the names of compiled modules; those that share what was compiled are in one list. However many differ, all
    are compiled: each kind has a cache of its own, where `Module.compile` runs those beyond torch's
    `recompile_limit` as written.

    Raises PlanMismatchError for a name or glob that no module with planned nodes has, InvalidOptionError and
    UnknownOptionError for options.
    """
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    plan = plan if isinstance(plan, PrecisionPlan) else load_plan(plan)
    patterns = [modules] if isinstance(modules, str) else modules
    if not (isinstance(patterns, Sequence) and patterns and all(isinstance(p, str) for p in patterns)):
        raise InvalidOptionError("modules", modules, "a name or glob such as 'layers.*', or a list of them")
    for name in ("budget", "hardware", "hardware_file", "rules"):
        if name in options:
            raise InvalidOptionError(name, options[name], "nothing: all modules follow the plan that is given")
    parse_options(options)
    kinds: defaultdict[Hashable, list[tuple[str, nn.Module, PrecisionPlan]]] = defaultdict(list)
    for name, module in _named(model, plan, patterns).items():
        part = module_plan(plan, name)
        kinds[alike_but_steps(part)].append((name, module, part))
    for members in kinds.values():
        run, shared = _own_copy(), members[0][2]
        all_alike = all(part is shared for _, _, part in members)
        for _, module, part in members:
            compiled = torch.compile(
                MethodType(run, module), backend="dsmp", dynamic=dynamic, options={**options, "plan": shared}
            )
            module._compiled_call_impl = compiled if all_alike else with_steps(compiled, shared, part)
    return [[name for name, _, _ in members] for members in kinds.values()]


def _run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _own_copy() -> FunctionType:
    """`_run` with code of its own: torch.compile counts and looks up what it compiled by the code of a function."""
    code: CodeType = _run.__code__.replace()
    return FunctionType(code, _run.__globals__, _run.__name__, _run.__defaults__, _run.__closure__)


def _named(model: nn.Module, plan: PrecisionPlan, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules that match and have planned nodes, in the model's order."""
    planned = {above for d in plan for above in _chain(d.module)}
    names = module_names(model)
    called = {n: m for m in model.modules() if (n := names[str(id(m))]) in planned and not _is_container(m)}
    matched: set[str] = set()
    for pattern in patterns:
        found = [n for n in called if fnmatchcase(n, pattern)]
        if not found:
            hint = did_you_mean(pattern, sorted(called))
            raise PlanMismatchError(
                f"no module that the plan for {plan.model.source} has nodes of is named {pattern!r}. "
                + (hint or f"There are modules such as {next(iter(called), '(none)')!r}.")
            )
        matched.update(found)
    return {n: m for n, m in called.items() if n in matched and not matched.intersection(_above(n))}


def _chain(name: str) -> Iterator[str]:
    """A module's name and those of all that it lies in, without the model's own."""
    if name:
        yield name
        yield from _above(name)


def _above(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def _is_container(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward
