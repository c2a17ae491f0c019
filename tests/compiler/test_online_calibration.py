"""`torch.compile(model, backend="dsmp", options={"budget": ...})`: calibrate on the first batch while compiling."""

from __future__ import annotations

import pytest
import torch
from test_calibrated import batches, model
from torch import nn

import dsmp
from dsmp.errors import BudgetError, InvalidOptionError


def compiled(m: nn.Module, **options: object) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(m, backend="dsmp", options={"hardware": "h800", "executor": "eager", **options})


def test_a_training_step_is_calibrated_on_its_first_batch(tmp_path):
    m = model().train()
    before = {k: v.clone() for k, v in m.state_dict().items()}
    state = torch.get_rng_state()
    c = compiled(m, budget="2%", save_plan=tmp_path / "plan.json")
    out = c(*batches()[0])
    assert torch.equal(state, torch.get_rng_state())
    out.logsumexp(-1).sum().backward()
    plan = dsmp.plan_of(c)
    assert plan.solution.measured <= 0.02 and plan.program.drift == "gradients"
    assert plan.hardware == "h800" and plan.model.source == "Mlp"
    assert dsmp.load_plan(tmp_path / "plan.json") == plan
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in m.parameters())
    offline = dsmp.plan(m, batches()[0], hardware="h800")
    assert set(plan.by_key) == set(offline.by_key)


def test_inference_is_calibrated_too():
    c = compiled(model(), budget=0.02, drift="kl")
    with torch.no_grad():
        c(*batches()[0])
    plan = dsmp.plan_of(c)
    assert plan.program.drift == "kl" and plan.solution.samples == 16
    assert plan.solve(budget=0.5).solution.time_us <= plan.solution.time_us


def test_buffers_of_the_model_are_written_once():
    m = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16)).train()
    twin = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16)).train()
    twin.load_state_dict(m.state_dict())
    c = compiled(m, budget=0.0)
    x = batches()[0][0]
    c(x), twin(x)
    assert int(m[1].num_batches_tracked) == 1
    assert torch.allclose(m[1].running_mean, twin[1].running_mean, atol=1e-6)


def test_dynamic_shapes():
    m = model()
    c = torch.compile(
        m, backend="dsmp", dynamic=True, options={"hardware": "h800", "executor": "eager", "budget": 0.02}
    )
    with torch.no_grad():
        for size in (16, 24):
            x = torch.randn(size, 32)
            assert torch.allclose(c(x), m(x), atol=0.1)
    assert dsmp.plan_of(c).solution is not None


def test_a_function_has_a_plan_too():
    linear = nn.Linear(32, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return linear(x).square().mean()

    c = torch.compile(step, backend="dsmp", options={"hardware": "h800", "executor": "eager"})
    c(batches()[0][0])
    plan = dsmp.plan_of(c)
    assert plan.model.source == "step" and plan.solution is None
    assert any(d.op == "linear" for d in plan)


class Returning(nn.Module):
    """A linear layer whose outputs are views of each other, buffers and inputs that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        y = self.linear(x)
        self.seen.add_(y.detach().mean(0))
        return y.view(-1), self.norm(y), y.t(), x, x.argmax(-1)


@pytest.mark.parametrize("written", [False, True])
def test_outputs_may_be_views_and_inputs_written_to(written):
    c = compiled(Returning(), budget=0.05)
    x = batches()[0][0].clone()
    out = c(x.requires_grad_() * 1 if written else x)
    out[1].square().sum().backward()
    plan = dsmp.plan_of(c)
    assert plan.program.drift == "gradients" and plan.solution.measured <= 0.05
    assert {d.phase for d in plan if d.op == "linear"} >= {"fprop", "wgrad"}


def test_every_head_is_measured():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(32, 10), nn.Linear(32, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(x), self.right(x)

    c = compiled(Heads(), budget=0.1)
    sum(y.square().mean() for y in c(batches()[0][0])).backward()
    program = dsmp.plan_of(c).program
    assert all(c.drift is not None for k in program.keys if "wgrad" in k for c in program.candidates[k][:2])


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(32, 8), lambda: nn.Sequential(nn.Linear(32, 8), nn.ReLU())], ids=["linear", "sequential"]
)
def test_modules_of_torch_have_plans(make):
    c = compiled(make())
    c(batches()[0][0])
    assert any(d.op == "linear" for d in dsmp.plan_of(c))
    m = make()
    torch._dynamo.reset()
    m.compile(backend="dsmp", options={"hardware": "h800", "executor": "eager"})
    m(batches()[0][0])
    assert any(d.op == "linear" for d in dsmp.plan_of(m))


def test_plan_of_names_what_has_none():
    for thing in (model(), print, compiled(model())):
        with pytest.raises(InvalidOptionError, match="first call"):
            dsmp.plan_of(thing)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": "lots"}, BudgetError, "cannot be read"),
        ({"memory": "1GB"}, InvalidOptionError, "with a budget"),
        ({"budget": 0.1, "drift": "mse"}, InvalidOptionError, "bernoulli"),
        ({"budget": 0.1, "save_plan": 3}, InvalidOptionError, "path"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as caught:
        compiled(model(), **options)(*batches()[0])
    assert isinstance(caught.value.inner_exception, error)


def test_another_model_of_the_class_is_measured_by_itself():
    first, second = model(), model()
    second.head.weight.data.mul_(3.0)
    torch._dynamo.reset()
    options = {"hardware": "h800", "executor": "eager", "budget": 0.02}
    both = [torch.compile(m, backend="dsmp", options=options) for m in (first, second)]
    with torch.no_grad():
        for c in (*both, *both):
            c(*batches()[0])
    plans = [dsmp.plan_of(c) for c in both]
    assert plans[0].program.loss != pytest.approx(plans[1].program.loss, rel=0.01)


def test_evaluation_between_epochs_leaves_the_plan_of_training(tmp_path):
    m = model().train()
    c = compiled(m, budget="2%", save_plan=tmp_path / "plan.json")
    c(*batches()[0]).sum().backward()
    trained = dsmp.plan_of(c)
    m.eval()
    with torch.no_grad():
        c(*batches()[0])
    assert dsmp.plan_of(c) == trained == dsmp.load_plan(tmp_path / "plan.json")
    assert any(d.phase == "wgrad" for d in trained)
