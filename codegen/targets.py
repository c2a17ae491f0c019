"""The instruction sets that kernels are compiled for: what one program may use, and how a matrix instruction looks.

Limits of NVIDIA targets are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability" (https://docs.nvidia.com/cuda/cuda-c-programming-guide/); those of AMD targets are of the CDNA and RDNA
instruction set documents (https://gpuopen.com/amd-isa-documentation/) and of LLVM's AMDGPU usage guide
(https://llvm.org/docs/AMDGPUUsage.html).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget

from ..errors import UnknownTargetError
from ..hardware_db.capability import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One instruction set.

    isa: as the hardware database writes it (`sm_90`, `gfx942`). `shared_bytes`: the most shared memory (LDS) that one
    program may have; `shared_bytes_per_unit`: what the programs on a unit share. `registers_per_unit`: 32-bit
    registers of a unit's register file, counted per lane. `max_registers`: the most per thread. `max_warps`: warps
    (waves) resident on a unit. `register_step`: registers are given out per thread in multiples of it.
    """

    isa: str
    backend: str
    warp_size: int
    shared_bytes: int
    shared_bytes_per_unit: int
    registers_per_unit: int
    max_registers: int
    max_warps: int
    register_step: int = 8

    @property
    def triton(self) -> GPUTarget:
        """The target as Triton names it."""
        arch = int(self.isa.removeprefix("sm_")) if self.backend == "cuda" else self.isa
        return GPUTarget(self.backend, arch, self.warp_size)

    @property
    def capability(self) -> int:
        """Compute capability of NVIDIA targets, e.g. 90; 0 on others."""
        return int(self.isa.removeprefix("sm_")) if self.backend == "cuda" else 0

    def occupancy(self, registers: int, shared_bytes: int, warps: int) -> float:
        """Share of the resident warps of a unit that programs of these needs fill, from 0 to 1.

        registers: per thread; shared_bytes, warps: per program.
        """
        step = self.register_step
        rounded = max(step, -(-registers // step) * step)
        by_registers = self.registers_per_unit // (rounded * self.warp_size * warps)
        by_shared = self.shared_bytes_per_unit // shared_bytes if shared_bytes else self.max_warps
        return min(by_registers, by_shared, self.max_warps // warps) * warps / self.max_warps


def _nvidia(isa: str, shared_kib: int, unit_kib: int, max_warps: int) -> Target:
    return Target(
        isa=isa,
        backend="cuda",
        warp_size=32,
        shared_bytes=shared_kib * 1024,
        shared_bytes_per_unit=unit_kib * 1024,
        registers_per_unit=65536,
        max_registers=255,
        max_warps=max_warps,
    )


def _cdna(isa: str, shared_kib: int) -> Target:
    # a unit has 4 SIMDs of 512 vector registers (incl. accumulation registers) of 64 lanes, and 8 waves on each
    return Target(
        isa=isa,
        backend="hip",
        warp_size=64,
        shared_bytes=shared_kib * 1024,
        shared_bytes_per_unit=shared_kib * 1024,
        registers_per_unit=4 * 512 * 64,
        max_registers=512,
        max_warps=32,
    )


def _rdna(isa: str) -> Target:
    # a workgroup processor has 4 SIMDs of 1536 vector registers of 32 lanes, and 16 waves on each; 128 KiB LDS
    return Target(
        isa=isa,
        backend="hip",
        warp_size=32,
        shared_bytes=64 * 1024,
        shared_bytes_per_unit=128 * 1024,
        registers_per_unit=4 * 1536 * 32,
        max_registers=256,
        max_warps=64,
        register_step=24,
    )


TARGETS: dict[str, Target] = {
    t.isa: t
    for t in (
        _nvidia("sm_80", 163, 164, 64),
        _nvidia("sm_86", 99, 100, 48),
        _nvidia("sm_89", 99, 100, 48),
        _nvidia("sm_90", 227, 228, 64),
        _nvidia("sm_100", 227, 228, 64),
        _nvidia("sm_120", 99, 100, 48),
        _cdna("gfx90a", 64),
        _cdna("gfx942", 64),
        _cdna("gfx950", 160),
        _rdna("gfx1100"),
        _rdna("gfx1200"),
    )
}
"""Every instruction set that kernels are written for, by name."""

NO_MATRIX_INSTRUCTIONS = frozenset({"sm_70", "sm_72", "sm_75"})
"""Instruction sets for which Triton emits no matrix instruction: their GEMMs are left to libraries."""

TRITON_TYPES: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
"""Triton's names of element types."""


def get_target(isa: str) -> Target:
    """The target of an instruction set. Raises UnknownTargetError."""
    try:
        return TARGETS[isa]
    except KeyError:
        raise UnknownTargetError(isa, tuple(TARGETS)) from None


_FAMILY = {"sm_103": "sm_100", "sm_121": "sm_120", "gfx940": "gfx942", "gfx941": "gfx942", "gfx1101": "gfx1100",
           "gfx1102": "gfx1100", "gfx1201": "gfx1200", "sm_87": "sm_86"}  # fmt: skip


def target_of(device: Device) -> Target | None:
    """The target whose kernels a device runs; None where there is none (CPUs, older GPUs, other accelerators)."""
    return TARGETS.get(_FAMILY.get(device.isa, device.isa))
