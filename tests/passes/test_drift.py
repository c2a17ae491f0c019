from __future__ import annotations

import pytest
import torch
from torch import nn

import dsmp
from dsmp.passes.drift import Metric, find_metric

SHAPES = {"kl": (3, 4, 7), "bernoulli": (3, 5), "l2": (3, 4, 7), "gradients": (6, 7)}


def metric(kind: str, form: str, count: int = 1) -> Metric:
    return Metric(kind=kind, outputs=tuple(range(count)), form=form)


def outputs_of(kind: str, form: str, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(SHAPES[kind], generator=torch.Generator().manual_seed(seed))
    if form != "probabilities":
        return logits
    return logits.softmax(-1) if kind == "kl" else logits.sigmoid()


CASES = [
    ("kl", "logits"),
    ("kl", "probabilities"),
    ("bernoulli", "logits"),
    ("bernoulli", "probabilities"),
    ("l2", "values"),
    ("gradients", "values"),
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_cotangents_measure_the_drift_of_a_small_change(kind, form):
    """kappa * E[(u . dy)^2], averaged over samples, is the drift that a direct comparison finds."""
    m = metric(kind, form)
    y = outputs_of(kind, form).double()
    change = 1e-4 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if form == "probabilities" and kind == "kl":
        change = y * (change - (y * change).sum(-1, keepdim=True))  # stays a distribution
    true = m.per_sample([y], [y + change]).mean()
    generator = torch.Generator().manual_seed(2)
    rows = 1 if kind == "gradients" else y.shape[0]
    squares = []
    for _ in range(4000):
        u = m.cotangents([y], generator)[0]
        squares.append((u * change).reshape(rows, -1).sum(1).square())
    assert m.kappa * torch.stack(squares).mean() == pytest.approx(float(true), rel=0.12)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_no_change_is_no_drift_and_more_change_is_more(kind, form):
    m = metric(kind, form)
    y = outputs_of(kind, form)
    noise = 0.05 * torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) * y.abs()
    small, large = (m.per_sample([y], [(y + k * noise)]) for k in (0.1, 1.0))
    assert torch.equal(m.per_sample([y], [y.clone()]), torch.zeros_like(small))
    assert float(small.mean()) < float(large.mean())
    assert small.shape == (1 if kind == "gradients" else 3,)


def test_kl_against_torch():
    a, b = outputs_of("kl", "logits", 0).double(), outputs_of("kl", "logits", 1).double()
    want = nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none")
    got = metric("kl", "logits").per_sample([a], [b])
    assert torch.allclose(got, want.sum(-1).mean(1))


def test_a_run_that_is_not_finite_is_infinitely_far():
    y = outputs_of("kl", "logits")
    bad = y.clone()
    bad[1, 2, 3] = float("nan")
    drift = metric("kl", "logits").per_sample([y], [bad])
    assert drift.isinf().tolist() == [False, True, False]


def test_entropy_is_that_of_torch_distributions():
    y = outputs_of("kl", "logits")
    want = torch.distributions.Categorical(logits=y.double()).entropy().mean(1)
    assert torch.allclose(metric("kl", "logits").entropy([y]), want)
    b = outputs_of("bernoulli", "logits")
    assert torch.allclose(
        metric("bernoulli", "logits").entropy([b]),
        torch.distributions.Bernoulli(logits=b.double()).entropy().sum(1),
        atol=1e-6,
    )
    assert metric("l2", "values").entropy([y]) is None


def test_several_outputs_are_averaged():
    a, b = outputs_of("l2", "values", 0), outputs_of("l2", "values", 1)
    both = metric("l2", "values", 2).per_sample([a, b], [a + 0.1, b])
    assert torch.allclose(both, metric("l2", "values").per_sample([a], [a + 0.1]) / 2)


class Ends(nn.Module):
    def __init__(self, end: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.end = end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.linear(x))


@pytest.mark.parametrize(
    ("model", "kind", "form"),
    [
        (Ends(nn.Identity()), "kl", "logits"),
        (Ends(nn.Softmax(-1)), "kl", "probabilities"),
        (Ends(nn.LogSoftmax(-1)), "kl", "logits"),
        (Ends(nn.Sigmoid()), "bernoulli", "probabilities"),
        (Ends(nn.LayerNorm(6)), "l2", "values"),
        (Ends(nn.Identity(), width=1), "l2", "values"),
    ],
)
def test_what_a_models_outputs_call_for(model, kind, form):
    graph = dsmp.capture(model, (torch.randn(5, 4),), training=False).graphs[0]
    found = find_metric(graph.gm, None, 1)
    assert (found.kind, found.form, found.outputs) == (kind, form, (0,))
    assert find_metric(graph.gm, "l2", 1).kind == "l2"


def test_a_training_step_is_judged_by_its_gradients():
    graph = dsmp.capture(Ends(nn.Identity()), (torch.randn(5, 4),)).graphs[0]
    found = find_metric(graph.gm, None, 1)
    assert found.kind == "gradients"
    assert 0 not in found.outputs and len(found.outputs) == 2


def test_outputs_that_do_not_count_samples_are_compared_as_a_whole():
    """And measured so: the projections over samples add up to the drift of the whole."""
    m = metric("l2", "values", 3)
    generator = torch.Generator().manual_seed(0)
    outputs = [
        torch.randn((*shape, 1), generator=generator, dtype=torch.float64)[..., 0] for shape in ((8, 5), (3, 4), ())
    ]
    changes = [1e-3 * torch.randn((*y.shape, 1), generator=generator, dtype=torch.float64)[..., 0] for y in outputs]
    drift = m.per_sample(outputs, [y + d for y, d in zip(outputs, changes, strict=True)])
    whole = [(d.square().sum() / y.square().sum()) for y, d in zip(outputs, changes, strict=True)][1:]
    assert m.samples(outputs) == 8 and drift.shape == (8,)
    first = changes[0].square().sum(1) / outputs[0].square().sum(1)
    assert torch.allclose(drift, (first + sum(whole)) / 3)
    squares = [0.0, 0.0]
    for _ in range(4000):
        cotangents = m.cotangents(outputs, generator)
        for i in (0, 1):
            # the change of the whole, had it come from one sample alone
            squares[i] += float((cotangents[i + 1] * changes[i + 1]).sum() ** 2) / 8 / 4000
    assert squares == pytest.approx([float(w) / 3 for w in whole], rel=0.12)


def test_gradients_of_rounding_noise_do_not_count():
    m = metric("gradients", "values", 3)
    gradients = [torch.randn(16, 8), 1e-8 * torch.randn(16), 1e-3 * torch.randn(8, 8)]
    other = [gradients[0] * 1.01, torch.randn(16), gradients[2] * 1.01]
    assert m.per_sample(gradients, other) == pytest.approx([1e-4], rel=1e-3)
    found = m.cotangents(gradients, torch.Generator().manual_seed(0))
    assert found[1] is None and found[0] is not None and found[2] is not None
    other[1][3] = float("nan")
    assert m.per_sample(gradients, other).isinf().all()
    nothing = [torch.zeros(3), torch.zeros(2), torch.zeros(2)]
    assert m.per_sample(nothing, nothing).tolist() == [0.0] and m.cotangents(nothing, torch.Generator()) == [None] * 3


def test_classes_that_are_ruled_out_have_no_part_in_kl():
    y = outputs_of("kl", "logits").double()
    ruled_out = y.clone()
    ruled_out[..., 5:] = -torch.inf
    m = metric("kl", "logits")
    assert torch.allclose(
        m.per_sample([ruled_out], [ruled_out + y * 0.1]), m.per_sample([y[..., :5]], [y[..., :5] * 1.1])
    )
    assert torch.allclose(m.entropy([ruled_out]), m.entropy([y[..., :5]]))


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (lambda y: y.softmax(-1), "probabilities"),
        (lambda y: y.log_softmax(2), "logits"),
        (lambda y: y.softmax(1), None),
        (lambda y: y.log_softmax(1), None),
        (lambda y: y.softmax(-1).mT, None),
        (lambda y: y.softmax(-1).flatten(1), None),
        (lambda y: y.softmax(-1).reshape(-1, 5), "probabilities"),
        (lambda y: y, "logits"),
        (lambda y: y.mT, None),
        (lambda y: y.reshape(2, 30), None),
    ],
)
def test_distributions_lie_along_the_last_dimension(body, form):
    linear = nn.Linear(4, 5)
    graph = dsmp.compiler.capture.capture(lambda x: body(linear(x)), (torch.randn(2, 6, 4),), training=False).graphs[0]
    found = find_metric(graph.gm, None, 1)
    assert found == Metric(kind="kl" if form else "l2", outputs=(0,), form=form or "values")


def test_convolutions_have_no_classes():
    conv = nn.Conv1d(4, 6, 3)
    graph = dsmp.compiler.capture.capture(conv, (torch.randn(2, 4, 9),), training=False).graphs[0]
    assert find_metric(graph.gm, None, 1).kind == "l2"
