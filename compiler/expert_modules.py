"""The modules of a model that hold experts: found by their parameters and by what their call takes, not by their class.

A module of experts holds the weights of all of them stacked, each parameter [experts, ...], at least one of them 3-D,
and is called as `experts(hidden_states, top_k_index, top_k_weights)`: [tokens, columns], int64 [tokens, k] and
[tokens, k] give [tokens, columns], the sum over k of weight times result. Models of the transformers library do so.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..errors import ExpertsError

log = logging.getLogger("dsmp")

_COUNTS = ("num_experts", "num_local_experts", "n_experts")
_TOLERANCE = 0.02  # relative; what bf16 experts differ by when their rows are multiplied in another order is less


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A module of experts: its name, itself, how many there are, the names of its stacked parameters, and those of the
    three arguments of its call."""

    name: str
    module: nn.Module
    count: int
    weights: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The name, or the class of a module that is the whole model."""
        return self.name or type(self.module).__name__

    @property
    def counts(self) -> list[str]:
        """Attributes in which the module keeps the number of its experts."""
        return [n for n in _COUNTS if getattr(self.module, n, None) == self.count]


def find_experts(model: nn.Module, globs: Sequence[str] | None = None) -> list[Experts]:
    """All modules of experts of a model, or those whose names match one of the globs.

    Raises ExpertsError where there are none, where a glob matches none, and for a model that is divided already.
    """
    if isinstance(globs, str) or (globs is not None and not globs):
        raise ExpertsError(f"experts is {globs!r}; allowed: a list of names (globs) of modules, or None for all.")
    found = [e for name, module in model.named_modules() if (e := _experts(name, module)) is not None]
    for glob in globs or ():
        if not any(fnmatchcase(e.name, glob) for e in found):
            known = ", ".join(e.shown for e in found) or "none"
            raise ExpertsError(f"{glob!r} names no module of experts of {type(model).__name__}; found: {known}.")
    if globs is not None:
        found = [e for e in found if any(fnmatchcase(e.name, glob) for glob in globs)]
    if not found:
        raise ExpertsError(
            f"{type(model).__name__} has no module of experts: one whose parameters are [experts, ...], at least one "
            "of them 3-D, and that is called as experts(hidden_states, top_k_index, top_k_weights)."
        )
    for e in found:
        if getattr(e.module, "_is_expert_parallel", False):
            raise ExpertsError(f"the experts of {e.shown} are divided by transformers already. Load the model without.")
        # a loop over experts would average its gradient as often as experts are met, which differs between ranks
        common = [n for n, p in e.module.named_parameters() if p.requires_grad and n not in e.weights]
        if common:
            raise ExpertsError(
                f"{e.shown} holds parameters that its experts share ({', '.join(common)}). Move them out of it, or "
                "call requires_grad_(False) on them."
            )
    return found


def _experts(name: str, module: nn.Module) -> Experts | None:
    own = {n: p for n, p in module._parameters.items() if p is not None}
    counts = {p.shape[0] for p in own.values() if p.dim() == 3}
    if len(counts) != 1:
        return None
    (count,) = counts
    arguments = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(arguments) != 3:
        return None
    weights = tuple(n for n, p in own.items() if p.dim() and p.shape[0] == count)
    return Experts(name=name, module=module, count=count, weights=weights, arguments=tuple(a.name for a in arguments))


def check_share(experts: Experts, ranks: int) -> None:
    """Try the first rank's share of the experts on a few random tokens: its results have to be the whole module's.

    Raises ExpertsError where they are not: for results that are no sum over rows, each times its weight, and for a
    number of experts that the module keeps in an attribute of another name. Nothing is tried on the meta device, or
    without an idea of how many columns the module takes.
    """
    module, own = experts.module, experts.count // ranks
    first: Tensor = getattr(module, experts.weights[0])
    if first.is_meta:
        return
    share = copy.copy(module)
    share._parameters = {
        n: nn.Parameter(p.detach()[:own], p.requires_grad) if n in experts.weights and p is not None else p
        for n, p in module._parameters.items()
    }
    for name in experts.counts:
        setattr(share, name, own)
    training = module.training
    module.eval()
    try:
        for columns in _widths(experts):
            x = torch.linspace(-1, 1, 3 * columns).cos().view(3, columns).to(first)
            index = torch.arange(3, device=first.device).unsqueeze(1) % own
            weights = torch.tensor([[0.5], [-1.5], [2.0]]).to(first)
            whole = _called(module, x, index, weights)
            if whole is not None and whole.shape == x.shape:
                part = _called(share, x, index, torch.ones_like(weights))
                _compare(experts, whole.double(), None if part is None else (part * weights).double())
                return
    finally:
        module.train(training)
    log.warning("the experts of %s could not be tried with few tokens", experts.shown)


def _called(module: nn.Module, *args: Tensor) -> Tensor | None:
    """What a module returns; None where it cannot take its arguments."""
    try:
        with torch.no_grad():
            result: Tensor = module(*args)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    return result


def _widths(experts: Experts) -> list[int]:
    """How many columns a module may take: what its weights multiply, in the order of likelihood."""
    shapes = [getattr(experts.module, n).shape for n in experts.weights]
    return list(dict.fromkeys(size for shape in shapes if len(shape) == 3 for size in (shape[2], shape[1])))


def _compare(experts: Experts, whole: Tensor, part: Tensor | None) -> None:
    error = math.inf if part is None else float((whole - part).norm() / whole.norm())
    if error > _TOLERANCE:
        what = "cannot be called" if part is None else f"is off by {error:.2g}"
        raise ExpertsError(
            f"a share of the experts of {experts.shown} does not compute what all of them do: it {what}. The module "
            "has to turn each row into a result times its weight, and to read the number of its experts from its "
            f"weights or from an attribute {' or '.join(_COUNTS)}."
        )
