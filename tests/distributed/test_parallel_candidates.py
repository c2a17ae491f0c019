"""Plans found on graphs of small models; no process group is needed to find one."""

from __future__ import annotations

import pytest
import torch
import zoo
from llama import Llama
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from dsmp.compiler.joint_capture import capture_joint
from dsmp.errors import IndivisibleError, InvalidOptionError, ShardingPlanError
from dsmp.passes.parallel_candidates import propose

MESH = {"tp": 2}


def candidate(model, inputs, mesh=MESH, **options):
    captured = capture_joint(model, inputs)
    return propose(captured.gm, mesh, captured.names, **options)


def divided(plan, model):
    """Which parameters a plan divides, and along which dimension."""
    found = {n: plan.stored(n)[0] for n, _ in model.named_parameters()}
    return {n: p.dim for n, p in found.items() if isinstance(p, Shard)}


def tokens(length=16):
    return torch.zeros(4, length, dtype=torch.int64), torch.zeros(4, length, dtype=torch.int64)


@pytest.fixture(scope="module")
def llama():
    model = Llama()
    return model, capture_joint(model, tokens())


def test_a_llama_is_divided_as_megatron_does(llama):
    model, captured = llama
    plan = propose(captured.gm, MESH, captured.names).plan
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert divided(plan, model) == {
        "embed.weight": 0,
        **{f"layers.0.{c}.weight": 0 for c in columns},
        "layers.0.attention.o_proj.weight": 1,
        "layers.0.mlp.down_proj.weight": 1,
        "head.weight": 0,
    }


def test_heads_that_cannot_be_divided_stay_whole_and_the_verdict_says_why(llama):
    model, captured = llama
    found = propose(captured.gm, {"tp": 4}, captured.names)  # 4 heads, but 2 kv heads
    assert not any("attention" in name for name in divided(found.plan, model))
    assert "layers.0.mlp.down_proj.weight" in divided(found.plan, model)
    (refused,) = [v.reason for v in found.verdicts if not v and "k_proj" in v.reason]
    assert "'tp'" in refused and "as 2 parts" in refused and "4 ranks" in refused


def test_zero_divides_a_dimension_that_tensor_parallelism_left(llama):
    _, captured = llama
    plan = propose(captured.gm, {"dp": 2, "tp": 2}, captured.names, zero=3).plan
    assert plan.stored("layers.0.mlp.up_proj.weight") == (Shard(1), Shard(0))
    assert plan.computed("layers.0.mlp.up_proj.weight") == (Replicate(), Shard(0))
    assert plan.stored("layers.0.mlp.down_proj.weight") == (Shard(0), Shard(1))
    second = propose(captured.gm, {"dp": 2, "tp": 2}, captured.names, zero=2).plan
    assert second.stored("norm.weight") == (Replicate(), Replicate())
    assert second.gradient("norm.weight") == (Shard(0), Replicate())
    with pytest.raises(InvalidOptionError, match="zero"):
        propose(captured.gm, {"dp": 2}, captured.names, zero=4)


def test_the_batch_is_divided_over_data_dimensions_or_refused(llama):
    _, captured = llama
    plan = propose(captured.gm, {"dp": 4}, captured.names).plan
    assert plan.input("ids") == plan.input("targets") == (Shard(0),)
    with pytest.raises(IndivisibleError, match=r"the batch.*3 ranks.*'dp'"):
        propose(captured.gm, {"dp": 3}, captured.names)
    with pytest.raises(ShardingPlanError, match="rows, cols"):
        propose(captured.gm, {"rows": 2, "cols": 2}, captured.names)


def test_biases_follow_their_columns():
    model = zoo.Mlp()
    assert divided(candidate(model, (torch.zeros(4, 10, 64),)).plan, model) == {
        "up.weight": 0,
        "up.bias": 0,
        "down.weight": 1,
    }


class Conv1d(nn.Module):
    """An MLP whose weights lie as [in, out]."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 16))
        self.scale = nn.Parameter(torch.randn(16))
        self.down = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return (torch.tanh(x @ self.up) * self.scale) @ self.down


def test_weights_that_lie_the_other_way_and_vectors_on_the_way():
    model = Conv1d()
    assert divided(candidate(model, (torch.zeros(4, 8),)).plan, model) == {"up": 1, "scale": 0, "down": 0}


class Mixed(nn.Module):
    """Between two linears a value is added that no linear of the group makes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x) + torch.tanh(x))


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (zoo.FusedQkv(), (2, 8, 64), "split"),
        (zoo.Twice(), (6, 32), "two ways"),
        (Mixed(), (4, 8), "tanh"),
        (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), (4, 8), "layer_norm"),
        (nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8)), (4, 8), "9 cannot be divided"),
        (zoo.ConvNet(), (2, 3, 12, 12), "no linear"),
    ],
    ids=["fused", "twice", "mixed", "norm", "odd", "conv"],
)
def test_what_cannot_be_divided_is_refused_with_its_reason(model, shape, reason):
    with pytest.raises(ShardingPlanError, match=reason) as refused:
        candidate(model, (torch.zeros(shape),))
    assert "'tp'" in str(refused.value)


def test_tied_parameters_have_one_place():
    model = zoo.Tied()
    captured = capture_joint(model, (torch.zeros(2, 6, dtype=torch.int64),))
    names = {n.meta["desc"].target for n in captured.gm.graph.nodes if hasattr(n.meta.get("desc"), "target")}
    assert names == {"embed.weight", "body.weight"}
    assert divided(propose(captured.gm, MESH, captured.names).plan, model)["embed.weight"] == 1
