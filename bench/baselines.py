"""What others do: rankings of nodes, module-level gradient scores with a linear program, lists and uniform formats.

A ranking lowers nodes to one 8-bit format in its order until the time is met; everything else stays as it started. The
gradient-score program follows NVIDIA ModelOpt's auto_quantize: one format per module, the least sum of scores within a
budget of bits, casts unknown to it. It is solved for many budgets, and its best plan whose true time, casts included,
meets the target counts.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from bench.equal_cost import Choice, Costs, Labels
from bench.node_statistics import NodeStatistics
from dsmp.errors import BudgetError
from dsmp.passes.assignment import AssignmentProblem
from dsmp.passes.keys import NodeKey
from dsmp.passes.labels import split_label
from dsmp.passes.plan import Decision
from dsmp.passes.program import Program
from dsmp.passes.select_optimal import select_optimal

RANDOM_SEEDS = 4
_BUDGETS = 60


def rankings(statistics: Mapping[str, NodeStatistics], keys: Sequence[str]) -> dict[str, list[str]]:
    """Orders in which to lower nodes (`keys` in the order of the graph), the least sensitive first, by method."""
    place = {key: i for i, key in enumerate(keys)}
    middle = (len(keys) - 1) / 2
    return {
        "ends": sorted(keys, key=lambda k: (abs(place[k] - middle), place[k])),
        "range": sorted(keys, key=lambda k: statistics[k].peak),
        "weight SQNR": sorted(keys, key=lambda k: -statistics[k].weight_sqnr),
        "output SQNR": sorted(keys, key=lambda k: -statistics[k].output_sqnr),
    }


def random_rankings(keys: Sequence[str], seeds: int = RANDOM_SEEDS) -> list[list[str]]:
    """Several orders drawn at random."""
    return [random.Random(seed).sample(list(keys), len(keys)) for seed in range(seeds)]


def labels_of(program: Program, gemms: Collection[str], arithmetic: str) -> dict[str, str]:
    """The label with which each GEMM multiplies in an arithmetic, for those that may; the one of least drift where its
    result can be stored in two ways."""
    found = {}
    for key in gemms:
        same = [c for c in program.allowed[key] if split_label(c.label)[0] == arithmetic]
        if same:
            found[key] = min(same, key=lambda c: c.drift or 0.0).label
    return found


def shortest_prefix(
    costs: Costs, start: Labels, order: Iterable[str], low: Mapping[str, str], time_us: float
) -> Choice | None:
    """The fewest nodes of an order that have to be lowered to meet a time; None if not even all of them do."""
    labels = dict(start)
    for key in order:
        if key not in low:
            continue
        labels[key] = low[key]
        choice = costs.choice(labels)
        if choice.time_us <= time_us:
            return choice
    return None


def gradient_program(
    costs: Costs, start: Labels, scores: Mapping[str, NodeStatistics], arithmetics: Sequence[str], time_us: float
) -> Choice | None:
    """The plan of least summed gradient score, one format per module, that meets a true time; None if none does."""
    program = costs.program
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for key in scores:
        modules[NodeKey.parse(key).fqn].append(key)
    options = [_module_options(program, keys, start, scores, arithmetics) for keys in modules.values()]
    least = sum(min(bits for _, bits, _ in ways) for ways in options)
    most = sum(max(bits for _, bits, _ in ways) for ways in options)
    best: tuple[float, Choice] | None = None
    for budget in np.linspace(least, most, _BUDGETS):
        picked = _least_score(options, float(budget))
        if picked is None:
            continue
        labels = dict(start)
        for way in picked:
            labels |= way[2]
        choice = costs.choice(labels)
        score = sum(way[0] for way in picked)
        if choice.time_us <= time_us and (best is None or score < best[0]):
            best = score, choice
    return best[1] if best else None


_Way = tuple[float, float, dict[str, str]]
"""Score, time without casts, and labels of a module's nodes."""


def _module_options(
    program: Program, keys: Sequence[str], start: Labels, scores: Mapping[str, NodeStatistics],
    arithmetics: Sequence[str],
) -> list[_Way]:  # fmt: skip
    """The ways of one module: as it started, and all of its nodes in each arithmetic that all of them may take."""
    time = {key: {c.label: c.time_us for c in program.allowed[key]} for key in keys}
    as_started = {key: start[key] for key in keys}
    ways = [(0.0, sum(time[k][label] for k, label in as_started.items()), as_started)]
    for arithmetic in arithmetics:
        labels = labels_of(program, keys, arithmetic)
        if len(labels) < len(keys) or any(arithmetic not in scores[k].gradient for k in keys):
            continue
        score = sum(scores[k].gradient[arithmetic] for k in keys)
        ways.append((score, sum(time[k][label] for k, label in labels.items()), labels))
    return ways


def _least_score(options: Sequence[Sequence[_Way]], budget: float) -> list[_Way] | None:
    """The multiple-choice knapsack of auto_quantize: score in the place of time, bits in the place of error."""
    problem = AssignmentProblem(
        labels=tuple(tuple(str(i) for i in range(len(ways))) for ways in options),
        time=tuple(np.array([w[0] for w in ways]) for ways in options),
        error=tuple(np.array([w[1] for w in ways]) for ways in options),
        memory=tuple(np.zeros(len(ways)) for ways in options),
        error_budget=budget * (1 + 1e-9),
    )
    try:
        choice = select_optimal(problem, gap=1e-6).choice
    except BudgetError:
        return None
    return [ways[i] for ways, i in zip(options, choice, strict=True)]


# points that are what they are, not at equal cost


def uniform(program: Program, gemms: Collection[str], start: Labels, arithmetic: str) -> dict[str, str]:
    """Every GEMM in one arithmetic where it may."""
    return {**start, **labels_of(program, gemms, arithmetic)}


def autocast(program: Program, gemms: Collection[str], start: Labels, name: str = "bf16") -> dict[str, str]:
    """torch.autocast's lists: linear layers, products, convolutions and attention compute and store in 16 bits."""
    labels = dict(start)
    for key in gemms:
        same = [c for c in program.allowed[key] if c.compute == name and c.recipe == "none"]
        stored = [c for c in same if c.output == name]
        if same:
            labels[key] = (stored or same)[0].label
    return labels


def as_decided(program: Program, start: Labels, decisions: Iterable[Decision]) -> dict[str, str]:
    """The candidates nearest to a plan's decisions: of the same arithmetic, stored alike if that is offered."""
    labels = dict(start)
    for decision in decisions:
        allowed = program.allowed.get(decision.key, ())
        same = [c for c in allowed if c.compute == decision.compute and c.recipe == decision.recipe]
        if same:
            labels[decision.key] = max(same, key=lambda c: c.output == decision.output).label
    return labels
