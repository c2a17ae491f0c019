"""Compile kernels for any target on a machine without a GPU, and read from the machine code what they became."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from .kernel_call import KernelCall
from .machine_code import MachineCode, read_machine_code
from .targets import TRITON_TYPES, Target


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledKernel:
    """A kernel's machine code for one target.

    `assembly`: texts and binaries by stage (ptx, cubin; amdgcn, hsaco). `shared_bytes`: of one program.
    `occupancy`: resident warps over the most that a unit holds, as registers and shared memory allow.
    """

    name: str
    target: Target
    assembly: Mapping[str, Any]
    shared_bytes: int
    code: MachineCode
    occupancy: float


def compile_call(call: KernelCall, target: Target) -> CompiledKernel:
    """Compile a call for a target. Tensors may be on any device, `meta` too; only their dtypes and strides count.

    Raises whatever Triton raises for a kernel that the target cannot have.
    """
    signature, constants, attributes = _specialize(call)
    # Triton 3.9 asks for an explicit choice; contraction of a product and a sum is what GPUs do by default.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    config = call.config
    compiled = triton.compile(
        ASTSource(call.kernel, signature, constants, attributes),
        target=target.triton,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, **config.options},
    )
    code = read_machine_code(compiled.asm, target)
    shared = int(compiled.metadata.shared)
    return CompiledKernel(
        name=call.name,
        target=target,
        assembly=compiled.asm,
        shared_bytes=shared,
        code=code,
        occupancy=target.occupancy(code.registers, shared, config.num_warps),
    )


def _specialize(call: KernelCall) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """Signature, constants and alignment as Triton's launcher derives them from the arguments (triton/runtime/jit.py):
    pointers and ints divisible by 16 are marked, ints equal to 1 and None are constants."""
    given = {**call.arguments, **call.compiled_in(interpreted=False)}
    constexprs = {p.name for p in call.kernel.params if p.is_constexpr}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(call.kernel.params):
        name = parameter.name
        value = given.get(name, parameter.default)
        aligned = False
        if name in constexprs or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = f"*{TRITON_TYPES[value.dtype]}"
            aligned = int(value.storage_offset()) * value.element_size() % 16 == 0
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name], constants[name], aligned = _descriptor(value)
            if signature[name] != "constexpr":
                del constants[name]
        if aligned and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _descriptor(value: Any) -> tuple[str, Any, bool]:
    """A tensor descriptor (TMA) by its element type and block shape."""
    element = TRITON_TYPES[value.base.dtype]
    return f"tensordesc<{element}{list(value.block_shape)}>", None, False


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, to describe a call with."""
    return torch.empty(shape, dtype=dtype, device="meta")
