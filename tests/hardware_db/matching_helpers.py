"""A small catalogue of made-up figures, and properties as runtimes report them."""

from __future__ import annotations

from dsmp.hardware_db.catalog import build_catalog
from dsmp.hardware_db.matching import Properties

MIB = 2**20
GIB = 2**30
AVX512 = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl"
BF16 = f"{AVX512} avx512_vnni avx512_bf16"
AMX = f"{BF16} amx_tile amx_bf16 amx_int8"
NEON = "fp asimd fphp asimdhp asimddp"


def _profile(key, isa, reference=None, *, parent="any.gpu", vendor="nvidia", lines="", vector="", matrix=""):
    """A profile's table; the default of its instruction set if it has a reference and no class of its own."""
    default = "isa_default = true\n" if reference and "@" not in lines else ""
    return f"""
[[architecture]]
key = "{key}"
parent = "{parent}"
isa = "{isa}"
vendor = "{vendor}"
family = "family of {isa}"
source = ["test"]
{f'reference = "{reference}"' if reference else ""}
{default}{lines.replace("@", "")}
[architecture.vector]
{vector}
[architecture.matrix]
{matrix}
"""


def _device(identity, arch, units, memory, bandwidth, *names, clock=1000, segment="datacenter", lines=""):
    listed = ", ".join(f'"{n}"' for n in names)
    return f"""
[[device]]
id = "{identity}"
name = "The {identity}"
arch = "{arch}"
detect_names = [{listed}]
segment = "{segment}"
year = 2020
units = {units}
vector_clock_mhz = {clock}
memory_bytes = {memory * MIB}
memory_type = "test"
memory_bandwidth_bytes_per_s = {bandwidth}e9
l2_bytes = {units * MIB // 2}
sources.all = ["test"]
confidence.all = "A"
{lines}
"""


_TIER = """
[architecture.efficiency]
compute = 0.8
memory = 0.8
source = "test"
[architecture.tier]
storage = "fp32"
linear = [{ format = "fp32" }]
conv = [{ format = "fp32" }]
attention = [{ format = "fp32" }]
"""
_ROOTS = f"""
[[architecture]]
key = "any.gpu"
vendor = "nvidia"
family = "any GPU"
kind = "gpu"
isa = "any"
unit_kind = "SM"
io_formats = ["fp32", "fp16"]
launch_overhead_s = 5e-6
launch_overhead_source = "test"
source = ["test"]
[architecture.vector]
fp32 = 256
[architecture.matrix]
"fp16@fp32" = 1024
{_TIER}
[[architecture]]
key = "cpu.avx2"
vendor = "amd"
family = "any CPU"
kind = "cpu"
isa = "avx2"
reference = "epyc-7763"
unit_kind = "core"
io_formats = ["fp32"]
cpu_flags = ["avx2", "fma", "f16c"]
single_unit_bandwidth_bytes_per_s = 20e9
launch_overhead_s = 2e-6
launch_overhead_source = "test"
source = ["test"]
[architecture.vector]
fp32 = 32
{_TIER}
"""
_PROFILES = "".join(
    (
        _profile("nv.sm_75.full", "sm_75", "t4"),
        _profile("nv.sm_75.half", "sm_75", "rtx-2080-ti", lines="@", matrix='"fp16@fp32" = 512'),
        _profile("nv.sm_75.notc", "sm_75", "gtx-1660-ti", lines="@", matrix='"fp16@fp32" = 0'),
        _profile("nv.sm_80", "sm_80", "a100"),
        _profile("nv.sm_86.full", "sm_86", "a40", lines="@"),
        _profile("nv.sm_86.half", "sm_86", "rtx-3090", matrix='"fp16@fp32" = 512'),
        _profile("nv.sm_86.a10g", "sm_86", parent="nv.sm_86.half"),
        _profile("nv.sm_87", "sm_87", "orin-64gb"),
        _profile("nv.sm_89.full", "sm_89", "l40s"),
        _profile("nv.sm_90", "sm_90", "h100", matrix='"fp16@fp32" = 4096'),
        _profile("nv.sm_90.h800", "sm_90", parent="nv.sm_90"),
        _profile("nv.sm_100", "sm_100", "b200"),
        _profile("nv.sm_120.half", "sm_120", "rtx-5090"),
        _profile("amd.gfx900", "gfx900", "vega", vendor="amd"),
        _profile("amd.gfx90a", "gfx90a", "mi250x", vendor="amd"),
        _profile("amd.gfx942", "gfx942", "mi300x", vendor="amd"),
        _profile("amd.gfx1100", "gfx1100", "rx-7900-xtx", vendor="amd"),
        _profile("amd.gfx1150", "gfx1150", "radeon-890m", vendor="amd"),
        _profile("intel.xehpc", "intel_gpu_pvc", "max-1550", vendor="intel"),
        _profile("intel.xe2", "intel_gpu_bmg", "arc-b580", vendor="intel"),
        _profile("apple.gpu", "metal", "m3-max", vendor="apple"),
        _profile("gaudi.gaudi2", "hpu_gaudi2", vendor="intel"),
        _profile("ascend.davinci2", "ascend910b", vendor="huawei"),
        _profile("maca.c500", "maca", "metax-c500", vendor="metax"),
        _profile("cpu.avx512", "avx512", "xeon-8380", parent="cpu.avx2", vendor="intel",
                 lines='cpu_flags = ["avx2", "fma", "f16c", "avx512f", "avx512bw"]@', vector="fp32 = 64"),
        _profile("cpu.avx512_bf16", "avx512_bf16", "xeon-8380h", parent="cpu.avx512", vendor="intel",
                 lines='cpu_flags = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"]@'),
        _profile("cpu.zen4", "avx512_bf16", "epyc-9654", parent="cpu.avx512_bf16", vendor="amd",
                 lines='cpu_vendor = "AuthenticAMD"\ncpu_family = 25@'),
        _profile("cpu.amx", "amx", "xeon-8480", parent="cpu.avx512_bf16", vendor="intel",
                 lines='cpu_flags = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", '
                 '"amx_tile", "amx_bf16", "amx_int8"]@'),
        _profile("cpu.neon", "neon", "graviton2", parent="cpu.avx2", vendor="arm",
                 lines='cpu_flags = ["asimd", "fphp", "asimdhp", "asimddp"]@'),
        _profile("cpu.apple", "neon", "m1-cpu", parent="cpu.neon", vendor="apple",
                 lines='cpu_vendor = "Apple"\ncpu_flags = ["asimd", "fphp", "asimdhp", "asimddp", "asimdfhm"]@'),
    )
)  # fmt: skip
_DEVICES = "".join(
    (
        _device("t4", "nv.sm_75.full", 40, 15095, 320, "Tesla T4"),
        _device("rtx-2080-ti", "nv.sm_75.half", 68, 11264, 616, "NVIDIA GeForce RTX 2080 Ti"),
        _device("gtx-1660-ti", "nv.sm_75.notc", 24, 6144, 288, "NVIDIA GeForce GTX 1660 Ti"),
        _device("a100", "nv.sm_80", 108, 81251, 2039, "NVIDIA A100-SXM4-80GB"),
        _device("a100-pcie-80gb", "nv.sm_80", 108, 81251, 1935, "NVIDIA A100 80GB PCIe"),
        _device("a100-sxm4-40gb", "nv.sm_80", 108, 40370, 1555, "NVIDIA A100-SXM4-40GB"),
        _device("a100-pcie-40gb", "nv.sm_80", 108, 40326, 1555, "NVIDIA A100-PCIE-40GB"),
        _device("a30", "nv.sm_80", 56, 24576, 933, "NVIDIA A30"),
        _device("a10", "nv.sm_86.full", 72, 24576, 600, "NVIDIA A10"),
        _device("a10g", "nv.sm_86.a10g", 80, 22587, 600, "NVIDIA A10G"),
        _device("a40", "nv.sm_86.full", 84, 46068, 696, "NVIDIA A40"),
        _device("rtx-a1000", "nv.sm_86.full", 18, 8192, 192, "NVIDIA RTX A1000"),
        _device("rtx-a2000-12gb", "nv.sm_86.full", 26, 12288, 288, "NVIDIA RTX A2000 12GB"),
        _device("rtx-3090", "nv.sm_86.half", 82, 24576, 936, "NVIDIA GeForce RTX 3090", clock=1695),
        _device("rtx-3060", "nv.sm_86.half", 28, 12288, 360, "NVIDIA GeForce RTX 3060"),
        _device("rtx-3060-8gb", "nv.sm_86.half", 28, 8192, 240, "NVIDIA GeForce RTX 3060"),
        _device("orin-64gb", "nv.sm_87", 16, 65536, 204, "Orin", segment="edge"),
        _device("orin-32gb", "nv.sm_87", 14, 32768, 204, "Orin", segment="edge"),
        _device("orin-nano-8gb", "nv.sm_87", 8, 8192, 68, "Orin", segment="edge"),
        _device("l4", "nv.sm_89.full", 58, 24576, 300, "NVIDIA L4"),
        _device("l40", "nv.sm_89.full", 142, 49152, 864, "NVIDIA L40"),
        _device("l40s", "nv.sm_89.full", 142, 45589, 864, "NVIDIA L40S"),
        _device("h100", "nv.sm_90", 132, 81008, 3352, "NVIDIA H100 80GB HBM3", clock=1980,
                lines="matrix_clock_mhz = 1830"),
        _device("h100-pcie", "nv.sm_90", 114, 81008, 2039, "NVIDIA H100 PCIe"),
        _device("h100-nvl", "nv.sm_90", 132, 95830, 3938, "NVIDIA H100 NVL"),
        _device("gh200", "nv.sm_90", 132, 97871, 4022, "NVIDIA GH200 480GB"),
        _device("h200", "nv.sm_90", 132, 143771, 4800, "NVIDIA H200"),
        _device("h800", "nv.sm_90.h800", 132, 81008, 3352, "NVIDIA H800"),
        _device("b200", "nv.sm_100", 148, 182642, 8000, "NVIDIA B200"),
        _device("rtx-5090", "nv.sm_120.half", 170, 32607, 1792, "NVIDIA GeForce RTX 5090", clock=2407),
        _device("vega", "amd.gfx900", 64, 8176, 484, "Radeon RX Vega"),
        _device("mi250x", "amd.gfx90a", 110, 65520, 1638, "AMD Instinct MI250X", "AMD Instinct MI250X/MI250",
                lines='pci_ids = ["740c", "7408"]\nlogical_devices = 2'),
        _device("mi250", "amd.gfx90a", 104, 65520, 1638, "AMD Instinct MI250", "AMD Instinct MI250X/MI250",
                lines='pci_ids = ["740c"]\nlogical_devices = 2'),
        _device("mi300x", "amd.gfx942", 304, 196592, 5300, "AMD Instinct MI300X", lines='pci_ids = ["74a1", "74b5"]'),
        _device("rx-7900-xtx", "amd.gfx1100", 96, 24560, 960, "Radeon RX 7900 XTX", clock=2500),
        _device("radeon-890m", "amd.gfx1150", 16, 16384, 120, "AMD Radeon 890M Graphics", "AMD Radeon Graphics",
                segment="integrated"),
        _device("max-1550", "intel.xehpc", 64, 65536, 1638, "Intel(R) Data Center GPU Max 1550",
                lines="logical_devices = 2"),
        _device("max-1100", "intel.xehpc", 56, 49152, 1229, "Intel(R) Data Center GPU Max 1100"),
        _device("arc-b580", "intel.xe2", 20, 12216, 456, "Intel(R) Arc(TM) B580 Graphics"),
        _device("arc-pro-b60", "intel.xe2", 20, 24480, 456, "Intel(R) Arc(TM) Pro B60 Graphics",
                lines='pci_ids = ["e211"]'),
        _device("m3-max", "apple.gpu", 40, 131072, 400, "Apple M3 Max", segment="integrated"),
        _device("m3-max-30-core", "apple.gpu", 30, 98304, 300, "Apple M3 Max", segment="integrated"),
        _device("gaudi-2", "gaudi.gaudi2", 24, 98304, 2450, "GAUDI2"),
        _device("ascend-910b3", "ascend.davinci2", 20, 65536, 1600, "Ascend910B3"),
        _device("metax-c500", "maca.c500", 104, 65536, 1800, "MetaX C500"),
        _device("epyc-7763", "cpu.avx2", 64, 262144, 205, "AMD EPYC 7763 64-Core Processor", clock=2800),
        _device("xeon-8380", "cpu.avx512", 40, 262144, 205, "Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz"),
        _device("xeon-8380h", "cpu.avx512_bf16", 28, 262144, 141),
        _device("epyc-9654", "cpu.zen4", 96, 262144, 461),
        _device("xeon-8480", "cpu.amx", 56, 262144, 307, "Intel(R) Xeon(R) Platinum 8480+"),
        _device("graviton2", "cpu.neon", 64, 262144, 205, "Neoverse-N1"),
        _device("altra", "cpu.neon", 80, 262144, 205, "Neoverse-N1"),
        _device("m1-cpu", "cpu.apple", 4, 16384, 68, "Apple M1"),
    )
)  # fmt: skip
SMALL = build_catalog({"small.toml": _ROOTS + _PROFILES + _DEVICES})


def nvidia(name, isa, units, mib, **more):
    return Properties(backend="cuda", name=name, isa=isa, units=units, memory_bytes=mib * MIB, **more)


def amd(name, isa, units, mib, pci_id=""):
    return Properties(backend="rocm", name=name, isa=isa, pci_id=pci_id, units=units, memory_bytes=mib * MIB)


def intel(name, isa, units, mib, pci_id=""):
    return Properties(backend="xpu", name=name, isa=isa, pci_id=pci_id, units=units, memory_bytes=mib * MIB)


def cpu_properties(name="Some CPU", flags="avx2 fma f16c", vendor="GenuineIntel", family=6, cores=4):
    return Properties(backend="cpu", name=name, units=cores, memory_bytes=8 * GIB, flags=frozenset(flags.split()),
                      vendor=vendor, family=family)  # fmt: skip
