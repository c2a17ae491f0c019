"""A sharded module on a mesh of one rank: nothing is communicated, so what it computes is what the model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import dsmp
from dsmp.errors import EmptyStateError, InputSpecError, InvalidOptionError, ShardingPlanError, UnknownWireFormatError


class Branches(nn.Module):
    """Takes a mapping, a flag and a constant, gives a mapping; holds a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.offset = torch.linspace(0, 1, 8)

    def forward(self, batch, twice=False, factor=1.0):
        y = self.down(torch.relu(self.up(batch["x"]))) + self.offset
        y = y * factor
        return {"y": y * 2 if twice else y, "total": y.sum()}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Branches()


@pytest.fixture(scope="module")
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def test_inputs_and_results_keep_their_form(model, x, fake_mesh):
    sharded = dsmp.parallelize(model, fake_mesh(dp=1, tp=1), inputs={"batch": {"x": x}, "twice": True})
    result, wanted = sharded(batch={"x": x}, twice=True), model({"x": x}, twice=True)
    assert isinstance(result["y"], DTensor) and result["y"].placements == (Shard(0), Replicate())
    torch.testing.assert_close(result["y"].to_local(), wanted["y"])
    torch.testing.assert_close(result["total"], wanted["total"])
    (result["y"].full_tensor().square().sum() + result["total"]).backward()
    (wanted["y"].square().sum() + wanted["total"]).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad.full_tensor(), p.grad)


def test_a_model_without_gradients_runs_its_inference_graph(model, x, fake_mesh):
    frozen = Branches().requires_grad_(False)
    frozen.load_state_dict(model.state_dict())
    sharded = dsmp.parallelize(frozen, fake_mesh(dp=1, tp=1), inputs=({"x": x},))
    result = sharded({"x": DTensor.from_local(x, sharded.mesh, [Shard(0), Replicate()])})
    torch.testing.assert_close(result["y"].to_local(), model({"x": x})["y"].detach())
    assert not result["total"].requires_grad


def test_other_inputs_than_those_it_was_sharded_for_are_refused(model, x, fake_mesh):
    sharded = dsmp.parallelize(model, fake_mesh(dp=1, tp=1), inputs={"batch": {"x": x}, "factor": 0.5})
    with pytest.raises(InputSpecError, match="form"):
        sharded({"x": x})
    with pytest.raises(InputSpecError, match=r"'factor' was 0\.5"):
        sharded(batch={"x": x}, factor=0.25)
    with pytest.raises(InputSpecError, match=r"batch\['x'\].*float64"):
        sharded(batch={"x": x.double()}, factor=0.5)


def test_parameters_on_the_meta_device_stay_there_until_they_are_loaded(model, x, fake_mesh):
    with torch.device("meta"):
        empty = Branches()
    empty.offset = model.offset
    sharded = dsmp.parallelize(empty, fake_mesh(dp=1, tp=1), inputs=({"x": x},))
    assert all(p.to_local().is_meta for p in sharded.parameters())
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in sharded.named_parameters():
            p.to_local().copy_(model.get_parameter(name))
    torch.testing.assert_close(sharded({"x": x})["total"], model({"x": x})["total"])


def test_empty_buffers_that_no_checkpoint_fills_are_named(x, fake_mesh, caplog):
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    empty[1].register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    empty.register_buffer("saved", torch.empty(3, device="meta"))
    sharded = dsmp.parallelize(empty, fake_mesh(dp=1, tp=1), inputs=(x,))
    assert "fill after to_empty(): 1.table" in caplog.text
    with pytest.raises(EmptyStateError, match=r"0\.weight, 0\.bias.*to_empty"):
        sharded(x)


def test_rules_win_over_what_was_found(model, x, fake_mesh):
    mesh = fake_mesh(dp=1, tp=2)
    found = dsmp.parallelize(model, mesh, inputs=({"x": x},))
    assert found.up.weight.placements == (Replicate(), Shard(0))
    rule = dsmp.ShardingRule(pattern="up.*", placements={"tp": "replicate"})
    ruled = dsmp.parallelize(model, mesh, inputs=({"x": x},), rules=[rule])
    assert ruled.up.weight.placements == (Replicate(), Replicate())
    assert ruled.down.weight.placements == (Replicate(), Shard(1))


def test_plans_that_do_not_fit_are_refused(model, x, fake_mesh):
    mesh = fake_mesh(dp=1, tp=2)
    with pytest.raises(ShardingPlanError, match="did you mean up"):
        rule = dsmp.ShardingRule(pattern="upp.weight", placements={"tp": "shard(0)"})
        dsmp.parallelize(model, mesh, inputs=({"x": x},), rules=[rule])
    with pytest.raises(ShardingPlanError, match="mesh"):
        dsmp.parallelize(model, mesh, dsmp.ShardingPlan(mesh={"tp": 2}), inputs=({"x": x},))
    with pytest.raises(ShardingPlanError, match="'auto'"):
        dsmp.parallelize(model, mesh, "best", inputs=({"x": x},))


def test_the_model_is_left_as_it_was(model, x, fake_mesh):
    before = {n: v.clone() for n, v in model.state_dict().items()}
    sharded = dsmp.parallelize(model, fake_mesh(dp=1, tp=1), inputs=({"x": x},))
    with torch.no_grad():
        for p in sharded.parameters():
            p.to_local().add_(1.0)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_wire_formats_are_checked_before_anything_is_traced(model, x, fake_mesh):
    mesh = fake_mesh(dp=1, tp=1)
    with pytest.raises(InvalidOptionError, match=r"'wire' got .*by mesh dimension \(dp, tp\)"):
        dsmp.parallelize(model, mesh, inputs=({"x": x},), wire={"pp": "int8"})
    with pytest.raises(UnknownWireFormatError, match="int7"):
        dsmp.parallelize(model, mesh, inputs=({"x": x},), wire="int7")
