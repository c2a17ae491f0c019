"""The part of a plan that a mesh of devices adds: where tensors lie, what every collective sends, time and memory of a
rank.

Times are microseconds, bytes are those of one rank, both as predicted on the planned hardware.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..errors import DsmpError
from .plan_fields import KeyText, PlanModel, Reason
from .wire_formats import parse_wire

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


def _known_wire(text: str) -> str:
    try:
        parse_wire(text)
    except DsmpError as error:
        raise ValueError(str(error)) from None
    return text


WireText = Annotated[str, AfterValidator(_known_wire)]


class CollectiveDecision(PlanModel):
    """What one collective sends. `hidden`: nothing but parameters is needed for it, or nothing but gradients waits for
    it, so that it runs beside the computation."""

    key: KeyText
    dim: str
    kind: CollectiveKind
    shape: list[int]
    wire: WireText
    bytes_as_written: float = Field(ge=0)
    bytes: float = Field(ge=0)
    time_us: float = Field(ge=0)
    hidden: bool
    reason: Reason


class RankMemory(PlanModel):
    """Bytes of a rank: stored parameters and buffers, their gradients, the optimizer's state (two fp32 moments, as
    Adam's), what the forward pass saves, and the largest block of gathered parameters. `available` is the device's."""

    parameters: int = Field(ge=0)
    gradients: int = Field(ge=0)
    optimizer: int = Field(ge=0)
    activations: int = Field(ge=0)
    gathered: int = Field(ge=0)
    available: int = Field(ge=0)

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.gathered

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.total <= self.available


class StepTime(PlanModel):
    """A step of one rank: computation of the forward and of the backward pass, communication that computation waits
    for by mesh dimension, and all of it. `products` is the GEMMs' part of the computation."""

    forward_us: float = Field(ge=0)
    backward_us: float = Field(ge=0)
    products_us: float = Field(ge=0)
    exposed_us: dict[str, float]

    @property
    def compute_us(self) -> float:
        """The computation of both passes."""
        return self.forward_us + self.backward_us

    @property
    def total_us(self) -> float:
        """The whole step."""
        return self.compute_us + sum(self.exposed_us.values())

    @property
    def bound(self) -> str:
        """What takes the largest part of the step, in words."""
        parts = {
            "products": self.products_us,
            "memory traffic of other operators": self.compute_us - self.products_us,
            **{f"communication over {dim}": us for dim, us in self.exposed_us.items()},
        }
        name, us = max(parts.items(), key=lambda part: part[1])
        return f"{name}: {100 * us / self.total_us:.0f} % of the step" if self.total_us else "nothing"


class Placing(PlanModel):
    """One way to place the model that was priced: its ZeRO stage, whether sequences are divided, time and memory; the
    first one is the plan's."""

    zero: int
    sequence: bool
    step_us: float = Field(ge=0)
    memory_bytes: int = Field(ge=0)
    fits: bool


class MeshPlan(PlanModel):
    """How a model runs on a mesh. `node` is the machine whose links were priced, `sharding` what `ShardingPlan.to_dict`
    gives; `refused` says what could not be divided, and why."""

    node: str
    sharding: dict[str, Any]
    placings: list[Placing]
    step: StepTime
    memory: RankMemory
    collectives: list[CollectiveDecision]
    refused: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_a_mesh(self) -> Self:
        mesh = self.sharding.get("mesh")
        sizes = list(mesh.values()) if isinstance(mesh, dict) else []
        if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
            raise ValueError("sharding.mesh gives the ranks of each mesh dimension")
        return self

    @property
    def wires(self) -> dict[str, str]:
        """The wire format of every collective, by key."""
        return {c.key: c.wire for c in self.collectives}

    @property
    def mesh(self) -> dict[str, int]:
        """Ranks by mesh dimension, outermost first."""
        return dict(self.sharding["mesh"])
