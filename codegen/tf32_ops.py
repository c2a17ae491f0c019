"""Convolutions and attention of libraries in tf32, for one node alone.

cuDNN and the fused attention kernels of CUDA multiply fp32 tensors in tf32 where a flag of the process allows it. These
operators are torch's own, with the flags set while they run and put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

aten = torch.ops.aten

_WRAPPED = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
_LIBRARY: Any = torch.library.Library("dsmp", "FRAGMENT")  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """cuDNN and cuBLAS may use tf32 inside, whatever they may outside."""
    before = torch._C._get_cudnn_allow_tf32(), torch._C._get_cublas_allow_tf32()
    torch._C._set_cudnn_allow_tf32(True)
    torch._C._set_cublas_allow_tf32(True)
    try:
        yield
    finally:
        torch._C._set_cudnn_allow_tf32(before[0])
        torch._C._set_cublas_allow_tf32(before[1])


def _define(op: Any) -> Any:
    """`dsmp::NAME_tf32`, of an operator's own signature."""
    name = f"{op._schema.name.split('::')[1].lstrip('_')}_tf32"
    _LIBRARY.define(f"{name}{str(op._schema)[len(op._schema.name) :]}")

    def run(*args: Any, **kwargs: Any) -> Any:
        with tf32_allowed():
            return op(*args, **kwargs)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsmp::{name}", lambda *args, **kwargs: op(*args, **kwargs), lib=_LIBRARY)
    return getattr(torch.ops.dsmp, name).default


TF32_OPS: Mapping[str, Any] = {f"aten.{op._schema.name.split('::')[1]}": _define(op) for op in _WRAPPED}
"""The operator in tf32 for the name of each traced operator that has one."""
