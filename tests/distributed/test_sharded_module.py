"""A sharded module on a mesh of one rank: nothing is communicated, so what it computes is what the model does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import dsmp
from dsmp.compiler.parallelize import warn_of_strangers
from dsmp.errors import (
    EmptyStateError,
    InputSpecError,
    InvalidOptionError,
    InvalidWireFormatError,
    ShardingPlanError,
    UnknownWireFormatError,
)


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


@pytest.mark.parametrize("trained", [True, False])
def test_inputs_that_require_a_gradient_get_it(trained, model, x, fake_mesh):
    given, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    frozen = Branches().requires_grad_(trained)
    frozen.load_state_dict(model.state_dict())
    sharded = dsmp.parallelize(frozen, fake_mesh(dp=1, tp=1), inputs=({"x": given},))
    sharded({"x": given})["total"].backward()
    model({"x": wanted})["total"].backward()
    torch.testing.assert_close(given.grad, wanted.grad)


def test_a_gradient_that_the_graph_has_not_is_refused(model, x, fake_mesh):
    sharded = dsmp.parallelize(model, fake_mesh(dp=1, tp=1), inputs=({"x": x},))
    needing = {"x": x.clone().requires_grad_()}
    with pytest.raises(InputSpecError, match=r"batch\['x'\].*requires a gradient.*detach"):
        sharded(needing)
    with torch.no_grad():
        assert sharded(needing)["total"].isfinite()


def test_a_result_without_a_gradient_beside_nothing_that_is_saved(x, fake_mesh):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.w.sum(), (2 * self.w).sum()

    sharded = dsmp.parallelize(Constant(), fake_mesh(dp=1, tp=1), inputs=(x,))
    sharded(x)[0].backward()
    assert torch.equal(sharded.w.grad.to_local(), torch.ones(8))


def test_a_mode_that_the_graph_was_not_made_in_is_warned_of(model, x, fake_mesh, caplog):
    sharded = dsmp.parallelize(model, fake_mesh(dp=1, tp=1), inputs=({"x": x},))
    sharded.train()
    assert "graph was made" not in caplog.text
    sharded.eval()
    assert "made in training mode, and is the same in evaluation mode" in caplog.text


def test_one_tensor_is_one_input(x, fake_mesh):
    whole = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    sharded = dsmp.parallelize(whole, fake_mesh(dp=1, tp=1), inputs=x[:1])
    assert sharded(x[:1]).shape == (1, 8)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"mesh": None}, r"'mesh' got None.*DeviceMesh"),
        ({"model": len}, "'model' got .*nn.Module"),
        ({"zero": True}, "'zero' got True"),
        ({"plan": dsmp.ShardingPlan(mesh={"dp": 1, "tp": 1}), "zero": 3}, "'zero' got 3.*'auto' only"),
        ({"plan": dsmp.ShardingPlan(mesh={"dp": 1, "tp": 1}), "sequence": True}, "'sequence' got True.*'auto' only"),
    ],
)
def test_arguments_of_the_wrong_kind_and_without_effect_are_refused(change, match, model, x, fake_mesh):
    given = {"model": model, "mesh": fake_mesh(dp=1, tp=1), **change}
    with pytest.raises(InvalidOptionError, match=match):
        dsmp.parallelize(inputs=({"x": x},), **given)


@pytest.mark.parametrize(
    "wire, error",
    [(5, InvalidWireFormatError), ({"dp": None}, InvalidWireFormatError), (["int8"], InvalidWireFormatError)],
)
def test_wire_formats_that_are_no_text(wire, error, model, x, fake_mesh):
    with pytest.raises(error, match="allowed: a name"):
        dsmp.parallelize(model, fake_mesh(dp=1, tp=1), inputs=({"x": x},), wire=wire)


def test_shards_of_gradients_along_dimensions_that_there_are_not(model, x, fake_mesh):
    rule = dsmp.ShardingRule(pattern="up.weight", gradients={"dp": "shard(7)"})
    with pytest.raises(ShardingPlanError, match=r"gradient of 'up\.weight' has 2 dimensions.*'dp' wants 7"):
        dsmp.parallelize(model, fake_mesh(dp=1, tp=1), inputs=({"x": x},), rules=[rule])


@pytest.mark.parametrize("sizes, option", [({"tp": 2}, {"zero": 3}), ({"dp": 2}, {"sequence": True})])
def test_what_no_mesh_dimension_takes_is_refused(sizes, option, model, x, fake_mesh):
    with pytest.raises(InvalidOptionError, match=f"{next(iter(option))!r} got .*on a mesh of {next(iter(sizes))}"):
        dsmp.parallelize(model, fake_mesh(**sizes), inputs=({"x": x},), **option)


def test_two_mesh_dimensions_that_divide_the_batch(model, x, fake_mesh):
    with pytest.raises(ShardingPlanError, match="dp and ep would both divide the batch"):
        dsmp.parallelize(model, fake_mesh(dp=2, ep=2), inputs=({"x": x},))


def test_collectives_of_a_plan_that_the_graph_lacks_are_named(caplog):
    rank = SimpleNamespace(collectives=[])
    warn_of_strangers({"up|dgrad|mm|0": "bf16"}, rank)
    assert "1 collectives of the plan are not in the graph, and are ignored: up|dgrad|mm|0" in caplog.text
