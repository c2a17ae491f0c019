"""A product as the data files describe it: about a dozen scalars on top of an architecture profile, each group of them
with its source and confidence.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from .schema import STRICT, Bandwidth, ClockMhz, Text, Tflops, Vendor, canonical_rates

Confidence = Literal["A", "B", "C"]
"""A: read in vendor-authored or vendor-citing text; B: read in a secondary source; C: recalled or disputed."""
Segment = Literal["datacenter", "workstation", "consumer", "edge", "integrated"]
Group = Literal["structure", "clocks", "memory", "link", "power", "peaks"]
"""What is sourced together: unit and core counts with the caches; clocks; memory size and bandwidth; the interconnect;
the power limit; the vendor's stated peaks."""

SEGMENTS: tuple[Segment, ...] = get_args(Segment)
GROUPS: tuple[Group, ...] = get_args(Group)


class Interconnect(BaseModel):
    """The fastest link to a peer device. Bidirectional over all its lanes or links, as vendors state it; one way is
    half."""

    model_config = STRICT

    kind: Text
    bidirectional_bytes_per_s: Annotated[float, Field(ge=1e9, le=1e13)]


class DeviceRow(BaseModel):
    """One product. All quantities are per *logical device* (what torch shows as one device), except those
    whose name ends in `_per_card`, which are the vendor's figures for a card of `logical_devices` such
    devices.

    `memory_bytes` is what the runtime reports where a dump was read, else nominal. `cores` is the vendor's count of
    cores or shaders. `stated_*_per_card` are the vendor's dense peaks; each must agree with the derived peak within
    3 % or be listed, keyed "vector.fp32@fp32" or "matrix.bf16@fp32", in `known_disagreements` with the reason. On a
    `totals_only` profile they are the peaks, clocks may be missing, and fp32, where the vendor says nothing, is
    assumed at `assumed_fp32_share` of the 16-bit matrix peak (or of what narrower ones would be at 16 bits).

    `sources` and `confidence` speak for all groups under the key "all", or for one group that differs under its own.
    """

    model_config = STRICT

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    name: Text
    arch: str
    vendor: Vendor | None = None
    segment: Segment
    aliases: tuple[Annotated[str, Field(min_length=2)], ...] = ()
    detect_names: tuple[Text, ...] = ()
    pci_ids: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{4}$")], ...] = ()
    year: Annotated[int, Field(ge=2010, le=2035)]
    units: Annotated[int, Field(ge=1, le=2048)]
    cores: Annotated[int, Field(ge=1, le=10**6)] | None = None
    logical_devices: Annotated[int, Field(ge=1, le=16)] = 1
    vector_clock_mhz: ClockMhz | None = None
    matrix_clock_mhz: ClockMhz | None = None
    memory_bytes: Annotated[int, Field(ge=10**8, le=10**13)]
    memory_type: Text
    memory_bandwidth_bytes_per_s: Bandwidth
    l2_bytes: Annotated[int, Field(ge=2**16, le=2**30)] | None = None
    llc_bytes: Annotated[int, Field(ge=2**20, le=2**33)] | None = None
    interconnect: Interconnect | None = None
    tdp_w_per_card: Annotated[float, Field(ge=1, le=5000)] | None = None
    stated_vector_tflops_per_card: dict[str, Tflops] = Field(default_factory=dict)
    stated_matrix_tflops_per_card: dict[str, Tflops] = Field(default_factory=dict)
    assumed_fp32_share: Annotated[float, Field(gt=0, le=1)] | None = None
    known_disagreements: dict[str, Text] = Field(default_factory=dict)
    sources: dict[Group | Literal["all"], Annotated[tuple[Text, ...], Field(min_length=1)]]
    confidence: dict[Group | Literal["all"], Confidence]
    note: str = ""

    @field_validator("stated_vector_tflops_per_card", "stated_matrix_tflops_per_card", mode="after")
    @classmethod
    def _stated_are_keyed(cls, stated: dict[str, float]) -> dict[str, float]:
        return canonical_rates(stated)

    @field_validator("sources", "confidence", mode="after")
    @classmethod
    def _speaks_for_all_groups(cls, given: dict[str, object]) -> dict[str, object]:
        missing = [g for g in GROUPS if g not in given]
        if missing and "all" not in given:
            raise ValueError(f"nothing is said of {', '.join(missing)}; give them, or 'all'")
        return given

    @model_validator(mode="after")
    def _matrix_clock_needs_a_vector_clock(self) -> DeviceRow:
        if self.matrix_clock_mhz is not None and self.vector_clock_mhz is None:
            raise ValueError("matrix_clock_mhz is given without vector_clock_mhz")
        return self

    def source_of(self, group: Group) -> tuple[str, ...]:
        """Where the numbers of a group were read."""
        return self.sources[group] if group in self.sources else self.sources["all"]

    def confidence_of(self, group: Group) -> Confidence:
        """How far to trust the numbers of a group."""
        return self.confidence[group] if group in self.confidence else self.confidence["all"]

    @property
    def worst_confidence(self) -> Confidence:
        """The lowest confidence of the groups that predictions use: structure, clocks and memory."""
        return max(self.confidence_of(g) for g in ("structure", "clocks", "memory"))
