"""Hard limits on a product's format, from dataflow."""

from __future__ import annotations

import pytest
import torch
from graph_helpers import keyed_graph
from torch import nn

from dsmp.compiler.capture import capture
from dsmp.passes.graph import calls
from dsmp.passes.keys import FPROP, key_of
from dsmp.passes.vetoes import find_vetoes


def vetoes_of(graph):
    """{key text: [veto codes]} for the products that have any."""
    return {str(k): [v.code for v in found] for k, found in find_vetoes(graph.gm).items() if found}


def vetoed_modules(graph, code):
    return {k.split("|")[0] for k, codes in vetoes_of(graph).items() if code in codes}


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("mlp", {"down"}),
        ("normed", {"head"}),
        ("encoder", set()),
        ("tied", {"head"}),
        ("twice", {"inner"}),
        ("fused_qkv", {"out"}),
        ("convnet", {"head"}),
        ("router", {"head"}),
        ("llama", {"lm_head"}),
        ("bert", {"cls.predictions.decoder"}),
        ("vit", {"classifier"}),
        ("t5", {"lm_head"}),
        ("mixtral", {"lm_head"}),
        ("resnet18", {"fc"}),
        ("mobilenet_v3_small", {"classifier.3"}),
    ],
)
def test_heads_and_nothing_else(name, heads, captured):
    assert vetoed_modules(captured(name).graphs[0], "veto-head") == heads


def test_only_the_last_call_of_a_module_called_twice_is_a_head(captured):
    found = vetoes_of(captured("twice").graphs[0])
    assert set(found) == {f"inner|{p}|linear|1" for p in ("fprop", "dgrad", "wgrad")}


def test_gradients_share_the_veto_of_their_forward_product(captured):
    found = vetoes_of(captured("normed").graphs[0])
    assert found == {f"head|{p}|linear|0": ["veto-head"] for p in ("fprop", "dgrad", "wgrad")}


@pytest.mark.parametrize(("name", "gates"), [("router", {"gate"}), ("mixtral", {"model.layers.0.mlp.gate"})])
def test_routers(name, gates, captured):
    graph = captured(name).graphs[0]
    assert vetoed_modules(graph, "veto-router") == gates
    assert not vetoed_modules(graph, "veto-router") & vetoed_modules(graph, "veto-head")


@pytest.mark.parametrize("name", ["mlp", "normed", "llama", "resnet18", "vit"])
def test_models_without_experts_have_no_router(name, captured):
    assert not vetoed_modules(captured(name).graphs[0], "veto-router")


def test_an_attention_product_at_the_end_is_no_head(captured):
    assert not [k for k in vetoes_of(captured("gram").graphs[0]) if "|matmul|" in k]


def test_a_head_behind_a_residual_and_a_softmax():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            h = torch.relu(self.body(x))
            return torch.softmax(h + self.head(h), dim=-1)

    (graph,) = capture(Net(), (torch.randn(4, 8),))
    assert vetoed_modules(graph, "veto-head") == {"head"}


def test_a_convolution_at_the_end_is_a_head():
    (graph,) = capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), (torch.randn(1, 3, 8, 8),))
    assert vetoed_modules(graph, "veto-head") == {"2"}


def test_one_hot_operands_hold_integers(captured):
    found = vetoes_of(captured("positions").graphs[0])
    assert found["|fprop|linear|0"] == found["|wgrad|linear|0"] == ["veto-integer"]
    assert "mix|fprop|linear|0" not in found


def test_positions_turned_float_hold_integers():
    graph = keyed_graph(lambda i, w: i.to(torch.float32)[:, None].expand(5, 3) @ w, torch.arange(5), torch.randn(3, 4))
    assert vetoes_of(graph) == {"|fprop|matmul|0": ["veto-integer"]}
    scaled = keyed_graph(
        lambda i, w: (i.to(torch.float32) / 7)[:, None].expand(5, 3) @ w, torch.arange(5), torch.randn(3, 4)
    )
    assert vetoes_of(scaled) == {}, "a computed value holds no integers any more"


def test_outer_products():
    graph = keyed_graph(torch.mm, torch.randn(6, 1), torch.randn(1, 5))
    assert vetoes_of(graph) == {"|fprop|matmul|0": ["veto-outer-product"]}
    assert vetoes_of(keyed_graph(torch.mm, torch.randn(6, 2), torch.randn(2, 5))) == {}


def test_what_the_vetoes_bar(captured):
    by_code = {
        v.code: v
        for name in ("mixtral", "positions")
        for found in find_vetoes(captured(name).graphs[0].gm).values()
        for v in found
    }
    head, router, integer = (by_code[f"veto-{c}"] for c in ("head", "router", "integer"))
    assert [f for f in ("fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1") if not head.bars(f)] == []
    assert not any(head.bars(f) for f in ("bf16", "fp16", "tf32", "fp32"))
    for veto in (router, integer):
        assert all(veto.bars(f) for f in ("fp8_e4m3", "bf16", "fp16", "tf32"))
        assert not veto.bars("fp32") and not veto.bars("fp64")
        assert veto.text


def test_every_product_is_judged(captured):
    graph = captured("normed").graphs[0]
    judged = find_vetoes(graph.gm)
    from_graph = {key_of(n) for n in calls(graph.gm) if key_of(n) and key_of(n).op == "linear"}
    assert set(judged) == from_graph and any(k.phase == FPROP for k in judged)
