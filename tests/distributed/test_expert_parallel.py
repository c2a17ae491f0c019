"""Experts divided among two ranks: losses, gradients, saved states and plans against the model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expert_ranks import adopted, mistakes, planned, routed, states, step
from gloo import Ranks

pytestmark = pytest.mark.slow  # real processes

EAGER, INDUCTOR = {"executor": "eager"}, {"executor": "inductor"}
NARROW = {"dispatch": "fp8", "combine": "bf16"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("mixtral", EAGER, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", EAGER, marks=pytest.mark.slow),
        pytest.param("mixtral", None, marks=pytest.mark.long),
        pytest.param("qwen3_moe", EAGER, marks=pytest.mark.long),
        pytest.param("mixtral", INDUCTOR, marks=pytest.mark.long),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(
    two_ranks: Ranks, name: str, options: dict[str, Any] | None
) -> None:
    for rank in two_ranks.run(step, name, options, {}):
        assert rank["loss"] < 1e-5
        assert len(rank["gradients"]) > 10 and max(rank["gradients"].values()) < 1e-5, rank["gradients"]
        assert {n.split(".")[-1] for n in rank["gradients"] if ".experts." in n} == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("wires", "options", "least", "most"),
    [
        pytest.param(NARROW, EAGER, 5e-3, 0.15, marks=pytest.mark.slow),
        pytest.param(NARROW, INDUCTOR, 5e-3, 0.15, marks=pytest.mark.long),
        pytest.param({"dispatch": "bf16", "combine": "bf16"}, EAGER, 5e-4, 2e-2, marks=pytest.mark.long),
        pytest.param({"dispatch": "int8:32", "combine": "int8:32"}, EAGER, 1e-3, 4e-2, marks=pytest.mark.long),
        pytest.param({"gradients": "int8"}, EAGER, 1e-3, 4e-2, marks=pytest.mark.slow),
    ],
)
def test_narrow_formats_cost_what_they_round(
    two_ranks: Ranks, wires: dict[str, str], options: dict[str, Any], least: float, most: float
) -> None:
    for rank in two_ranks.run(step, "mixtral", options, wires):
        assert least < max(rank["gradients"].values()) < most, rank["gradients"]
        assert rank["loss"] < 1e-3


@pytest.mark.parametrize(
    "kind", ["loop", *(pytest.param(k, marks=pytest.mark.long) for k in ("eager", "batched_mm", "grouped_mm"))]
)
def test_any_routing(two_ranks: Ranks, kind: str) -> None:
    for case in ("random", "one expert", "top 1", "top 3", "a rank without tokens"):
        for apart in two_ranks.run(routed, kind, case):
            assert max(apart.values()) < 1e-5, (case, apart)


@pytest.mark.long
def test_four_ranks_with_an_expert_each(four_ranks: Ranks) -> None:
    for case in ("one expert", "top 3"):
        for apart in four_ranks.run(routed, "loop", case):
            assert max(apart.values()) < 1e-5, (case, apart)


def test_states_are_saved_and_loaded(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank in two_ranks.run(states, str(tmp_path / "checkpoint")):
        assert len(rank) == 14 and all(rank.values()), rank


def test_training_stays_with_one_process(two_ranks: Ranks) -> None:
    for rank in two_ranks.run(adopted, {}):
        assert rank["difference"] < 1e-4 and rank["buffers"] == ["offset"]
    for rank in two_ranks.run(adopted, {"gradients": "int8", "dispatch": "int8"}):
        assert 1e-6 < rank["difference"] < 0.07, "three steps of Adam are 0.03 at most, in each direction"
        assert "first._dsmp_ef_weight" in rank["buffers"] and "experts._dsmp_ef_up" not in rank["buffers"]


def test_mistakes_have_remedies(two_ranks: Ranks) -> None:
    wanted = {
        "no experts": "ExpertsError: Linear has no module of experts",
        "three experts": "IndivisibleError: ",
        "two dimensions": "as in mesh['ep']",
        "no mesh": "ExpertsError: mesh is 'ep'; allowed: a DeviceMesh of one dimension",
        "sparse": "InvalidWireFormatError: wire format 'topk' is not possible",
        "unknown": "UnknownWireFormatError: ",
        "twice": "Call this once.",
        "averaged": "Call this once.",
        "averaged later": "Call this once.",
        "wrapped": "pass the module inside it instead",
        "no such name": "'expert' names no module of experts of Net; found: experts.",
        "miscounted": "read the number of its experts from its weights or from an attribute num_experts",
        "squared": "turn each row into a result times its weight",
        "shared": "experts holds parameters that its experts share (scale). Move them out of it",
        "formats differ": "RanksDisagreeError: ranks hold different models or formats",
        "models differ": "RanksDisagreeError: ranks hold different models or formats",
    }
    for found in two_ranks.run(mistakes):
        assert found.keys() == wanted.keys()
        for case, message in wanted.items():
            assert message in found[case], (case, found[case])
        assert "2 ranks do not divide the 3 experts" in found["three experts"]


@pytest.mark.slow
def test_the_plan_keeps_the_router_wide_and_shows_what_is_sent(two_ranks: Ranks) -> None:
    rules = {"*experts|fprop|grouped_mm|0": "fp8_e4m3"}
    mixtral = two_ranks.run(planned, "mixtral", NARROW, rules)[0]
    experts = "model.layers.0.mlp.experts"
    decisions, ran = mixtral["decisions"], mixtral["ran"]
    router = {k: d for k, d in decisions.items() if "mlp.gate|" in k and "|linear|" in k}
    assert len(router) == 3 and {d[1] for d in router.values()} == {"fp32"}
    assert all("ranked to choose experts" in d[3] for d in router.values())
    products = {k: d for k, d in decisions.items() if "|grouped_mm|" in k}
    assert len(products) == 6 and {d[1] for d in products.values()} == {"bf16", "fp8_e4m3"}
    assert products[f"{experts}|fprop|grouped_mm|0"][1] == "fp8_e4m3"
    # as many rows come as are sent: 2 sequences of 16 tokens, 2 experts each, 64 columns, gate and up of 48
    assert products[f"{experts}|fprop|grouped_mm|0"][2] == 2 * 64 * 64 * 96
    sent = {k: d for k, d in decisions.items() if "|wire_decode_rows|" in k}
    assert sorted(sent) == [f"{experts}|{phase}|wire_decode_rows|{i}" for phase in ("bwd", "fprop") for i in (0, 1)]
    assert {d[0] for d in sent.values()} == {"collective"}
    texts = [sent[f"{experts}|fprop|wire_decode_rows|{i}"][3] for i in (0, 1)]
    assert texts == [
        f"rows exchanged among 2 ranks as {wire} bytes each in place of 256" for wire in ("fp8: 66", "bf16: 128")
    ]
    assert ran[f"{experts}|fprop|wire_decode_rows|0"] == ("wire_fp8", texts[0])
    assert {ran[f"{experts}|bwd|wire_decode_rows|{i}"][0] for i in (0, 1)} == {"wire_bf16"}


@pytest.mark.long
def test_rows_as_they_are_are_in_the_plan(two_ranks: Ranks) -> None:
    found = two_ranks.run(planned, "mixtral", {}, {})[0]
    sent = {k: d for k, d in found["decisions"].items() if "|all_to_all_single|" in k}
    assert len(sent) == 4
    assert {d[3] for d in sent.values()} == {"rows exchanged among 2 ranks as they are: 256 bytes each"}
    assert {found["ran"][k][0] for k in sent} == {"torch"}
