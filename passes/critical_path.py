"""The longest chain of nodes that wait for each other, and how much slower each node could be without lengthening it.

A plan's predicted time is the sum over all nodes, as on a device that runs one kernel after the other. The critical
path is what would remain if everything that can run side by side did: nodes are charged their predicted time in the
chosen formats, and a converted copy delays those who read it. Slack is (length of the path) - (longest chain through a
node).

The graph is a networkx DiGraph: attribute `time_us` on nodes, `copy_us` on edges from the node that computes a value to
a node that reads a copy of it. Inputs of which copies are read are nodes without time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from ..errors import NotCalibratedError, PlanSchemaError
from .exchange import chosen_candidates
from .plan import PrecisionPlan
from .program import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalPath:
    """Microseconds of the longest chain, the keys on it in the order they run, and the slack of each node."""

    length_us: float
    keys: tuple[str, ...]
    slack_us: Mapping[str, float]


def dependency_graph(plan: PrecisionPlan, chosen: Mapping[str, Candidate] | None = None) -> nx.DiGraph[str]:
    """Which node waits for which, with predicted microseconds on nodes and copies on edges.

    `chosen` are the plan's chosen candidates, if they are at hand.

    Raises NotCalibratedError for a plan without a program, which is what knows the data flow.
    """
    program = plan.program
    if program is None:
        raise NotCalibratedError(plan.model.source)
    chosen = chosen_candidates(plan, program) if chosen is None else chosen
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(plan.by_key, time_us=0.0)
    graph.add_nodes_from((key, {"time_us": c.time_us}) for key, c in chosen.items())
    graph.add_edges_from(((source, key) for key, sources in program.reads.items() for source in sources), copy_us=0.0)
    for copy in program.copies:
        source = chosen.get(copy.value)
        label = source.label if source is not None else ""
        time_us = copy.time_us.get("" if copy.value not in program.candidates else label, 0.0)
        for key, labels in copy.readers.items():
            if time_us and key in chosen and chosen[key].label in labels and key != copy.value:
                held = graph.edges[copy.value, key]["copy_us"] if graph.has_edge(copy.value, key) else 0.0
                graph.add_edge(copy.value, key, copy_us=max(held, time_us))
    return graph


def critical_path(plan: PrecisionPlan, chosen: Mapping[str, Candidate] | None = None) -> CriticalPath:
    """The critical path of a calibrated plan; `chosen` are its chosen candidates, if they are at hand.

    Raises NotCalibratedError, and PlanSchemaError where the plan's nodes read each other in a circle.
    """
    graph = dependency_graph(plan, chosen)
    try:
        order = list(nx.topological_sort(graph))
    except nx.NetworkXUnfeasible:
        circle = " -> ".join(source for source, _ in nx.find_cycle(graph))
        raise PlanSchemaError(f"plan for {plan.model.source}: field program.reads has a circle: {circle}.") from None
    time_us = {key: float(data.get("time_us", 0.0)) for key, data in graph.nodes(data=True)}
    readers = {key: [(r, edge["copy_us"]) for r, edge in found.items()] for key, found in graph.adjacency()}
    before, after, waits_for, ends = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0), {}, {}
    for key in order:
        ends[key] = before[key] + time_us[key]
        for reader, copy_us in readers[key]:
            arrival = ends[key] + copy_us
            if arrival > before[reader]:
                before[reader], waits_for[reader] = arrival, key
    for key in reversed(order):
        for reader, copy_us in readers[key]:
            after[key] = max(after[key], copy_us + time_us[reader] + after[reader])
    last = max(order, key=ends.__getitem__, default=None)
    length = ends[last] if last is not None else 0.0
    chain = []
    while last is not None:
        chain.append(last)
        last = waits_for.get(last)
    known = plan.by_key
    return CriticalPath(
        length_us=length,
        keys=tuple(key for key in reversed(chain) if key in known),
        slack_us={key: max(0.0, length - ends[key] - after[key]) for key in order if key in known},
    )


def slacks(plan: PrecisionPlan) -> dict[str, float]:
    """Microseconds by which each node could be slower without lengthening the critical path, by key.

    Raises NotCalibratedError and PlanSchemaError.
    """
    return dict(critical_path(plan).slack_us)
