"""Calibration of models of every kind: what they return, what they are called with, how they are written."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import dsmp
from dsmp.compiler import recording
from dsmp.compiler.batches import Batch
from dsmp.compiler.capture import capture
from dsmp.compiler.objective import Objective
from dsmp.errors import CalibrationError, InvalidOptionError, LossError
from dsmp.passes import sample_layout, sensitivity
from dsmp.passes.keys import key_of
from dsmp.passes.plan import PrecisionPlan
from dsmp.passes.plan_fields import GEMM_CLASSES

LABELS = torch.arange(8)


def mlp(classes: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, classes)).eval()


def x(count: int = 8) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(count))


class Returning(nn.Module):
    """An MLP with its output wrapped by a function."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = mlp()
        self.wrap = wrap

    def forward(self, inputs: Tensor) -> Any:
        return self.wrap(self.body(inputs))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 10), nn.Linear(32, 5)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(inputs))
        return self.left(hidden), self.right(hidden)


@dataclasses.dataclass
class Answer:
    logits: Tensor
    classes: Tensor


def calibrated(model: Any, batches: Any, **options: Any) -> PrecisionPlan:
    given = {"hardware": "h800", "cost": "bits", "budget": 0.02, "training": False, **options}
    return dsmp.plan(model, calibration=batches, **given)


def lowered(plan: PrecisionPlan) -> list[str]:
    return [d.key for d in plan if d.op in GEMM_CLASSES and d.compute != d.traced]


# ---- what models return


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: {"classes": y.argmax(-1), "logits": y, "count": 3},
        lambda y: Answer(logits=y, classes=y.argmax(-1)),
        lambda y: (None, y, (y.sum(),)),
        lambda y: y.square().mean(),
        lambda y: (y[:3].tanh(), y.tanh(), y.mean()),
    ],
    ids=["dict", "dataclass", "nested", "scalar", "of several sizes"],
)
def test_any_output_can_be_measured(wrap, training):
    plan = calibrated(Returning(wrap), [(x(),)], training=training)
    assert lowered(plan) and plan.solution.measured <= plan.solution.limit


def test_classes_may_be_ruled_out():
    model = Returning(lambda y: y.masked_fill(torch.arange(10) > 6, -torch.inf))
    assert lowered(calibrated(model, [(x(),)], drift="kl"))
    with pytest.raises(CalibrationError, match="not finite"):
        calibrated(model, [(x(),)], drift="l2")


def test_every_head_of_a_model_is_trained():
    plan = calibrated(TwoHeads(), [(x(),)], training=True)
    for name in ("left", "right"):
        assert {f"{name}|{p}|linear|0" for p in ("fprop", "dgrad", "wgrad")} <= set(lowered(plan))


def test_what_the_loss_does_not_depend_on_stays_as_traced():
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output[0], target)

    plan = calibrated(TwoHeads(), [(x(), LABELS)], training=True, loss=loss)
    assert "left|fprop|linear|0" in lowered(plan) and "right|fprop|linear|0" not in lowered(plan)
    scores = dsmp.measure_scores(TwoHeads(), [(x(), LABELS)], loss=loss, hardware="h800")
    again = dsmp.plan(TwoHeads(), (x(),), hardware="h800", cost="bits", budget=0.02, scores=scores)
    assert "left|fprop|linear|0" in lowered(again) and "right|fprop|linear|0" not in lowered(again)


def test_a_loss_may_have_parameters_of_its_own():
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(10, 10)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.weight(output), target)

    assert lowered(calibrated(mlp(), [(x(), LABELS)], training=True, loss=Projected()))


def test_a_loss_that_depends_on_nothing_is_named():
    with pytest.raises(CalibrationError, match="does not depend on any parameter"):
        calibrated(mlp(), [(x(), LABELS)], training=True, loss=lambda y, t: F.cross_entropy(y.detach(), t))


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_loss_that_no_budget_is_a_share_of_is_named(value):
    def loss(output: Tensor, _target: Tensor) -> Tensor:
        return output.sum() * 0 + value

    with pytest.raises(LossError, match="above 0"):
        calibrated(mlp(), [(x(), LABELS)], loss=loss)
    assert lowered(calibrated(mlp(), [(x(), LABELS)], loss=loss, drift="l2"))


def test_a_drift_that_has_no_effect_is_refused():
    with pytest.raises(InvalidOptionError, match="gradients"):
        calibrated(mlp(), [(x(),)], drift="kl", training=True)
    for wrap in (lambda y: y.mean(-1), lambda y: y.mean()):
        with pytest.raises(CalibrationError, match="distributions over classes"):
            calibrated(Returning(wrap), [(x(),)], drift="kl")


# ---- what models are called with


def test_a_batch_without_samples_is_named():
    for batches, number in ([(x(0),)], 1), ([(x(),), (x(0),)], 2):
        with pytest.raises(CalibrationError, match=f"batch {number} holds no samples"):
            calibrated(mlp(), batches)


def test_a_batch_that_cannot_be_made_is_named():
    def batches():
        yield (x(),)
        raise ValueError("no such file")

    with pytest.raises(CalibrationError, match="batch 2 could not be made: ValueError: no such file"):
        calibrated(mlp(), batches())


def test_a_batch_that_does_not_fit_is_named_with_a_loss_as_well():
    with pytest.raises(CalibrationError, match="batch 2 does not fit"):
        calibrated(mlp(), [(x(), LABELS), (torch.randn(8, 31), LABELS)], loss=nn.CrossEntropyLoss())


def test_attention_masks_of_minus_infinity_are_no_mistake():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 16)

        def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
            y = self.project(inputs)
            return (y @ y.mT + mask).softmax(-1) @ y

    mask = torch.full((2, 6, 6), -torch.inf).triu(1)
    assert lowered(calibrated(Masked(), [(torch.randn(2, 6, 16), mask)], budget=0.1))


@pytest.mark.parametrize("training", [True, False])
def test_inference_mode_is_no_obstacle(training):
    model = mlp()
    with torch.inference_mode():
        batches = [(torch.randn(8, 32),)]
        assert lowered(calibrated(model, batches, training=training))
    assert lowered(calibrated(model, batches, training=training))


def test_samples_and_entropies_count_once():
    model = mlp()
    scores = dsmp.measure_scores(model, [(x(6),), (x(10),)], hardware="h800", training=False)
    with torch.no_grad():
        entropy = torch.distributions.Categorical(logits=model(torch.cat([x(6), x(10)]))).entropy()
    assert scores.samples == 16 and scores.loss == pytest.approx(float(entropy.mean()), rel=1e-5)


# ---- how models are written


def functions() -> dict[str, Callable[[Tensor], Tensor]]:
    model, table = mlp(), {"a": mlp()}

    def default(inputs: Tensor, used: nn.Module = model) -> Tensor:
        return used(inputs).square().mean()

    return {
        "closure": lambda inputs: model(inputs).square().mean(),
        "item of a dict": lambda inputs: table["a"](inputs).square().mean(),
        "default": default,
        "bound method": model.forward,
    }


@pytest.mark.parametrize("name", functions())
def test_functions_are_trained_like_modules(name):
    plan = calibrated(functions()[name], [(x(),)], training=True)
    assert {d.phase for d in plan if d.key in lowered(plan)} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("name", ["convnet", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "mixtral"))])
def test_gradients_of_zero_do_not_decide(name):
    """Biases of keys and before a norm have a gradient of rounding noise; experts without tokens have none at all."""
    case = zoo.build(name)
    plan = calibrated(case.model, [dict(case.kwargs) or tuple(case.args)], training=True, budget=0.05)
    assert plan.solution.measured <= plan.solution.limit
    gemms = [d for d in plan if d.op in GEMM_CLASSES]
    assert len(lowered(plan)) > 0.8 * len(gemms)


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), None])
def test_a_training_step_has_the_keys_of_its_model(loss):
    """Nodes of the loss come between those of the model's forward and backward pass and take none of their keys."""
    model = nn.Sequential(mlp(), nn.Linear(10, 10))

    def forward(inputs: Tensor) -> Tensor:  # residual and activation lie outside of all modules
        hidden = model[0](inputs)
        return model[1](F.silu(hidden)) + hidden

    def keyed(graph: Any) -> dict[str, str]:
        return {str(key_of(n)): str(n.target) for n in graph.gm.graph.nodes if key_of(n) is not None}

    own = keyed(capture(forward, (x(),), training=True).graphs[0])
    batch = Batch(args=(x(),), kwargs={}, target=LABELS)
    step = keyed(next(iter(recording.record_calls(forward, [batch], Objective(loss)))).graph)
    assert {k: v for k, v in step.items() if not k.startswith("(loss)")} == own


# ---- what calibration promises


def test_the_measured_drift_of_gradients_is_that_of_the_compiled_step():
    model = TwoHeads().train()
    plan = calibrated(
        model,
        [(x(), LABELS)],
        training=True,
        budget=0.01,
        loss=lambda y, t: F.cross_entropy(y[0], t) + y[1].exp().mean(),
    )
    compiled = torch.compile(model, backend="dsmp", options={"plan": plan, "executor": "eager", "strict": True})
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        left, right = run(x())
        (F.cross_entropy(left, LABELS) + right.exp().mean()).backward()
        gradients.append([p.grad.double().clone() for p in model.parameters()])
    errors = [float((a - b).square().sum() / a.square().sum()) for a, b in zip(*gradients, strict=True)]
    assert plan.solution.measured == pytest.approx(sum(errors) / len(errors), rel=1e-3)


@pytest.mark.parametrize("drift", ["kl", "l2"])
def test_the_measured_drift_of_outputs_is_that_of_the_compiled_model(drift):
    model = mlp()
    plan = calibrated(model, [(x(),), (x(5),)], drift=drift)
    compiled = torch.compile(model, backend="dsmp", options={"plan": plan, "executor": "eager", "strict": True})
    with torch.no_grad():
        exact, low = (torch.cat([run(x()), run(x(5))]).double() for run in (model, compiled))
    if drift == "kl":
        found = F.kl_div(low.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    else:
        found = (exact - low).square().sum(1) / exact.square().sum(1)
    assert plan.solution.measured == pytest.approx(float(found.mean()), rel=1e-4)
    assert plan.solution.p95 == pytest.approx(float(found.quantile(0.95)), rel=1e-4)
    chosen = {d.key: (d.compute, d.recipe, d.accumulate, d.output) for d in plan}
    total = sum(
        c.drift
        for key, found in plan.program.candidates.items()
        for c in found
        if (c.compute, c.recipe, c.accumulate, c.output) == chosen[key]
    )
    assert plan.solution.drift == pytest.approx(total, rel=1e-9)


def state(model: nn.Module) -> list[Any]:
    """All that a calibration may not change."""
    return [
        {k: v.clone().tolist() for k, v in model.state_dict().items()},
        [(p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        [sorted(m.__dict__) for m in model.modules()],
        [m.training for m in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", ["nowhere", "loss", "record", "score", "layout"])
def test_an_interrupted_calibration_leaves_the_model_as_it_was(place, training, monkeypatch):
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 10)).train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[0].bias.requires_grad_(False)
    calls = [0]

    def interrupting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += not (place == "loss" and torch.compiler.is_compiling())  # being traced is no call
            if calls[0] == 2:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    targets = {
        "record": (recording, "copy_graph" if training else "key_graph"),
        "score": (sensitivity, "round_operands"),
    }
    targets["layout"] = (sample_layout, "_layout")
    loss = interrupting(F.cross_entropy) if place == "loss" else F.cross_entropy
    if place in targets:
        monkeypatch.setattr(*targets[place], interrupting(getattr(*targets[place])))
    before = state(model)
    # batches of two sizes, so that each of them is recorded
    batches = [(x(8), torch.arange(8)), (x(6), torch.arange(6))]
    if place == "nowhere" or (place == "layout" and training):
        calibrated(model, batches, training=training, loss=loss)
    else:
        with pytest.raises(KeyboardInterrupt):
            calibrated(model, batches, training=training, loss=loss)
    assert state(model) == before
