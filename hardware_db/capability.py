"""What one device can do: the object that passes ask, so that no pass ever looks at a device's name.

Questions are answered per op class, operand, format and accumulator with a `Verdict`: a yes or no that
carries its reason. Three kinds of op classes are told apart:

* *matrix* (linear, matmul, conv, sdpa, grouped_mm): the format needs a rate `format@accumulate` on the matrix
  units or, failing that, on the vector units; and the architecture may limit a format to some op classes (fp8
  to GEMMs).
* *moving* (view, collective): nothing is computed, every format that can be stored passes.
* all others: the vector units compute. With an fp32 accumulator the operand is widened on load and narrowed
  on store, which needs a format the units convert in hardware (`io_formats`); with a narrower one they need a
  rate of their own.

Peaks are derived (schema.py has the formula) and always dense and per logical device. What a kernel achieves of them
is taken from measurements of the running device where there are any (measurement.py), else it is the architecture's
usual fraction, times the occupancy of the shape on a GPU (work.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import UnsupportedFormatError
from .device_row import Confidence
from .formats import FORMATS, get_format
from .measurement import Measurement
from .schema import (
    ACCUMULATORS,
    MATRIX_OP_CLASSES,
    MOVING_OP_CLASSES,
    OP_CLASSES,
    Architecture,
    Choice,
    Efficiency,
    Kind,
    LadderGroup,
    OpClass,
    natural_accumulator,
)
from .work import GemmShape, Work

_LADDER_OF: dict[OpClass, LadderGroup] = {
    "linear": "linear",
    "grouped_mm": "linear",
    "conv": "conv",
    "matmul": "attention",
    "sdpa": "attention",
}
_BIAS_OPERAND = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer and its reason, one sentence with facts. True in a condition exactly when `ok`."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One logical device (what torch shows as one), from the catalogue or detected.

    `memory_bandwidth` and `link_bandwidth` (one way, None without a peer link) are bytes/s, `memory_bytes`
    and `l2_bytes` bytes. Clocks are None where the vendor publishes totals only. `vector_peaks` and `matrix_peaks`
    are dense FLOP/s (OP/s for ints) by `format@accumulate`. `estimated`: some number was scaled or assumed instead
    of looked up, so times are rough. `confidence`: A vendor text, B secondary, C recalled: not `verified`.
    `link_bandwidth` follows vendors' totals over all links. `overlays` names the user's files that defined or
    changed the device; `measured` is what was measured on it, if anything.
    """

    id: str
    name: str
    vendor: str
    isa: str
    kind: Kind
    units: int
    vector_clock_mhz: float | None
    matrix_clock_mhz: float | None
    vector_peaks: Mapping[str, float] = field(repr=False, hash=False)
    matrix_peaks: Mapping[str, float] = field(repr=False, hash=False)
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int | None
    link_bandwidth: float | None
    logical_devices: int
    estimated: bool
    confidence: Confidence
    profile: Architecture = field(repr=False, hash=False)
    overlays: tuple[str, ...] = ()
    measured: Measurement | None = field(default=None, repr=False, hash=False)

    @property
    def verified(self) -> bool:
        """Whether structure, clocks and memory were read in some source, not only recalled."""
        return self.confidence != "C"

    @property
    def efficiency(self) -> Efficiency:
        """Fractions of the peaks that are assumed where nothing was measured."""
        return self.profile.efficiency

    @property
    def launch_overhead_s(self) -> float:
        """Seconds per kernel: measured, else the architecture's usual figure."""
        return self.measured.launch_overhead_s if self.measured else self.profile.launch_overhead_s

    @property
    def achieved_bandwidth(self) -> float:
        """Bytes/s that kernels reach: measured, else the usual fraction of `memory_bandwidth`."""
        if self.measured:
            return self.measured.memory_bandwidth_bytes_per_s
        return self.memory_bandwidth * self.efficiency.memory

    @property
    def caveats(self) -> list[str]:
        """One sentence for each thing to know before trusting predictions; empty for published figures."""
        found = []
        if not self.verified:
            found.append(f"figures of {self.id} are recalled, not verified (confidence C)")
        if self.profile.totals_only:
            found.append(f"peaks of {self.id} are the vendor's totals, nothing derives them: for planning only")
        elif self.estimated and not self.measured:
            found.append(f"figures of {self.name} are estimated from {self.architecture} and its {self.units} units")
        if self.measured:
            found.append(f"rates measured on {self.measured.date} with torch {self.measured.torch}")
        if self.overlays:
            found.append(f"uses data of {', '.join(self.overlays)}")
        return found

    @property
    def storage(self) -> str:
        """The tier's format of activations between nodes."""
        return self.profile.tier.storage

    @property
    def architecture(self) -> str:
        """Key of the architecture profile, e.g. "nv.sm_90"."""
        return self.profile.key

    @property
    def scratchpad_bytes(self) -> int | None:
        """Shared memory (LDS) per unit; None on CPUs."""
        return self.profile.scratchpad_bytes_per_unit

    def ladder(self, op_class: OpClass) -> tuple[Choice, ...]:
        """The tier's choices for an op class, most aggressive first, fp32 last.

        grouped_mm uses linear's ladder, matmul and sdpa the attention ladder, anything without a multiply
        "other". A choice may still be refused by `supports`, whose reason then says why the next one is
        taken. Raises ValueError on an unknown op class.
        """
        _check_op_class(op_class)
        ladder: tuple[Choice, ...] = getattr(self.profile.tier, _LADDER_OF.get(op_class, "other"))
        return ladder

    def supports(self, op_class: OpClass, operand: int | None, format: str, accumulate: str = "fp32") -> Verdict:
        """Whether `operand` of an op of this class may be given in `format`, summed up in `accumulate`.

        `operand` counts (lhs or input, rhs or weight, bias); None asks for the op as a whole. A bias joins
        the accumulator, so it needs conversion only. Ints accumulate in int32 and fp64 in fp64 when
        `accumulate` is "fp32". Raises `UnknownFormatError` on an unknown format, ValueError on an unknown op
        class or an operand that is no number.
        """
        _check_op_class(op_class)
        get_format(format)
        if not isinstance(operand, int | None):
            raise ValueError(
                f"operands are counted: 0 (lhs), 1 (rhs), 2 (bias), None (the op as a whole), not {operand!r}"
            )
        accumulate = _accumulator(format, accumulate)
        if op_class in MOVING_OP_CLASSES:
            return self._moving(format)
        if op_class not in MATRIX_OP_CLASSES:
            return self._vector(op_class, format, accumulate)
        if operand is not None and operand >= _BIAS_OPERAND and op_class != "sdpa":
            return self._vector(f"bias of {op_class}", format, natural_accumulator(format))
        return self._matrix(op_class, format, accumulate)

    def peak(self, format: str, accumulate: str | None = None) -> float:
        """Dense FLOP/s (OP/s for ints) of `format`: the matrix units' if they have it, else the vector
        units'.

        `accumulate` None means fp32, int32 for ints and fp64 for fp64. Raises `UnsupportedFormatError` with
        the verdict's reason when there is no rate.
        """
        key = _rate_key(format, accumulate)
        peak = self.matrix_peaks.get(key) or self.vector_peaks.get(key)
        if peak is None:
            raise UnsupportedFormatError(f"{self._no_rate(*key.split('@'))}.")
        return peak

    def rated(self, format: str, accumulate: str | None = None) -> bool:
        """Whether `time` can tell anything of GEMMs in `format`: there is a peak, or it was measured."""
        key = _rate_key(format, accumulate)
        known = key in self.matrix_peaks or key in self.vector_peaks
        return known or (self.measured is not None and any(p.key == key for p in self.measured.gemm))

    def vector_peak(self, format: str = "fp32") -> float:
        """FLOP/s of elementwise arithmetic on operands in `format`.

        The vector units' own rate if they have one, else fp32's for formats that they convert on load and
        store. Raises `UnsupportedFormatError` for formats that they do neither compute nor convert.
        """
        get_format(format)
        peaks = self.vector_peaks
        peak = peaks.get(f"{format}@{format}") or peaks.get(f"{format}@{natural_accumulator(format)}")
        if peak is not None:
            return peak
        verdict = self._vector("pointwise", format, natural_accumulator(format))
        if not verdict.ok:
            raise UnsupportedFormatError(verdict.reason)
        return self.peak("fp32")

    def achievable(self, format: str, shape: GemmShape, accumulate: str | None = None) -> float:
        """FLOP/s that a GEMM of this shape reaches in `format`: measured nearby, else the architecture's usual
        fraction of the peak times, on a GPU, the shape's occupancy.

        Raises `UnsupportedFormatError` when there is no rate.
        """
        rate = self.measured.rate(_rate_key(format, accumulate), shape) if self.measured else None
        if rate is not None:
            return rate
        occupancy = shape.occupancy(self.units) if self.kind == "gpu" else 1.0
        return self.peak(format, accumulate) * self.efficiency.compute_for(format) * occupancy

    def time(self, work: Work, format: str, accumulate: str | None = None) -> float:
        """Predicted seconds of one operator in `format`: a roofline, plus the launch.

        max(flops / achievable, bytes / achieved bandwidth) + launch overhead (Williams, Waterman and Patterson,
        "Roofline", CACM 2009). Raises `UnsupportedFormatError` when there is no rate.
        """
        if work.gemm is not None:
            rate = self.achievable(format, work.gemm, accumulate)
        else:
            rate = self.peak(format, accumulate) * self.efficiency.compute_for(format)
        return max(work.flops / rate, work.moved_bytes / self.achieved_bandwidth) + self.launch_overhead_s

    def conversion_time(self, source: str, target: str, recipe: str, numel: int) -> float:
        """Predicted seconds to cast (recipe "none") or quantise `numel` values: measured, else limited by memory."""
        moved = numel * (get_format(source).storage_bits + get_format(target).storage_bits) / 8
        rate = self.measured.conversion_rate(source, target, recipe) if self.measured else None
        return moved / (rate or self.achieved_bandwidth) + self.launch_overhead_s

    def slower_than_fp32(
        self, format: str, accumulate: str | None = None, shape: GemmShape | None = None
    ) -> float | None:
        """The measured rate of `format` as a multiple of fp32's, near a shape or on the whole, if it was measured and
        is no faster, else None."""
        ratio = self.measured.ratio_to_fp32(_rate_key(format, accumulate), shape) if self.measured else None
        return ratio if ratio is not None and ratio <= 1 else None

    def scaled(self, *, units: int, memory_bytes: int, memory_bandwidth: float, l2_bytes: int | None) -> Device:
        """This device with other numbers of units and bytes (a MIG slice, a sibling): peaks go with the units, and the
        result is `estimated`."""
        share = units / self.units
        return replace(
            self,
            units=units,
            memory_bytes=memory_bytes,
            memory_bandwidth=memory_bandwidth,
            l2_bytes=l2_bytes,
            vector_peaks={k: v * share for k, v in self.vector_peaks.items()},
            matrix_peaks={k: v * share for k, v in self.matrix_peaks.items()},
            estimated=True,
        )

    def flushes_denormals(self, format: str) -> bool:
        """True when the matrix units read subnormal inputs of `format` as zero."""
        return get_format(format).name in self.profile.flushes_denormals

    def accumulator_mantissa_bits(self, format: str) -> int | None:
        """Mantissa bits the matrix accumulator keeps where fewer or more than its nominal format's; None if
        nominal."""
        caveat = self.profile.accumulation.get(get_format(format).name)
        return caveat.effective_mantissa_bits if caveat else None

    def promote_every_k(self, format: str) -> int | None:
        """Contraction length after which partial sums should be promoted to fp32; None where it is not
        needed."""
        caveat = self.profile.accumulation.get(get_format(format).name)
        return caveat.promote_every_k if caveat else None

    @property
    def _label(self) -> str:
        return f"{self.name} ({self.isa})"

    def _moving(self, format: str) -> Verdict:
        if format == "tf32":
            return Verdict(False, "tf32 is how matrix units read fp32, nothing is stored or sent in it; use fp32.")
        return Verdict(True, f"only bytes move, no arithmetic in {format}.")

    def _vector(self, op_class: str, format: str, accumulate: str) -> Verdict:
        if format == "tf32":
            return Verdict(False, "tf32 is how matrix units read fp32, vector units do not have it; use fp32.")
        limit = self.profile.limits.get(format)
        if limit and op_class not in limit.op_classes and format not in self.profile.io_formats:
            return Verdict(False, self._limited(op_class, format, limit.reason))
        if f"{format}@{accumulate}" in self.vector_peaks:
            return Verdict(True, f"{self._label} computes {format} with {accumulate} accumulation on its vector units.")
        if format in self.profile.io_formats and accumulate == natural_accumulator(format):
            return Verdict(True, f"{self._label} converts {format} on load and store and computes in {accumulate}.")
        if format in self.profile.io_formats:
            return Verdict(
                False,
                f"{self._label} has no vector rate for {format} with {accumulate} accumulation; "
                f"accumulate in {natural_accumulator(format)}.",
            )
        return Verdict(False, f"{self._no_rate(format, accumulate)}.")

    def _matrix(self, op_class: str, format: str, accumulate: str) -> Verdict:
        key = f"{format}@{accumulate}"
        if key not in self.matrix_peaks and key not in self.vector_peaks:
            return Verdict(False, f"{self._no_rate(format, accumulate)}.")
        limit = self.profile.limits.get(format)
        if limit and op_class not in limit.op_classes:
            return Verdict(False, self._limited(op_class, format, limit.reason))
        where = "matrix" if key in self.matrix_peaks else "vector"
        return Verdict(
            True,
            f"{self._label} has {format} {where} units with {accumulate} accumulation, "
            f"{self.peak(format, accumulate) / 1e12:.3g} TFLOPS dense.",
        )

    def _limited(self, op_class: str, format: str, reason: str) -> str:
        return f"no {format} {op_class} on {self._label}: {reason}."

    def _no_rate(self, format: str, accumulate: str) -> str:
        """Why there is no rate for `format@accumulate`, without the full stop."""
        if self.measured and (ratio := self.slower_than_fp32(format, accumulate)) is not None:
            return (
                f"{self._label} does not offer {format}: its GEMMs measured {ratio:.2g} times as fast as fp32's here, "
                "in the mean over shapes"
            )
        if reason := self.profile.refusals.get(format):
            return f"{self._label} does not offer {format}: {reason}"
        twin = _other_fp8_flavour(format)
        if twin and self.profile.fp8_flavour and self._accumulators(twin):
            return (
                f"{self._label} has the {self.profile.fp8_flavour} flavour of fp8, not {format}; use {twin} "
                "and convert values (the same bits mean twice or half)"
            )
        if others := self._accumulators(format):
            return (
                f"{self._label} does not accumulate {format} in {accumulate}; accumulators it has: {', '.join(others)}"
            )
        matrix = [f for f in FORMATS if any(k.startswith(f"{f}@") for k in self.matrix_peaks)]
        have = ", ".join(matrix) if matrix else "none (vector units compute fp32)"
        return f"{self._label} has no {format} units; formats with matrix units: {have}"

    def _accumulators(self, format: str) -> list[str]:
        return [a for a in ACCUMULATORS if f"{format}@{a}" in self.vector_peaks or f"{format}@{a}" in self.matrix_peaks]


def _check_op_class(op_class: str) -> None:
    if op_class not in OP_CLASSES:
        raise ValueError(f"unknown op class {op_class!r}; known: {', '.join(OP_CLASSES)}.")


def _accumulator(format: str, accumulate: str) -> str:
    """`accumulate`, except that the default "fp32" gives way to what ints and fp64 accumulate in."""
    get_format(accumulate)
    return natural_accumulator(format) if accumulate == "fp32" else accumulate


def _rate_key(format: str, accumulate: str | None) -> str:
    """`format@accumulate` with what None and "fp32" stand for. Raises `UnknownFormatError`."""
    get_format(format)
    return f"{format}@{_accumulator(format, 'fp32' if accumulate is None else accumulate)}"


def _other_fp8_flavour(format: str) -> str | None:
    if not format.startswith("fp8_"):
        return None
    return format.removesuffix("fnuz") if format.endswith("fnuz") else f"{format}fnuz"
