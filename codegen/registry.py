"""Which implementations there are for a planned product, which of them can serve it, and which one is taken.

An implementation is a family of Triton kernels, a call of a library, or simulation. Each answers for a `Product` with a
verdict (available or not, and why) and a predicted time; the fastest available one is taken. One that a user asks for
by name must be available. What the planned device lacks altogether is no question here: the plan asked the hardware
database.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import InvalidOptionError, KernelUnavailableError, did_you_mean
from ..hardware_db.capability import Device, Verdict
from ..hardware_db.formats import get_format, is_dynamic, is_static, keeps_wide, split_recipe
from ..hardware_db.work import GemmShape, Work
from .cpu.extension import cpu_operators
from .cpu.narrow_linear import narrow_linear_available
from .half_ops import HALF_OPS
from .kernels.block_gemm import block_gemm_available
from .kernels.gemm_configs import has_gemm
from .kernels.mx_gemm import mx_gemm_available
from .kernels.scales import QUANTIZED_DTYPES
from .targets import NO_MATRIX_INSTRUCTIONS, target_of
from .tf32_ops import TF32_OPS

PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})
"""Operators that Triton kernels replace: products of two tensors."""
_BLOCKS = frozenset({"1x128", "128x128"})
_WHOLE = frozenset({"none", "tensor", "row"})
# ROCm's fused attention (AOTriton, https://github.com/ROCm/aotriton) is built for gfx90a and later
NO_FUSED_ATTENTION = frozenset({"gfx900", "gfx906", "gfx908"})
"""Instruction sets of GPUs on which torch computes attention as two products and a softmax."""
_NARROW_FLOATS = frozenset({"fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A planned product: what an implementation has to compute.

    aten: the traced operator (`aten.addmm`). `recipe`: of both operands (`1x128/128x128`). `traced`: the format the
    model was written in; `output`: the one its result is stored in. `shape`: None where an operand is empty.
    """

    key: str
    op_class: str
    phase: str
    aten: str
    compute: str
    recipe: str
    accumulate: str
    output: str
    traced: str
    shape: GemmShape | None

    @property
    def recipes(self) -> frozenset[str]:
        """The names of its operands' recipes."""
        return frozenset(r.name for r in split_recipe(self.recipe))

    @property
    def as_traced(self) -> bool:
        """Whether it is computed as the model was written."""
        return self.compute == self.traced and self.recipe == "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to compute products.

    kind: `triton`, `library` or `simulation`. `available`: the verdict for a product on a device. `share`: the part
    of the device's achievable rate that it is assumed to reach: `bench/gemm.py` measures it.
    """

    name: str
    kind: str
    available: Callable[[Product, Device], Verdict]
    share: float

    def time_us(self, product: Product, device: Device) -> float:
        """Predicted microseconds on the device; 0 where nothing is known of its rate or there is nothing to do."""
        if product.shape is None or not device.rated(product.compute, product.accumulate):
            return 0.0
        shape = product.shape
        size = get_format(product.compute).storage_bits / 8
        moved = shape.batch * (
            (shape.m * shape.k + shape.k * shape.n) * size
            + shape.m * shape.n * get_format(product.output).storage_bits / 8
        )
        seconds = device.time(Work(flops=shape.flops / self.share, moved_bytes=moved, gemm=shape), product.compute,
                              product.accumulate)  # fmt: skip
        return 1e6 * seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was taken for a product, and what every other implementation answered. forced: it was asked for by name."""

    implementation: Implementation
    reason: str
    refused: Mapping[str, str]
    forced: bool = False


def _no(reason: str) -> Verdict:
    return Verdict(False, reason)


def _tensor_cores(product: Product, device: Device) -> Verdict | None:
    """Why no Triton kernel serves this product on this device; None if one may."""
    if product.aten not in PRODUCTS:
        return _no(f"Triton kernels replace products of two tensors, not {product.aten}")
    if device.isa in NO_MATRIX_INSTRUCTIONS:
        return _no(f"Triton emits no matrix instruction for {device.isa}")
    if target_of(device) is None:
        return _no(f"there are no kernels for {device.isa}")
    return None


def _triton_gemm(product: Product, device: Device) -> Verdict:
    refused = _tensor_cores(product, device)
    if refused is not None:
        return refused
    if not product.recipes <= _WHOLE:
        return _no(f"it scales whole operands, rows and columns, not {product.recipe}")
    if "row" in product.recipes and product.aten not in ("aten.mm", "aten.addmm"):
        return _no(f"it scales rows of matrices, not of the batches of {product.aten}")
    if product.compute == "fp64":
        return _no("fp64 is left to the library")
    target = target_of(device)
    assert target is not None
    return has_gemm(product.compute, target)


def _triton_block_gemm(product: Product, device: Device) -> Verdict:
    refused = _tensor_cores(product, device)
    if refused is not None:
        return refused
    if not product.recipes <= _BLOCKS:
        return _no(f"it scales blocks of 1x128 and 128x128, not {product.recipe}")
    if product.aten not in ("aten.mm", "aten.addmm"):
        return _no(f"it multiplies two matrices, not the batches of {product.aten}")
    target = target_of(device)
    assert target is not None
    return block_gemm_available(QUANTIZED_DTYPES[product.compute], target)


def _triton_mx_gemm(product: Product, device: Device) -> Verdict:
    refused = _tensor_cores(product, device)
    if refused is not None:
        return refused
    if product.recipes != {"mx32"}:
        return _no(f"it scales blocks of 32 (mx32), not {product.recipe}")
    if product.aten not in ("aten.mm", "aten.addmm"):
        return _no(f"it multiplies two matrices, not the batches of {product.aten}")
    target = target_of(device)
    assert target is not None
    return mx_gemm_available(QUANTIZED_DTYPES[product.compute], target)


def _torch_operator(product: Product, device: Device) -> Verdict:
    if product.recipe != "none":
        return _no(f"the operator of torch takes no scales ({product.recipe})")
    if product.compute in ("bf16", "fp16", "fp64") or product.as_traced:
        return Verdict(True, f"{product.aten} takes {product.compute} operands")
    if product.compute == "fp32":
        return Verdict(True, f"{product.aten} takes fp32 operands")
    return _no(f"{product.aten} takes no {product.compute} operands for a node of its own")


def _torch_scaled_mm(product: Product, device: Device) -> Verdict:
    if product.aten not in ("aten.mm", "aten.addmm"):
        return _no(f"_scaled_mm multiplies two matrices, not {product.aten}")
    if product.compute not in _NARROW_FLOATS:
        return _no(f"_scaled_mm multiplies fp8, not {product.compute}")
    if product.recipes not in ({"tensor"}, {"row"}):
        return _no(f"_scaled_mm is used with scales per tensor or row, not {product.recipe}")
    if "row" in product.recipes and product.output != "bf16":
        return _no(f"_scaled_mm with scales per row writes bf16, not {product.output}")
    if not (device.isa.startswith(("sm_89", "sm_9", "sm_1")) or device.isa in ("gfx942", "gfx950")):
        return _no(f"_scaled_mm has no fp8 product on {device.isa}")
    shape = product.shape
    if shape is None or shape.k % 16 or shape.n % 16:
        return _no("_scaled_mm takes contractions and columns that are multiples of 16")
    return Verdict(True, f"_scaled_mm multiplies {product.compute} with scales per {product.recipe}")


def _torch_half_mm(product: Product, device: Device) -> Verdict:
    if product.aten not in PRODUCTS or product.compute != "fp16" or product.recipes != {"tensor"}:
        return _no("it multiplies fp16 operands with a scale each")
    if device.isa not in NO_MATRIX_INSTRUCTIONS:
        return _no(f"it is for GPUs without Triton kernels, not for {device.isa}")
    return Verdict(True, "cuBLAS multiplies fp16 and adds up in fp32, the scales are applied to the result")


def _torch_half_op(product: Product, device: Device) -> Verdict:
    if product.op_class not in ("conv", "sdpa") or product.aten not in HALF_OPS:
        return _no("it is for convolutions and fused attention")
    if product.compute != "fp16" or product.recipes != {"tensor"}:
        return _no(f"it multiplies fp16 operands with a scale each, not {product.compute} ({product.recipe})")
    if device.kind != "gpu" or device.vendor not in ("nvidia", "amd"):
        return _no(f"cuDNN, MIOpen and torch's fused attention run on GPUs of NVIDIA and AMD, not on {device.id}")
    if product.op_class == "conv":
        library = "cuDNN" if device.vendor == "nvidia" else "MIOpen"
        return Verdict(True, f"{library} convolves fp16 and adds up in fp32, the scales are applied to the result")
    if device.isa in NO_FUSED_ATTENTION:
        return _no(f"torch has no fused attention in fp16 on {device.isa}")
    return Verdict(True, "torch's fused attention takes fp16 operands, scales are applied to its results")


def _torch_tf32(product: Product, device: Device) -> Verdict:
    # attention that was captured on a CPU has another operator there; on the GPU it is one of those that can
    if product.compute != "tf32" or (product.aten not in TF32_OPS and product.op_class != "sdpa"):
        return _no("it is for convolutions and fused attention in tf32")
    if device.vendor != "nvidia":
        return _no(f"cuDNN and CUDA's fused attention run on NVIDIA GPUs, not on {device.isa}")
    return Verdict(True, f"{product.aten} multiplies fp32 tensors in tf32 where it is allowed to")


def _cpu_narrow_linear(product: Product, device: Device) -> Verdict:
    if device.kind != "cpu" or product.aten not in ("aten.mm", "aten.addmm"):
        return _no("it is for linears on CPUs")
    if not keeps_wide(product.recipe):
        return _no(f"it keeps activations wide, not {product.recipe}")
    (weight,) = product.recipes - {"wide"}
    return narrow_linear_available(product.compute, weight)


def _cpu_int8(product: Product, device: Device) -> Verdict:
    if device.kind != "cpu" or product.aten not in ("aten.mm", "aten.addmm", "aten.convolution"):
        return _no("it is for linears and convolutions on CPUs")
    if product.compute != "int8" or product.recipes != {"static", "row"}:
        return _no(
            f"it multiplies int8 with static activations (static/row), not {product.compute} by {product.recipe}"
        )
    return cpu_operators()


def _cpu_int8_dynamic(product: Product, device: Device) -> Verdict:
    if device.kind != "cpu" or product.aten not in ("aten.mm", "aten.addmm"):
        return _no("it is for linears on CPUs")
    if product.compute != "int8" or product.recipes != {"dynamic", "row"}:
        return _no(f"it multiplies int8 in steps of each row (dynamic/row), not {product.compute} by {product.recipe}")
    return cpu_operators()


def _simulation(product: Product, device: Device) -> Verdict:
    return Verdict(True, "operands are rounded as planned and multiplied in fp32")


# torch: the operator itself (cuBLAS, cuDNN, hipBLASLt, MIOpen, fused attention). torch_scaled_mm: torch._scaled_mm
# (cuBLASLt, CUTLASS, hipBLASLt). torch_half_mm: mm of scaled fp16 operands. torch_half_op: a convolution or fused
# attention of scaled fp16 operands. torch_tf32: one that may use tf32, for one node alone. cpu_narrow_linear: linears
# with narrow weights alone. cpu_int8: linears and convolutions of int8 whose activations have static steps;
# cpu_int8_dynamic: linears whose activations have steps for each row. triton_*: the families in kernels/. simulation:
# operands rounded exactly, then torch's operator in fp32.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(name="torch", kind="library", available=_torch_operator, share=1.0),
    Implementation(name="torch_scaled_mm", kind="library", available=_torch_scaled_mm, share=1.0),
    Implementation(name="torch_half_mm", kind="library", available=_torch_half_mm, share=1.0),
    Implementation(name="torch_half_op", kind="library", available=_torch_half_op, share=1.0),
    Implementation(name="torch_tf32", kind="library", available=_torch_tf32, share=1.0),
    Implementation(name="cpu_narrow_linear", kind="library", available=_cpu_narrow_linear, share=1.0),
    Implementation(name="cpu_int8", kind="library", available=_cpu_int8, share=1.0),
    Implementation(name="cpu_int8_dynamic", kind="library", available=_cpu_int8_dynamic, share=1.0),
    Implementation(name="triton_gemm", kind="triton", available=_triton_gemm, share=0.9),
    Implementation(name="triton_block_gemm", kind="triton", available=_triton_block_gemm, share=0.8),
    Implementation(name="triton_mx_gemm", kind="triton", available=_triton_mx_gemm, share=0.8),
    Implementation(name="simulation", kind="simulation", available=_simulation, share=1.0),
)
"""Every implementation, library calls first: among equal times the first one is taken."""

SIMULATION = IMPLEMENTATIONS[-1]


def names() -> tuple[str, ...]:
    """The names that `implementations` and `without` may use."""
    return tuple(i.name for i in IMPLEMENTATIONS)


def check_names(option: str, given: Collection[str]) -> None:
    """Raise InvalidOptionError for a name that no implementation has."""
    known = names()[:-1] if "without" in option else names()  # there is always simulation
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise InvalidOptionError(option, name, f"one of {', '.join(known)}" + (f" ({hint})" if hint else ""))


def forced_name(key: str, forced: Mapping[str, str]) -> str | None:
    """The implementation that was asked for by name for a node: the last glob that matches counts."""
    return next((name for glob, name in reversed(tuple(forced.items())) if fnmatchcase(key, glob)), None)


def choose(
    product: Product,
    device: Device,
    *,
    forced: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    kinds: Collection[str] = ("triton", "library"),
) -> Choice:
    """The fastest available implementation of a product on a device, simulation if there is none.

    forced: names by glob over node keys, the last match counts. `without`: names not to use. `kinds`: which kinds may
    be taken. Raises KernelUnavailableError when the one asked for by name cannot serve the product.
    """
    wanted = forced_name(product.key, forced or {})
    refused: dict[str, str] = {}
    able: list[Implementation] = []
    for implementation in IMPLEMENTATIONS[:-1]:
        verdict = implementation.available(product, device)
        if implementation.name in without:
            verdict = _no("the option 'without' names it")
        elif implementation.kind not in kinds:
            verdict = _no(f"implementations of kind {implementation.kind} do not run here")
        if verdict.ok:
            able.append(implementation)
        else:
            refused[implementation.name] = verdict.reason
    if wanted is not None:
        if wanted == SIMULATION.name:
            return Choice(implementation=SIMULATION, reason="asked for by name", refused=refused, forced=True)
        found = next((i for i in able if i.name == wanted), None)
        if found is None:
            others = ", ".join(i.name for i in able) or SIMULATION.name
            raise KernelUnavailableError(
                f"{product.key}: {wanted} cannot compute {product.compute} ({product.recipe}) here: "
                f"{refused[wanted].rstrip('.')}. Available: {others}; or do not name one."
            )
        return Choice(implementation=found, reason="asked for by name", refused=refused, forced=True)
    if not able:
        text = "; ".join(f"{n}: {r}" for n, r in refused.items() if _is_about(n, product))
        return Choice(implementation=SIMULATION, reason=text or "no implementation takes it", refused=refused)
    times = {i.name: i.time_us(product, device) for i in able}
    best = min(able, key=lambda i: times[i.name])
    reason = best.available(product, device).reason
    if len(able) > 1:
        others = ", ".join(f"{i.name} {times[i.name]:.3g} us" for i in able if i is not best)
        reason = f"{times[best.name]:.3g} us predicted; {others}"
    return Choice(implementation=best, reason=reason, refused=refused)


def _is_about(name: str, product: Product) -> bool:
    """Whether an implementation's refusal tells a reader something: it is the one made for such a product."""
    if is_static(product.recipe):
        return name == "cpu_int8"
    if is_dynamic(product.recipe):
        return name == "cpu_int8_dynamic"
    if product.op_class in ("conv", "sdpa"):
        if product.compute == "fp16" and product.recipes == {"tensor"}:
            return name == "torch_half_op"
        return name == "torch_tf32" if product.compute == "tf32" else name == "torch"
    if keeps_wide(product.recipe):
        return name == "cpu_narrow_linear"
    if product.recipes <= _BLOCKS:
        return name == "triton_block_gemm"
    if product.recipes == {"mx32"}:
        return name == "triton_mx_gemm"
    return name == "triton_gemm"
