from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dsmp.compiler.batches import Batch
from dsmp.compiler.objective import Objective
from dsmp.compiler.recording import RecordedCall, record_calls
from dsmp.passes.differentiable import run
from dsmp.passes.drift import Metric, find_metric
from dsmp.passes.gemm import gemm_op
from dsmp.passes.keys import key_of
from dsmp.passes.labels import gemm_label
from dsmp.passes.sensitivity import SensitivityScorer, round_operands, weight_operands


class Block(nn.Module):
    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(a)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self, time_major: bool = False) -> None:
        super().__init__()
        self.time_major = time_major
        self.embed = nn.Linear(40, 48)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(48, 9)

    def forward(self, x: Tensor) -> Tensor:
        # Time-major, the rows of the first product are time step by time step.
        y = self.embed(x.transpose(0, 1)).transpose(0, 1) if self.time_major else self.embed(x)
        return self.head(self.blocks(y).mean(1))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.mid = nn.Conv2d(16, 32, 3, stride=2, groups=4)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.stem(x).relu()).relu().mean((2, 3)))


def recorded(model: nn.Module, shape: tuple[int, ...], batches: int = 4, training: bool = False) -> list[RecordedCall]:
    generator = torch.Generator().manual_seed(7)
    data = [Batch(args=(torch.randn(shape, generator=generator),), kwargs={}) for _ in range(batches)]
    return list(record_calls(model, data, Objective() if training else None))


def scores(calls: list[RecordedCall], labels: set[str], draws: int = 4) -> tuple[dict[str, dict[str, float]], Metric]:
    metric = find_metric(calls[0].graph.gm, None, calls[0].forward_outputs)
    scorer = SensitivityScorer(measure=lambda key, label: label in labels, draws=draws)
    for call in calls:
        scorer.add(call.graph.gm, call.inputs, metric, call.graph.parameters, varying=call.varying, ranges=True)
    return {k: dict(s.drifts) for k, s in scorer.results(metric).items()}, metric


def truth(calls: list[RecordedCall], metric: Metric, key: str, compute: str, recipe: str) -> float:
    """Drift with one node rounded, measured directly."""

    def outputs(call: RecordedCall, rounded: bool) -> list[Tensor]:
        def tap(node, function, args, kwargs):
            if rounded and str(key_of(node)) == key:
                args = round_operands(node, args, compute, recipe, weight_operands(node, call.graph.parameters))
            return function(*args, **kwargs)

        with torch.no_grad():
            return run(call.graph.gm, call.inputs, tap)

    return float(torch.cat([metric.per_sample(outputs(c, False), outputs(c, True)) for c in calls]).mean())


def gemm_keys(call: RecordedCall) -> list[str]:
    return [str(key_of(n)) for n in call.graph.gm.graph.nodes if n.op == "call_function" and gemm_op(n) is not None]


FORMATS = [("bf16", "none"), ("fp8_e4m3", "row/row"), ("int8", "row/row")]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Classifier(), (16, 12, 40)),
        (Classifier(time_major=True), (16, 12, 40)),
        (Convolutions(), (16, 3, 12, 12)),
    ],
    ids=["transformer", "time-major", "convolutions"],
)
def test_scores_agree_with_single_node_truths(model, shape):
    torch.manual_seed(0)
    model = model.apply(_wider).eval()
    calls = recorded(model, shape)
    found, metric = scores(calls, {gemm_label(f, r) for f, r in FORMATS if f != "bf16"})
    ratios = []
    for key in gemm_keys(calls[0]):
        for compute, recipe in FORMATS:
            predicted = found[key].get(gemm_label(compute, recipe))
            if predicted is not None:
                ratios.append((predicted / truth(calls, metric, key, compute, recipe)) ** 0.5)
    ratios = torch.tensor(ratios)
    assert 0.85 < float(ratios.median()) < 1.2
    assert float(ratios.min()) > 0.4 and float(ratios.max()) < 2.0


def _wider(module: nn.Module) -> None:
    """Larger weights in the last layer, so that outputs are no longer uniform."""
    if isinstance(module, nn.Linear) and module.out_features < 10:
        nn.init.normal_(module.weight, std=0.5)


def test_a_training_step_scores_all_three_products():
    torch.manual_seed(0)
    calls = recorded(Classifier().apply(_wider), (8, 12, 40), batches=2, training=True)
    found, metric = scores(calls, {"fp8_e4m3:row/row"})
    assert metric.kind == "gradients"
    phases = {k.split("|")[1] for k in gemm_keys(calls[0])}
    assert phases >= {"fprop", "dgrad", "wgrad"}
    ratios = []
    for key in gemm_keys(calls[0]):
        predicted = found[key].get("fp8_e4m3:row/row")
        if predicted is not None:
            true = truth(calls, metric, key, "fp8_e4m3", "row/row")
            ratios.append((predicted / true) ** 0.5)
    ratios = torch.tensor(ratios)
    assert len(ratios) > 10
    assert 0.8 < float(ratios.median()) < 1.4
    assert float(ratios.min()) > 0.25 and float(ratios.max()) < 4


def test_nothing_is_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(4))
    x = torch.randn(6, 3, 10)
    model(x)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    calls = list(record_calls(model, [Batch(args=(x,), kwargs={})], Objective()))
    with torch.random.fork_rng(devices=[]):  # dropout draws
        scores(calls, {"fp8_e4m3:tensor/tensor"}, draws=1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_stored_results_are_scored():
    torch.manual_seed(0)
    calls = recorded(Classifier().eval(), (16, 12, 40), batches=1)
    found, _ = scores(calls, set(), draws=1)
    stored = {k: v["->bf16"] for k, v in found.items() if "->bf16" in v and v["->bf16"] > 0}
    assert len(stored) > 5
    for drifts in found.values():
        if drifts.get("->fp16") and drifts.get("->bf16"):
            assert drifts["->fp16"] < drifts["->bf16"]
