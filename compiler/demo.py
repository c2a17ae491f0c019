"""The demonstration: one training step of a small GPT, planned, compiled, run and measured against fp64.

    running device    captured, planned, compiled through torch.compile(backend="dsmp"), run; next to it eager fp32 and
                      torch.autocast(bf16)
    other devices     the same captured graph planned for each, and its step run here with their formats' exact rounding
    a larger sibling  the same network at the width of a 7B model, captured on meta and planned for each: what changes
                      when GEMMs are large enough for 8-bit formats to pay

Errors are against the same step in fp64: |loss - loss64| / |loss64|, and, for the gradients of all parameters taken as
one vector, |g - g64| / |g64| in the Euclidean norm.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from ..hardware_db.capability import Device
from ..hardware_db.detect import detect
from ..passes.plan import Decision, PrecisionPlan
from ..passes.plan_fields import GEMM_CLASSES
from .capture import Capture, capture
from .console import Stages
from .options import Executor
from .pipeline import make_plan
from .report import flop_shares, format_text, shape_text, short_reason
from .small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch

DEMO_DEVICES = ("a100", "mi250x", "h800")

# one layer: a second would add nothing to what is seen and a quarter to the time Inductor takes
SMALL = SmallGptConfig(layers=1, d_model=128, heads=4, context=64)
SMALL_BATCH = 4
LARGE = SmallGptConfig(layers=1, d_model=4096, heads=32, context=2048)
LARGE_BATCH = 4
_SEED = 0

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One way to run the step: relative errors of loss and gradient against fp64, seconds to compile (None: eager)."""

    name: str
    loss_error: float
    gradient_error: float
    compile_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One decision, as shown."""

    key: str
    shape: str
    format: str
    output: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """What is planned for one device: formats per group of op classes, FLOP shares, prediction, examples.

    `width` is the model's, `simulated` the run of the plan on this machine (None where it was only planned).
    """

    hardware: str
    width: int
    formats: dict[str, str]
    shares: dict[str, float]
    time_us: float
    time_us_fp32: float
    saved_bytes: int | None
    saved_bytes_fp32: int | None
    examples: list[Example]
    simulated: Run | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """Everything that the demonstration shows."""

    model: str
    large_model: str
    running: str
    executor: str
    note: str
    runs: list[Run]
    here: DevicePlan
    devices: list[DevicePlan]
    large: list[DevicePlan] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def run_demo(
    devices: Sequence[Device],
    *,
    files: Sequence[Path] = (),
    executor: Executor = "inductor",
    large: bool = True,
    stages: Stages | None = None,
) -> Demo:
    """Run the demonstration on the running device, with `devices` simulated.

    `files` are data files that may describe the running device.

    `executor` runs the plan of the running device; without a working C++ compiler it becomes "eager" and the note says
    so. `large` adds the larger sibling's plans.
    """
    stages = stages or Stages()
    place = "cuda" if torch.cuda.is_available() else "cpu"
    running = detect(files)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = SmallGpt(SMALL).to(place)
    batch = small_gpt_batch(batch=SMALL_BATCH, context=SMALL.context, seed=_SEED, device=place)
    with stages.stage("capture", "capturing one training step"):
        captured = capture(model, batch, source="small GPT")
    with stages.stage("planning", f"planning for {running.id} and {len(devices)} more"):
        plan_here, *plans = (make_plan(captured, d) for d in (running, *devices))
    judge = _Judge(model, batch)
    with stages.stage("references", "running the step in fp64, fp32 and under autocast"):
        runs = [judge.run("eager fp32", model), judge.run("autocast bf16", _autocast(model, place))]
    executor, note = _usable(executor, place)
    compiled: Run | None = None
    if executor == "inductor":
        with stages.stage("compiling", f"compiling with Inductor for {running.id}"):
            try:
                compiled = judge.compiled(plan_here, "inductor")
            except Exception as error:
                if (failure := _compiler_failure(error)) is None:
                    raise
                executor, note = "eager", _no_compiler(failure)
    if compiled is None:
        with stages.stage("running", "running the plan op by op"):
            compiled = judge.compiled(plan_here, "eager")
    simulated = []
    for plan in plans:
        with stages.stage("simulating", f"simulating the formats of {plan.hardware}"):
            simulated.append(judge.run(f"{plan.hardware} simulated", _with_plan(model, plan, "eager")))
    return Demo(
        model=_describe(SMALL, SMALL_BATCH),
        large_model=_describe(LARGE, LARGE_BATCH),
        running=running.id,
        executor=executor,
        note=note,
        runs=[*runs, compiled],
        here=_device_plan(plan_here, SMALL.d_model),
        devices=[_device_plan(p, SMALL.d_model, s) for p, s in zip(plans, simulated, strict=True)],
        large=list(_large_plans(devices, stages)) if large else [],
        seconds=stages.seconds,
    )


class _Judge:
    """Runs the step in different ways and measures each against the same step in fp64."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        self.model = model
        self.batch = batch
        exact = SmallGpt(SMALL).to(device=batch[0].device, dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        self.loss, self.gradient = self._step(exact, exact)

    def _step(self, step: Step, owner: nn.Module) -> tuple[float, Tensor]:
        owner.zero_grad(set_to_none=True)
        loss = step(*self.batch)
        torch.autograd.backward(loss)
        gradients = [p.grad.double().flatten() for p in owner.parameters() if p.grad is not None]
        return loss.item(), torch.cat(gradients)

    def run(self, name: str, step: Step) -> Run:
        """Errors of a step that works on the model's own parameters."""
        loss, gradient = self._step(step, self.model)
        return Run(
            name=name,
            loss_error=abs(loss - self.loss) / abs(self.loss),
            gradient_error=float((gradient - self.gradient).norm() / self.gradient.norm()),
        )

    def compiled(self, plan: PrecisionPlan, executor: Executor) -> Run:
        """The step compiled for a plan."""
        started = time.perf_counter()
        run = self.run(f"dsmp, {executor}", _with_plan(self.model, plan, executor))
        seconds = time.perf_counter() - started
        return dataclasses.replace(run, compile_s=seconds if executor == "inductor" else None)


def _with_plan(model: nn.Module, plan: PrecisionPlan, executor: Executor) -> Step:
    # strict: a node that the offline plan does not know would be a defect, not something to warn of
    options = {"plan": plan, "executor": executor, "strict": True}
    step: Step = torch.compile(model, backend="dsmp", options=options)  # type: ignore[arg-type]
    return step


def _autocast(model: nn.Module, place: str) -> Step:
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(place, torch.bfloat16):
            loss: Tensor = model(ids, targets)
        return loss

    return step


# ---- is there a C++ compiler? ------------------------------------------------------------------------------


def _usable(executor: Executor, place: str) -> tuple[Executor, str]:
    """The executor that can run here, and why it is not the one that was asked for."""
    if executor == "inductor" and place == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            return "eager", _no_compiler(error)
    return executor, ""


def _compiler_failure(error: BaseException | None) -> BaseException | None:
    """The C++ compiler's failure among an exception and its causes, None if it is something else."""
    while error is not None:
        if isinstance(error, (CppCompileError, InvalidCxxCompiler)):
            return error
        error = error.__cause__ or error.__context__
    return None


def _no_compiler(error: BaseException) -> str:
    """One line: what is wrong with the compiler, and what happens instead."""
    said = next((line.strip() for line in str(error).splitlines() if "error:" in line), "")
    what = f"the C++ compiler fails ({said[-40:]})" if said else "there is no working C++ compiler"
    return f"{what}, so the plan runs op by op, not through Inductor"


# ---- what is shown of a plan -------------------------------------------------------------------------------

_GROUPS = {
    "linear": ("linear",),
    "attention": ("sdpa", "matmul"),
    "norm, softmax, loss": ("norm", "softmax", "loss"),
}

_EXAMPLES = (
    ("blocks.0.mlp.up", "fprop", "linear"),
    ("blocks.0.mlp.up", "dgrad", "linear"),
    ("blocks.0.mlp.up", "wgrad", "linear"),
    ("blocks.0.attn", "fprop", "sdpa"),
    ("blocks.0.norm_attn", "fprop", "norm"),
    ("head", "fprop", "linear"),
)  # fmt: skip


def _device_plan(plan: PrecisionPlan, width: int, simulated: Run | None = None) -> DevicePlan:
    p = plan.prediction
    found = [
        next((d for d in plan if (d.module, d.phase, d.op) == wanted and d.reason.code != "view"), None)
        for wanted in _EXAMPLES
    ]
    formats = {group: _formats(d.compute for d in plan if d.op in classes) for group, classes in _GROUPS.items()}
    formats["storage"] = _formats(d.output for d in plan if d.op in GEMM_CLASSES and d.phase == "fprop")
    return DevicePlan(
        hardware=plan.hardware,
        width=width,
        formats=formats,
        shares=flop_shares(plan)["all"],
        time_us=p.time_us,
        time_us_fp32=p.time_us_fp32,
        saved_bytes=p.saved_bytes,
        saved_bytes_fp32=p.saved_bytes_fp32,
        examples=[_example(d) for d in found if d is not None],
        simulated=simulated,
    )


def _formats(names: Iterator[str]) -> str:
    """The formats that occur, the most frequent first: `fp8_e4m3+bf16`."""
    return "+".join(name for name, _ in Counter(names).most_common()) or "none"


def _example(d: Decision) -> Example:
    return Example(
        key=d.key, shape=shape_text(d), format=format_text(d), output=d.output, reason=short_reason(d.reason)
    )


def _large_plans(devices: Sequence[Device], stages: Stages) -> Iterator[DevicePlan]:
    with torch.device("meta"):
        model = SmallGpt(LARGE)
    batch = small_gpt_batch(batch=LARGE_BATCH, context=LARGE.context, device="meta")
    with stages.stage("larger sibling", "planning the same network at the width of a 7B model, on meta"):
        captured: Capture = capture(model, batch, source="large GPT")
        plans = [_device_plan(make_plan(captured, d), LARGE.d_model) for d in devices]
    yield from plans


def _describe(config: SmallGptConfig, batch: int) -> str:
    return f"{config.layers}-layer GPT of width {config.d_model} on {batch} x {config.context} tokens"
