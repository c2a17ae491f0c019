"""What a compiled kernel became: registers, spills and matrix instructions, read from its machine code.

NVIDIA's code is read with the tools that ship inside the triton package (cuobjdump for the resources, nvdisasm for
SASS); PTX names the element types of a matrix instruction, which SASS of some generations leaves out. AMD's assembly
holds everything in its text.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from ..errors import MissingToolError
from .targets import Target

_PTX_MATRIX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
_SASS_MATRIX = re.compile(r"\b(?:[HIQBDO]MMA|[HIQ]GMMA|UTC\w*MMA)[A-Z0-9_.]*")
_AMD_MATRIX = re.compile(r"\bv_(?:mfma|smfmac|wmma|swmmac)\w*")
_CUDA_TYPES = {
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "f16",
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
    "int8": "s8",
    "fp64": "f64",
}
_TCGEN_KINDS = {
    "tf32": "kind::tf32",
    "bf16": "kind::f16",
    "fp16": "kind::f16",
    "fp8_e4m3": "f8f6f4",
    "fp8_e5m2": "f8f6f4",
    "int8": "kind::i8",
}
_AMD_PATTERNS = {
    "fp64": r"_f64_\d+x\d+x\d+_?f64",
    "fp32": r"_f32_\d+x\d+x\d+_?f32",
    "tf32": r"_xf32",
    "bf16": r"bf16",
    "fp16": r"_f32_\d+x\d+x\d+_?f16",
    "fp8_e4m3": r"_fp8_fp8|f8f6f4",
    "fp8_e5m2": r"_bf8_bf8|f8f6f4",
    "fp8_e4m3fnuz": r"_fp8_fp8",
    "fp8_e5m2fnuz": r"_bf8_bf8",
    "int8": r"i8$|_iu8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineCode:
    """registers: 32-bit registers per thread (vector and accumulation registers on AMD). spills: registers or bytes
    of stack that did not fit, 0 when everything did. matrix_instructions: the distinct ones, sorted: as PTX or AMD
    assembly names them."""

    registers: int
    spills: int
    matrix_instructions: tuple[str, ...]

    def multiplies(self, format: str) -> bool:
        """Whether a matrix instruction multiplies operands of `format` and adds up in fp32 (int32, fp64)."""
        return any(_multiplies(i, format) for i in self.matrix_instructions)


def _multiplies(instruction: str, format: str) -> bool:
    if instruction.startswith("v_"):
        pattern = _AMD_PATTERNS.get(format)
        return pattern is not None and re.search(pattern, instruction) is not None
    if instruction.startswith("tcgen05"):
        return format in _TCGEN_KINDS and _TCGEN_KINDS[format] in instruction
    kind = _CUDA_TYPES.get(format)
    return kind is not None and f".{kind}.{kind}" in instruction.replace("e5m2.e4m3", "").replace("e4m3.e5m2", "")


def read_machine_code(assembly: Mapping[str, Any], target: Target) -> MachineCode:
    """Read the artefacts that Triton's compiler returns. Raises MissingToolError where triton lacks its tools."""
    if target.backend == "hip":
        return _read_amd(assembly["amdgcn"])
    usage = _nvidia_tool("cuobjdump", assembly["cubin"], "--dump-resource-usage")
    fields = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return MachineCode(
        registers=fields["REG"],
        spills=max(fields["STACK"], fields["LOCAL"]),
        matrix_instructions=tuple(sorted(set(_PTX_MATRIX.findall(assembly["ptx"])))),
    )


def sass_matrix_instructions(cubin: bytes) -> tuple[str, ...]:
    """The distinct matrix instructions of a cubin, by their names in SASS (HMMA, IMMA, QGMMA, UTCQMMA, ...)."""
    return tuple(sorted(set(_SASS_MATRIX.findall(_nvidia_tool("nvdisasm", cubin, "-c")))))


def _read_amd(text: str) -> MachineCode:
    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return MachineCode(
        registers=number(r"TotalNumVgprs: (\d+)") or number(r"\.vgpr_count:\s+(\d+)"),
        spills=number(r"\.vgpr_spill_count:\s*(\d+)")
        + number(r"\.sgpr_spill_count:\s*(\d+)")
        + number(r"ScratchSize: (\d+)"),
        matrix_instructions=tuple(sorted(set(_AMD_MATRIX.findall(text)))),
    )


def _nvidia_tool(name: str, binary: bytes, *options: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not tool.exists():
        raise MissingToolError(name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingToolError(f"{name} (it says: {done.stderr.strip()[:200]})")
    return done.stdout
