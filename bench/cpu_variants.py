"""The ways in which `bench/cpu.py` runs a model: eager, torch.compile, torch's and torchao's quantisation, dsmp.

Compile times are those of a process whose Inductor cache is empty and which has compiled a small function before, so
that imports and the search for a C++ compiler do not count: the first call less the second, without Python's garbage
collector. Packing weights counts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

import dsmp
from bench.cpu_models import Sizes, Workload, workload
from bench.interleaved import Case, Subject, VariantError, resident_mb
from bench.timing import timed
from dsmp.codegen.cpu.extension import cpu_operators
from dsmp.codegen.cpu.packs import clear, packed_bytes

EAGER, BASELINE = "eager fp32", "torch.compile fp32"
CHANNELS_LAST, COMPILED_CHANNELS_LAST = "eager channels_last", "torch.compile channels_last"
AUTOCAST = "torch.compile bf16 autocast"
PACKED = "packed fp32 kernel"
DYNAMIC = "torch.ao dynamic int8"
TORCHAO, TORCHAO_BF16 = "torchao int8 weights", "torchao int8 weights, bf16"
UNPLANNED, WIDE = "dsmp without a plan", "dsmp in fp32"
FP32 = (EAGER, BASELINE, CHANNELS_LAST, COMPILED_CHANNELS_LAST, PACKED)
"""Variants of full precision: the best of them is what narrow formats have to beat."""

TORCHAO_NOTE = (
    "no rows of torchao's int4 weights: torchao 0.18 has no layout of them for CPUs"
    if importlib.util.find_spec("torchao")
    else "no rows of torchao: it is not installed"
)


class PackedLinear(nn.Module):
    """A linear without bias, x float32[M, K] -> float32[M, N], by our kernel for few rows of fp32."""

    payload: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.rows = linear.out_features
        self.register_buffer("payload", torch.ops.dsmp_cpu.pack_fp32(linear.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.dsmp_cpu.linear_fp32(x, self.payload, None, self.rows)
        return y


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """How a workload is run in a process of its own; `plans` are files by case. Called, it makes the subject."""

    name: str
    workload: str
    sizes: Sizes
    plans: tuple[tuple[str, Path], ...] = ()

    def __call__(self) -> Subject:
        warnings.simplefilter("ignore")  # torch and torchao announce what they mean to move
        torch._inductor.config.compile_threads = 1  # no pool of processes beside each variant
        cpu_operators()
        if "compile" in self.name or "dsmp" in self.name or "torchao" in self.name:
            with fresh_cache():
                torch.compile(_small, **self._compiler(None))(torch.ones(8, 8))
            torch._dynamo.reset()
        work = workload(self.workload, self.sizes)
        base = resident_mb()
        model = self._changed(work.model())
        cases = {title: self._case(work, model, title) for title in work.cases}
        return Subject(cases=cases, base_mb=base)

    def _changed(self, model: nn.Module) -> nn.Module:
        """The model as this variant holds it, before it is compiled."""
        if self.name in (CHANNELS_LAST, COMPILED_CHANNELS_LAST):
            return model.to(memory_format=torch.channels_last)
        if self.name == DYNAMIC:
            changed: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
            return changed
        if self.name == PACKED:
            return nn.Sequential(*(PackedLinear(m) for m in model.modules() if isinstance(m, nn.Linear)))
        if self.name in (TORCHAO, TORCHAO_BF16):
            torchao = importlib.import_module("torchao.quantization")
            model = model.bfloat16() if self.name == TORCHAO_BF16 else model
            torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return model

    def _case(self, work: Workload, model: nn.Module, title: str) -> Case:
        inputs = work.cases[title]
        if self.name in (CHANNELS_LAST, COMPILED_CHANNELS_LAST):
            inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
        if self.name == TORCHAO_BF16:
            inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
        clear()
        # a collection of all that libraries hold takes up to half a second, and falls where it will
        gc.collect()
        gc.disable()
        with fresh_cache(), _generated_code() as code:
            target, started = timed(lambda: self._compiled(work, model, title))
            run = functools.partial(target, *inputs)
            if self.name == AUTOCAST:
                run = functools.partial(_autocast, run)
            output, first = timed(run)
            _, second = timed(run)
        gc.enable()
        return Case(
            call=run,
            output=_tensor(output).detach().clone(),
            compile_s=max(0.0, started + first - second),
            weights_mb=(held_bytes(model) + packed_bytes()) / 1e6,
            code=hashlib.sha256("".join(sorted(code)).encode()).hexdigest() if code else "",
        )

    def _compiled(self, work: Workload, model: nn.Module, title: str) -> Callable[..., object]:
        if self.name in (EAGER, CHANNELS_LAST, DYNAMIC, PACKED):
            return model
        plans = dict(self.plans)
        plan = dsmp.load_plan(plans[title]) if title in plans else None
        target = copy.copy(model) if not work.alone else _sharing(model)
        if plan is not None and work.alone:
            dsmp.compile_modules(target, plan, work.alone, dynamic=False, strict=True)
            return target
        for name in work.alone or ("",):
            target.get_submodule(name).compile(**self._compiler(plan), dynamic=False)
        return target

    def _compiler(self, plan: dsmp.PrecisionPlan | None) -> dict[str, Any]:
        """Arguments of torch.compile."""
        if not self.name.startswith("dsmp"):
            return {}
        if plan is not None:
            return {"backend": "dsmp", "options": {"plan": plan, "strict": True}}
        rules = [{"match": "*", "format": "fp32"}] if self.name == WIDE else []
        return {"backend": "dsmp", "options": {"hardware": "cpu", "rules": rules}}


@contextlib.contextmanager
def _generated_code() -> Iterator[set[str]]:
    """Collects what Inductor generates, without the lines of comments."""
    found: set[str] = set()

    def save(text: str) -> None:
        found.add("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("# ")))

    with mock.patch.object(GraphLowering, "save_output_code", save):
        yield found


def _small(x: Tensor) -> Tensor:
    return torch.sin(x @ x)


def _sharing(model: nn.Module) -> nn.Module:
    """A copy of the modules that holds the model's own parameters and buffers: each case compiles a copy."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})


def _autocast(run: Callable[[], object]) -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return run()


def _tensor(output: object) -> Tensor:
    """A model's output, or the first of several."""
    return output if isinstance(output, Tensor) else _tensor(output[0])  # type: ignore[index]


def held_bytes(model: nn.Module) -> int:
    """Bytes of parameters, buffers and the weights of torch's own quantised layers."""
    found = {id(t): t for t in (*model.parameters(), *model.buffers())}
    quantised = (m.weight() for m in model.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear))
    return sum(_bytes(t) for t in (*found.values(), *quantised))


def _bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def names_of(work: Workload, *, bf16: bool = True) -> list[str]:
    """Variants of a workload that need no plan, the baseline among them."""
    names = [EAGER, BASELINE]
    if work.images:
        names += [CHANNELS_LAST, COMPILED_CHANNELS_LAST]
    if bf16:
        names.append(AUTOCAST)
    if work.linears:
        names.append(DYNAMIC)
        if importlib.util.find_spec("torchao"):
            names += [TORCHAO, TORCHAO_BF16]
    if work.name.startswith("linears") and cpu_operators():
        names.append(PACKED)
    return [*names, UNPLANNED, WIDE]


def make_plan(name: str, sizes: Sizes, title: str, budget: str, file: Path) -> str:
    """Plan a case for the running CPU, save the plan, and return how many products take which format.

    Raises VariantError for what cannot be planned.
    """
    warnings.simplefilter("ignore")
    work = workload(name, sizes)
    share, _, untied = budget.partition(" ")
    try:
        plan = dsmp.plan(
            work.model(), work.cases[title], calibration=work.calibration(), budget=share, drift=work.drift,
            training=False, hardware="cpu", tied=not untied,
        )  # fmt: skip
    except dsmp.DsmpError as error:  # it may not survive the way between processes
        raise VariantError(f"{type(error).__name__}: {error}") from error
    plan.save(file)
    return formats((d.compute, d.recipe) for d in plan if d.op in ("linear", "conv", "matmul", "sdpa"))


def formats(decisions: Iterable[tuple[str, str]]) -> str:
    """Formats with their recipes and how often each occurs, the most frequent first."""
    counts: dict[str, int] = {}
    for compute, recipe in decisions:
        label = compute if recipe == "none" else f"{compute} {recipe}"
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(f"{n} {label}" for label, n in sorted(counts.items(), key=lambda t: -t[1]))
