"""Readers: from what torch and operating systems say to properties, and the running device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsmp.errors import HardwareDataError, UnknownHardwareError
from dsmp.hardware_db import detect as detection
from dsmp.hardware_db import load_catalog
from dsmp.hardware_db.cpu_features import CpuDescription, canonical_flags, from_cpuinfo, from_identifier, from_sysctl
from dsmp.hardware_db.detect import (
    cpu_properties,
    detect,
    extension_properties,
    gpu_properties,
    mps_properties,
    read_cpu,
    read_gpu,
    read_running,
    read_xpu,
    resolve_hardware,
    xpu_properties,
)
from dsmp.hardware_db.main_memory import group_limits, usable_bytes
from dsmp.hardware_db.matching import Properties, match

MIB = 2**20
GIB = 2**30


def _cuda(name="NVIDIA H100 80GB HBM3", major=9, minor=0, units=132, mib=81008, **more):
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=units, total_memory=mib * MIB, **more
    )


def _hip(name, gcn, multiprocessors, mib, major=9, minor=4, **more):
    return _cuda(name, major, minor, multiprocessors, mib, gcnArchName=gcn, L2_cache_size=4 * MIB, **more)


def _xpu(name, subslices, mib, **more):
    return SimpleNamespace(name=name, gpu_subslice_count=subslices, gpu_eu_count=8 * subslices,
                           max_compute_units=8 * subslices, total_memory=mib * MIB, **more)  # fmt: skip


def test_cuda_records_are_read():
    raw = _cuda(
        "NVIDIA GeForce RTX 3090",
        8,
        6,
        82,
        24245,
        clock_rate=1695000,
        memory_clock_rate=9751000,
        memory_bus_width=384,
        L2_cache_size=6 * MIB,
    )
    read = gpu_properties(raw, hip=False, pci_id="2204")
    assert read == Properties(
        backend="cuda",
        name="NVIDIA GeForce RTX 3090",
        isa="sm_86",
        pci_id="2204",
        units=82,
        memory_bytes=24245 * MIB,
        clock_mhz=1695,
        bandwidth=pytest.approx(936e9, rel=0.001),
        l2_bytes=6 * MIB,
    )


def test_records_of_older_torch_say_less():
    read = gpu_properties(_cuda(), hip=False)
    assert (read.isa, read.units, read.clock_mhz, read.bandwidth, read.l2_bytes) == ("sm_90", 132, 0, 0, 0)


@pytest.mark.parametrize(
    ("raw", "isa", "units"),
    [
        # HIP's (9, 4) is no CUDA capability
        (_hip("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304, 196592), "gfx942", 304),
        (_hip("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", 110, 65520, 9, 0), "gfx90a", 110),
        # from gfx10 on HIP counts work-group processors of two compute units
        (_hip("AMD Radeon RX 9070 XT", "gfx1201", 32, 16304, 12, 0), "gfx1201", 64),
        (_hip("AMD Radeon(TM) 8060S Graphics", "gfx1151", 20, 80065, 11, 5), "gfx1151", 40),
    ],
)
def test_hip_records_are_read(raw, isa, units):
    read = gpu_properties(raw, hip=True)
    assert (read.backend, read.isa, read.units, read.memory_bytes) == ("rocm", isa, units, raw.total_memory)
    assert (read.l2_bytes, read.bandwidth) == (0, 0), "HIP tells one die's L2, and memory clocks on another scale"


def test_the_pci_product_id_is_read_from_the_slot(tmp_path, monkeypatch):
    slot = tmp_path / "0000:c3:00.0"
    slot.mkdir()
    (slot / "device").write_text("0x740c\n")
    monkeypatch.setattr(detection, "_PCI_DEVICES", tmp_path)
    raw = _hip("", "gfx90a", 110, 65520, pci_domain_id=0, pci_bus_id=0xC3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: raw)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (read_gpu().pci_id, read_gpu().backend) == ("740c", "rocm")
    raw.pci_bus_id = 0xC4
    assert read_gpu().pci_id == ""
    monkeypatch.setattr(torch.version, "hip", None)
    assert (read_gpu().isa, read_gpu().backend) == ("sm_94", "cuda")


@pytest.mark.parametrize(
    ("raw", "properties"),
    [
        (
            _xpu("Intel(R) Arc(TM) Pro B60 Graphics", 20, 23256, device_id=0xE211, architecture=0x500400400),
            {"isa": "intel_gpu_bmg", "pci_id": "e211", "units": 20, "memory_bytes": 23256 * MIB},
        ),
        (
            _xpu("Intel(R) Data Center GPU Max 1550", 56, 65536, device_id=0x0BD5, architecture=0x30F000700),
            {"isa": "intel_gpu_pvc", "pci_id": "0bd5", "units": 56, "memory_bytes": 64 * GIB},
        ),
        (
            _xpu("Intel(R) Arc(TM) A770 Graphics", 32, 15473),
            {"isa": "", "pci_id": "", "units": 32, "memory_bytes": 15473 * MIB},
        ),
    ],
)
def test_xpu_records_are_read(raw, properties, monkeypatch):
    assert xpu_properties(raw) == Properties(backend="xpu", name=raw.name, **properties)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: raw)
    assert read_xpu() == xpu_properties(raw)


def test_extensions_tell_name_and_memory():
    npu = extension_properties("npu", "Ascend910B3", SimpleNamespace(name="Ascend910B3", total_memory=62432 * MIB))
    assert npu == Properties(backend="npu", name="Ascend910B3", memory_bytes=62432 * MIB)
    hpu = extension_properties("hpu", "GAUDI2", SimpleNamespace(sramSize=50331648, dramSize=102106132480))
    assert hpu.memory_bytes == 102106132480
    assert extension_properties("mlu", "MLU370-X8", SimpleNamespace()).memory_bytes == 0


def test_macs_tell_their_gpu_cores():
    read = mps_properties("Apple M3 Max", 30, 28 * GIB)
    assert (read.isa, read.units, read.memory_bytes) == ("metal", 30, 28 * GIB)
    other = mps_properties("AMD Radeon Pro 5500M", 24, 4 * GIB)
    assert (other.isa, other.units) == ("", 0)


class _Extension:
    """A torch extension module with one device."""

    def __init__(self, name):
        self._name = name

    def is_available(self):
        return bool(self._name)

    def current_device(self):
        return 0

    def get_device_name(self, index):
        return self._name

    def get_device_properties(self, index):
        return SimpleNamespace(total_memory=64 * GIB)


def test_accelerators_are_tried_in_order(monkeypatch):
    present = set()
    monkeypatch.setattr(torch.version, "hip", None)
    for module, name in ((torch.cuda, "cuda"), (torch.xpu, "xpu"), (torch.backends.mps, "mps")):
        monkeypatch.setattr(module, "is_available", lambda name=name: name in present)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _cuda())
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: _xpu("Intel(R) Arc(TM) B580 Graphics", 20, 1))
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 10)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 11 * GIB)
    assert read_running().backend == "cpu"
    present.add("mps")
    assert (read_running().backend, read_running().units) == ("mps", 10)
    monkeypatch.setattr(torch, "npu", _Extension("Ascend910B3"), raising=False)
    monkeypatch.setattr(torch, "hpu", _Extension(""), raising=False)
    assert (read_running().backend, read_running().name) == ("npu", "Ascend910B3")
    assert detect().id == "ascend-910b3"
    present.add("xpu")
    assert read_running().backend == "xpu"
    present.add("cuda")
    assert (read_running().backend, detect().id) == ("cuda", "h100")


XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: the second
"""
GRAVITON3 = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 \
sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""
MAC = """hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_FHM: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.neon: 1
hw.optional.arm64: 1
machdep.cpu.cores_per_package: 16
machdep.cpu.brand_string: Apple M3 Max
"""
INTEL_MAC = """hw.optional.avx2_0: 1
machdep.cpu.vendor: GenuineIntel
machdep.cpu.brand_string: Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz
machdep.cpu.family: 6
machdep.cpu.features: FPU VME FMA SSE4.2 AVX1.0 F16C
machdep.cpu.leaf7_features: RDWRFSGS AVX2 BMI2
"""


def _read(**texts):
    return cpu_properties(**{"amx": True, "cores": 4, "memory_bytes": 8 * GIB, **texts})


def test_amx_counts_only_if_torch_can_switch_it_on():
    with_amx, without = _read(cpuinfo=XEON), _read(cpuinfo=XEON, amx=False)
    assert with_amx.flags - without.flags == {"amxbf16", "amxtile", "amxint8"}
    assert (without.name, without.vendor, without.family) == ("Intel(R) Xeon(R) Platinum 8480+", "GenuineIntel", 6)
    assert (match(with_amx, load_catalog()).id, match(without, load_catalog()).architecture) == (
        "xeon-8480",
        "cpu.avx512_bf16",
    )


def test_arm_cpus_are_named_by_implementer_and_part():
    read = _read(cpuinfo=GRAVITON3)
    assert (read.name, read.vendor, read.family) == ("Neoverse-V1", "ARM", 0xD40)
    assert {"asimd", "asimdhp", "asimddp", "sve", "svebf16", "svei8mm", "bf16", "i8mm"} <= read.flags
    assert match(read, load_catalog()).architecture == "cpu.sve256"
    unknown = from_cpuinfo("CPU implementer : 0x99\nFeatures : asimd\n")
    assert unknown == CpuDescription(name="", vendor="", family=0, flags=frozenset({"asimd"}))


def test_macs_tell_features_through_sysctl():
    read = _read(sysctl=MAC)
    assert (read.name, read.vendor) == ("Apple M3 Max", "Apple")
    assert {"asimd", "asimdhp", "asimddp", "asimdfhm", "bf16", "i8mm"} <= read.flags and "sme" not in read.flags
    assert match(read, load_catalog()).architecture.startswith("cpu.apple")
    intel = from_sysctl(INTEL_MAC)
    assert intel.vendor == "GenuineIntel" and intel.family == 6 and {"avx2", "fma", "f16c"} <= intel.flags


def test_windows_tells_maker_and_family():
    told = from_identifier("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD")
    assert (told.vendor, told.family) == ("AuthenticAMD", 25)
    assert from_identifier("") == CpuDescription()


def test_torchs_capabilities_mean_the_kernels_flags():
    capabilities = {
        "avx2": True,
        "fma3": True,
        "f16c": True,
        "avx512_f": True,
        "avx512_bw": True,
        "avx512_vnni": True,
        "avx512_bf16": True,
        "avx512_fp16": False,
        "l2_cache_size": 1,
        "cpu_name": "AMD EPYC 9654 96-Core Processor",
    }
    read = _read(capabilities=capabilities, identifier="AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD")
    assert read.name == "AMD EPYC 9654 96-Core Processor" and "avx512fp16" not in read.flags
    assert match(read, load_catalog()).architecture == "cpu.zen4"
    arm = _read(capabilities={"neon": True, "fp16_arith": True, "dot": True, "sve": True, "sve_max_length": 256})
    assert arm.flags == {"asimd", "asimdhp", "asimddp", "sve", "sve256"}


def test_flags_have_one_spelling():
    assert canonical_flags(["avx512_f", "FMA3", "AVX512_VNNI", "fphp"]) == {"avx512f", "fma", "avx512vnni", "asimdhp"}


def test_container_limits_are_found(tmp_path):
    def limit(path, value):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{value}\n")

    limit("user.slice/job/memory.max", "max")
    limit("user.slice/memory.max", 4 * GIB)
    limit("memory/box/memory.limit_in_bytes", 2 * GIB)
    limit("memory/memory.limit_in_bytes", 9223372036854771712)
    assert list(group_limits("0::/user.slice/job\n", tmp_path)) == [4 * GIB]
    assert list(group_limits("4:memory:/box\n2:cpu:/\n", tmp_path)) == [2 * GIB, 9223372036854771712]
    assert list(group_limits("0::/../elsewhere\nnonsense\n", tmp_path)) == []


def test_this_machine_has_memory():
    assert 10**8 < usable_bytes() < 10**14


def test_the_running_cpu():
    device = resolve_hardware("cpu")
    assert device.kind == "cpu" and device.estimated
    assert device.units == torch.get_num_threads()
    assert device.memory_bytes == usable_bytes()
    assert resolve_hardware(" CPU ") == device == load_catalog().calibrated(match(read_cpu(), load_catalog()))


def test_auto_and_none_mean_the_running_device():
    assert resolve_hardware("auto") == resolve_hardware(None) == resolve_hardware() == detect()
    assert (detect().kind == "gpu") == torch.cuda.is_available()


def test_other_names_come_from_the_catalogue():
    assert resolve_hardware("H800-SXM").id == "h800"
    for wrong in ("h900", ""):
        with pytest.raises(UnknownHardwareError, match="use 'auto' for the running device"):
            resolve_hardware(wrong)


OVERLAY = """
[[device]]
id = "our-board"
name = "Our board"
arch = "nv.sm_90"
detect_names = ["NVIDIA Our Board"]
segment = "datacenter"
year = 2025
units = 100
vector_clock_mhz = 1500
memory_bytes = 85899345920
memory_type = "HBM3"
memory_bandwidth_bytes_per_s = 2e12
sources.all = ["the board's label"]
confidence.all = "A"

[[measurement]]
device = "our-board"
name = "Our board"
units = 100
date = "2026-11-30"
torch = "2.14"
memory_bandwidth_bytes_per_s = 1.7e12
launch_overhead_s = 4e-6
gemm = [{ format = "bf16", accumulate = "fp32", m = 4096, n = 4096, k = 4096, flop_per_s = 3e14, operator = "linear" }]
"""


def test_files_add_devices_and_measurements_to_the_running_one(tmp_path, monkeypatch):
    file = tmp_path / "ours.toml"
    file.write_text(OVERLAY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    raw = _cuda("NVIDIA Our Board", 9, 0, 100, 80000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: raw)
    found = detect([file])
    assert (found.id, found.measured.date, found.overlays) == ("our-board", "2026-11-30", ("ours.toml",))
    assert resolve_hardware("auto", hardware_file=[file]) == found
    assert resolve_hardware("our board", hardware_file=[file]).measured == found.measured
    assert detect().id == "nv-sm-90" and detect().measured is None
    raw.multi_processor_count = 50
    assert detect([file]).measured is None, "a slice was not measured"
    with pytest.raises(HardwareDataError, match="no such hardware data file"):
        detect([tmp_path / "missing.toml"])
