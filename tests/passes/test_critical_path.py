"""The longest chain through a plan against all chains, and the slack of nodes beside it."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_samples import priced_plan, sample_program, traced_plan

from dsmp.errors import NotCalibratedError, PlanSchemaError
from dsmp.passes.critical_path import critical_path, dependency_graph, slacks
from dsmp.passes.plan import Decision, PrecisionPlan
from dsmp.passes.program import Candidate, Copy, Program


def small_plan(reads: dict[int, list[int]], times: list[float], copies: list[Copy] | None = None) -> PrecisionPlan:
    """Nodes `n0`, `n1` ... in fp32 that read each other as given."""
    keys = [f"n{i}|fprop|add|0" for i in range(len(times))]
    template = sample_program(1)[0][0]
    decisions: list[Decision] = [template.model_copy(update={"key": key}) for key in keys]
    program = Program(
        cost="roofline", drift="kl", loss=1.0, copies=copies or [],
        reads={keys[i]: [keys[j] for j in sources] for i, sources in reads.items()},
        candidates={
            k: [Candidate(label="fp32", compute="fp32", accumulate="fp32", output="fp32", time_us=t, drift=0.0)]
            for k, t in zip(keys, times, strict=True)
        },
    )  # fmt: skip
    return traced_plan(decisions, program)


def chains(plan: PrecisionPlan) -> list[tuple[list[str], float]]:
    """Every chain from a node without sources to one without readers, and how long it takes."""
    graph = dependency_graph(plan)
    starts = [n for n in graph if not graph.in_degree(n)]
    ends = [n for n in graph if not graph.out_degree(n)]
    paths = [[n] for n in starts if n in ends]
    paths += [p for s in starts for e in ends if s != e for p in nx.all_simple_paths(graph, s, e)]

    def length(path: list[str]) -> float:
        nodes = sum(graph.nodes[n].get("time_us", 0.0) for n in path)
        return nodes + sum(graph.edges[a, b]["copy_us"] for a, b in pairwise(path))

    return [(path, length(path)) for path in paths]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 9))
def test_against_all_chains(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    reads = {i: [j for j in range(i) if random.random() < 0.4] for i in range(count)}
    times = random.integers(1, 9, count).astype(float).tolist()
    copies = [
        Copy(value=f"n{j}|fprop|add|0", format="bf16", time_us={"fp32": float(random.integers(0, 5))},
             readers={f"n{i}|fprop|add|0": ["fp32"]})
        for i, sources in reads.items() for j in sources if random.random() < 0.5
    ]  # fmt: skip
    copies.append(Copy(value="x", format="bf16", time_us={"": 3.0}, readers={f"n{count - 1}|fprop|add|0": ["fp32"]}))
    plan = small_plan(reads, times, copies)
    found, all_chains = critical_path(plan), chains(plan)
    longest = max(length for _, length in all_chains)
    assert found.length_us == pytest.approx(longest)
    assert list(found.keys) in [[n for n in path if "|" in n] for path, length in all_chains if length == longest]
    for key in plan.by_key:
        through = max(length for path, length in all_chains if key in path)
        assert found.slack_us[key] == pytest.approx(longest - through)


def test_a_copy_delays_only_those_who_read_it() -> None:
    copy = Copy(value="n0|fprop|add|0", format="bf16", time_us={"fp32": 5.0}, readers={"n2|fprop|add|0": ["fp32"]})
    plan = small_plan({1: [0], 2: [0]}, [1.0, 4.0, 2.0], [copy])
    assert critical_path(plan).length_us == 8.0
    assert slacks(plan) == {"n0|fprop|add|0": 0.0, "n1|fprop|add|0": 3.0, "n2|fprop|add|0": 0.0}


def test_a_copy_that_nobody_reads_delays_nobody() -> None:
    copy = Copy(value="n0|fprop|add|0", format="bf16", time_us={"fp32": 5.0}, readers={"n1|fprop|add|0": ["->bf16"]})
    assert critical_path(small_plan({1: [0]}, [1.0, 2.0], [copy])).length_us == 3.0


def test_slack_is_what_a_node_can_lose() -> None:
    times = [1.0, 4.0, 2.0, 1.0]
    reads = {1: [0], 2: [0], 3: [1, 2]}
    slack = slacks(small_plan(reads, times))["n2|fprop|add|0"]
    assert critical_path(small_plan(reads, [1.0, 4.0, 2.0 + slack, 1.0])).length_us == 6.0
    assert critical_path(small_plan(reads, [1.0, 4.0, 2.0 + slack + 0.5, 1.0])).length_us == 6.5


def test_views_are_on_the_path_without_time() -> None:
    plan = priced_plan(1, 1e5)
    found = critical_path(plan)
    assert set(found.slack_us) == set(plan.by_key)
    views = [d.key for d in plan if d.op == "view"]
    assert sum(view in found.keys for view in views) == 1
    assert all(dependency_graph(plan).nodes[v]["time_us"] == 0.0 for v in views)


def test_empty_plan() -> None:
    plan = small_plan({}, [])
    assert (critical_path(plan).length_us, critical_path(plan).keys) == (0.0, ())


def test_refuses() -> None:
    decisions, program = sample_program(1)
    with pytest.raises(NotCalibratedError, match="without calibration"):
        slacks(traced_plan(decisions, None))
    circle = program.model_copy(update={"reads": {**program.reads, program.keys[0]: [program.keys[-1]]}})
    with pytest.raises(PlanSchemaError, match=r"circle: .*embed"):
        slacks(traced_plan(decisions, circle))


def test_ten_thousand_nodes() -> None:
    plan = priced_plan(720, 1e5)
    assert len(plan) > 10_000
    found = critical_path(plan)
    graph = dependency_graph(plan)
    waits = nx.DiGraph()
    time_us = dict(graph.nodes.data("time_us"))
    waits.add_weighted_edges_from((a, b, copy + time_us[b]) for a, b, copy in graph.edges.data("copy_us"))
    waits.add_weighted_edges_from(("start", n, time_us[n]) for n in graph)
    assert found.length_us == pytest.approx(nx.dag_longest_path_length(waits))
    assert all(found.slack_us[key] == pytest.approx(0.0, abs=1e-6 * found.length_us) for key in found.keys)
