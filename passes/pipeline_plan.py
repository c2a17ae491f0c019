"""The pipeline part of a plan: which layers form a stage, where stages lie, how they are scheduled, what that costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..errors import StageSplitError
from .pipeline_timing import StageSeconds

Boundary = Literal["fp32", "bf16", "fp16"]
BOUNDARIES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Formats in which values may cross from stage to stage, and their bytes; "fp32" leaves them as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What a layer costs per microbatch, times and kept activations by kind of device, and the bytes of its parameters
    with gradients and optimizer state.

    `boundary_bytes` are sent if a stage ends behind the layer, as many come back. `names` are the modules in it: more
    than one where modules share a parameter and so must lie in one stage.
    """

    name: str
    seconds: Mapping[str, StageSeconds]
    activation_bytes: Mapping[str, int]
    parameter_bytes: int
    boundary_bytes: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineDevice:
    """A rank's device: its kind (a hardware id) and the bytes of memory that stages may fill."""

    kind: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
    """What it takes to send from one rank to the next: bytes/s one way, and seconds per message."""

    bytes_per_s: float = 25e9
    latency_s: float = 5e-6

    def seconds(self, size: float) -> float:
        return self.latency_s + size / self.bytes_per_s if size else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage: the rank that it lies on, the modules in it, predicted seconds and bytes per microbatch."""

    rank: int
    layers: tuple[str, ...]
    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int

    @property
    def seconds(self) -> StageSeconds:
        return StageSeconds(self.forward_s, self.input_gradient_s, self.weight_gradient_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """Stages in order, the devices of the ranks, the schedule, and what it predicts.

    `step_s` is the time of a step without the optimizer, `bubble` the idle share of it; `peak_microbatches` and
    `memory_bytes` are per rank. Stages send `boundary`, activations and gradients alike.
    """

    schedule: str
    microbatches: int
    boundary: Boundary
    devices: tuple[str, ...]
    stages: tuple[StagePlan, ...]
    step_s: float
    bubble: float
    peak_microbatches: tuple[int, ...]
    memory_bytes: tuple[int, ...]

    def stage_of(self) -> dict[str, int]:
        """The stage of every layer by its name."""
        return {name: i for i, stage in enumerate(self.stages) for name in stage.layers}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PipelinePlan:
        """The inverse of `to_dict`. Raises StageSplitError on unknown or missing fields and on values of no sense."""
        try:
            stages = tuple(StagePlan(**{**s, "layers": tuple(s["layers"])}) for s in values["stages"])
            lists = {name: tuple(values[name]) for name in ("devices", "peak_microbatches", "memory_bytes")}
            plan = cls(**{**values, **lists, "stages": stages})
        except (KeyError, TypeError, AttributeError) as error:
            raise StageSplitError(
                f"this is no pipeline plan: {error!r}. Take what PipelinePlan.to_dict gave."
            ) from error
        if plan.boundary not in BOUNDARIES:
            raise StageSplitError(f"field boundary is {plan.boundary!r}; allowed: {', '.join(BOUNDARIES)}.")
        ranks = {s.rank for s in plan.stages}
        if ranks != set(range(len(plan.devices))):
            raise StageSplitError(
                f"the stages lie on ranks {sorted(ranks)}, and there are {len(plan.devices)} devices."
            )
        return plan

    def digest(self) -> str:
        """A hash of what ranks must agree on: schedule, microbatches, boundary, and each stage's layers and rank."""
        what = [self.schedule, self.microbatches, self.boundary, [(s.rank, s.layers) for s in self.stages]]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def __str__(self) -> str:
        lines = [
            f"pipeline of {len(self.stages)} stages on {len(self.devices)} ranks, {self.schedule}, {self.microbatches} "
            f"microbatches, boundary {self.boundary}: predicted step {1e3 * self.step_s:.3g} ms, "
            f"bubble {self.bubble:.1%}"
        ]
        for i, s in enumerate(self.stages):
            layers = s.layers[0] if len(s.layers) == 1 else f"{s.layers[0]} .. {s.layers[-1]} ({len(s.layers)} layers)"
            sends = f", sends {s.boundary_bytes:,} B" if s.boundary_bytes else ""
            lines.append(
                f"  stage {i} on rank {s.rank} ({self.devices[s.rank]}): {layers}; {1e3 * sum(s.seconds):.3g} ms and "
                f"{s.activation_bytes:,} B a microbatch, parameters {s.parameter_bytes:,} B{sends}"
            )
        peaks = ", ".join(f"{p} ({m:,} B)" for p, m in zip(self.peak_microbatches, self.memory_bytes, strict=True))
        return "\n".join([*lines, f"  most live microbatches by rank, and memory: {peaks}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where stages end: the number of layers up to the end of each, and seconds of the busiest device per step."""

    ends: tuple[int, ...]
    busiest_s: float
    ranges: tuple[range, ...] = field(init=False)

    def __post_init__(self) -> None:
        starts = (0, *self.ends[:-1])
        object.__setattr__(self, "ranges", tuple(range(a, b) for a, b in zip(starts, self.ends, strict=True)))


def stage_plans(
    layers: Sequence[LayerCost], cut: Cut, placement: Sequence[int], devices: Sequence[PipelineDevice]
) -> tuple[StagePlan, ...]:
    """The stages of a cut with the sums over their layers."""
    found = []
    for s, part in enumerate(cut.ranges):
        kind = devices[placement[s]].kind
        own = [layers[i] for i in part]
        seconds = StageSeconds(*(sum(times) for times in zip(*(x.seconds[kind] for x in own), strict=True)))
        found.append(
            StagePlan(
                rank=placement[s],
                layers=tuple(name for x in own for name in (x.names or (x.name,))),
                forward_s=seconds.forward,
                input_gradient_s=seconds.input_gradient,
                weight_gradient_s=seconds.weight_gradient,
                parameter_bytes=sum(x.parameter_bytes for x in own),
                activation_bytes=kept_bytes(layers, part, kind),
                boundary_bytes=own[-1].boundary_bytes if part.stop < len(layers) else 0,
            )
        )
    return tuple(found)


def kept_bytes(layers: Sequence[LayerCost], part: range, kind: str) -> int:
    """Bytes that a stage of these layers keeps per microbatch: activations of its layers and what it got and sent."""
    got = layers[part.start - 1].boundary_bytes if part.start else 0
    sent = layers[part.stop - 1].boundary_bytes if part.stop < len(layers) else 0
    return got + sent + sum(layers[i].activation_bytes[kind] for i in part)
