"""Plan from data: measure a model on calibration batches, solve for the fastest formats in a budget, test the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..errors import CalibrationError, InvalidOptionError
from ..hardware_db.capability import Device
from ..passes.budget_text import DEFAULT_BUDGET, parse_budget, parse_memory
from ..passes.exchange import labels_of
from ..passes.formulate import formulate
from ..passes.plan import Budget, PrecisionPlan, follow
from ..passes.program import Cost, DriftKind, Program, Solution
from ..passes.rules import Rule, given_keys
from ..passes.scores import Scores
from ..passes.solve import Solved, force, solve_program
from .batches import Loss, read_batches
from .capture import Capture
from .execution import predict_execution
from .objective import Objective
from .pipeline import make_plan
from .recording import RecordedCall, record_calls
from .repair import measured_solution, repair
from .scoring import Measurement, device_labels, gemm_keys, mean_loss, measure, scores_fingerprint
from .simulated import without_simulated
from .trial import Trial

Tell = Callable[[str, int, int], None]
"""Progress: what is done, how much of it is, of how much (0: not known)."""

DRIFTS = ("kl", "bernoulli", "l2")
COSTS = ("roofline", "bits")


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How to calibrate and what to solve for, as users say it; see `dsmp.plan`.

    `batches` with a `loss` are (inputs, target) pairs; after `read` they are a list of `Batch`.
    """

    batches: Any = None
    loss: Loss | None = None
    drift: DriftKind | None = None
    budget: Any = None
    memory: Any = None
    cost: Cost = "roofline"
    tied: bool = True
    draws: int = 2

    def check(self, *, scored: bool) -> None:
        """Raise InvalidOptionError or BudgetError for settings that no calibration has, or that have no effect."""
        calibrated = self.batches is not None or scored
        for name in ("loss", "drift"):
            if getattr(self, name) is not None and self.batches is None:
                raise InvalidOptionError(name, getattr(self, name), "with calibration batches")
        for name in ("budget", "memory"):
            if getattr(self, name) is not None and not calibrated:
                raise InvalidOptionError(name, getattr(self, name), "with calibration batches, or scores")
        if self.batches is not None and scored:
            raise InvalidOptionError("scores", "given", "without calibration batches: scores are what those measure")
        if self.drift not in (None, *DRIFTS):
            raise InvalidOptionError("drift", self.drift, " or ".join(map(repr, DRIFTS)))
        if self.cost not in COSTS:
            raise InvalidOptionError("cost", self.cost, " or ".join(map(repr, COSTS)))
        if isinstance(self.draws, bool) or not isinstance(self.draws, int) or self.draws < 1:
            raise InvalidOptionError("draws", self.draws, "a number of 1 or more")
        if self.loss is not None and not callable(self.loss):
            raise InvalidOptionError("loss", self.loss, "a function of (output, target)")
        if self.budget is not None:
            parse_budget(self.budget)
        parse_memory(self.memory, 1)

    @property
    def amount(self) -> float:
        """The budget as a share of 1."""
        return DEFAULT_BUDGET if self.budget is None else parse_budget(self.budget)

    def read(self) -> Calibration:
        """The same with the batches read and checked. Raises CalibrationError."""
        return replace(self, batches=list(read_batches(self.batches, with_target=self.loss is not None)))

    def measure(
        self,
        model: nn.Module | Callable[..., Any],
        devices: Sequence[Device],
        *,
        training: bool,
        source: str,
        captured: Capture | None = None,
        whole: bool = False,
        tell: Tell = _silent,
    ) -> Measurement:
        """Record a model on the batches (read) and score its nodes for what the devices offer; `whole`: measure all of
        it, whatever the budget. `captured` is the model's own graph, with which the scores are signed. Raises
        CalibrationError, LossError, and InvalidOptionError for a drift that a training step does not have."""
        if training and self.drift is not None:
            raise InvalidOptionError(
                "drift", self.drift,
                "without a training step, which is judged by its gradients (training=False, on the command line "
                "--infer)",
            )  # fmt: skip
        if isinstance(model, nn.Module) and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise CalibrationError(
                f"{source} lies on the meta device, without values to measure. Build it with weights (random ones will "
                "do for a trial), or give scores that were measured before."
            )
        loss = None
        if self.loss is not None and not training:
            loss = mean_loss(model, self.batches, self.loss)
        objective = Objective(self.loss) if training else None
        calls = list(record_calls(model, self.batches, objective))
        return self.score(calls, devices, source=source, captured=captured, loss=loss, whole=whole, tell=tell)

    def score(
        self,
        calls: Sequence[RecordedCall],
        devices: Sequence[Device],
        *,
        source: str,
        captured: Capture | None = None,
        loss: float | None = None,
        whole: bool = False,
        tell: Tell = _silent,
    ) -> Measurement:
        """Score recorded calls for what the devices offer. Raises CalibrationError."""
        return measure(
            calls, source=source, model=captured.graphs[0] if captured else None,
            drift=self.drift, loss=loss, budget=None if whole else self.amount,
            labels=frozenset[str]().union(*map(device_labels, devices)), draws=self.draws,
            progress=lambda done, total: tell("scoring", done, total),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """A plan and what it was made from."""

    plan: PrecisionPlan
    scores: Scores
    seconds: dict[str, float] = field(default_factory=dict)


def calibrate(
    model: nn.Module | Callable[..., Any],
    captured: Capture,
    device: Device,
    settings: Calibration,
    *,
    training: bool,
    rules: Sequence[Rule] = (),
    tell: Tell = _silent,
) -> Calibrated:
    """Measure a model on the batches (read), solve, try the plan out and repair it.

    Raises CalibrationError, LossError, BudgetError, RuleError, PlanHardwareError.
    """
    check_measurable(captured, training)
    measurement = settings.measure(
        model, [device], training=training, source=captured.source, captured=captured, tell=tell
    )
    return plan_from_measurement(captured, device, measurement, settings, rules=rules, tell=tell)


def plan_from_measurement(
    captured: Capture,
    device: Device,
    measurement: Measurement,
    settings: Calibration,
    *,
    rules: Sequence[Rule] = (),
    tell: Tell = _silent,
) -> Calibrated:
    """Solve for a captured model from what was measured on it, try the plan out and repair it.

    Raises CalibrationError where nothing of the model was measured, BudgetError, RuleError, PlanHardwareError.
    """
    base = make_plan(captured, device)
    gemms = gemm_keys(captured.graphs[0])
    if gemms and not gemms & set(measurement.scores.nodes):
        raise CalibrationError(
            f"the calibration reaches none of the {len(gemms)} products of {captured.source}. Check that the batches "
            "and the loss belong to this model."
        )
    program = _program(captured, base, device, measurement.scores, settings, rules)
    limit, saved = _limits(program, base, settings)
    trial = Trial(measurement.calls, measurement.metric, base.nodes, storage=device.storage)
    repaired = repair(program, trial, drift=limit, saved_bytes=saved, tell=lambda text: tell(text, trial.runs, 0))
    solution = measured_solution(repaired.solved.solution, limit, repaired.result, trial.runs)
    plan = _plan(captured, base, device, repaired.program, repaired.solved, solution, settings, rules)
    return Calibrated(plan=plan, scores=measurement.scores)


def plan_from_scores(
    captured: Capture, device: Device, scores: Scores, settings: Calibration, *, rules: Sequence[Rule] = ()
) -> PrecisionPlan:
    """Solve for a captured model from scores that were measured before; nothing is run.

    Raises ScoresError for scores of another model, BudgetError, RuleError, PlanHardwareError.
    """
    check_measurable(captured, training=False)
    scores.check(scores_fingerprint(captured.graphs[0]))
    base = make_plan(captured, device)
    program = _program(captured, base, device, scores, settings, rules)
    limit, saved = _limits(program, base, settings)
    solved = solve_program(program, drift=limit, saved_bytes=saved)
    return _plan(captured, base, device, program, solved, solved.solution, settings, rules)


def check_measurable(captured: Capture, training: bool) -> None:
    """Raise CalibrationError for a model in several graphs, or without anything to train."""
    if training and not captured.joint:
        raise CalibrationError(
            f"no floating-point parameter of {captured.source} requires a gradient: there is no training step to "
            "measure. Plan inference (training=False, on the command line --infer)."
        )
    if len(captured.graphs) > 1:
        raise CalibrationError(
            f"{captured.source} is captured in {len(captured.graphs)} graphs (torch.compile breaks it), and a model is "
            "measured from its inputs to its outputs. Remove the graph breaks (TORCH_LOGS=graph_breaks shows them), or "
            "calibrate the part that matters by itself."
        )


def _program(
    captured: Capture,
    base: PrecisionPlan,
    device: Device,
    scores: Scores,
    settings: Calibration,
    rules: Sequence[Rule],
) -> Program:
    check_measurable(captured, training=False)
    graphs = [(g.gm, g.parameters) for g in captured]
    program = formulate(graphs, device, scores, cost=settings.cost, tied=settings.tied)
    program = program.model_copy(update={"default": labels_of(base.nodes, program)})
    if base.prediction.saved_bytes_fp32:
        program = _saving(program, base.prediction.saved_bytes_fp32)
    if rules:
        program = force(program, given_keys(rules, program))
    return without_simulated(program, base.by_key, device)


def _saving(program: Program, traced_bytes: int) -> Program:
    """A program whose saved bytes add up to what is saved as traced: the partitioner recomputes part of what the
    backward pass reads, and which part hardly depends on the formats."""
    total = sum(found[0].saved_bytes for found in program.candidates.values())
    share = traced_bytes / total if total else 1.0
    candidates = {
        key: [c.model_copy(update={"saved_bytes": round(share * c.saved_bytes)}) for c in found]
        for key, found in program.candidates.items()
    }
    return program.model_copy(update={"candidates": candidates})


def _limits(program: Program, base: PrecisionPlan, settings: Calibration) -> tuple[float, float]:
    """The budgets as a drift and as bytes."""
    memory = parse_memory(settings.memory, base.prediction.saved_bytes_fp32)
    return program.limit(settings.amount), math.inf if memory is None else float(memory)


def _plan(
    captured: Capture, base: PrecisionPlan, device: Device, program: Program, solved: Solved, solution: Solution,
    settings: Calibration, rules: Iterable[Rule],
) -> PrecisionPlan:  # fmt: skip
    nodes = follow(base.nodes, program, solved)
    execution = predict_execution(captured, {d.key: d for d in nodes}, device) if captured.joint else None
    prediction = base.prediction.model_copy(
        update={
            "time_us": round(solution.time_us, 3),
            "time_us_fp32": round(_traced_time(program), 3),
            "saved_bytes": execution.saved_bytes if execution else None,
        }
    )
    memory = parse_memory(settings.memory, base.prediction.saved_bytes_fp32)
    return base.model_copy(
        update={
            "budget": Budget(amount=settings.amount, saved_bytes=memory), "prediction": prediction,
            "solution": solution, "program": program, "rules": list(rules), "nodes": nodes,
        }
    )  # fmt: skip


def _traced_time(program: Program) -> float:
    """Predicted time of everything as traced: the first candidate of each node, blocked by a rule or not."""
    free = {key: [found[0].model_copy(update={"blocked": None})] for key, found in program.candidates.items()}
    alone = program.model_copy(update={"candidates": free, "ties": []})
    return alone.totals({key: found[0].label for key, found in free.items()}).time
