"""Whether budgets can be met at all, what they rule out by themselves, and a first choice within them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from ..errors import UnreachableBudgetError
from .assignment import AssignmentProblem
from .contraction import Bools, Floats, Instance, Ints

HALVINGS = 60
# branch-and-bound nodes of the one-row program that decides whether two budgets go together
NODE_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """The two budgets as limits on totals that were summed in another order than the user's: rounding allowed for."""

    error: float
    memory: float

    def hold(self, error: float, memory: float) -> bool:
        return error <= self.error and memory <= self.memory


def restrict(instance: Instance, limits: Limits) -> Instance:
    """Without labels that break a budget even if all else takes its least; the instance itself where none does."""
    allowed = instance.allowed
    for cost, limit in ((instance.error, limits.error), (instance.memory, limits.memory)):
        if np.isfinite(limit):
            least = np.where(instance.allowed, cost, np.inf).min(axis=1)
            allowed = allowed & (float(least.sum()) + (cost - least[:, None]) <= limit)
    if not allowed.any(axis=1).all() or (allowed == instance.allowed).all():
        return instance
    return instance.only(allowed)


def least_choice(instance: Instance, first: Floats, second: Floats) -> Ints:
    """Per variable the label of the least `first` (n, L), among equals of the least `second`, then of least time."""
    allowed: Bools = instance.allowed
    for cost in (first, second):
        masked = np.where(allowed, cost, np.inf)
        allowed = masked == masked.min(axis=1, keepdims=True)
    return np.asarray(np.where(allowed, instance.time, np.inf).argmin(axis=1))


def feasible_choice(instance: Instance, limits: Limits) -> Ints:
    """A choice within both limits where there is one; casts and time do not matter.

    Otherwise the choice of the least error, of the least memory, or of the least memory within the error limit, in this
    order the first that is beyond a limit.
    """
    by_error = least_choice(instance, instance.error, instance.memory if np.isfinite(limits.memory) else instance.time)
    by_memory = least_choice(instance, instance.memory, instance.error if np.isfinite(limits.error) else instance.time)
    _, error, _ = instance.totals(by_error)
    _, _, memory = instance.totals(by_memory)
    if error > limits.error or limits.hold(*instance.totals(by_error)[1:]):
        return by_error
    if memory > limits.memory or limits.hold(*instance.totals(by_memory)[1:]):
        return by_memory
    unit = limits.error or 1.0, limits.memory or 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        share = (low + high) / 2
        mixed = share * instance.error / unit[0] + (1 - share) * instance.memory / unit[1]
        choice = least_choice(instance, mixed, instance.error)
        _, error, memory = instance.totals(choice)
        if limits.hold(error, memory):
            return choice
        low, high = (share, high) if error > limits.error else (low, share)
    return _least_memory(instance, limits, by_error)


def _least_memory(instance: Instance, limits: Limits, otherwise: Ints) -> Ints:
    """The choice of the least memory within the error limit, by HiGHS on the one row that is left."""
    variable, label = np.nonzero(instance.allowed)
    error, memory = instance.error[variable, label], instance.memory[variable, label]
    simplex = coo_array(
        (np.ones(len(variable)), (variable, np.arange(len(variable)))), shape=(len(instance), len(error))
    )
    scale = limits.error or 1.0
    rows = vstack([simplex, coo_array(error[None, :] / scale)]).tocsr()
    low = np.concatenate([np.ones(len(instance)), [-np.inf]])
    high = np.concatenate([np.ones(len(instance)), [limits.error / scale]])
    solved = milp(
        memory / (limits.memory or 1.0),
        integrality=np.ones(len(error)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows, low, high),
        options={"node_limit": NODE_LIMIT},
    )
    if solved.x is None:
        return otherwise
    share = np.full(instance.allowed.shape, -1.0)
    share[variable, label] = solved.x
    choice = np.asarray(share.argmax(axis=1))
    return choice if instance.totals(choice)[1] <= limits.error else otherwise


def refusal(
    problem: AssignmentProblem, instance: Instance, choice: Ints, limits: Limits, group: Ints
) -> UnreachableBudgetError:
    """Why a `feasible_choice` beyond the limits means that there is none; `group` (N,) is each node's variable."""

    def refused(name: str, limit: float, each: Floats, given: str = "") -> UnreachableBudgetError:
        nodes = _standing(each, group, limit)
        return UnreachableBudgetError(name, limit, float(each.sum()), nodes, given, problem.named(nodes))

    for name, cost, limit in (("error", instance.error, limits.error), ("memory", instance.memory, limits.memory)):
        each = np.where(instance.allowed, cost, np.inf).min(axis=1)
        if float(each.sum()) > limit:
            return refused(name, limit, each)
    each = instance.memory[np.arange(len(instance)), choice]
    given = f" within the error budget {limits.error:.6g}"
    return refused("memory", limits.memory, each, given)


def _standing(cost: Floats, group: Ints, limit: float) -> list[int]:
    """Nodes of the fewest variables whose costs together make up what is too much."""
    order = np.argsort(-cost, kind="stable")
    enough = np.cumsum(cost[order]) >= float(cost.sum()) - limit
    last = int(enough.argmax()) if enough.any() else len(order) - 1
    return np.flatnonzero(np.isin(group, order[: last + 1])).tolist()
