"""What operating systems and torch say of a CPU, in one vocabulary: the kernel's flag names without underscores.

Sources: /proc/cpuinfo on Linux (x86 and Arm), `sysctl` on macOS, the processor identifier on Windows, and
`torch.cpu.get_capabilities()` everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_SPELLINGS = {
    "fma3": "fma",
    "neon": "asimd",
    "dot": "asimddp",
    "dotprod": "asimddp",
    "fphp": "asimdhp",
    "fp16": "asimdhp",
    "fp16arith": "asimdhp",
    "fhm": "asimdfhm",
}
# Makers and cores as lscpu names them (util-linux, lscpu-arm.c).
_IMPLEMENTERS = {
    0x41: "ARM", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm", 0x61: "Apple", 0x6D: "Microsoft",
    0xC0: "Ampere",
}  # fmt: skip
_PARTS = {
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "TaiShan-v110",
    (0x51, 0x001): "Oryon",
    (0x6D, 0xD49): "Azure-Cobalt-100",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}


@dataclass(frozen=True, slots=True)
class CpuDescription:
    """A CPU in one source's words: "" and 0 where it is silent. `vendor` and `family` are the kernel's `vendor_id` and
    `cpu family` on x86, the implementer's name (such as "ARM") and the part number on Arm."""

    name: str = ""
    vendor: str = ""
    family: int = 0
    flags: frozenset[str] = frozenset()


def canonical_flags(flags: Iterable[str]) -> frozenset[str]:
    """Flags of kernels, torch and macOS under one spelling: `avx512_f` -> `avx512f`, `fma3` -> `fma`."""
    plain = (f.replace("_", "").lower() for f in flags)
    return frozenset(_SPELLINGS.get(f, f) for f in plain)


def merged(descriptions: Iterable[CpuDescription]) -> CpuDescription:
    """All sources as one: the flags of all, name, vendor and family of the first that knows them."""
    known = list(descriptions)
    return CpuDescription(
        name=next((d.name for d in known if d.name), ""),
        vendor=next((d.vendor for d in known if d.vendor), ""),
        family=next((d.family for d in known if d.family), 0),
        flags=frozenset().union(*(d.flags for d in known)),
    )


def from_cpuinfo(text: str) -> CpuDescription:
    """The first processor of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if "CPU implementer" in fields:
        implementer, part = _number(fields["CPU implementer"]), _number(fields.get("CPU part", ""))
        return CpuDescription(
            name=_PARTS.get((implementer, part), ""),
            vendor=_IMPLEMENTERS.get(implementer, ""),
            family=part,
            flags=canonical_flags(fields.get("Features", "").split()),
        )
    return CpuDescription(
        name=fields.get("model name", ""),
        vendor=fields.get("vendor_id", ""),
        family=_number(fields.get("cpu family", "")),
        flags=canonical_flags(fields.get("flags", "").split()),
    )


def from_sysctl(text: str) -> CpuDescription:
    """The lines `key: value` of `sysctl hw.optional machdep.cpu`."""
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}
    present = [k.rpartition(".")[2] for k, v in fields.items() if k.startswith("hw.optional.") and v == "1"]
    features = [k.removeprefix("FEAT_") for k in present]
    for key in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
        features += fields.get(key, "").split()
    name = fields.get("machdep.cpu.brand_string", "")
    return CpuDescription(
        name=name,
        vendor=fields.get("machdep.cpu.vendor", "Apple" if name.startswith("Apple ") else ""),
        family=_number(fields.get("machdep.cpu.family", "")),
        flags=canonical_flags(features),
    )


def from_identifier(text: str) -> CpuDescription:
    """Windows' identifier, such as "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD"."""
    found = re.search(r"Family (\d+) .*, (\w+)$", text)
    return CpuDescription(vendor=found[2], family=int(found[1])) if found else CpuDescription()


def from_torch(capabilities: Mapping[str, object]) -> CpuDescription:
    """`torch.cpu.get_capabilities()`; a length in bits of SVE vectors becomes a flag such as `sve256`."""
    flags = {k for k, v in capabilities.items() if v is True}
    if isinstance(bits := capabilities.get("sve_max_length"), int) and bits > 0:
        flags.add(f"sve{bits}")
    return CpuDescription(name=str(capabilities.get("cpu_name", "")), flags=canonical_flags(flags))


def _number(text: str) -> int:
    """A decimal or 0x number, 0 if it is none."""
    try:
        return int(text, 0)
    except ValueError:
        return 0
