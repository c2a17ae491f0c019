"""Which nodes take the same format."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsmp.compiler.capture import capture
from dsmp.hardware_db import resolve
from dsmp.passes.candidates import ways_of
from dsmp.passes.formulate import formulate
from dsmp.passes.labels import SCORED_ARITHMETIC
from dsmp.passes.ranges import Range
from dsmp.passes.scores import NodeScores, Score, Scores
from dsmp.passes.ties import ties_of


def ties(graph, device="h800", scores=None):
    return ties_of(ways_of(graph.gm, resolve(device), graph.parameters, scores), graph.parameters)


def group_of(groups, key):
    return next((set(g) for g in groups if key in g), set())


@pytest.mark.parametrize("phase", ["fprop", "dgrad", "wgrad"])
def test_siblings_and_repeated_blocks(phase, captured):
    groups = ties(captured("llama").graphs[0])
    layers = [f"model.layers.{i}" for i in range(2)]
    attention = {f"{x}.self_attn.{p}_proj|{phase}|linear|0" for x in layers for p in "qkv"}
    mlp = {f"{x}.mlp.{p}_proj|{phase}|linear|0" for x in layers for p in ("gate", "up")}
    out = {f"{x}.self_attn.o_proj|{phase}|linear|0" for x in layers}
    down = {f"{x}.mlp.down_proj|{phase}|linear|0" for x in layers}
    for expected in (attention, mlp, out, down):
        assert group_of(groups, min(expected)) == expected
    assert group_of(groups, f"lm_head|{phase}|linear|0") == set()


@pytest.mark.parametrize("device", ["h800", "v100", "cpu-amx"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "resnet18", "wide", "convnet"])
def test_groups_are_disjoint_and_may_take_the_same_labels(name, device, captured):
    (graph,) = captured(name)
    program = formulate([(graph.gm, graph.parameters)], resolve(device), lambda *_: 1e-6)
    members = [key for group in program.ties for key in group]
    assert len(members) == len(set(members))
    order = {key: i for i, key in enumerate(program.keys)}
    for group in program.ties:
        assert len(group) > 1 and group == sorted(group, key=order.__getitem__)
        labels = {tuple(c.label for c in program.allowed[key]) for key in group}
        assert len(labels) == 1 and len(labels.pop()) > 1
    assert program.ties == ties(graph, device, lambda *_: 1e-6)
    assert formulate([(graph.gm, graph.parameters)], resolve(device), None, tied=False).ties == []


def test_experts_are_tied():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.head = nn.Linear(32, 8)

        def forward(self, x):
            a, b, c = x.chunk(3)
            first, second, third = self.experts
            return self.head(torch.cat([first(a), second(b), third(c)]).relu())

    (graph,) = capture(Experts(), (torch.randn(9, 32),))
    groups = ties(graph)
    assert group_of(groups, "experts.0|fprop|linear|0") == {f"experts.{i}|fprop|linear|0" for i in range(3)}


class Chain(nn.Module):
    """Modules whose names end in numbers, and two of another width."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 32), nn.Linear(32, 32)
        self.blocks = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 48))
        self.head = nn.Linear(48, 8)

    def forward(self, x):
        return self.head(torch.tanh(self.blocks(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))))


def test_only_whole_numbers_in_a_path_and_equal_shapes_make_a_block():
    (graph,) = capture(Chain(), (torch.randn(4, 32),))
    groups = ties(graph)
    assert group_of(groups, "fc1|fprop|linear|0") == group_of(groups, "fc2|fprop|linear|0") == set()
    assert group_of(groups, "blocks.0|fprop|linear|0") == {"blocks.0|fprop|linear|0", "blocks.2|fprop|linear|0"}
    assert group_of(groups, "blocks.4|fprop|linear|0") == set()


class Branches(nn.Module):
    """Convolutions on one activation: two of one window, one of another; and a product with a second operand."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(16, 16, 3, padding=1)
        self.a, self.b = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 24, 1)
        self.c = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(40, 4, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head(torch.cat([self.a(x), self.b(x), self.c(x)], 1).relu())


def test_siblings_sum_over_the_same_length():
    (graph,) = capture(Branches(), (torch.randn(2, 16, 8, 8),))
    groups = ties(graph)
    for phase in ("fprop", "dgrad", "wgrad"):
        assert group_of(groups, f"a|{phase}|conv|0") == {f"a|{phase}|conv|0", f"b|{phase}|conv|0"}
        assert group_of(groups, f"c|{phase}|conv|0") == set()


class Residual(nn.Module):
    """A stream that other operators read between its additions, and an addition of something else's shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        x = x.exp()
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) + x.sum()


def test_the_residual_stream_is_one_group():
    (graph,) = capture(Residual(), (torch.randn(4, 32),), training=False)
    groups = ties(graph)
    joins = [f"|fprop|add|{i}" for i in range(3)]
    assert set(joins[:2]) <= group_of(groups, joins[0])
    assert group_of(groups, joins[0]) <= set(joins)
    assert all("|fprop|add|3" not in g for g in groups)


def test_a_block_that_may_take_less_leaves_the_group():
    (graph,) = capture(Residual(), (torch.randn(4, 32),), training=False)
    labels = [f if r == "none" else f"{f}:{r}" for f, r in SCORED_ARITHMETIC]
    known = {name: Score(drift=1.0, measured=True) for name in (*labels, "->bf16", "->fp16")}
    keys = [str(n.key) for n in ways_of(graph.gm, resolve("h800"), graph.parameters, None)]
    nodes = {key: NodeScores(labels=known) for key in keys}
    large = "layers.1|fprop|linear|0"
    nodes[large] = NodeScores(labels=known, ranges={"lhs": Range(absmax=6e4, exponents={})})
    scores = Scores(dsmp="0", torch="0", source="x", fingerprint="0", drift="kl", samples=1, draws=1, nodes=nodes)
    groups = ties(graph, scores=scores)
    assert group_of(groups, "layers.0|fprop|linear|0") == {f"layers.{i}|fprop|linear|0" for i in (0, 2)}
    assert group_of(groups, large) == set()
