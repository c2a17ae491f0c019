"""Collectives in wire formats: what two ranks get against fp32, what is sent, and what the pass leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import RankFailed, Ranks
from graph_helpers import aten_graph, signature
from rank_functions import (
    KINDS,
    collective,
    every_format,
    fail_on_one_rank,
    functional,
    group,
    not_finite,
    rewritten,
    values,
)
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsmp.codegen.collective_nodes import find_collectives, graph_ring_bytes
from dsmp.codegen.collectives import rewrite_collectives
from dsmp.passes.graph import node_op
from dsmp.passes.wire_formats import WIRE_NAMES, parse_wire

# Largest error of a value against the largest magnitude that was sent, for one rounding.
ERROR = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4, "int8": 0.504 / 127, "int4": 0.504 / 7}
SHARES = {"bf16": 0.51, "fp16": 0.51, "fp8": 0.27, "int8": 0.27, "int4": 0.14}
SHAPES = ((64, 33), (1001,), (3, 7, 11), (2, 2000))


@pytest.mark.parametrize(("kind", "op"), [("all_gather", "sum"), *((k, o) for k in KINDS[1:] for o in ("sum", "avg"))])
def test_every_format_against_fp32(two_ranks: Ranks, kind: str, op: str) -> None:
    shapes = SHAPES if kind != "reduce_scatter" else ((64, 33), (1002,), (4, 7, 11), (2, 2000))
    ranks = two_ranks.run(every_format, kind, op, shapes)
    inputs = [[values(s, r) for s in shapes] for r in range(2)]
    for rank, found in enumerate(ranks):
        exact = [_expected(kind, op, [i[n] for i in inputs], rank) for n in range(len(shapes))]
        wide = found["fp32"][1]
        for wire, (results, on_graph, measured, sent, operators) in found.items():
            assert on_graph == measured == pytest.approx(sum(s.bytes for s in sent)), (wire, "counted as measured")
            if wire == "fp32":
                assert operators == [kind]
                assert all(torch.allclose(r, e) for r, e in zip(results, exact, strict=True))
                continue
            if wire != "topk":
                assert on_graph <= SHARES[wire] * wide
                assert "all_reduce" not in operators and "reduce_scatter" not in operators, "no sum on the wire"
            for n, (result, e) in enumerate(zip(results, exact, strict=True)):
                assert result.shape == e.shape and result.dtype == e.dtype and result.is_contiguous()
                if wire == "topk":
                    assert _keeps_the_largest(kind, op, result, [i[n] for i in inputs], rank)
                    continue
                largest = max(float(i[n].abs().max()) for i in inputs)
                once = ERROR[wire] * largest
                bound = {"all_gather": once, "reduce_scatter": 2 * once, "all_reduce": 4.2 * once}[kind]
                assert (result - e).abs().max() <= bound / (2 if op == "avg" else 1)
                assert wire in ("bf16", "fp16") or not torch.equal(result, e), "the format leaves its mark"
    if kind == "all_reduce":
        for wire in WIRE_NAMES:
            for a, b in zip(ranks[0][wire][0], ranks[1][wire][0], strict=True):
                assert torch.equal(a, b), f"{wire}: all ranks have the same bits"


def _expected(kind: str, op: str, sent: list[torch.Tensor], rank: int) -> torch.Tensor:
    if kind == "all_gather":
        return torch.cat(sent)
    total = sum(sent) / (len(sent) if op == "avg" else 1)
    return total if kind == "all_reduce" else total.chunk(len(sent))[rank]


def _keeps_the_largest(kind: str, op: str, result: torch.Tensor, sent: list[torch.Tensor], rank: int) -> bool:
    """Whether top-k gives what keeping the largest tenth of each row by hand gives."""

    def kept(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        mask = torch.zeros_like(flat).index_fill_(0, flat.abs().topk(math.ceil(0.1 * flat.numel())).indices, 1.0)
        return (flat * mask).reshape(x.shape)

    if kind == "reduce_scatter":
        total = sum(kept(s.chunk(len(sent))[rank]) for s in sent) / (len(sent) if op == "avg" else 1)
        return torch.allclose(result, total)
    return torch.allclose(result, _expected(kind, op, [kept(s) for s in sent], rank))


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_of_one_rank_arrives(two_ranks: Ranks, kind: str) -> None:
    first, second = two_ranks.run(not_finite, kind)
    assert all(first)
    assert all(second) or kind == "reduce_scatter"  # the second rank's part of the sum has none


def test_the_helper_reports_what_happened(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="the second rank's own words"):
        two_ranks.run(fail_on_one_rank)
    assert two_ranks.run(collective, torch.ones(2), "all_reduce")[1].tolist() == [2, 2]


# graphs alone, among 8 ranks that do not exist


@pytest.fixture
def eight() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def graph_of(
    function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    return aten_graph(function, *(torch.randn(s).to(dtype) for s in shapes))


def ops(gm: fx.GraphModule) -> list[str]:
    return [name for n in gm.graph.nodes if (name := node_op(n)).startswith(("_c10d", "dsmp"))]


@pytest.mark.usefixtures("eight")
def test_fp32_leaves_the_graph_as_it_is() -> None:
    gm = graph_of(lambda x: [collective(x, k) for k in KINDS], (64, 64))
    nodes, text, graph, code = list(gm.graph.nodes), signature(gm), gm.graph, gm.code
    sent = rewritten(gm, "fp32")
    assert [s.reason for s in sent] == ["as written"] * 3 and all(s.bucket is None for s in sent)
    assert gm.graph is graph and gm.code == code and signature(gm) == text
    assert all(a is b for a, b in zip(nodes, gm.graph.nodes, strict=True))


@pytest.mark.usefixtures("eight")
def test_ring_bytes_on_the_graph() -> None:
    size = 64 * 64 * 4
    gm = graph_of(lambda x: [collective(x, k) for k in KINDS], (64, 64))
    assert graph_ring_bytes(gm) == size * 7 + size * 7 / 8 + 2 * size * 7 / 8
    whole = graph_of(lambda x: functional.all_gather_into_tensor_coalesced([x, x], 8, group()), (64, 64))
    assert graph_ring_bytes(whole) == 2 * size * 7


@pytest.mark.usefixtures("eight")
def test_independent_collectives_share_a_bucket() -> None:
    def step(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [collective(x, "all_reduce").sin() for x in xs] + [collective(x, "all_gather") for x in xs]

    gm = graph_of(step, *[(128, 32)] * 12)
    sent = rewritten(gm, "int8")
    assert {s.bucket for s in sent if s.kind == "all_reduce"} == {0}
    assert {s.bucket for s in sent if s.kind == "all_gather"} == {1}
    assert len(ops(gm)) == (2 + 2 + 2 + 2) + 4, "as many operators as for one tensor"
    gm = graph_of(step, *[(128, 32)] * 12)
    limited = rewritten(gm, "int8", bucket_bytes=int(3.5 * 128 * 32 * 4 * 2))
    assert [s.bucket for s in limited if s.kind == "all_reduce"] == [n // 4 for n in range(12)]


@pytest.mark.usefixtures("eight")
def test_what_differs_does_not_share_a_bucket() -> None:
    def step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        return [collective(a, "all_reduce"), collective(b, "all_reduce", "avg"), collective(c.half(), "all_reduce")]

    assert len({s.bucket for s in rewritten(graph_of(step, *[(128, 32)] * 3), "int8")}) == 3
    same = graph_of(lambda a, b: [collective(a, "all_reduce"), collective(b, "all_reduce")], (128, 32), (128, 32))
    first, second = find_collectives(same)
    sent = rewrite_collectives(same, {first.start: parse_wire("int8"), second.start: parse_wire("int4")})
    assert [s.bucket for s in sent] == [0, 1] and [s.wire for s in sent] == ["int8", "int4"]


@pytest.mark.usefixtures("eight")
def test_dependent_collectives_do_not_share_a_bucket() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = collective(x, "all_reduce").tanh()
        return x

    assert [s.bucket for s in rewritten(graph_of(chain, (128, 32)), "int8")] == [0, 1, 2]

    def crossed(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        """a1 -> b2 and b1 -> a2: merging both kinds at once would make a circle."""
        a1 = collective(a, "all_reduce")
        b1 = collective(b, "all_reduce", "avg")
        return [collective(a1 + 1, "all_reduce", "avg"), collective(b1 + 1, "all_reduce")]

    gm = graph_of(crossed, (128, 32), (128, 32))
    sent = rewritten(gm, "int8")
    assert len({s.bucket for s in sent}) == 3
    gm.graph.lint()


@pytest.mark.usefixtures("eight")
def test_writes_and_random_numbers_keep_their_order() -> None:
    def writes(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a = collective(x, "all_reduce")
        x.copy_(y)
        return [a, collective(y, "all_reduce")]

    assert len({s.bucket for s in rewritten(graph_of(writes, (128, 32), (128, 32)), "int8")}) == 2

    def draws(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a = torch.bernoulli(collective(x, "all_reduce").sigmoid())
        return [a, collective(torch.bernoulli(y.sigmoid()), "all_reduce")]

    gm = graph_of(draws, (128, 32), (128, 32))
    before = [n.name for n in gm.graph.nodes if "bernoulli" in n.name]
    assert len({s.bucket for s in rewritten(gm, "int8")}) == 2
    assert [n.name for n in gm.graph.nodes if "bernoulli" in n.name] == before


@pytest.mark.usefixtures("eight")
def test_what_is_left_alone_says_why() -> None:
    def step(x: torch.Tensor, tiny: torch.Tensor, n: torch.Tensor) -> list[Any]:
        unfinished = functional.all_reduce(x, "sum", group())
        return [
            collective(x, "all_reduce", "max"), collective(tiny, "all_reduce"), collective(n.long(), "all_gather"),
            collective(x.half(), "all_gather"), unfinished,
        ]  # fmt: skip

    gm = graph_of(step, (128, 32), (), (64,))
    text = signature(gm)
    reasons = {s.key: s.reason for s in rewritten(gm, "bf16")}
    assert signature(gm) == text
    expected = ("'max' is neither", "would send", "no floating-point", "would send", "other ways")
    assert sorted(reasons) == sorted(c.start.name for c in find_collectives(gm))
    for reason in expected:
        assert any(reason in found for found in reasons.values()), reason


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("kind", KINDS)
def test_new_nodes_have_what_later_passes_need(kind: str) -> None:
    gm = graph_of(lambda x: collective(x.sin(), kind).cos(), (128, 32))
    (c,) = find_collectives(gm)
    source, before = c.source, c.wait.meta["val"]
    for n in gm.graph.nodes:
        n.meta["partitioner_tag"] = "is_forward"
    for n in (c.start, c.wait):
        n.meta |= {
            "partitioner_tag": "is_backward",
            "seq_nr": 5,
            "nn_module_stack": {"a": ("block", object)},
            "recompute": 1,
        }
    old = set(gm.graph.nodes)
    rewritten(gm, "int8")
    new = [n for n in gm.graph.nodes if n not in old]
    assert source in old and len(new) >= 4
    for n in new:
        assert n.meta["partitioner_tag"] == "is_backward" and n.meta["seq_nr"] == 5 and n.meta["recompute"] == 1
        assert n.meta["nn_module_stack"] and "val" in n.meta and n.meta["dsmp_wire"] == "int8"
    after = new[-1].meta["val"]
    assert after.shape == before.shape and after.dtype == before.dtype
