"""GEMM with scales before and an epilogue behind: out = activation(alpha * sa * sb * (a @ b) + bias) + residual.

Products are summed up in fp32 (int32 for int8), scales, bias, activation and residual are fp32 arithmetic, and the
result is rounded once, to out's dtype; with an `out_scale` s it is result / s, saturating, as in `passes.rounding`.

Operands are tensors of their format: fp32 (as "fp32", or as "tf32": rounded to nearest in the kernel, where matrix
units would cut off), bf16, fp16, fp8 in any flavour, int8. Scales are fp32 tensors: of one value (recipe "tensor"), or
scale_a per row of a and scale_b per column of b (recipe "row").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import gelu, relu, silu
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import KernelUnavailableError
from ...hardware_db.capability import Verdict
from ...hardware_db.formats import get_format
from ...passes.rounding import round_to
from ..kernel_call import Config, KernelCall
from ..running import require_target, running_device
from .gemm_configs import FORMAT_OF_DTYPE, GROUP, gemm_configs, has_gemm, interpreter_config
from .gemm_kernels import gemm_persistent, gemm_tiles

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "silu": silu,
}
ACTIVATIONS = tuple(_ACTIVATIONS)


def gemm_call(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    config: Config,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_scale: Tensor | None = None,
    alpha: float = 1.0,
    activation: str = "none",
    format: str | None = None,
    promote_every_k: int | None = None,
) -> KernelCall:
    """The launch that fills `out`.

    a: [m, k] or [batch, m, k]; b: [k, n] or [batch, k, n]; out: [m, n] or [batch, m, n]. Batches of 1 broadcast.
    bias: [n]; residual: broadcastable to out. scale_a: one value, [m] or [batch, m] (or with a last dimension of 1);
    scale_b: one value, [n] or [batch, n] (or with 1 in the dimension before). format: "tf32" or "fp32" (default) of
    fp32 operands, else that of a's dtype. promote_every_k: see `dot.dot`.

    Raises ValueError for shapes or dtypes that do not fit together.
    """
    problem = _Problem(a, b, out, bias, residual, scale_a, scale_b, out_scale, alpha, activation, format)
    a, b = problem.a, problem.b
    batch, m, n, k = problem.sizes
    blocks = config.blocks
    arguments, constants = problem.shared(blocks["BLOCK_K"], promote_every_k)
    arguments |= dict(zip(("stride_a_batch", "stride_a_m", "stride_a_k"), a.stride(), strict=True))
    arguments |= dict(zip(("stride_b_batch", "stride_b_k", "stride_b_n"), b.stride(), strict=True))
    return KernelCall(
        name=problem.name,
        kernel=gemm_tiles,
        arguments={"a": a, "b": b, **arguments},
        constants={
            **blocks,
            **constants,
            "EVEN_K": k % blocks["BLOCK_K"] == 0,
            "WIDE": problem.wide or _reach(a) >= 2**31 or _reach(b) >= 2**31,
        },
        grid=(batch * -(-m // blocks["BLOCK_M"]) * -(-n // blocks["BLOCK_N"]),),
        config=config,
        operand_format=problem.format,
    )


def gemm_persistent_call(
    a: Tensor, b: Tensor, out: Tensor, *, config: Config, programs: int, **epilogue: Any
) -> KernelCall:
    """The launch of the persistent kernel for operands that `tma_operands` allows, on sm_90 and later.

    programs: how many run at once, the device's units. `epilogue`: further arguments of `gemm_call`.
    """
    promote = epilogue.pop("promote_every_k", None)
    problem = _Problem(a, b, out, **epilogue)
    verdict = tma_operands(a, b)
    if not verdict:
        raise KernelUnavailableError(f"{problem.name}: {verdict.reason}")
    _, m, n, _ = problem.sizes
    blocks = config.blocks
    arguments, constants = problem.shared(blocks["BLOCK_K"], promote)
    a, b = problem.a[0], problem.b[0]
    columns = {"COLUMN_MAJOR_A": a.stride(1) != 1, "COLUMN_MAJOR_B": b.stride(1) != 1}
    tiles = -(-m // blocks["BLOCK_M"]) * -(-n // blocks["BLOCK_N"])
    return KernelCall(
        name=f"{problem.name}_persistent",
        kernel=gemm_persistent,
        arguments={
            "a": _descriptor(a, blocks["BLOCK_M"], blocks["BLOCK_K"]),
            "b": _descriptor(b, blocks["BLOCK_K"], blocks["BLOCK_N"]),
            **{name: value for name, value in arguments.items() if not name.endswith("_batch")},
        },
        constants={**blocks, **constants, **columns, "WIDE": problem.wide},
        grid=(min(programs, tiles),),
        config=config,
        operand_format=problem.format,
    )


def tma_operands(a: Tensor, b: Tensor) -> Verdict:
    """Whether the copy engine can fetch tiles of both: not empty, one batch, one contiguous dimension, and rows (or
    columns) that start at multiples of 16 bytes."""
    for name, operand in (("a", a), ("b", b)):
        if operand.dim() == 3 and operand.size(0) != 1:
            return Verdict(False, f"{name} has a batch of {operand.size(0)}, the persistent kernel takes one.")
        matrix = operand[0] if operand.dim() == 3 else operand
        if matrix.numel() == 0:
            return Verdict(False, f"{name} is empty.")
        if matrix.stride(1) != 1:
            matrix = matrix.t()
        size = matrix.element_size()
        offset = matrix.storage_offset() * size if matrix.device.type == "meta" else matrix.data_ptr()
        if matrix.stride(1) != 1 or matrix.stride(0) * size % 16 or offset % 16 or matrix.stride(0) < matrix.size(1):
            return Verdict(False, f"{name}'s strides {tuple(operand.stride())} are not those of aligned rows.")
    return Verdict(True, "both operands have aligned rows.")


def gemm(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, config: Config | None = None, **epilogue: Any
) -> Tensor:
    """a @ b with everything that `gemm_call` takes; out_dtype: default is a's, fp32 for fp8 and int8.

    On the CPU the kernel is interpreted. On a GPU from sm_90 on the persistent kernel runs where alignment allows it.
    """
    dtype = out_dtype or (torch.float32 if a.element_size() == 1 else a.dtype)
    batch: torch.Size = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    m, k, n = a.size(-2), a.size(-1), b.size(-1)
    out = torch.empty([*batch, m, n], dtype=dtype, device=a.device)
    if a.device.type == "cpu":
        gemm_call(a, b, out, config=config or interpreter_config(m, n, k), **epilogue).run()
        return out
    format = epilogue.get("format") or FORMAT_OF_DTYPE[a.dtype]
    other = FORMAT_OF_DTYPE[b.dtype] if format != "tf32" else None
    target, device = require_target(lambda t: has_gemm(format, t, other)), running_device()
    if config is None:
        promoted = epilogue.get("promote_every_k") is not None
        space = gemm_configs(m, n, k, format, target, batch=math.prod(batch), device=device, promoted=promoted)
        config = space[0]
    if target.capability >= 90 and not batch and tma_operands(a, b):
        gemm_persistent_call(a, b, out, config=config, programs=device.units, **epilogue).run()
    else:
        gemm_call(a, b, out, config=config, **epilogue).run()
    return out


def gemm_reference(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_scale: Tensor | None = None,
    alpha: float = 1.0,
    activation: str = "none",
    format: str | None = None,
) -> Tensor:
    """The same in torch, with fp64 inside and one rounding at the end; fp64, whatever out_dtype is."""
    x, y = a.double(), b.double()
    if format == "tf32":
        x, y = round_to(a, "tf32").double(), round_to(b, "tf32").double()
    result = x @ y
    for scale, vector in ((scale_a, -1), (scale_b, -2)):
        if scale is not None:
            factor = scale.double()
            if scale.numel() == 1:
                factor = factor.reshape(())
            elif scale.dim() < result.dim() or scale.size(vector) != 1:
                factor = factor.unsqueeze(vector)
            result = result * factor
    result = result * alpha
    if bias is not None:
        result = result + bias.double()
    result = _ACTIVATIONS[activation](result)
    if residual is not None:
        result = result + residual.double()
    if out_scale is not None:
        result = result / out_scale.double()
    return round_to(result, FORMAT_OF_DTYPE[out_dtype], saturate=out_scale is not None)


class _Problem:
    """The arguments of a GEMM, checked, with all operands of rank 3."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        out_scale: Tensor | None = None,
        alpha: float = 1.0,
        activation: str = "none",
        format: str | None = None,
    ) -> None:
        self.format = _operand_format(a, b, format)
        self.a, self.b, self.out = (t if t.dim() == 3 else t.unsqueeze(0) for t in (a, b, out))
        batch, m, n = self.out.shape
        k = self.a.size(2)
        self.sizes = batch, m, n, k
        if self.a.shape[1:] != (m, k) or self.b.shape[1:] != (k, n) or {self.a.size(0), self.b.size(0)} - {1, batch}:
            raise ValueError(
                f"gemm: a {list(a.shape)} times b {list(b.shape)} is not out {list(out.shape)}. Pass [batch, m, k], "
                "[batch, k, n], [batch, m, n]; a batch of 1 broadcasts."
            )
        if activation not in ACTIVATIONS:
            raise ValueError(f"gemm: there is no activation {activation!r}, only {', '.join(ACTIVATIONS)}.")
        if out.dtype not in FORMAT_OF_DTYPE:
            raise ValueError(f"gemm: out is {out.dtype}, which is not among {', '.join(map(str, FORMAT_OF_DTYPE))}.")
        self.a, self.b = self.a.expand(batch, m, k), self.b.expand(batch, k, n)
        if bias is not None and bias.shape != (n,):
            raise ValueError(f"gemm: bias has shape {list(bias.shape)}, not [{n}].")
        self.bias, self.out_scale = bias, out_scale
        self.residual = None if residual is None else residual.expand(out.shape).expand(batch, m, n)
        self.scale_a, self.row_a = _scale(scale_a, batch, m, -1)
        self.scale_b, self.row_b = _scale(scale_b, batch, n, -2)
        self.alpha, self.activation = float(alpha), activation
        self.wide = _reach(self.out) >= 2**31 or (self.residual is not None and _reach(self.residual) >= 2**31)

    @property
    def name(self) -> str:
        """Operand formats, out's format, and the parts of the epilogue, e.g. `gemm_e4m3_bf16_bias_gelu`."""
        formats = dict.fromkeys((self.format, self.format if self.format == "tf32" else FORMAT_OF_DTYPE[self.b.dtype]))
        parts = [*formats, FORMAT_OF_DTYPE[self.out.dtype]]
        parts += ["bias"] * (self.bias is not None) + [self.activation] * (self.activation != "none")
        parts += ["residual"] * (self.residual is not None) + ["quantized"] * (self.out_scale is not None)
        return "_".join(["gemm", *(p.removeprefix("fp8_") for p in parts)])

    def shared(self, block_k: int, promote_every_k: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments and constants that both kernels have."""
        _, m, n, k = self.sizes
        tensors = {
            "out": self.out,
            "bias": self.bias,
            "residual": self.residual,
            "scale_a": self.scale_a,
            "scale_b": self.scale_b,
            "out_scale": self.out_scale,
        }
        strides = {
            **dict(zip(("stride_out_batch", "stride_out_m", "stride_out_n"), self.out.stride(), strict=True)),
            **dict(zip(("stride_res_batch", "stride_res_m", "stride_res_n"), _strides(self.residual, 3), strict=True)),
            "stride_bias": _strides(self.bias, 1)[0],
            **dict(zip(("stride_sa_batch", "stride_sa_m"), _strides(self.scale_a, 2), strict=True)),
            **dict(zip(("stride_sb_batch", "stride_sb_n"), _strides(self.scale_b, 2), strict=True)),
        }
        constants = {
            "GROUP": GROUP,
            "PRECISION": "tf32" if self.format == "tf32" else "ieee",
            "PROMOTE": None if promote_every_k is None else min(promote_every_k, block_k),
            "ACCUMULATE": tl.int32 if self.format == "int8" else tl.float32,
            "ROW_A": self.row_a,
            "ROW_B": self.row_b,
            "ACTIVATION": self.activation,
            "SATURATE": self.out_scale is not None,
        }
        return {**tensors, "alpha": self.alpha, "m": m, "n": n, "k": k, **strides}, constants


def _operand_format(a: Tensor, b: Tensor, format: str | None) -> str:
    own = FORMAT_OF_DTYPE.get(a.dtype)
    other = FORMAT_OF_DTYPE.get(b.dtype)
    both_fp8 = own is not None and other is not None and own.startswith("fp8") and other.startswith("fp8")
    if own is None or other is None or (own != other and not both_fp8):
        raise ValueError(f"gemm: a is {a.dtype} and b is {b.dtype}. Cast them to one format.")
    if format is None or format == own:
        return own
    if format == "tf32" and own == "fp32":
        return "tf32"
    raise ValueError(f"gemm: operands of {a.dtype} cannot be multiplied as {get_format(format).name}.")


def _scale(scale: Tensor | None, batch: int, size: int, unit: int) -> tuple[Tensor | None, bool]:
    """A scale as [batch, size] and whether it has several values; `unit`: the dimension of 1 it may have."""
    if scale is None:
        return None, False
    if scale.dtype != torch.float32:
        raise ValueError(f"gemm: scales are fp32, not {scale.dtype}.")
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(batch, size), False
    vector = scale.squeeze(unit) if scale.dim() > 1 and scale.size(unit) == 1 else scale
    if vector.size(-1) != size or vector.dim() > 2 or (vector.dim() == 2 and vector.size(0) not in (1, batch)):
        raise ValueError(f"gemm: a scale has shape {list(scale.shape)}; it needs one value or [{size}].")
    return vector.expand(batch, size), True


def _strides(tensor: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if tensor is None else tensor.stride()


def _reach(tensor: Tensor) -> int:
    """The largest offset from the first element, in elements, within one batch."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True) if size)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [rows, columns]
    if matrix.stride(1) != 1:
        matrix, block = matrix.t(), [columns, rows]
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)
