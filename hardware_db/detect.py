"""The running device, as a `Device`. The only file of this layer that imports torch.

Reading and deciding are apart: the readers here turn what torch and the operating system say into `Properties`;
`match` (matching.py) turns those into a device. In this order, the first that is there: CUDA or ROCm, XPU, accelerators
whose torch extension is loaded, MPS, CPU. What was measured on the device (measurement.py) is attached to it.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import cpu_features
from .capability import Device
from .catalog import Catalog, load_catalog
from .instruction_sets import amd_isa, intel_isa, nvidia_isa, units_per_multiprocessor
from .main_memory import usable_bytes
from .matching import Backend, Properties, match
from .overlays import HardwareFile

_EXTENSIONS: tuple[Backend, ...] = ("hpu", "npu", "musa", "mlu")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def resolve_hardware(name: str | None = None, hardware_file: HardwareFile = ()) -> Device:
    """The device a user means: None and "auto" the running one, "cpu" the running CPU, else a catalogue name, under the
    user's data files and `hardware_file`, a TOML file or several.

    Raises `UnknownHardwareError`, `AmbiguousHardwareError`, `HardwareDataError`, or `UndetectedHardwareError` for a
    running device that nothing is known of.
    """
    wanted = "auto" if name is None else name.strip().lower()
    if wanted == "auto":
        return detect(hardware_file)
    catalog = load_catalog(hardware_file)
    return catalog.calibrated(match(read_cpu(), catalog) if wanted == "cpu" else catalog.resolve(name or ""))


def detect(hardware_file: HardwareFile = ()) -> Device:
    """The running device: torch's current accelerator if there is one, else the CPU. Raises as `resolve_hardware`."""
    catalog: Catalog = load_catalog(hardware_file)
    return catalog.calibrated(match(read_running(), catalog))


def read_running() -> Properties:
    """Properties of the accelerator that torch runs on, else of the CPU."""
    if torch.cuda.is_available():
        return read_gpu()
    if torch.xpu.is_available():
        return read_xpu()
    for backend in _EXTENSIONS:
        module = getattr(torch, backend, None)  # there only after `import torch_npu` and the like
        if module is not None and module.is_available():
            return read_extension(backend, module)
    if torch.backends.mps.is_available():
        return read_mps()
    return read_cpu()


def read_gpu(index: int | None = None) -> Properties:
    """Properties of a CUDA or ROCm device (default: the current one)."""
    raw = torch.cuda.get_device_properties(index)
    return gpu_properties(raw, hip=torch.version.hip is not None, pci_id=_pci_product(raw))


def gpu_properties(raw: Any, *, hip: bool, pci_id: str = "") -> Properties:
    """Properties from torch's record of a CUDA or ROCm device.

    Bandwidth is taken from CUDA only, as clock (double data rate) x bus: HIP reports memory clocks on another scale,
    and the L2 of one die only.
    """
    isa = amd_isa(raw.gcnArchName) if hip else nvidia_isa(raw.major, raw.minor)
    bus_bits, memory_khz = getattr(raw, "memory_bus_width", 0), getattr(raw, "memory_clock_rate", 0)
    return Properties(
        backend="rocm" if hip else "cuda",
        name=raw.name or "",
        isa=isa,
        pci_id=pci_id,
        units=raw.multi_processor_count * units_per_multiprocessor(isa),
        memory_bytes=raw.total_memory,
        clock_mhz=getattr(raw, "clock_rate", 0) / 1e3,
        bandwidth=0.0 if hip else 2.0 * memory_khz * 1e3 * bus_bits / 8,
        l2_bytes=0 if hip else getattr(raw, "L2_cache_size", 0),
    )


def read_xpu(index: int | None = None) -> Properties:
    """Properties of an Intel GPU, or of one stack where torch shows stacks (default: the current one)."""
    return xpu_properties(torch.xpu.get_device_properties(index))


def xpu_properties(raw: Any) -> Properties:
    """Properties from torch's record of an XPU device; older versions of torch leave out the ids."""
    pci_id = getattr(raw, "device_id", 0)
    return Properties(
        backend="xpu",
        name=raw.name or "",
        isa=intel_isa(getattr(raw, "architecture", 0)),
        pci_id=f"{pci_id:04x}" if pci_id else "",
        units=raw.gpu_subslice_count,
        memory_bytes=raw.total_memory,
    )


def read_extension(backend: Backend, module: Any) -> Properties:
    """Name and memory of the current device of a torch extension such as torch.hpu or torch.npu."""
    index = module.current_device()
    return extension_properties(backend, module.get_device_name(index), module.get_device_properties(index))


def extension_properties(backend: Backend, name: str, raw: Any) -> Properties:
    """Properties from a torch extension's record; Gaudi's calls its memory `dramSize`."""
    memory = getattr(raw, "total_memory", 0) or getattr(raw, "dramSize", 0)
    return Properties(backend=backend, name=name, memory_bytes=memory)


def read_mps() -> Properties:
    """Properties of the GPU of a Mac; memory is what Metal recommends to use of the shared main memory."""
    return mps_properties(
        torch.backends.mps.get_name(), torch.backends.mps.get_core_count(), torch.mps.recommended_max_memory()
    )


def mps_properties(name: str, cores: int, memory_bytes: int) -> Properties:
    """Properties from a Metal device's name and GPU cores. Other makers' GPUs in older Macs have no known profile."""
    apple = name.startswith("Apple ")
    return Properties(
        backend="mps",
        name=name,
        isa="metal" if apple else "",
        units=cores if apple else 0,
        memory_bytes=memory_bytes,
    )


def read_cpu() -> Properties:
    """Properties of this process's CPU."""
    return cpu_properties(
        cpuinfo=_read_text(Path("/proc/cpuinfo")),
        sysctl=_sysctl() if platform.system() == "Darwin" else "",
        identifier=platform.processor() if platform.system() == "Windows" else "",
        capabilities=getattr(torch.cpu, "get_capabilities", dict)(),
        amx=_torch_says("_is_amx_tile_supported") and _torch_says("_init_amx"),
        cores=torch.get_num_threads(),
        memory_bytes=usable_bytes(),
    )


def cpu_properties(
    *,
    cpuinfo: str = "",
    sysctl: str = "",
    identifier: str = "",
    capabilities: Mapping[str, object] | None = None,
    amx: bool,
    cores: int,
    memory_bytes: int,
) -> Properties:
    """Properties from the texts of /proc/cpuinfo, sysctl and Windows' identifier, and from torch's capabilities, as far
    as they exist. Without `amx` its flags are dropped: containers may show them and forbid the use."""
    said = cpu_features.merged(
        (
            cpu_features.from_cpuinfo(cpuinfo),
            cpu_features.from_sysctl(sysctl),
            cpu_features.from_identifier(identifier),
            cpu_features.from_torch(capabilities or {}),
        )
    )
    return Properties(
        backend="cpu",
        name=said.name,
        units=cores,
        memory_bytes=memory_bytes,
        flags=frozenset(f for f in said.flags if amx or not f.startswith("amx")),
        vendor=said.vendor,
        family=said.family,
    )


def _pci_product(raw: Any) -> str:
    """The PCI product id of a CUDA or ROCm device. torch's `pci_device_id` is not it, but the slot on the bus."""
    bus = getattr(raw, "pci_bus_id", None)
    if bus is None:
        return ""
    domain, slot = getattr(raw, "pci_domain_id", 0), getattr(raw, "pci_device_id", 0)
    return _read_text(_PCI_DEVICES / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "device").strip().removeprefix("0x")


def _torch_says(function: str) -> bool:
    """torch's private capability functions come and go: one that is missing says no."""
    asked = getattr(torch.cpu, function, None)
    return bool(asked()) if asked is not None else False


def _sysctl() -> str:
    command = ["/usr/sbin/sysctl", "hw.optional", "machdep.cpu"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
