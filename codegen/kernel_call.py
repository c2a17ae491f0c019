"""One launch of one kernel: what is compiled offline, interpreted and run on a GPU is the same description.

A family of kernels (`kernels/`) turns tensors and a configuration into a `KernelCall`. On meta tensors it describes a
kernel to compile for a target; on CPU tensors it is interpreted, on a GPU's it is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from .interpreter import interpret


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How a kernel is cut: `blocks` are its tile sizes by constexpr name; `options` go to Triton's backend."""

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Short form for tables, e.g. `128x128x64`."""
        return "x".join(str(v) for v in self.blocks.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """A kernel with everything it is launched with.

    name: of the specialised kernel, e.g. `gemm_e4m3_bf16`. `arguments`: run-time arguments by parameter name (tensors,
    ints, floats, bools, None for a pointer that is not there); `constants`: constexpr parameters by name. `grid`:
    numbers of programs. `operand_format`: the format that matrix instructions multiply in, None without a product.
    """

    name: str
    kernel: JITFunction
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    config: Config
    operand_format: str | None = None

    def run(self) -> None:
        """Interpret the kernel if its tensors are on the CPU, else launch it on the current stream."""
        if 0 in self.grid:
            return
        devices = {a.device.type for a in self.arguments.values() if isinstance(a, Tensor)}
        if devices == {"cpu"}:
            interpret(self.kernel, self.grid, {**self.arguments, **self.compiled_in(interpreted=True)})
            return
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages, **self.config.options}
        first = next(a for a in self.arguments.values() if isinstance(a, Tensor))
        with torch.cuda.device(first.device):
            self.kernel[self.grid](**self.arguments, **self.compiled_in(interpreted=False), **options)

    def compiled_in(self, *, interpreted: bool) -> dict[str, Any]:
        """Constexprs; kernels that must know how they are run have one of the name INTERPRETED."""
        constants = dict(self.constants)
        if "INTERPRETED" in self.kernel.arg_names:
            constants["INTERPRETED"] = interpreted
        return constants
