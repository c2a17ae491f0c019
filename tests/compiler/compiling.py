"""What the compiler's tests share: compiling with dsmp, seeing what the backend keyed, comparing gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

import dsmp.compiler.backend as backend
from dsmp.codegen.audit import Audit
from dsmp.passes.keys import key_of
from dsmp.passes.plan import PrecisionPlan

GEMMS = ("linear", "matmul", "conv", "sdpa", "grouped_mm")


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    """The model under torch.compile with dsmp, run op by op unless the options say otherwise."""
    return torch.compile(model, backend="dsmp", options={"executor": "eager", **options})


def key_texts(gm: fx.GraphModule) -> list[str]:
    """All node keys of a keyed graph, in graph order."""
    return [str(k) for n in gm.graph.nodes if (k := key_of(n)) is not None]


def gemms_of(keys: list[str]) -> list[str]:
    """The keys of matrix products, convolutions and attention, as sorted `fqn|phase|op|ordinal`."""
    return sorted(k for k in keys if k.split("|")[2] in GEMMS)


@dataclass
class Seen:
    """What the backend keyed: one list of keys a graph, and the names of backward GEMMs without a forward node."""

    graphs: list[list[str]] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    @property
    def gemms(self) -> list[list[str]]:
        return [gemms_of(g) for g in self.graphs]


def watch(monkeypatch: Any) -> Seen:
    """From now on, every graph that the backend keys is written down."""
    seen = Seen()
    original = backend.key_graph

    def key_graph(gm: fx.GraphModule, *args: Any) -> Any:
        report = original(gm, *args)
        seen.graphs.append(key_texts(gm))
        seen.unmatched.extend(report.unmatched)
        return report

    monkeypatch.setattr(backend, "key_graph", key_graph)
    return seen


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """All parameter gradients, in order; a parameter without one counts as zeros."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def relative(candidate: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """|candidate - reference| / |reference| in L2 over all tensors together, in float64."""
    pairs = list(zip(candidate, reference, strict=True))
    wrong = sum((c.double() - r.double()).square().sum().item() for c, r in pairs)
    whole = sum(r.double().square().sum().item() for _, r in pairs)
    return (wrong / whole) ** 0.5


def numbered(prefix: str, phases: str = "fprop dgrad wgrad", op: str = "linear", count: int = 1) -> Iterator[str]:
    """`prefix|phase|op|0`, ... for every phase and ordinal."""
    for phase in phases.split():
        for ordinal in range(count):
            yield f"{prefix}|{phase}|{op}|{ordinal}"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A training step of a zoo model under a plan that was made offline, saved, loaded and replayed with strict=True.

    `offline` are the keys of the capture, `keys` those that the backend saw, `other` the keys on which the plan and a
    decision made anew at run time differ, `warnings` what was logged, `audit` what ran.
    """

    plan: PrecisionPlan
    offline: list[list[str]]
    keys: list[list[str]]
    unmatched: list[str]
    other: list[str]
    warnings: list[str]
    audit: Audit
    gradients: list[torch.Tensor]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations this small wait for other threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
