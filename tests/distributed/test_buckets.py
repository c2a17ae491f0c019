"""Random programs with collectives compute the same after bucketing: no value is read too early, lost or mixed up.

Every rank is imagined to hold the same small integers, which fp16 sends exactly, and both ranks' halves of a tensor are
the same, so one process can stand for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graph_helpers import aten_graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_functions import KINDS, collective, rewritten
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsmp.passes.graph import node_op

RANKS, ROWS, COLUMNS = 2, 4, 33


@pytest.fixture(scope="module")
def two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class Alike(fx.Interpreter):
    """Runs the graph of rank 0 as if all ranks held the same."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "_schema", None) and target._schema.name
        if not name or not name.startswith("_c10d_functional::"):
            return super().call_function(target, args, kwargs)
        x = args[0].clone()
        if "all_gather" in name:
            return torch.cat([x] * RANKS)
        if "all_to_all" in name:
            return torch.cat([x[:1]] * RANKS)
        factor = RANKS if "wait" not in name and args[1] == "sum" else 1
        return factor * (x.chunk(RANKS)[0].clone() if "reduce_scatter" in name else x)


def same_shape(x: torch.Tensor, kind: str, op: str) -> torch.Tensor:
    """A collective, and its result brought back to the shape of what was sent, as integers that stay small."""
    found = collective(x, kind, op)
    if kind == "all_gather":
        found = found[ROWS - 1 : 2 * ROWS - 1]
    elif kind == "reduce_scatter":
        found = torch.cat([found, found])
    return torch.remainder(found, 64)


Step = tuple[str, str, int, int]
STEPS = st.tuples(
    st.sampled_from((*KINDS, *KINDS, "add", "negate")),
    st.sampled_from(("sum", "avg")),
    st.integers(0, 99),
    st.integers(0, 99),
)


@pytest.mark.usefixtures("two")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=2, max_size=14), most=st.sampled_from([1, 2000, 10**9]))
def test_random_programs(steps: list[Step], most: int) -> None:
    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for kind, op, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            made = {"add": lambda a=a, b=b: torch.remainder(a + b, 64), "negate": lambda a=a: -a}
            values.append(made[kind]() if kind in made else same_shape(a, kind, op))
        return values

    generator = torch.Generator().manual_seed(0)
    halves = [torch.randint(-50, 50, (ROWS // RANKS, COLUMNS), generator=generator).float() for _ in range(2)]
    inputs = [torch.cat([half] * RANKS) for half in halves]
    gm = aten_graph(program, *inputs)
    wanted = Alike(gm).run(*inputs)
    sent = rewritten(gm, "fp16", bucket_bytes=most)
    buckets = {s.bucket for s in sent}
    assert None not in buckets
    assert sum(node_op(n) == "dsmp.wire_encode" for n in gm.graph.nodes) == len(buckets) + len(
        {s.bucket for s in sent if s.kind == "all_reduce"}
    )
    if most == 1:
        assert len(buckets) == len(sent)
    for found, exact in zip(Alike(gm).run(*inputs), wanted, strict=True):
        assert torch.equal(found, exact)
