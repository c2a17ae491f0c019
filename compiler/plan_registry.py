"""Which plan a compiled model or function runs under, and what really runs for it: remembered while it is compiled,
asked with `dsmp.plan_of` and `dsmp.audit`.

Inductor's caches may know a compiled graph already; then no pass runs, and what it would have remembered is found out
when somebody asks, by tracing the graph once more.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from types import FrameType
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ..codegen.audit import Audit
from ..codegen.audit import merged as merged_audit
from ..errors import InvalidOptionError
from ..passes.keys import FPROP, NodeKey
from ..passes.plan import ModelInfo, PrecisionPlan
from .outside_graphs import unplanned_products

log = logging.getLogger("dsmp")

_PLANS: MutableMapping[Any, list[PrecisionPlan]] = weakref.WeakKeyDictionary()
_AUDITS: MutableMapping[Any, list[Audit]] = weakref.WeakKeyDictionary()
_DEFERRED: MutableMapping[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
# The function of torch that calls what was compiled; its `fn` is the code that the user handed over.
_WRAPPER = "compile_wrapper"


def plan_of(compiled: nn.Module | Callable[..., Any]) -> PrecisionPlan:
    """The plan that a model or function compiled with `backend="dsmp"` runs under.

    It is known once the model was called; of a model that was called for training and for evaluation it is that of
    training. A model that was compiled in several graphs gets the decisions of all in one
    plan, without a solution of its own. Raises InvalidOptionError for what was not compiled by dsmp, or not yet.
    """
    target = _plain(compiled)
    plans = _PLANS.get(target) if _catch_up(target) else None
    if not plans:
        raise _not_compiled("plan_of", compiled, target)
    plan = merged(plans)
    _say_what_is_left(target, ((d.module, d.op) for d in plan))
    return plan


def audit(compiled: nn.Module | Callable[..., Any]) -> Audit:
    """What really runs for every planned node of a model or function compiled with `backend="dsmp"`.

    Raises InvalidOptionError for what was not compiled by dsmp, or not yet.
    """
    target = _plain(compiled)
    audits = _AUDITS.get(target) if _catch_up(target) else None
    if not audits:
        raise _not_compiled("audit", compiled, target)
    found = merged_audit(audits)
    _say_what_is_left(target, ((NodeKey.parse(e.key).fqn, e.op) for e in found))
    return found


def _not_compiled(name: str, compiled: Any, target: Any) -> InvalidOptionError:
    return InvalidOptionError(
        name,
        type(compiled).__name__,
        'what torch.compile(..., backend="dsmp") returned, after its first call: compiling happens then (a module may '
        "also run code that was compiled for another one of its class: ask that one). "
        f"If it was called: {unplanned_products(target, ()) or 'no graph was compiled for it'}",
    )


def _say_what_is_left(target: Any, planned: Iterable[tuple[str, str]]) -> None:
    if left := unplanned_products(target, planned):
        log.warning("%s: %s", compiled_name(target), left)


def remember_audit(found: Audit, target: Any) -> None:
    """Note what runs in a graph of `target`; compiling the same nodes again replaces what was noted."""
    if target is None:
        return
    audits = _AUDITS.setdefault(target, [])
    audits[:] = [a for a in audits if a.by_key.keys() != found.by_key.keys()] + [found]


def defer(target: Any, find_out: Callable[[], None]) -> None:
    """Note how to find out the plan and the audit of a graph of `target` when somebody asks."""
    if target is not None:
        _DEFERRED.setdefault(target, []).append(find_out)


def _catch_up(target: Any) -> bool:
    """Find out what was put off; False for what cannot have been compiled."""
    try:
        pending = _DEFERRED.pop(target, [])
    except TypeError:  # it cannot be referred to weakly
        return False
    for find_out in pending:
        find_out()
    return True


def remember(plan: PrecisionPlan, target: Any) -> PrecisionPlan:
    """Note the plan of a graph of `target` (`being_compiled()`); returns the plan of all its graphs so far."""
    if target is None:
        return plan
    plans = _PLANS.setdefault(target, [])
    # Compiling again (other shapes, a changed setting) replaces what the same nodes were decided to be, but evaluation
    # between two epochs does not replace the plan of training.
    keys, trains = set(plan.by_key), _trains(plan)
    plans[:] = [p for p in plans if _trains(p) != trains or not keys & set(p.by_key)] + [plan]
    return merged(plans)


def _trains(plan: PrecisionPlan) -> bool:
    return any(d.phase != FPROP for d in plan)


def compiled_name(target: Any) -> str:
    """The class of the model, or the name of the function, that is being compiled."""
    return getattr(target, "__name__", type(target).__name__) if target is not None else "compiled code"


def merged(plans: list[PrecisionPlan]) -> PrecisionPlan:
    """One plan with the decisions of several: of the training step, where there are plans of both."""
    plans = [p for p in plans if _trains(p)] or plans
    first = plans[0]
    if len(plans) == 1:
        return first
    nodes = [d for p in plans for d in p.nodes]
    saved = [p.prediction.saved_bytes for p in plans if p.prediction.saved_bytes is not None]
    saved_fp32 = [p.prediction.saved_bytes_fp32 for p in plans if p.prediction.saved_bytes_fp32 is not None]
    prediction = first.prediction.model_copy(
        update={
            "time_us": sum(p.prediction.time_us for p in plans),
            "time_us_fp32": sum(p.prediction.time_us_fp32 for p in plans),
            "saved_bytes": sum(saved) if saved else None,
            "saved_bytes_fp32": sum(saved_fp32) if saved_fp32 else None,
        }
    )
    model = ModelInfo(source=first.model.source, fingerprint=first.model.fingerprint, nodes=len(nodes))
    return first.model_copy(
        update={"nodes": nodes, "prediction": prediction, "model": model, "solution": None, "program": None}
    )


def _plain(compiled: Any) -> Any:
    if isinstance(compiled, OptimizedModule):
        return compiled._orig_mod
    original = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    # torch puts a wrapper around its own modules and around `Module.compile`, whose code it would otherwise skip.
    wrapped = getattr(original, "__wrapped__", None)
    for candidate in (original, wrapped):
        owner = getattr(candidate, "__self__", candidate)
        if isinstance(owner, nn.Module):
            return owner
    return original


def being_compiled() -> Any:
    """What the user compiled, from the call of it that is on the stack; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _WRAPPER and callable(frame.f_locals.get("fn")):
            return _plain(frame.f_locals["fn"])
        frame = frame.f_back
    return None
