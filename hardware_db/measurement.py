"""What was measured on one machine: rates that replace assumed fractions of derived peaks.

`dsmp hardware calibrate` writes such a record into an overlay file; it applies to the running device it was taken on
and to no other (`applies_to`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from ..errors import DsmpError
from .formats import split_recipe
from .schema import STRICT, Text, canonical_rate_key, check_format
from .work import GemmShape

Size = Annotated[int, Field(ge=1, le=2**31)]
Rate = Annotated[float, Field(gt=0, le=1e17)]
BytesPerSecond = Annotated[float, Field(gt=0, le=1e14)]
MemoryBandwidth = Annotated[float, Field(ge=1e7, le=1e14)]
Seconds = Annotated[float, Field(gt=0, le=100)]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]

_NEIGHBOURS = 3


class GemmPoint(BaseModel):
    """Achieved rate of [batch, m, k] @ [batch, k, n] in FLOP/s (a multiply-add counts as two) by `operator`."""

    model_config = STRICT

    format: str
    accumulate: str
    batch: Size = 1
    m: Size
    n: Size
    k: Size
    flop_per_s: Rate
    operator: Text

    @field_validator("format", "accumulate", mode="after")
    @classmethod
    def _format_exists(cls, name: str) -> str:
        return check_format(name)

    @property
    def key(self) -> str:
        """`format@accumulate`."""
        return canonical_rate_key(f"{self.format}@{self.accumulate}")

    @property
    def shape(self) -> GemmShape:
        """The point's place on the grid."""
        return GemmShape(batch=self.batch, m=self.m, n=self.n, k=self.k)


class Conversion(BaseModel):
    """Bytes per second, read and written together, of a cast (recipe "none") or of quantising with scales."""

    model_config = STRICT

    source: str
    target: str
    recipe: str = "none"
    bytes_per_s: BytesPerSecond

    @field_validator("source", "target", mode="after")
    @classmethod
    def _format_exists(cls, name: str) -> str:
        return check_format(name)

    @field_validator("recipe", mode="after")
    @classmethod
    def _recipe_exists(cls, name: str) -> str:
        try:
            split_recipe(name)
        except DsmpError as error:
            raise ValueError(str(error)) from None
        return name


class CollectivePoint(BaseModel):
    """Latency and asymptotic bandwidth of a collective among `ranks` processes: seconds = latency + bytes / bandwidth,
    where bytes is the size of the tensor that one rank holds in full."""

    model_config = STRICT

    op: CollectiveOp
    backend: Text
    ranks: Annotated[int, Field(ge=2, le=2**20)]
    latency_s: Seconds
    bytes_per_s: BytesPerSecond


class Measurement(BaseModel):
    """All that was measured on one device. `device`, `name` and `units` say on which."""

    model_config = STRICT

    device: Text
    name: Text
    units: Annotated[int, Field(ge=1, le=2048)]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    torch: Text
    memory_bandwidth_bytes_per_s: MemoryBandwidth
    launch_overhead_s: Seconds
    gemm: Annotated[tuple[GemmPoint, ...], Field(min_length=1)]
    conversion: tuple[Conversion, ...] = ()
    collective: tuple[CollectivePoint, ...] = ()

    @field_validator("date", mode="after")
    @classmethod
    def _date_exists(cls, text: str) -> str:
        date.fromisoformat(text)
        return text

    def applies_to(self, device_id: str, name: str, units: int) -> bool:
        """Whether this was taken on the device of that id, name and number of units."""
        return (device_id, name, units) == (self.device, self.name, self.units)

    def rate(self, key: str, shape: GemmShape) -> float | None:
        """Achieved FLOP/s of a GEMM in `format@accumulate`, from the nearest measured shapes; None if it was not
        measured.

        The mean of the three nearest points in the space of log2(rows, columns, contraction, batch), each weighted
        with the inverse of its squared distance.
        """
        points = [p for p in self.gemm if p.key == key]
        return _nearest_mean([(p.shape, p.flop_per_s) for p in points], shape) if points else None

    def ratios_to_fp32(self, key: str) -> dict[GemmShape, float]:
        """The rate of `format@accumulate` over fp32's at every shape that was measured in both."""
        base = {p.shape: p.flop_per_s for p in self.gemm if p.key == "fp32@fp32"}
        return {p.shape: p.flop_per_s / base[p.shape] for p in self.gemm if p.key == key and p.shape in base}

    def ratio_to_fp32(self, key: str, shape: GemmShape | None = None) -> float | None:
        """How fast `format@accumulate` is in terms of fp32: near a shape, as `rate` does, or the geometric mean over
        all shapes; None if no shape was measured in both."""
        ratios = self.ratios_to_fp32(key)
        if not ratios:
            return None
        if shape is not None:
            return _nearest_mean(ratios.items(), shape)
        return math.exp(sum(map(math.log, ratios.values())) / len(ratios))

    def conversion_rate(self, source: str, target: str, recipe: str) -> float | None:
        """Bytes per second, read and written, of a conversion; None if it was not measured."""
        wanted = (source, target, recipe)
        return next((c.bytes_per_s for c in self.conversion if (c.source, c.target, c.recipe) == wanted), None)


def _nearest_mean(points: Iterable[tuple[GemmShape, float]], shape: GemmShape) -> float:
    near = sorted((shape.distance(at), rate) for at, rate in points)[:_NEIGHBOURS]
    if near[0][0] == 0:
        return near[0][1]
    weights = [1 / distance**2 for distance, _ in near]
    return math.exp(sum(w * math.log(r) for w, (_, r) in zip(weights, near, strict=True)) / sum(weights))
