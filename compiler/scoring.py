"""Measure a model's sensitivity on calibration batches: from recorded calls to signed scores."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from ..errors import CalibrationError, LossError, NotDifferentiableError
from ..hardware_db.capability import Device
from ..hardware_db.formats import get_format, keeps_wide, packs_weight
from ..hardware_db.narrow_weights import stores_weights
from ..hardware_db.schema import OpClass
from ..passes.drift import Metric, find_metric
from ..passes.gemm import gemm_op, operand_nodes, operand_slots
from ..passes.graph import calls, concrete, root
from ..passes.keys import key_of
from ..passes.labels import SCORED_ARITHMETIC, gemm_label
from ..passes.plan import fingerprint
from ..passes.program import DriftKind, drift_limit
from ..passes.scores import NodeScores, Score, Scores
from ..passes.sensitivity import Measure, Sensitivity, SensitivityScorer
from .batches import Batch, Loss, loss_value
from .capture import CapturedGraph
from .capture_state import ModelState, uncompiled
from .objective import LOSS
from .recording import RecordedCall, explained

SHORT_CONTRACTION = 32
"""Products of fewer terms are always measured: their errors repeat instead of averaging out."""
NEGLIGIBLE = 0.01
"""Estimates below this share of the budget are not measured."""
HOPELESS = 10.0
"""Nor are estimates that exceed the budget this many times."""
ENOUGH_BATCHES = 4
"""From this many batches on, the first one is for estimates alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Scores, the calls that they were measured on, and how their outputs are compared."""

    scores: Scores
    calls: tuple[RecordedCall, ...]
    metric: Metric


def scores_fingerprint(graph: CapturedGraph) -> str:
    """The identity of a model as far as scores go: its GEMMs, whatever the batch size, without those of a loss."""
    return fingerprint((key, "", []) for key in gemm_keys(graph))


def gemm_keys(graph: CapturedGraph) -> set[str]:
    """Keys of the GEMMs of a graph, without those of a loss."""
    keys = [k for n in calls(graph.gm) if (k := key_of(n)) is not None and gemm_op(n) is not None]
    return {str(k) for k in keys if k.fqn.partition(".")[0] != LOSS}


def device_labels(device: Device) -> frozenset[str]:
    """The labels of the formats that a device multiplies in, for some op class."""
    kinds: tuple[OpClass, ...] = ("linear", "matmul", "conv", "sdpa", "grouped_mm")
    able = {f for f, _ in SCORED_ARITHMETIC if any(device.supports(k, None, f) for k in kinds)}
    packing = bool(device.profile.weights)
    return frozenset(
        gemm_label(f, r)
        for f, r in SCORED_ARITHMETIC
        if (stores_weights(device, f).ok if keeps_wide(r) else f in able) and (packing or not packs_weight(r))
    )


def measure(
    recorded: Sequence[RecordedCall],
    *,
    source: str,
    model: CapturedGraph | None = None,
    drift: DriftKind | None = None,
    loss: float | None = None,
    budget: float | None = None,
    labels: Collection[str] | None = None,
    draws: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Score every node on recorded calls of one model.

    `model` is the graph whose fingerprint the scores are signed with where calls of another were recorded: a training
    step of it, which holds what the loss adds and lacks what the loss does not depend on.
    `drift` is how outputs are compared, None for what the outputs call for. `loss` is what the user's loss said, if
    there is one. `budget` (a share of 1) tells which formats are worth measuring, `labels` which the device has; what
    is not measured is estimated. `progress` is told (batches done, batches in all).

    Raises CalibrationError when the model's outputs are not finite or nothing in it can be scored, LossError for a loss
    of which no share can be a budget.
    """
    first = recorded[0]
    metric = find_metric(first.graph.gm, drift, first.forward_outputs)
    if metric.kind not in ("kl", "bernoulli"):
        loss = None
    elif loss is not None and loss <= 0.0:
        raise LossError(
            f"the mean loss is {loss:g} on the calibration data; a budget is a share of it, so it has to be above 0. "
            "Give a loss that is, leave it out, or choose drift='l2', which needs none."
        )
    if not metric.outputs:
        raise CalibrationError(f"nothing in {source} can be scored: it returns no floating-point value.")
    scorer = SensitivityScorer(draws=draws)
    entropies: dict[int, list[float]] = {}
    samples: dict[int, int] = {}

    def add(number: int) -> None:
        outputs = _scored(scorer, recorded[number - 1], metric, number)
        seen = metric.entropy(outputs)
        entropies[number] = [] if seen is None else seen.tolist()
        samples[number] = metric.samples(outputs)
        if progress is not None:
            progress(number, len(recorded))

    add(1)
    base = loss if loss is not None else _mean(entropies)
    scorer.measure = _worth_measuring(scorer.results(metric), first, metric.kind, labels, budget, base)
    # What the first batch told is what to measure; with few batches it has to be measured as well.
    for number in range(2 if len(recorded) >= ENOUGH_BATCHES else 1, len(recorded) + 1):
        add(number)
    if loss is None:
        base = _mean(entropies)
    results = scorer.results(metric)
    if not any(s.drifts for s in results.values()):
        raise CalibrationError(
            f"nothing in {source} can be scored: its outputs do not depend on any floating-point value."
        )
    scores = Scores(
        dsmp=version("dsmp"), torch=torch.__version__, source=source,
        fingerprint=scores_fingerprint(model or first.graph),
        drift=metric.kind, loss=base, samples=sum(samples.values()), draws=draws,
        nodes={key: _node_scores(s) for key, s in results.items()},
    )  # fmt: skip
    return Measurement(scores=scores, calls=tuple(recorded), metric=metric)


def _mean(by_batch: Mapping[int, Sequence[float]]) -> float | None:
    values = [v for found in by_batch.values() for v in found]
    return statistics.fmean(values) if values else None


def _worth_measuring(
    estimates: Mapping[str, Sensitivity], call: RecordedCall, kind: DriftKind, labels: Collection[str] | None,
    budget: float | None, loss: float | None,
) -> Measure:  # fmt: skip
    """Measure a device's formats where their estimate is within reach of mattering for the budget (everything of 8 bits
    and fewer without one), and wherever estimates are not to be trusted."""
    always = _always_measured(call)
    wanted = {gemm_label(*pair) for pair in SCORED_ARITHMETIC} if labels is None else set(labels)
    limit = None if budget is None else drift_limit(kind, budget, loss)

    def worth(key: str, label: str) -> bool:
        if label not in wanted or key not in estimates:
            return False
        if key in always:
            return True
        if limit is None:
            return get_format(label.partition(":")[0]).storage_bits <= 8
        return NEGLIGIBLE * limit <= estimates[key].drifts.get(label, 0.0) <= HOPELESS * limit

    return worth


def _scored(scorer: SensitivityScorer, call: RecordedCall, metric: Metric, number: int) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        try:
            outputs = scorer.add(
                call.graph.gm, call.inputs, metric, call.graph.parameters, varying=call.varying, ranges=number == 1
            )
        except RuntimeError as error:
            missing = _NO_DERIVATIVE.search(str(error))
            if missing is None:
                raise
            raise NotDifferentiableError(f"{missing[1]}, an operator without a derivative", _REMEDY) from error
    for i in metric.outputs:
        ruled_out = outputs[i] == -torch.inf if metric.kind == "kl" and metric.form == "logits" else False
        if not bool((torch.isfinite(outputs[i]) | ruled_out).all()):
            what = "gradients" if metric.kind == "gradients" else "outputs"
            raise CalibrationError(
                f"calibration batch {number}: the model's {what} are not finite in the precision it was written in. "
                "Leave the batch out, or repair the model first."
            )
    return outputs


def _node_scores(found: Sensitivity) -> NodeScores:
    labels = {
        label: Score(drift=drift if drift < _LARGEST else _LARGEST, measured=label in found.measured)
        for label, drift in found.drifts.items()
    }
    return NodeScores(labels=labels, ranges=dict(found.ranges))


_NO_DERIVATIVE = re.compile(r"derivative for (\S+) is not implemented")
_REMEDY = (
    "Where it is a fused fast path, switch that off for calibration and where you compile "
    "(torch.backends.mha.set_fastpath_enabled(False) for nn.TransformerEncoder); else plan without calibration."
)
_LARGEST = 1e30
"""What an infinite or undefined drift is written as: it exceeds every budget."""


def _always_measured(call: RecordedCall) -> set[str]:
    """Keys of GEMMs whose roundings may not behave like noise: few terms, or operands straight from the batch."""
    raw = {n for i, n in enumerate(call.graph.gm.graph.nodes) if n.op == "placeholder" and i in call.varying}
    found = set()
    for node in calls(call.graph.gm):
        key, op = key_of(node), gemm_op(node)
        if key is None or op is None:
            continue
        slots = operand_slots(node)
        index, axis = slots[0]
        value = node.args[index].meta["val"]  # type: ignore[union-attr]
        short = axis is not None and concrete(value.shape[axis]) < SHORT_CONTRACTION
        if op.kind == "conv" and axis is not None:
            weight = node.args[slots[1][0]].meta["val"]  # type: ignore[union-attr]
            short = weight.numel() // max(1, weight.shape[0]) < SHORT_CONTRACTION
        if short or any(root(n, through_casts=True) in raw for n in operand_nodes(node)):
            found.add(str(key))
    return found


def mean_loss(model: Callable[..., Any], batches: Iterable[Batch], loss: Loss) -> float:
    """The user's loss on the calibration data; the model stays as it is. Raises LossError, CalibrationError."""
    values = []
    with torch.no_grad(), uncompiled(model) as plain:
        for number, batch in enumerate(batches, start=1):
            before = ModelState(model, (batch.args, batch.kwargs))
            try:
                with explained(number):
                    values.append(float(loss_value(loss, plain(*batch.args, **batch.kwargs), batch.target)))
            finally:
                before.restore()
    return statistics.fmean(values)
