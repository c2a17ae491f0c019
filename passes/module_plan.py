"""The part of a plan that one module's own compilation follows: `layers.3` of a model whose layers are compiled alone.

Keys of a module that is compiled alone begin below it, so the part's keys do. Parts of equal decisions are one object:
torch.compile reuses what it compiled for one of several equal modules when their options are equal.
"""

from __future__ import annotations

import threading
import weakref

from ..errors import PlanMismatchError, did_you_mean
from .plan import Decision, ModelInfo, PrecisionPlan, fingerprint

_lock = threading.Lock()
_parts: weakref.WeakValueDictionary[tuple[str, str, str], PrecisionPlan] = weakref.WeakValueDictionary()


def module_plan(plan: PrecisionPlan, module: str) -> PrecisionPlan:
    """The part of `plan` for the module of that name, to compile it alone:

        block.compile(backend="dsmp", options={"plan": dsmp.module_plan(plan, "blocks.0")})

    Modules with equal decisions are compiled once, and more than torch's `recompile_limit` of different ones of a class
    not at all: `dsmp.compile_modules` compiles them all. Rules of the plan are in its decisions already. Raises
    PlanMismatchError for a module that the plan has no node of.
    """
    above = f"{module}."
    nodes = [
        _below(d, module) for d in plan if d.module == module or d.module.startswith(above)
    ]  # fmt: skip
    if not nodes or not module:
        known = sorted({d.module for d in plan if d.module})
        hint = did_you_mean(module, known)
        raise PlanMismatchError(
            f"the plan for {plan.model.source} has no node of the module {module!r}. "
            + (hint or f"It has modules such as {known[0]!r}." if known else "It names no modules.")
        )
    made = plan.model_copy(
        update={
            "model": ModelInfo(
                source=f"{plan.model.source}, one module",
                fingerprint=fingerprint((d.key, d.aten, d.shapes) for d in nodes),
                nodes=len(nodes),
            ),
            "nodes": nodes, "rules": [], "solution": None, "program": None, "mesh": None, "budget": None,
        }
    )  # fmt: skip
    key = (made.digest, made.model.fingerprint, plan.model.source)
    with _lock:
        return _parts.setdefault(key, made)


def _below(decision: Decision, module: str) -> Decision:
    def cut(text: str) -> str:
        return text[len(module) :].removeprefix(".")

    return decision.model_copy(update={"key": cut(decision.key), "module": cut(decision.module)})
