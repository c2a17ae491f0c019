"""Users' own FSDP2 and DDP code around compiled modules: policies, keys, and what is said of what no graph has."""

from __future__ import annotations

import pytest
import torch
from fsdp_ranks import bare_layers, train, whole_model, wire_without_collectives
from gloo import Ranks
from torch import nn

import dsmp
from dsmp.errors import FsdpPolicyError, InvalidOptionError, UnknownKeyError

BLOCK = {"attn.qkv", "attn.proj", "mlp.up", "mlp.down"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "reduce", "hardware", "loss", "error"),
    [
        ("fp32", "fp32", None, 1e-6, 1e-5),
        ("bf16", "fp32", "a100", 2e-2, 3e-2),
        pytest.param("bf16", "bf16", None, 2e-2, 3e-2, marks=pytest.mark.long),
    ],
)
def test_sharded_blocks_compute_what_one_process_does(
    gather: str, reduce: str, hardware: str | None, loss: float, error: float, two_ranks: Ranks
) -> None:
    for found in two_ranks.run(train, gather, reduce, hardware):
        assert found["loss"] < loss and max(found["errors"]) < error
        assert gather == "fp32" or max(found["errors"]) > 1e-4, "the policy leaves its mark"
        assert found["keys"], "keys are those of the block that is not sharded"
        assert {n.split("|")[0] for n in found["names"]} == {*BLOCK, "attn"}
        assert {n.split("|")[1] for n in found["names"]} >= {"fprop", "dgrad", "wgrad"}
        # parameters arrive in the policy's format, and nothing is decided wider
        assert found["formats"] == {(gather, gather, gather)}


@pytest.mark.long
def test_a_model_compiled_around_its_sharded_blocks(two_ranks: Ranks) -> None:
    for found in two_ranks.run(whole_model):
        assert {k.split("|")[0] for k in found["keys"]} == {f"blocks.0.{n}" for n in {*BLOCK, "attn"}}
        (text,) = set(found["warnings"])
        assert "SmallGpt: in no graph, and run as written: head." in text and "compile each block" in text


@pytest.mark.slow
def test_sharded_layers_of_torch_that_are_never_compiled(two_ranks: Ranks) -> None:
    for found in two_ranks.run(bare_layers):
        assert found["own"] == set()
        assert any("Bare: no graph has a product, and the model has up, down" in w for w in found["warnings"])
        assert "no graph has a product, and the model has 0, 2" in found["sequential"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ("around DDP", "dsmp.compress_ddp(module"),
        ("inside DDP", "dsmp.compress_ddp(module"),
        ("FSDP", "mp_policy=dsmp.fsdp_policy"),
        ("plain", ""),
    ],
)
def test_a_wire_format_that_reaches_nothing(how: str, remedy: str, two_ranks: Ranks) -> None:
    (said, error), (_, strict) = (two_ranks.run(wire_without_collectives, how, s)[0] for s in (False, True))
    assert error == "" and any("wire has no effect: this graph has no collectives" in w and remedy in w for w in said)
    if remedy:
        assert "NoEffectError: wire has no effect" in strict and remedy in strict
    else:
        assert strict == ""


def test_policies() -> None:
    policy = dsmp.fsdp_policy("bf16")
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    policy = dsmp.fsdp_policy("fp16", reduce="bf16")
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.float16, torch.bfloat16)
    assert policy.output_dtype is torch.float32, "what reads a block's result computes as it is written"
    assert dsmp.fsdp_policy().param_dtype is dsmp.fsdp_policy().output_dtype is None


def test_policies_of_a_plan() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    rules = {"0|*": "bf16", "2|*": "fp16"}
    plan = dsmp.plan(model, (torch.randn(8, 64),), hardware="a100", rules=rules)
    assert dsmp.fsdp_policy(plan, module="0").param_dtype == torch.bfloat16
    assert dsmp.fsdp_policy(plan, module="2").param_dtype == torch.float16
    assert dsmp.fsdp_policy(plan).param_dtype is None, "no 16-bit format has both's range and precision"
    narrow = dsmp.plan(model, (torch.randn(8, 64),), hardware="h800", rules={"*|linear|*": "fp8_e4m3"})
    assert dsmp.fsdp_policy(narrow).param_dtype == torch.bfloat16
    with pytest.raises(UnknownKeyError, match="'1'"):
        dsmp.fsdp_policy(plan, module="1")


@pytest.mark.parametrize(("options", "text"), [(("int8", "fp32"), "gather in 'int8'"), (("bf16", "fp8"), "reduce in")])
def test_policies_that_fully_shard_does_not_have(options: tuple[str, str], text: str) -> None:
    with pytest.raises(FsdpPolicyError, match=rf"{text}.*possible: fp32, bf16"):
        dsmp.fsdp_policy(options[0], reduce=options[1])


def test_policies_from_values_of_the_wrong_kind() -> None:
    with pytest.raises(InvalidOptionError, match=r"'module' got 'blocks.0'.*with a plan"):
        dsmp.fsdp_policy("bf16", module="blocks.0")
    with pytest.raises(FsdpPolicyError, match=r"gather in \['bf16'\]"):
        dsmp.fsdp_policy(["bf16"])  # type: ignore[arg-type]
