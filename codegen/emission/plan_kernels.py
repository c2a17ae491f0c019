"""Which kernels a plan needs on a target: one description for each distinct kernel, from the plan alone.

A plan has the shapes of every product; its operands lie as the phases of a step leave them: the forward product reads
rows of x and of the weight, the gradient of the input rows of dy and columns of the weight, the gradient of the weight
columns of both. Kernels that differ in nothing but run-time sizes are one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...hardware_db.capability import Device
from ...hardware_db.formats import split_recipe
from ...hardware_db.work import GemmShape
from ...passes.cast_motion import DTYPES
from ...passes.plan import Decision
from ...passes.plan_fields import GEMM_CLASSES
from ..kernel_call import KernelCall
from ..kernels.block_gemm import block_gemm_call, block_gemm_configs
from ..kernels.gemm import gemm_call
from ..kernels.gemm_configs import gemm_configs
from ..kernels.mx_gemm import mx_gemm_call, mx_gemm_configs
from ..kernels.quantize import (
    quantize_rows_call,
    quantize_rows_configs,
    quantize_tiles_call,
    quantize_tiles_configs,
    reads_once,
)
from ..kernels.quantize_vectors import (
    quantize_tensor_call,
    quantize_tensor_configs,
    quantize_vectors_call,
    quantize_vectors_configs,
)
from ..kernels.scales import QUANTIZED_DTYPES
from ..offline import meta
from ..registry import Choice, Product, choose
from ..targets import Target, target_of


@dataclass(frozen=True, kw_only=True)
class PlannedKernel:
    """One distinct kernel: the launch that stands for it (the largest one), and the nodes it serves.

    `shapes`: distinct products it computes; `flops`: of all its nodes, 0 for kernels that quantise. `time_us`:
    predicted for all its nodes. `peak_share`: predicted share of the device's peak.
    """

    call: KernelCall
    nodes: Sequence[str]
    shapes: Sequence[GemmShape]
    flops: int
    time_us: float
    peak_share: float | None


@dataclass(frozen=True, kw_only=True)
class LibraryCalls:
    """Products that a library computes: which implementation, in which format, how many nodes and FLOPs."""

    implementation: str
    compute: str
    op: str
    nodes: Sequence[str]
    flops: int


@dataclass(frozen=True, kw_only=True)
class PlanKernels:
    """All kernels and library calls of a plan, and the products that nothing computes."""

    kernels: Sequence[PlannedKernel]
    library: Sequence[LibraryCalls]
    uncovered: Mapping[str, str]
    flops: int

    @property
    def covered(self) -> float:
        """Share of the planned products' FLOPs that a kernel or a library call computes."""
        done = sum(k.flops for k in self.kernels) + sum(c.flops for c in self.library)
        return done / self.flops if self.flops else 1.0


def plan_kernels(
    decisions: Iterable[Decision],
    device: Device,
    *,
    forced: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> PlanKernels:
    """The kernels that a plan's products take on a device. Raises KernelUnavailableError for a forced implementation
    that cannot serve."""
    target = target_of(device)
    found: dict[tuple[object, ...], _Group] = {}
    library: dict[tuple[str, str, str], list[Decision]] = {}
    uncovered: dict[str, str] = {}
    total = 0
    for decision in decisions:
        if decision.op not in GEMM_CLASSES:
            continue
        total += decision.flops
        product = product_from(decision)
        choice = choose(product, device, forced=forced, without=without)
        name = choice.implementation.name
        if choice.implementation.kind == "library":
            library.setdefault((name, product.compute, decision.op), []).append(decision)
            continue
        if choice.implementation.kind != "triton" or product.shape is None or target is None:
            uncovered[decision.key] = choice.reason
            continue
        for call, multiplies in _CALLS[name](product, product.shape, target):
            group = found.setdefault(_identity(call), _Group(call=call, shape=product.shape))
            group.add(call, decision, product, choice, device, multiplies)
    return PlanKernels(
        kernels=[g.kernel(device) for g in found.values()],
        library=[
            LibraryCalls(
                implementation=name, compute=compute, op=op, nodes=[d.key for d in ds], flops=sum(d.flops for d in ds)
            )
            for (name, compute, op), ds in library.items()
        ],
        uncovered=uncovered,
        flops=total,
    )


def product_from(decision: Decision) -> Product:
    """The product of a decision, its shape from the operands' shapes that the plan holds; other GEMMs have none."""
    aten = decision.aten.removesuffix(".default")
    shape = None
    if aten in ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm") and len(decision.shapes) >= 2:
        left, right = decision.shapes[:2]
        if min(*left, *right) > 0:
            batch = left[0] if len(left) == 3 else 1
            shape = GemmShape(batch=batch, m=left[-2], n=right[-1], k=left[-1])
    return Product(
        key=decision.key,
        op_class=decision.op,
        phase=decision.phase,
        aten=aten,
        compute=decision.compute,
        recipe=decision.recipe,
        accumulate=decision.accumulate,
        output=decision.output,
        traced=decision.traced,
        shape=shape,
    )


@dataclass(kw_only=True)
class _Group:
    """The launches of one distinct kernel while a plan is read."""

    call: KernelCall
    shape: GemmShape
    nodes: list[str] = field(default_factory=list)
    shapes: dict[GemmShape, None] = field(default_factory=dict)
    flops: int = 0
    peak_flops: float = 0.0
    time_us: float = 0.0

    def add(
        self, call: KernelCall, decision: Decision, product: Product, choice: Choice, device: Device, multiplies: bool
    ) -> None:
        assert product.shape is not None
        if product.shape.flops > self.shape.flops:
            self.call, self.shape = call, product.shape
        self.nodes.append(decision.key)
        self.shapes.setdefault(product.shape)
        if multiplies:
            self.flops += decision.flops
            self.time_us += choice.implementation.time_us(product, device)
            if device.rated(product.compute, product.accumulate):
                self.peak_flops = device.peak(product.compute, product.accumulate)

    def kernel(self, device: Device) -> PlannedKernel:
        share = None
        if self.time_us and self.peak_flops:
            share = self.flops / (self.time_us * 1e-6) / self.peak_flops
        return PlannedKernel(
            call=self.call, nodes=tuple(dict.fromkeys(self.nodes)), shapes=tuple(self.shapes), flops=self.flops,
            time_us=self.time_us, peak_share=share,
        )  # fmt: skip


def _identity(call: KernelCall) -> tuple[object, ...]:
    """What makes two launches one kernel: everything that is compiled in."""
    arguments = tuple(
        (name, value.dtype if isinstance(value, Tensor) else _specialized(value))
        for name, value in call.arguments.items()
    )
    constants = tuple((k, str(v)) for k, v in call.constants.items())
    return call.name, arguments, constants, call.config.num_warps, call.config.num_stages, str(call.config.options)


def _specialized(value: object) -> object:
    """What Triton's launcher compiles in of a run-time argument: that it is 1, a multiple of 16, or not there."""
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    return "1" if value == 1 else f"int{'*16' if value % 16 == 0 else ''}"


# ---- the launches of each implementation ------------------------------------------------------------------

_Launches = Iterable[tuple[KernelCall, bool]]


def _values(rows: int, columns: int, dtype: torch.dtype, *, by_rows: bool, batch: int = 1) -> Tensor:
    """A [rows, columns] operand (batched if there is a batch) that lies by rows or by columns."""
    if batch == 1:
        return meta(rows, columns, dtype=dtype) if by_rows else meta(columns, rows, dtype=dtype).T
    if by_rows:
        return meta(batch, rows, columns, dtype=dtype)
    return meta(batch, columns, rows, dtype=dtype).mT


def _layouts(product: Product) -> tuple[bool, bool]:
    """Whether the left and the right operand lie by rows."""
    if product.op_class == "linear":
        return product.phase != "wgrad", product.phase != "fprop"
    return True, True


def _bias(product: Product, n: int) -> Tensor | None:
    return meta(n, dtype=torch.float32) if product.aten == "aten.addmm" else None


def _source(product: Product) -> torch.dtype:
    """The dtype in which operands lie in memory before they are quantised."""
    stored = product.output if product.phase == "fprop" else product.traced
    return DTYPES.get(stored, torch.float32)


def _output(product: Product) -> torch.dtype:
    return DTYPES[product.output]


def _gemm_launches(product: Product, shape: GemmShape, target: Target) -> _Launches:
    m, n, k, batch = shape.m, shape.n, shape.k, shape.batch
    left, right = _layouts(product)
    dtype = QUANTIZED_DTYPES.get(product.compute) or DTYPES[product.compute]
    recipes = [r.name for r in split_recipe(product.recipe)]
    scales: list[Tensor | None] = [None, None]
    for side, size in ((0, m), (1, n)):
        if recipes[side] != "none":
            scales[side] = meta(size, dtype=torch.float32) if recipes[side] == "row" else meta(dtype=torch.float32)
    out = meta(*((batch,) if batch > 1 else ()), m, n, dtype=_output(product))
    yield (
        gemm_call(
            _values(m, k, dtype, by_rows=left, batch=batch), _values(k, n, dtype, by_rows=right, batch=batch), out,
            format=product.compute, scale_a=scales[0], scale_b=scales[1], bias=_bias(product, n),
            config=gemm_configs(m, n, k, product.compute, target)[0],
        ),
        True,
    )  # fmt: skip
    for side, (rows, columns) in ((0, (m * batch, k)), (1, (k, n * batch))):
        x = meta(rows, columns, dtype=_source(product))
        values = meta(rows, columns, dtype=dtype)
        if recipes[side] == "row":
            config = quantize_vectors_configs(rows, columns, product.compute, target)[0]
            scale = meta(rows, dtype=torch.float32)
            yield quantize_vectors_call(x, values, scale, format=product.compute, config=config), False
        elif recipes[side] == "tensor":
            config = quantize_tensor_configs(rows, columns, product.compute, target)[0]
            scalar, partial = meta(dtype=torch.float32), meta(1024, dtype=torch.int32)
            call = quantize_tensor_call(
                x, values, scalar, meta(dtype=torch.float32), partial, format=product.compute,
                power_of_two=product.compute == "fp16", config=config,
            )  # fmt: skip
            yield call, False


def _block_launches(product: Product, shape: GemmShape, target: Target) -> _Launches:
    m, n, k = shape.m, shape.n, shape.k
    left, right = _layouts(product)
    dtype = QUANTIZED_DTYPES[product.compute]
    recipes = [r.name for r in split_recipe(product.recipe)]
    rows = [m if recipes[0] == "1x128" else -(-m // 128), n if recipes[1] == "1x128" else -(-n // 128)]
    a = _values(m, k, dtype, by_rows=left)
    b = _values(k, n, dtype, by_rows=right)
    scales = [meta(r, -(-k // 128), dtype=torch.float32) for r in rows]
    call = block_gemm_call(
        a, b.T, meta(m, n, dtype=_output(product)), scales[0], scales[1], bias=_bias(product, n),
        config=block_gemm_configs(m, n, k, target)[0],
    )  # fmt: skip
    yield call, True
    yield from _block_quantisations(product, (m, n, k), recipes, target, group=128)


def _mx_launches(product: Product, shape: GemmShape, target: Target) -> _Launches:
    m, n, k = shape.m, shape.n, shape.k
    left, right = _layouts(product)
    dtype = QUANTIZED_DTYPES[product.compute]
    scales = [meta(rows, -(-k // 32), dtype=torch.uint8) for rows in (m, n)]
    call = mx_gemm_call(
        _values(m, k, dtype, by_rows=left), _values(k, n, dtype, by_rows=right).T,
        meta(m, n, dtype=_output(product)), scales[0], scales[1], bias=_bias(product, n),
        config=mx_gemm_configs(m, n, k, target, dtype=dtype)[0],
    )  # fmt: skip
    yield call, True
    yield from _block_quantisations(product, (m, n, k), ["mx32", "mx32"], target, group=32)


def _block_quantisations(
    product: Product, sizes: tuple[int, int, int], recipes: Sequence[str], target: Target, *, group: int
) -> _Launches:
    """What quantises the operands: activations along rows and columns in one read, weights in tiles."""
    m, n, k = sizes
    name, dtype = product.compute, QUANTIZED_DTYPES[product.compute]
    scale_dtype = torch.uint8 if group == 32 else torch.float32
    for recipe, rows in zip(recipes, (m, n), strict=True):
        x, values = meta(rows, k, dtype=_source(product)), meta(rows, k, dtype=dtype)
        if recipe == "128x128":
            scale = meta(-(-rows // 128), -(-k // 128), dtype=torch.float32)
            config = quantize_tiles_configs(rows, k, name, target)[0]
            yield quantize_tiles_call(x, values, scale, format=name, config=config), False
            continue
        both = product.phase != "wgrad" and product.op_class == "linear" and group == 128
        wanted = [(True, False), (False, True)] if both else [(True, False)]
        for by_rows, by_columns in [(True, True)] if both and reads_once(rows, k) else wanted:
            config = quantize_rows_configs(rows, k, name, target, group=group, rows=by_rows, columns=by_columns)[0]
            call = quantize_rows_call(
                x, values if by_rows else None,
                meta(rows, -(-k // group), dtype=scale_dtype) if by_rows else None,
                meta(k, rows, dtype=dtype).T if by_columns else None,
                meta(-(-rows // group), k, dtype=scale_dtype) if by_columns else None,
                format=name, group=group, power_of_two=group == 32, config=config,
            )  # fmt: skip
            yield call, False


_CALLS: Mapping[str, Callable[[Product, GemmShape, Target], _Launches]] = {
    "triton_gemm": _gemm_launches,
    "triton_block_gemm": _block_launches,
    "triton_mx_gemm": _mx_launches,
}
