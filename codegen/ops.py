"""The operators that lowered graphs call: one per family of kernels, opaque to compilers.

On CPU tensors an operator runs its kernel in Triton's interpreter, on a GPU's it launches it on the current stream.
`matrices` are in the orientation of the product, [M, K] and [K, N], with any strides; scales have the matrices' rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..hardware_db.formats import get_recipe
from ..passes import rounding
from .kernels.block_gemm import block_gemm
from .kernels.gemm import gemm as gemm_kernel
from .kernels.mx_gemm import mx_gemm, to_e8m0
from .kernels.quantize import quantize_rows, quantize_tiles, reads_once
from .kernels.quantize_fused import gated_quantize as gated
from .kernels.quantize_vectors import quantize_tensor, quantize_vectors
from .kernels.scales import QUANTIZED_DTYPES
from .running import running_device
from .targets import target_of

_GROUPS = {"1x128": 128, "mx32": 32}


def value_dtype(format: str) -> torch.dtype:
    """The dtype that holds values of a narrow format. Raises KeyError for a format that none holds."""
    return QUANTIZED_DTYPES[format]


@torch.library.custom_op("dsmp::quantize", mutates_args=())
def quantize(x: Tensor, format: str, recipe: str, axis: int) -> tuple[Tensor, Tensor]:
    """Values of `x` in `format` and their scales under `recipe` along `axis`, as `passes.rounding.quantize` defines.

    x: a matrix, or of any rank under "tensor". Scales are fp32 with x's rank, a byte each (E8M0) under "mx32".
    """
    if x.numel() == 0:
        # one, as a scale and as an E8M0 byte: there is nothing to scale
        shape, dtype = _scales_of(x, recipe, axis)
        ones = torch.full(shape, 127 if dtype == torch.uint8 else 1, dtype=dtype, device=x.device)
        values = x.to(value_dtype(format), copy=True)
        return _laid_out(values, x) if recipe == "tensor" else values.contiguous(), ones
    if x.device.type != "cpu" and target_of(running_device()) is None:
        exact = rounding.quantize(x, format, recipe, axis=axis)
        values = exact.values.to(value_dtype(format))
        scale = to_e8m0(exact.scale) if recipe == "mx32" else exact.scale
        return _laid_out(values, x) if recipe == "tensor" else values, scale
    if recipe == "tensor":
        order = sorted(range(x.dim()), key=lambda d: -x.stride()[d])  # as it lies in memory
        lying = x.permute(order)
        flat = lying.reshape(-1, lying.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)
        narrow, scale, _ = quantize_tensor(flat, format, power_of_two=format == "fp16")
        narrow = narrow.reshape(lying.shape).permute([order.index(d) for d in range(x.dim())])
        return _laid_out(narrow, x), scale.reshape([1] * x.dim())
    if recipe == "128x128":
        return quantize_tiles(x, format)
    along_rows = axis % x.dim() == x.dim() - 1
    if recipe == "row":
        return quantize_vectors(x, format, axis=1 if along_rows else 0)
    blocks = quantize_rows(
        x,
        format,
        rows=along_rows,
        columns=not along_rows,
        group=_GROUPS[recipe],
        power_of_two=get_recipe(recipe).power_of_two,
        e8m0=recipe == "mx32",
    )
    found = (blocks.rows, blocks.row_scale) if along_rows else (blocks.columns, blocks.column_scale)
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


@quantize.register_fake
def _(x: Tensor, format: str, recipe: str, axis: int) -> tuple[Tensor, Tensor]:
    shape, dtype = _scales_of(x, recipe, axis)
    # under "tensor", views are put on the values that were on x: they lie in memory as x does
    values = torch.empty_like(x, dtype=value_dtype(format))
    return values if recipe == "tensor" else values.contiguous(), x.new_empty(shape, dtype=dtype)


def _scales_of(x: Tensor, recipe: str, axis: int) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of the scales of `x`."""
    if recipe == "tensor":
        return [1] * x.dim(), torch.float32
    rows, columns = x.shape
    if recipe == "128x128":
        return [-(-rows // 128), -(-columns // 128)], torch.float32
    along_rows = axis % x.dim() == x.dim() - 1
    blocks = 1 if recipe == "row" else -(-(columns if along_rows else rows) // _GROUPS[recipe])
    dtype = torch.uint8 if recipe == "mx32" else torch.float32
    return [rows, blocks] if along_rows else [blocks, columns], dtype


@torch.library.custom_op("dsmp::quantize_both", mutates_args=())
def quantize_both(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, N] quantised in blocks of 1x128 along its rows and along its columns, in one read.

    Returns values and scales [M, ceil(N / 128)] of the rows, then of the columns, [ceil(M / 128), N].
    """
    both = quantize_rows(x, format, rows=True, columns=True, transposed=True)
    assert both.rows is not None and both.row_scale is not None
    assert both.columns is not None and both.column_scale is not None
    return both.rows, both.row_scale, both.columns, both.column_scale


@quantize_both.register_fake
def _(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    dtype = value_dtype(format)
    return (
        x.new_empty((rows, columns), dtype=dtype),
        x.new_empty((rows, -(-columns // 128)), dtype=torch.float32),
        x.new_empty((columns, rows), dtype=dtype).T,
        x.new_empty((-(-rows // 128), columns), dtype=torch.float32),
    )


@torch.library.custom_op("dsmp::gated_quantize", mutates_args=())
def gated_quantize(gate: Tensor, up: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, [M, N] rounded to bf16, quantised in blocks of 1x128 along its rows: values and scales."""
    blocks, _ = gated(gate, up, format=format, rounded=True)
    assert blocks.rows is not None and blocks.row_scale is not None
    return blocks.rows, blocks.row_scale


@gated_quantize.register_fake
def _(gate: Tensor, up: Tensor, format: str) -> tuple[Tensor, Tensor]:
    rows, columns = gate.shape
    values = gate.new_empty((rows, columns), dtype=value_dtype(format))
    return values, gate.new_empty((rows, -(-columns // 128)), dtype=torch.float32)


@torch.library.custom_op("dsmp::gated_quantize_both", mutates_args=())
def gated_quantize_both(gate: Tensor, up: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """silu(gate) * up, [M, N] rounded to bf16, quantised as `quantize_both` does."""
    if gate.device.type != "cpu" and not reads_once(*gate.shape):
        product = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
        both = quantize_rows(product, format, rows=True, columns=True, transposed=True)
    else:
        both, _ = gated(gate, up, format=format, rows=True, columns=True, transposed=True, rounded=True)
    assert both.rows is not None and both.row_scale is not None
    assert both.columns is not None and both.column_scale is not None
    return both.rows, both.row_scale, both.columns, both.column_scale


@gated_quantize_both.register_fake
def _(gate: Tensor, up: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = gate.shape
    dtype = value_dtype(format)
    return (
        gate.new_empty((rows, columns), dtype=dtype),
        gate.new_empty((rows, -(-columns // 128)), dtype=torch.float32),
        gate.new_empty((columns, rows), dtype=dtype).T,
        gate.new_empty((-(-rows // 128), columns), dtype=torch.float32),
    )


@torch.library.custom_op("dsmp::gemm", mutates_args=())
def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    format: str,
    dtype: torch.dtype,
) -> Tensor:
    """a @ b + bias of matrices or batches of them, multiplied in `format`, in `dtype`.

    Scales are of whole tensors or, for matrices, of a's rows [M, 1] and b's columns [1, N].
    """
    return gemm_kernel(a, b, format=format, scale_a=_flat(a_scale), scale_b=_flat(b_scale), bias=bias, out_dtype=dtype)


@gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    format: str,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


@torch.library.custom_op("dsmp::block_mm", mutates_args=())
def block_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    a_recipe: str,
    b_recipe: str,
    dtype: torch.dtype,
) -> Tensor:
    """a @ b + bias of matrices in fp8 with scales of 1x128 blocks or 128x128 tiles, in `dtype`."""
    return block_gemm(a, b.T, a_scale, b_scale.T, bias=bias, dtype=dtype)


@block_mm.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    a_recipe: str,
    b_recipe: str,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


@torch.library.custom_op("dsmp::mx_mm", mutates_args=())
def mx_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a @ b + bias of matrices in fp8 with a power-of-two scale (E8M0 byte) for every 32 of K, in `dtype`."""
    return mx_gemm(a, b.T, a_scale, b_scale.T, bias=bias, dtype=dtype)


@mx_mm.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


@torch.library.custom_op("dsmp::library_half_mm", mutates_args=())
def library_half_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """a @ b + bias of fp16 matrices or batches of them, with a scale each, added up and scaled in fp32."""
    multiply = torch.bmm if a.dim() == 3 else torch.mm
    on_cpu = a.device.type == "cpu"  # torch's product with another output dtype is for CUDA
    product = multiply(a.float(), b.float()) if on_cpu else multiply(a, b, out_dtype=torch.float32)
    product = product * (a_scale.reshape(()) * b_scale.reshape(()))
    return (product if bias is None else product + bias).to(dtype)


@library_half_mm.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


@torch.library.custom_op("dsmp::library_scaled_mm", mutates_args=())
def library_scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`torch._scaled_mm` with operands in the layout that it takes: a by rows, b by columns."""
    if a_scale.numel() == 1:
        a_scale, b_scale = a_scale.reshape(()), b_scale.reshape(())
    rows = a if a.stride(-1) == 1 else a.contiguous()
    columns = b if b.stride(0) == 1 else b.T.contiguous().T
    narrow_bias = None if bias is None or dtype is torch.float32 else bias.to(dtype)
    product = torch._scaled_mm(
        rows, columns, scale_a=a_scale, scale_b=b_scale.contiguous(), bias=narrow_bias, out_dtype=dtype
    )
    return product + bias if bias is not None and narrow_bias is None else product


@library_scaled_mm.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def _laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Values in the layout of `torch.empty_like(like)`, which fake tensors promise."""
    promised = torch.empty_like(like, dtype=values.dtype)
    return values if values.stride() == promised.stride() else promised.copy_(values)


def _flat(scale: Tensor | None) -> Tensor | None:
    """A scale of a whole tensor as a scalar, others as a vector."""
    if scale is None:
        return None
    return scale.reshape(()) if math.prod(scale.shape) == 1 else scale.reshape(-1)
