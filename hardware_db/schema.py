"""The shape of the hardware data files: what a row may say, in which unit, within which range.

Two kinds of records. An *architecture* profile (here) is what one instruction set can do per clock and per unit,
together with its precision tier; a *device* (device_row.py) is about a dozen scalars on top of a profile. Peaks are
never stored, they are derived:

    peak [FLOP/s] = units * flop_per_clock_per_unit[format @ accumulate] * clock_mhz * 1e6

with the matrix clock for matrix units, except fp64, which runs at the vector clock as all vector units do. A
multiply-add counts as two operations. Only dense rates are stored; `sparsity_factor` (2:4) stands apart and
is never folded in. Where a vendor publishes totals and nothing to derive them from, the profile is
`totals_only` and the totals stand for the peaks, for planning.

Every number carries its unit in its field name and a plausible range. A violation raises `HardwareDataError`
naming the file, the record and the key (parsing.py). This module is pure: it reads no file and imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..errors import DsmpError
from .formats import FORMATS, get_format, keeps_wide, split_recipe

OpClass = Literal[
    "linear",
    "matmul",
    "conv",
    "sdpa",
    "grouped_mm",
    "norm",
    "softmax",
    "loss",
    "reduction",
    "embedding",
    "pointwise",
    "view",
    "index",
    "collective",
    "other",
]
Vendor = Literal[
    "nvidia",
    "amd",
    "intel",
    "apple",
    "google",
    "aws",
    "huawei",
    "cambricon",
    "moore-threads",
    "iluvatar",
    "metax",
    "hygon",
    "tenstorrent",
    "ampere",
    "fujitsu",
    "arm",
]
Kind = Literal["gpu", "cpu", "npu"]
UnitKind = Literal[
    "SM", "CU", "Xe-core", "GPU core", "core", "AI core", "TensorCore", "NeuronCore", "TPC", "MP", "AP", "Tensix",
    "cluster",
]  # fmt: skip
LadderGroup = Literal["linear", "conv", "attention", "other"]

OP_CLASSES: tuple[OpClass, ...] = get_args(OpClass)
"""Every op class."""
VENDORS: tuple[Vendor, ...] = get_args(Vendor)
"""Who makes devices, as `vendor` fields spell it."""
MATRIX_OP_CLASSES: frozenset[OpClass] = frozenset({"linear", "matmul", "conv", "sdpa", "grouped_mm"})
"""Op classes that multiply and accumulate, on matrix units where there are any."""
MOVING_OP_CLASSES: frozenset[OpClass] = frozenset({"view", "collective"})
"""Op classes that move bytes and compute nothing (collectives encode, move, decode; they never sum narrow
formats)."""
ACCUMULATORS: tuple[str, ...] = ("fp64", "fp32", "fp16", "bf16", "int32")
"""Formats that something can be accumulated in."""

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""How every record is read: unknown keys, wrong types and infinities are errors."""

Rate = Annotated[float, Field(gt=0, le=262144)]
ClockMhz = Annotated[float, Field(ge=200, le=8000)]
Bandwidth = Annotated[float, Field(ge=1e9, le=5e13)]
Fraction = Annotated[float, Field(gt=0, le=1.2)]
Tflops = Annotated[float, Field(gt=0, le=1e6)]
Text = Annotated[str, Field(min_length=3)]


def natural_accumulator(format: str) -> str:
    """The accumulator a format has when nothing else is asked: itself for fp64, int32 for ints, fp32 for the
    rest."""
    if format == "fp64":
        return "fp64"
    return "int32" if get_format(format).kind == "int" else "fp32"


def recipe_accumulator(format: str, recipe: str) -> str:
    """The natural accumulator of a product: fp32 where one operand is not rounded (recipe `wide`), since the other is
    widened to it."""
    return "fp32" if keeps_wide(recipe) else natural_accumulator(format)


@functools.cache
def canonical_rate_key(key: str) -> str:
    """`format@accumulate`; a bare `format` accumulates in itself. Raises ValueError on an unknown part."""
    name, _, accumulate = key.partition("@")
    accumulate = accumulate or name
    check_format(name)
    if accumulate not in ACCUMULATORS:
        raise ValueError(f"{key!r}: accumulator {accumulate!r} is not one of {', '.join(ACCUMULATORS)}")
    return f"{name}@{accumulate}"


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return name


def canonical_rates(rates: Mapping[str, float]) -> dict[str, float]:
    return {canonical_rate_key(k): v for k, v in rates.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """One rung of a ladder: multiply in `format` scaled by `recipe` ("lhs/rhs", or one name for both
    operands) and add up in `accumulate`."""

    format: str
    recipe: str = "none"
    accumulate: str = "fp32"

    __pydantic_config__ = STRICT


class Tier(BaseModel):
    """A profile's ladders, most aggressive choice first, fp32 last; `storage` is the format of activations
    between nodes."""

    model_config = STRICT

    storage: str
    linear: tuple[Choice, ...]
    conv: tuple[Choice, ...]
    attention: tuple[Choice, ...]
    other: tuple[Choice, ...] = (Choice("fp32"),)

    @model_validator(mode="after")
    def _ladders_are_safe_at_the_end(self) -> Tier:
        for group in get_args(LadderGroup):
            ladder: tuple[Choice, ...] = getattr(self, group)
            if not ladder or ladder[-1] != Choice("fp32"):
                raise ValueError(f"ladder {group!r} must end with fp32, recipe none, accumulate fp32")
            if len(set(ladder)) != len(ladder):
                raise ValueError(f"ladder {group!r} names a choice twice")
            for choice in ladder:
                canonical_rate_key(f"{choice.format}@{choice.accumulate}")
                try:
                    split_recipe(choice.recipe)
                except DsmpError as error:
                    raise ValueError(str(error)) from None
        if self.other != (Choice("fp32"),):
            raise ValueError("ladder 'other' is fp32 alone")
        return self


class Accumulation(BaseModel):
    """What the matrix unit's accumulator really keeps for one input format (product sums, before fp32 is
    written)."""

    model_config = STRICT

    effective_mantissa_bits: Annotated[int, Field(ge=4, le=53)]
    promote_every_k: Annotated[int, Field(ge=16, le=4096)] | None = None


class Limit(BaseModel):
    """The only op classes a format serves on this architecture, and why no others."""

    model_config = STRICT

    op_classes: tuple[OpClass, ...]
    reason: Text


class Efficiency(BaseModel):
    """Achieved fraction of the derived peak (`compute`) and of the memory bandwidth (`memory`) by good
    kernels.

    `compute_by_format` replaces `compute` where one number misleads; `compute_for` asks it. `source` says
    what was measured and what was assumed.
    """

    model_config = STRICT

    compute: Fraction
    memory: Fraction
    compute_by_format: dict[str, Fraction] = Field(default_factory=dict)
    source: Text

    def compute_for(self, format: str) -> float:
        """Achieved fraction of the peak of `format`."""
        return self.compute_by_format.get(format, self.compute)


class Architecture(BaseModel):
    """A resolved architecture profile (inheritance already applied).

    `vector` and `matrix` hold dense FLOP per clock per unit, keyed `format@accumulate`; both are empty where
    `totals_only`. `reference` is the id of the device that the profile's and, with `isa_default`, the
    instruction set's name stand for, and whose clocks an unknown device of this class is assumed to have.
    `lanes_per_unit` counts what the vendor calls cores or shaders. `io_formats` are the
    formats the vector units load and widen to fp32, and narrow to, in hardware. `flushes_denormals` lists the
    inputs whose subnormals the matrix units read as zero. `mx_formats` have native 32-element power-of-two
    block scales. `refusals` explains, per format, why it is not offered where the generic sentence would not
    do. `single_unit_bandwidth_bytes_per_s` is what one CPU core can draw of the socket's. `weights` are the formats
    in which a linear's weights may be stored alone, with the values that a unit widens per clock as it reads them.
    `toolchain` says which software still (or already) makes code for the instruction set.
    """

    model_config = STRICT

    key: Annotated[str, Field(pattern=r"^[a-z]+\.[a-z0-9_.]+$")]
    parent: str | None = None
    vendor: Vendor
    family: Text
    kind: Kind
    isa: Annotated[str, Field(pattern=r"^(sm_\d+|gfx[0-9a-f]+|[a-z][a-z0-9_]+)$")]
    isa_default: bool = False
    reference: str | None = None
    totals_only: bool = False
    unit_kind: UnitKind
    lanes_per_unit: Annotated[int, Field(ge=1, le=4096)] | None = None
    scratchpad_bytes_per_unit: Annotated[int, Field(ge=1024, le=2**24)] | None = None
    vector: dict[str, Rate] = Field(default_factory=dict)
    matrix: dict[str, Rate] = Field(default_factory=dict)
    sparsity_factor: Literal[1, 2, 4] = 1
    fp8_flavour: Literal["ocp", "fnuz"] | None = None
    mx_formats: tuple[str, ...] = ()
    io_formats: tuple[str, ...]
    flushes_denormals: tuple[str, ...] = ()
    accumulation: dict[str, Accumulation] = Field(default_factory=dict)
    limits: dict[str, Limit] = Field(default_factory=dict)
    refusals: dict[str, Text] = Field(default_factory=dict)
    weights: dict[str, Rate] = Field(default_factory=dict)
    tier: Tier
    efficiency: Efficiency
    launch_overhead_s: Annotated[float, Field(ge=1e-8, le=1e-3)]
    launch_overhead_source: Text
    single_unit_bandwidth_bytes_per_s: Annotated[float, Field(ge=1e8, le=2e11)] | None = None
    toolchain: str = ""
    cpu_flags: tuple[str, ...] = ()
    cpu_vendor: str | None = None
    cpu_family: int | None = None
    source: tuple[Text, ...]

    @field_validator("vector", "matrix", mode="after")
    @classmethod
    def _rates_are_keyed(cls, rates: dict[str, float]) -> dict[str, float]:
        return canonical_rates(rates)

    @field_validator("mx_formats", "io_formats", "flushes_denormals", mode="after")
    @classmethod
    def _formats_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_format(n) for n in names)

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        for name in (
            *self.accumulation, *self.limits, *self.refusals, *self.efficiency.compute_by_format, *self.weights,
        ):  # fmt: skip
            check_format(name)
        rated = {k.partition("@")[0] for k in (*self.vector, *self.matrix)}
        self._check_fp8_flavour(rated | {c.format for ladder in self._ladders() for c in ladder})
        if refused := rated & set(self.refusals):
            raise ValueError(f"formats both rated and refused: {', '.join(sorted(refused))}")
        spoken_of = set(self.mx_formats) | set(self.limits) | set(self.accumulation)
        if not self.totals_only and (unrated := spoken_of - rated):
            raise ValueError(f"mx_formats, limits or accumulation name formats without a rate: {sorted(unrated)}")
        if self.totals_only and rated:
            raise ValueError("totals_only profiles have no vector or matrix rates")
        if not self.totals_only and "fp32@fp32" not in self.vector:
            raise ValueError("every architecture computes fp32 on its vector units: vector.fp32 is missing")
        if "fp32" not in self.io_formats:
            raise ValueError("io_formats must hold fp32")
        if self.tier.storage not in self.io_formats:
            raise ValueError(f"tier.storage {self.tier.storage!r} is not in io_formats")
        for choice in {c for ladder in self._ladders() for c in ladder}:
            rate = f"{choice.format}@{choice.accumulate}"
            if not self.totals_only and rate not in self.matrix and rate not in self.vector:
                raise ValueError(f"tier names {rate!r}, which has no rate")
            if any(r.name == "mx32" for r in split_recipe(choice.recipe)) and choice.format not in self.mx_formats:
                raise ValueError(f"tier scales {choice.format!r} by mx32, but it is not in mx_formats")
        if (self.kind == "cpu") != bool(self.cpu_flags):
            raise ValueError("cpu_flags belong to CPU profiles, and each needs some")
        if (self.kind == "cpu") != (self.single_unit_bandwidth_bytes_per_s is not None):
            raise ValueError("single_unit_bandwidth_bytes_per_s belongs to CPU profiles, and each needs it")
        if (self.isa_default or self.kind == "cpu") and self.reference is None:
            raise ValueError("reference is missing: an instruction set's default and CPU profiles name one")
        return self

    def _ladders(self) -> tuple[tuple[Choice, ...], ...]:
        return (self.tier.linear, self.tier.conv, self.tier.attention, self.tier.other)

    def _check_fp8_flavour(self, used: Iterable[str]) -> None:
        flavours = {"fnuz" if f.endswith("fnuz") else "ocp" for f in used if f.startswith("fp8_")}
        if flavours - {self.fp8_flavour}:
            raise ValueError(f"fp8_flavour is {self.fp8_flavour!r}, but {sorted(flavours)} formats are used")
        if self.fp8_flavour == "fnuz" and not self.isa.startswith("gfx94"):
            raise ValueError(f"fp8_flavour 'fnuz' exists on gfx94x only, not on {self.isa}")
