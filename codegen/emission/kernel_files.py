"""Kernels of a plan as files: readable sources, and what their machine code is like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import PlanFileError
from ...passes.files import write_atomically
from ..machine_code import sass_matrix_instructions
from ..offline import CompiledKernel, compile_call
from ..targets import Target
from .plan_kernels import PlannedKernel
from .specialize import specialized_source


@dataclass(frozen=True, kw_only=True)
class EmittedKernel:
    """A kernel with its machine code, the file it was written to (None without a folder) and what was wrong with it.

    `instructions`: matrix instructions by their names in the machine code.
    """

    name: str
    planned: PlannedKernel
    compiled: CompiledKernel
    instructions: Sequence[str]
    path: Path | None

    @property
    def native(self) -> bool:
        """Whether a matrix instruction multiplies in the planned format; True for kernels without a product."""
        wanted = self.planned.call.operand_format
        return wanted is None or self.compiled.code.multiplies(wanted)

    def figures(self) -> dict[str, Any]:
        """Everything a table or a program wants to know of the kernel."""
        config = self.planned.call.config
        return {
            "kernel": self.name,
            "nodes": len(self.planned.nodes),
            "tile": config.text,
            "stages": config.num_stages,
            "warps": config.num_warps,
            "registers": self.compiled.code.registers,
            "spills": self.compiled.code.spills,
            "shared_bytes": self.compiled.shared_bytes,
            "occupancy": round(self.compiled.occupancy, 4),
            "matrix_instructions": list(self.instructions),
            "peak_share": self.planned.peak_share,
            "flops": self.planned.flops,
            "time_us": self.planned.time_us,
            "shapes": [[s.batch, s.m, s.n, s.k] for s in self.planned.shapes],
            "file": None if self.path is None else str(self.path),
        }


def emit_kernels(
    kernels: Sequence[PlannedKernel],
    target: Target,
    folder: Path | None,
    notes: Mapping[str, str],
    tell: Callable[[str, int], None] = lambda name, done: None,
) -> list[EmittedKernel]:
    """Compile every kernel for a target and, with a folder, write its source and machine code there.

    Files are `NAME.py` and `NAME.ptx` and `.cubin`, or `.amdgcn` and `.hsaco`. Raises PlanFileError for files that
    cannot be written.
    """
    emitted = []
    names: dict[str, int] = {}
    for number, kernel in enumerate(kernels):
        name = kernel_name(kernel)
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}_{names[name]}"
        tell(name, number)
        compiled = compile_call(kernel.call, target)
        path = None
        if folder is not None:
            path = _write(folder, name, kernel, compiled, target, notes)
        emitted.append(
            EmittedKernel(name=name, planned=kernel, compiled=compiled, instructions=_instructions(compiled), path=path)
        )
    return emitted


def kernel_name(kernel: PlannedKernel) -> str:
    """The name of a kernel's file: operator, formats, and the largest product that it serves."""
    shape = max(kernel.shapes, key=lambda s: s.flops)
    batch = f"{shape.batch}x" if shape.batch > 1 else ""
    return f"{kernel.call.name}_{batch}{shape.m}x{shape.n}x{shape.k}"


def _instructions(compiled: CompiledKernel) -> tuple[str, ...]:
    """Matrix instructions: PTX says of which types they are, SASS which unit executes them."""
    found = compiled.code.matrix_instructions
    if found and "cubin" in compiled.assembly:
        return (*found, *sass_matrix_instructions(compiled.assembly["cubin"]))
    return found


def _write(
    folder: Path, name: str, kernel: PlannedKernel, compiled: CompiledKernel, target: Target, notes: Mapping[str, str]
) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise PlanFileError(f"folder {str(folder)!r} cannot be made ({failure.strerror}). Name another.") from failure
    code = compiled.code
    shapes = ", ".join(f"{s.batch}x" * (s.batch > 1) + f"{s.m}x{s.n}x{s.k}" for s in kernel.shapes)
    lines = {
        **notes,
        "products (m x n x k)": shapes,
        "registers": f"{code.registers} per thread, {code.spills} spilled",
        "shared memory": f"{compiled.shared_bytes} bytes",
        "occupancy": f"{100 * compiled.occupancy:.0f} %",
    }
    if code.matrix_instructions:
        lines["matrix instructions"] = ", ".join(code.matrix_instructions)
    source = specialized_source(kernel.call, nodes=kernel.nodes, target=target, notes=lines)
    path = write_atomically(folder / f"{name}.py", source, PlanFileError, "kernel")
    for stage in ("ptx", "cubin", "amdgcn", "hsaco"):
        if stage in compiled.assembly:
            write_atomically(folder / f"{name}.{stage}", compiled.assembly[stage], PlanFileError, "machine code")
    return path
