"""Finding the one node of a plan that a user means: by key, module path, glob, or the beginning of a key."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from ..errors import AmbiguousKeyError, UnknownKeyError, near_matches
from .plan import Decision, PrecisionPlan
from .plan_fields import GEMM_CLASSES

_SHOWN = 8
_FORM = "Keys have the form fqn|phase|op|ordinal"


def find_decision(plan: PrecisionPlan, text: str) -> Decision:
    """The node with that key, else the only one whose module path it is, whose key or module path it matches as a glob,
    or whose key begins with it. Where several match but one of them alone is a GEMM, that one is meant.

    Raises UnknownKeyError with near matches, AmbiguousKeyError with the nodes to choose from.
    """
    if text in plan.by_key:
        return plan.by_key[text]
    ways: tuple[Callable[[Decision], bool], ...] = (
        lambda d: d.module == text,
        lambda d: fnmatchcase(d.key, text) or fnmatchcase(d.module, text),
        lambda d: d.key.startswith(text),
    )
    for matches in ways:
        found = [d for d in plan if matches(d)]
        gemms = [d for d in found if d.op in GEMM_CLASSES]
        if len(found) == 1 or len(gemms) == 1:
            return found[0] if len(found) == 1 else gemms[0]
        if found:
            first = gemms or found
            more = f" and {len(first) - _SHOWN:,} more" if len(first) > _SHOWN else ""
            names = ", ".join(d.key for d in first[:_SHOWN])
            raise AmbiguousKeyError(f"{text!r} fits {len(found):,} nodes of the plan. Name one: {names}{more}.")
    raise UnknownKeyError(f"no node of the plan has the key {text!r}.{_hint(plan, text)}")


def _hint(plan: PrecisionPlan, text: str) -> str:
    if not len(plan):
        return " The plan is empty."
    module, bar, tail = text.partition("|")
    # modules first: comparing with every key of a large plan takes seconds
    modules = near_matches(module, dict.fromkeys(d.module for d in plan))
    keys = [d.key for d in plan if d.module in modules]
    near = near_matches(text, keys) if bar and tail else near_matches(f"{module}|fprop|linear|0", keys)
    meant = f" Did you mean {' or '.join(repr(k) for k in near)}?" if near else ""
    return f"{meant} {_FORM}, for example {plan.nodes[0].key!r}."
