"""How fast the running device multiplies matrices, per format and shape, by the operators that plans run on it.

Products of few rows are those of decoding: only the forward pass of a linear exists, x[m, k] @ weight[n, k]^T. At other
shapes a training step multiplies in three layouts (forward, gradient of the input, gradient of the weight), and the
rate is that of their mean time; operators that have the forward layout alone are measured in it.

Operands are cut one after another from a pool larger than the last-level cache, so that weights come from memory, as
they do in a model.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...hardware_db.capability import Device
from ...hardware_db.measurement import GemmPoint
from ...hardware_db.schema import natural_accumulator
from ...hardware_db.work import GemmShape
from .timing import Call, Clock, kernel_seconds

DECODE_ROWS = 16
"""Products of at most so many rows are measured in the layout of a forward pass only."""

BASE = "fp32"
"""The format that all others are compared with; it is always measured."""

_PROBE = GemmShape(m=32, n=64, k=64)
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError)
_MOST_OPERANDS, _FEW_OPERANDS = 48, 4
_ALIGNMENT = 64
_PACKED_VALUES = 2**26
_INT8_STEP = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Which shapes to measure, in which order, and how much time to spend.

    About `point_s` seconds on one rate; a rate is left out if one call in each of its layouts should last longer than
    `round_s` in all; no new shape is begun after `total_s`.
    """

    shapes: tuple[GemmShape, ...]
    point_s: float
    round_s: float
    total_s: float


class Pool:
    """Random values of one dtype, cut into operands one after another; starts anew at its end."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size_bytes: int) -> None:
        self.dtype, self._device = dtype, device
        self._values = self._filled(size_bytes // dtype.itemsize)
        self._next = 0

    def take(self, *sizes: int) -> Tensor:
        """A contiguous tensor of these sizes."""
        count = math.prod(sizes)
        if count > self._values.numel():
            self._values = self._filled(count)
        start = self._next if self._next + count <= self._values.numel() else 0
        self._next = start + -(-count // _ALIGNMENT) * _ALIGNMENT
        return self._values[start : start + count].view(sizes)

    def operands(self, shape: GemmShape) -> int:
        """How many pairs of operands of this shape to take turns with: what the pool holds, within reason."""
        pair = shape.batch * (shape.m * shape.k + shape.n * shape.k)
        return max(1, min(self._values.numel() // pair, _MOST_OPERANDS))

    def _filled(self, count: int) -> Tensor:
        block = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
        if not self.dtype.is_floating_point:
            block = block.mul_(40).round_().clamp_(-127, 127)
        raw = block.to(self.dtype).view(torch.uint8).to(self._device)  # bytes: not every dtype can be repeated
        return raw.repeat(-(-count // block.numel()))[: count * self.dtype.itemsize].view(self.dtype)


class GemmOperator(Protocol):
    """One way to multiply two matrices in a format; `precision` is torch's switch for how fp32 operands are read."""

    format: str
    precision: str
    batched: bool

    def describe(self, shape: GemmShape) -> str:
        """What is called, and how."""
        ...

    def layouts(self, shape: GemmShape) -> int:
        """How many layouts of operands are measured."""
        ...

    def calls(self, shape: GemmShape) -> list[list[Call]]:
        """For each layout, calls on different operands to take turns with."""
        ...


class PlainGemm:
    """torch's mm and bmm on operands of one dtype."""

    batched = True

    def __init__(self, format: str, pool: Pool, precision: str = "highest") -> None:
        self.format = format
        self.precision = precision
        self._pool = pool

    def describe(self, shape: GemmShape) -> str:
        operator = "aten.mm" if shape.batch == 1 else "aten.bmm"
        switch = " under tf32" if self.precision == "high" else ""
        layouts = "forward layout" if self.layouts(shape) == 1 else "layouts of a training step"
        return f"{operator}{switch}, {layouts}"

    def layouts(self, shape: GemmShape) -> int:
        return 1 if shape.m <= DECODE_ROWS else len(_LAYOUTS)

    def calls(self, shape: GemmShape) -> list[list[Call]]:
        multiply = torch.mm if shape.batch == 1 else torch.bmm
        count = self._pool.operands(shape)
        return [
            [_bind(multiply, *layout(self._pool, shape)) for _ in range(count)]
            for layout in _LAYOUTS[: self.layouts(shape)]
        ]


class _ForwardOnly(ABC):
    """What operators have in common that know the layout of a linear's forward pass alone."""

    precision = "highest"
    batched = False

    def layouts(self, shape: GemmShape) -> int:
        return 1

    def calls(self, shape: GemmShape) -> list[list[Call]]:
        return [self._forward(shape)]

    @abstractmethod
    def _forward(self, shape: GemmShape) -> list[Call]:
        """Calls on different operands, in the one layout."""


class ScaledGemm(_ForwardOnly):
    """torch's fp8 product with one scale per operand; the right operand may be another fp8 format."""

    def __init__(self, format: str, left: Pool, right: Pool, device: torch.device) -> None:
        self.format = format
        self._left, self._right = left, right
        self._scale = torch.ones((), device=device)

    def describe(self, shape: GemmShape) -> str:
        return f"aten._scaled_mm by {self._right.dtype} to bf16, one scale per operand".replace("torch.", "")

    def _forward(self, shape: GemmShape) -> list[Call]:
        return [
            _bind(
                torch._scaled_mm, self._left.take(shape.m, shape.k), self._right.take(shape.n, shape.k).t(),
                scale_a=self._scale, scale_b=self._scale, out_dtype=torch.bfloat16,
            )
            for _ in range(self._right.operands(shape))
        ]  # fmt: skip


class IntegerGemm(_ForwardOnly):
    """torch's int8 product on accelerators."""

    format = "int8"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def describe(self, shape: GemmShape) -> str:
        return "aten._int_mm"

    def _forward(self, shape: GemmShape) -> list[Call]:
        pool = self._pool
        return [
            _bind(torch._int_mm, pool.take(shape.m, shape.k), pool.take(shape.n, shape.k).t())
            for _ in range(pool.operands(shape))
        ]


class DynamicInt8Gemm(_ForwardOnly):
    """int8 on CPUs: fp32 activations are quantised on the way in (a scale per tensor), weights (a scale per row)
    are packed beforehand, the result is fp32."""

    format = "int8"

    def __init__(self, values: Pool) -> None:
        self._values = values

    def describe(self, shape: GemmShape) -> str:
        return f"quantized.linear_dynamic ({torch.backends.quantized.engine}) on fp32 activations"

    def _forward(self, shape: GemmShape) -> list[Call]:
        # packing takes long, and with many rows it matters little where weights come from
        most = _MOST_OPERANDS if shape.m <= DECODE_ROWS else _FEW_OPERANDS
        count = max(1, min(_PACKED_VALUES // (shape.n * shape.k), most))
        # 7 bits of activations: without VNNI the sum of two products of 8 bits each overflows its 16 bits
        return [
            _bind(
                torch.ops.quantized.linear_dynamic, self._values.take(shape.m, shape.k), self._packed(shape),
                reduce_range=True,
            )
            for _ in range(count)
        ]  # fmt: skip

    def _packed(self, shape: GemmShape) -> object:
        scales, zeros = torch.full((shape.n,), _INT8_STEP), torch.zeros(shape.n, dtype=torch.int64)
        weight = self._values.take(shape.n, shape.k)
        with warnings.catch_warnings():
            # the operator takes no other weights; where these are gone, int8 is left out
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
            quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(quantised, None)


def gemm_operators(hardware: Device, device: torch.device, pool_bytes: int) -> dict[str, GemmOperator]:
    """The operators that run on a device, by format, `BASE` first.

    A format whose operator is refused on a small product is left out. So is tf32 where the device has none: torch's
    switch would have no effect.
    """
    pools: dict[torch.dtype, Pool] = {}

    def pool(dtype: torch.dtype) -> Pool:
        if dtype not in pools:
            pools[dtype] = Pool(dtype, device, pool_bytes)
        return pools[dtype]

    makers: dict[str, Callable[[], GemmOperator]] = {
        BASE: lambda: PlainGemm(BASE, pool(torch.float32)),
        "fp64": lambda: PlainGemm("fp64", pool(torch.float64)),
        "bf16": lambda: PlainGemm("bf16", pool(torch.bfloat16)),
        "fp16": lambda: PlainGemm("fp16", pool(torch.float16)),
    }
    if device.type == "cpu":
        makers["int8"] = lambda: DynamicInt8Gemm(pool(torch.float32))
    else:
        makers["int8"] = lambda: IntegerGemm(pool(torch.int8))
        for name, left, right in (
            ("fp8_e4m3", torch.float8_e4m3fn, torch.float8_e4m3fn),
            ("fp8_e5m2", torch.float8_e5m2, torch.float8_e4m3fn),  # a gradient by a weight: no two e5m2 operands
            ("fp8_e4m3fnuz", torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
            ("fp8_e5m2fnuz", torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
        ):
            makers[name] = lambda n=name, a=left, b=right: ScaledGemm(n, pool(a), pool(b), device)  # type: ignore[misc]
        if hardware.supports("linear", None, "tf32"):
            makers["tf32"] = lambda: PlainGemm("tf32", pool(torch.float32), "high")
    return {name: operator for name, make in makers.items() if (operator := _probed(name, make, device)) is not None}


def measure_gemms(
    operators: Sequence[GemmOperator], grid: Grid, clock: Clock, progress: Callable[[str], None]
) -> list[GemmPoint]:
    """The rate of every operator at every shape, as far as time allows; what is refused or too slow is left out.

    `BASE` must be among the operators, and its errors are not caught: a device without it measures nothing.
    """
    deadline = time.perf_counter() + grid.total_s
    points: list[GemmPoint] = []
    for shape in grid.shapes:
        if points and time.perf_counter() > deadline:
            break
        progress(f"GEMM {shape_text(shape)}")
        for operator in operators:
            if shape.batch > 1 and not operator.batched:
                continue
            try:
                point = _point(operator, shape, points, grid, clock)
            except _REFUSALS:
                if operator.format == BASE and not points:
                    raise
                continue
            if point is not None:
                points.append(point)
    return points


def shape_text(shape: GemmShape | GemmPoint) -> str:
    """`1024x4096x512` for m, n and k, with the batch before it if there is one."""
    product = f"{shape.m}x{shape.n}x{shape.k}"
    return product if shape.batch == 1 else f"{shape.batch} of {product}"


def _point(
    operator: GemmOperator, shape: GemmShape, known: Sequence[GemmPoint], grid: Grid, clock: Clock
) -> GemmPoint | None:
    """One measured rate, or None if it would take too long."""
    layouts = operator.layouts(shape)
    if _predicted_s(operator.format, shape, known) * layouts > grid.round_s:
        return None
    with _float32_precision(operator.precision):
        times = [kernel_seconds(_in_turn(c), clock, grid.point_s / layouts) for c in operator.calls(shape)]
    seconds = sum(times) / layouts
    return GemmPoint(
        format=operator.format, accumulate=natural_accumulator(operator.format),
        batch=shape.batch, m=shape.m, n=shape.n, k=shape.k,
        flop_per_s=significant(shape.flops / seconds), operator=operator.describe(shape),
    )  # fmt: skip


def significant(value: float) -> float:
    """A number as it is written to a file: four significant digits, more than timing gives."""
    return float(f"{value:.4g}")


def _predicted_s(format: str, shape: GemmShape, known: Sequence[GemmPoint]) -> float:
    """Seconds that one product should take, from the rate at the nearest shape; 0 if none was measured."""
    same = [p for p in known if p.format == format]
    if not same:
        return 0.0
    return shape.flops / min(same, key=lambda p: p.shape.distance(shape)).flop_per_s


def _probed(name: str, make: Callable[[], GemmOperator], device: torch.device) -> GemmOperator | None:
    """The operator if it runs."""
    try:
        operator = make()
        operator.calls(_PROBE)[0][0]()
        if device.type != "cpu":
            torch.accelerator.synchronize()
    except _REFUSALS:
        if name == BASE:
            raise
        return None
    return operator


@contextlib.contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    """torch's switch for fp32 operands, afterwards as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _forward(pool: Pool, shape: GemmShape) -> tuple[Tensor, Tensor]:
    return _take(pool, shape, shape.m, shape.k), _take(pool, shape, shape.n, shape.k).mT


def _input_gradient(pool: Pool, shape: GemmShape) -> tuple[Tensor, Tensor]:
    return _take(pool, shape, shape.m, shape.k), _take(pool, shape, shape.k, shape.n)


def _weight_gradient(pool: Pool, shape: GemmShape) -> tuple[Tensor, Tensor]:
    return _take(pool, shape, shape.k, shape.m).mT, _take(pool, shape, shape.k, shape.n)


_LAYOUTS = (_forward, _input_gradient, _weight_gradient)


def _take(pool: Pool, shape: GemmShape, rows: int, columns: int) -> Tensor:
    return pool.take(rows, columns) if shape.batch == 1 else pool.take(shape.batch, rows, columns)


def _in_turn(calls: Sequence[Call]) -> Call:
    """One call after the other, and again from the first."""
    ring = itertools.cycle(calls)
    return lambda: next(ring)()


def _bind(function: Callable[..., object], *args: object, **kwargs: object) -> Call:
    return lambda: function(*args, **kwargs)
