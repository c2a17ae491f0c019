"""Instruction sets of GPUs: how runtimes number them, and which known one stands for one that no data file has."""

from __future__ import annotations

import re
from collections.abc import Collection

# gfx90x is no family: these parts have no matrix units, while gfx908 and gfx90a do (LLVM, User Guide for AMDGPU).
_WITHOUT_MATRIX_UNITS = {"gfx902": "gfx900", "gfx904": "gfx900", "gfx909": "gfx900", "gfx90c": "gfx900"}

# Xe cores by IP version, as (major, release): Intel, sycl_ext_oneapi_device_architecture, names intel_gpu_12_55_8 etc.
_INTEL = {
    (12, 55): "intel_gpu_dg2",
    (12, 56): "intel_gpu_dg2",
    (12, 57): "intel_gpu_dg2",
    (12, 60): "intel_gpu_pvc",
    (12, 61): "intel_gpu_pvc",
    (12, 70): "intel_gpu_mtl",
    (12, 71): "intel_gpu_mtl",
    (20, 1): "intel_gpu_bmg",
    (20, 2): "intel_gpu_bmg",
    (20, 4): "intel_gpu_lnl",
}


def nvidia_isa(major: int, minor: int) -> str:
    """The name of a CUDA compute capability. Jetson Thor is 11.0, which CUDA 12 called 10.1."""
    return "sm_110" if (major, minor) == (10, 1) else f"sm_{major}{minor}"


def amd_isa(gcn_arch_name: str) -> str:
    """`"gfx942:sramecc+:xnack-"` -> `"gfx942"`. HIP's (major, minor) is no CUDA capability: gfx942 says (9, 4)."""
    return gcn_arch_name.split(":")[0]


def units_per_multiprocessor(isa: str) -> int:
    """Compute units in what HIP counts as one multiprocessor: from gfx10 on a work-group processor of two (ROCm clr,
    `enableWgpMode_`), before that one."""
    return 2 if re.match(r"gfx1\d", isa) else 1


def intel_isa(architecture: int) -> str:
    """The name of a SYCL device architecture, whose bits 8 to 39 are the IP version (major 10, release 8, reserved 8,
    revision 6 bits); "" for 0."""
    version = architecture >> 8
    major, release = version >> 22 & 0x3FF, version >> 14 & 0xFF
    if not major:
        return ""
    return _INTEL.get((major, release), f"intel_gpu_{major}_{release}")


def nearest_isa(isa: str, known: Collection[str]) -> str | None:
    """The known instruction set that stands for `isa`: itself; for NVIDIA the nearest older one of the same major
    version; for AMD the nearest older, else nearest newer, one of the same family (all but the last digit). None if
    there is none."""
    if isa in known:
        return isa
    if (plain := _WITHOUT_MATRIX_UNITS.get(isa)) is not None:
        return plain if plain in known else None
    if re.fullmatch(r"sm_\d+", isa):
        version = int(isa.removeprefix("sm_"))
        others = [int(k.removeprefix("sm_")) for k in known if re.fullmatch(r"sm_\d+", k)]
        older = [v for v in others if v // 10 == version // 10 and v < version]
        return f"sm_{max(older)}" if older else None
    if re.fullmatch(r"gfx(?!90)[0-9a-f]+", isa):
        relatives = sorted(k for k in known if re.fullmatch(rf"{isa[:-1]}[0-9a-f]", k))
        return max((r for r in relatives if r < isa), default=relatives[0] if relatives else None)
    return None
