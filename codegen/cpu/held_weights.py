"""Products by weights that are held packed, where no fp32 weight is left: opaque operators for CPUs.

    dsmp::held_weight(packed, format, size, groups)                                fp32 weight of shape `size`
    dsmp::held_linear(x, packed, bias, format, size, steps)                        x fp32[M, K] -> fp32[M, N]
    dsmp::held_convolution(x, packed, bias, size, stride, padding, dilation, groups, steps)
                                                                                   x fp32[N, C, H, W], as aten's

`packed` is what `pack_weight` makes, `format` one of FORMATS: fp16, int8 and int4 widen weights (narrow_linear.py), and
"static" and "dynamic" multiply int8 by activations in the steps of fp64 [1, 2], a scale and a zero, or of each row
(int8_ops.py). Compilers do not look into them; dsmp's backend takes them apart (held_graph.py), so that a plan's keys
and fusions apply. They have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...errors import KernelUnavailableError, ReleasedTrainingError
from ...passes.graph import node_op
from .extension import cpu_operators
from .int8_ops import window

STATIC, DYNAMIC = "static", "dynamic"
"""The formats of int8 weights whose activations are bytes too, in static steps and in those of each row."""
_IN_BYTES = (STATIC, DYNAMIC)
FORMATS = {"fp16": ("payload",), "int8": ("payload", "scales"), "int4": ("payload", "scales", "zeros"),
           STATIC: ("payload", "scales", "sums"), DYNAMIC: ("payload", "scales", "sums")}  # fmt: skip
"""The names of the tensors that each format is packed into."""

_LIBRARY: Any = torch.library.Library("dsmp", "FRAGMENT")  # type: ignore[no-untyped-call]


def pack_weight(weight: Tensor, format: str, groups: int = 1) -> tuple[Tensor, ...]:
    """The packed tensors of a float32 weight [N, K], or [O, C / groups, kh, kw] where `format` is STATIC.

    Raises KernelUnavailableError without the C++ operators, and ValueError for weights that are not finite.
    """
    _need_operators()
    weight = weight.detach()
    kernels = torch.ops.dsmp_cpu
    return tuple(kernels.int8_pack(weight, groups) if format in _IN_BYTES else kernels.narrow_pack(weight, format))


def is_held(node: Any, format: str = STATIC) -> bool:
    """Whether a node is a weight that is held packed in a format."""
    return isinstance(node, fx.Node) and node_op(node) == "dsmp.held_weight" and bool(node.args[1] == format)


def _need_operators() -> None:
    verdict = cpu_operators()
    if not verdict.ok:
        raise KernelUnavailableError(f"packed weights need dsmp's C++ operators: {verdict.reason}")


def _weight(packed: Sequence[Tensor], format: str, size: Sequence[int], groups: int) -> Tensor:
    _need_operators()
    kernels = torch.ops.dsmp_cpu
    if format in _IN_BYTES:
        wide: Tensor = kernels.int8_unpack(*packed, size, groups)
    else:
        wide = kernels.narrow_unpack(packed, format, *size)
    return wide


def _linear(
    x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, format: str, size: Sequence[int], steps: Tensor | None
) -> Tensor:
    _need_operators()
    kernels = torch.ops.dsmp_cpu
    if format == STATIC:
        product: Tensor = kernels.int8_linear_packed.shared(x, *packed, size, bias, steps, 0, "none")
    elif format == DYNAMIC:
        product = kernels.int8_dynamic_linear_packed(x, *packed, size, bias)
    else:
        product = kernels.narrow_linear_packed(x, packed, bias, format, *size)
    return product


def _convolution(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, size: Sequence[int], stride: Sequence[int],
                 padding: Sequence[int], dilation: Sequence[int], groups: int, steps: Tensor) -> Tensor:  # fmt: skip
    _need_operators()
    args = (size, bias, None, None, None, None, 0.0, None, stride, padding, dilation, groups, steps, 0, -1, "none", -1)
    y: Tensor = torch.ops.dsmp_cpu.int8_convolution_packed.shared(x, *packed, *args)
    return y.contiguous(memory_format=_order(x))


def _order(x: Tensor) -> torch.memory_format:
    """Results lie in the order of x, as those of torch's convolutions."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _fake_convolution(x: Tensor, packed: Any, bias: Any, size: Sequence[int], stride: Sequence[int],
                      padding: Sequence[int], dilation: Sequence[int], *_: Any) -> Tensor:  # fmt: skip
    shape = (x.shape[0], size[0], *window(x, size[2:], stride, padding, dilation))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_order(x))


def _fake_weight(packed: Sequence[Tensor], format: str, size: Sequence[int], groups: int) -> Tensor:
    return packed[0].new_empty(size, dtype=torch.float32)


def _no_gradient(*_: Any) -> Any:
    raise ReleasedTrainingError


_OPERATORS = (
    ("held_weight(Tensor[] packed, str format, int[] size, int groups) -> Tensor", _weight, _fake_weight),
    (
        "held_linear(Tensor x, Tensor[] packed, Tensor? bias, str format, int[] size, Tensor? steps) -> Tensor",
        _linear,
        lambda x, packed, bias, format, size, *_: x.new_empty(x.shape[0], size[0]),
    ),
    (
        "held_convolution(Tensor x, Tensor[] packed, Tensor? bias, int[] size, int[] stride, int[] padding, "
        "int[] dilation, int groups, Tensor steps) -> Tensor",
        _convolution,
        _fake_convolution,
    ),
)
for _schema, _run, _fake in _OPERATORS:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"dsmp::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"dsmp::{_name}", _no_gradient, lib=_LIBRARY)
