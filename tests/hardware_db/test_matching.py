"""From properties to devices, over a small catalogue: no GPU, no torch, no shipped figures."""

from __future__ import annotations

import pytest
from matching_helpers import AMX, AVX512, BF16, GIB, MIB, NEON, SMALL, amd, cpu_properties, intel, nvidia

from dsmp.errors import UndetectedHardwareError
from dsmp.hardware_db.matching import Properties, match
from dsmp.hardware_db.names import class_id

KNOWN = [
    (nvidia("Tesla T4", "sm_75", 40, 15095), "t4"),
    (nvidia("NVIDIA T4", "sm_75", 40, 15095), "t4"),
    (nvidia("NVIDIA A100-SXM4-80GB", "sm_80", 108, 81251), "a100"),
    (nvidia("A100-SXM4-80GB", "sm_80", 108, 81251), "a100"),
    (nvidia("NVIDIA A100-SXM4-40GB", "sm_80", 108, 40370), "a100-sxm4-40gb"),
    (nvidia("NVIDIA A100-PCIE-40GB", "sm_80", 108, 40326), "a100-pcie-40gb"),
    (nvidia("NVIDIA A100 80GB PCIe", "sm_80", 108, 81051), "a100-pcie-80gb"),
    (nvidia("NVIDIA A10G", "sm_86", 80, 22587), "a10g"),
    (nvidia("NVIDIA A10", "sm_86", 72, 22731), "a10"),
    (nvidia("NVIDIA A40", "sm_86", 84, 45416), "a40"),
    (nvidia("NVIDIA RTX A1000", "sm_86", 18, 8192), "rtx-a1000"),
    (nvidia("GeForce RTX 3090", "sm_86", 82, 24245), "rtx-3090"),
    (nvidia("NVIDIA L4", "sm_89", 58, 22700), "l4"),
    (nvidia("NVIDIA L40S", "sm_89", 142, 45589), "l40s"),
    (nvidia("NVIDIA L40", "sm_89", 142, 45589), "l40"),
    (nvidia("NVIDIA H100 80GB HBM3", "sm_90", 132, 81008), "h100"),
    (nvidia("NVIDIA H100 PCIe", "sm_90", 114, 81008), "h100-pcie"),
    (nvidia("NVIDIA H100 NVL", "sm_90", 132, 95830), "h100-nvl"),
    (nvidia("NVIDIA GH200 480GB", "sm_90", 132, 97871), "gh200"),
    (nvidia("NVIDIA H200", "sm_90", 132, 143771), "h200"),
    (nvidia("NVIDIA B200", "sm_100", 148, 182642), "b200"),
    # one name, several products
    (nvidia("NVIDIA GeForce RTX 3060", "sm_86", 28, 12044), "rtx-3060"),
    (nvidia("NVIDIA GeForce RTX 3060", "sm_86", 28, 8192), "rtx-3060-8gb"),
    (nvidia("Orin", "sm_87", 16, 62841), "orin-64gb"),
    (nvidia("Orin", "sm_87", 14, 30697), "orin-32gb"),
    (nvidia("Orin", "sm_87", 8, 7620), "orin-nano-8gb"),
    # a whole virtual GPU
    (nvidia("NVIDIA A40-48Q", "sm_86", 84, 46068), "a40"),
    (nvidia("NVIDIA H100XM-80C", "sm_90", 132, 81008), "h100"),
    # a maker behind another's API
    (nvidia("MetaX C500", "sm_80", 104, 65536), "metax-c500"),
    (amd("AMD Instinct MI250X", "gfx90a", 110, 65520), "mi250x"),
    (amd("AMD Instinct MI250X/MI250", "gfx90a", 110, 65520), "mi250x"),
    (amd("AMD Instinct MI250X/MI250", "gfx90a", 104, 65520), "mi250"),
    (amd("AMD Instinct MI300X", "gfx942", 304, 196592), "mi300x"),
    (amd("Radeon RX 7900 XTX", "gfx1100", 96, 24560), "rx-7900-xtx"),
    # no name, or one that tells nothing: PCI id, then structure
    (amd("AMD Radeon Graphics", "gfx90a", 110, 65520, "740c"), "mi250x"),
    (amd("", "gfx90a", 104, 65520, "740c"), "mi250"),
    (amd("", "gfx90a", 110, 65520), "mi250x"),
    (amd("", "gfx942", 304, 196592), "mi300x"),
    (amd("Some VF", "gfx942", 304, 196592, "74b5"), "mi300x"),
    (intel("", "", 20, 23256, "e211"), "arc-pro-b60"),
    # a shared main memory says nothing of the product
    (amd("AMD Radeon Graphics", "gfx1150", 16, 47000), "radeon-890m"),
    (Properties(backend="mps", name="Apple M3 Max", isa="metal", units=40, memory_bytes=27 * GIB), "m3-max"),
    (Properties(backend="mps", name="Apple M3 Max", isa="metal", units=30, memory_bytes=27 * GIB), "m3-max-30-core"),
    (intel("Intel(R) Data Center GPU Max 1550", "intel_gpu_pvc", 64, 65536), "max-1550"),
    (intel("Intel(R) Arc(TM) B580 Graphics", "", 20, 11605), "arc-b580"),
    (Properties(backend="hpu", name="GAUDI2", memory_bytes=102106132480), "gaudi-2"),
    (Properties(backend="npu", name="Ascend910B3", memory_bytes=62420 * MIB), "ascend-910b3"),
]  # fmt: skip


@pytest.mark.parametrize(("properties", "device"), KNOWN, ids=[f"{p.name or 'unnamed'}-{d}" for p, d in KNOWN])
def test_known_products_are_recognised(properties, device):
    found = match(properties, SMALL)
    assert (found.id, found.name, found.estimated) == (device, f"The {device}", False)
    assert found.memory_bytes == properties.memory_bytes, "the runtime's memory, not the name's"
    row = SMALL.device(device)
    assert (found.memory_bandwidth, found.matrix_peaks) == (row.memory_bandwidth, row.matrix_peaks)


CLASSES = [
    # the class that the name tells, whatever the default
    (nvidia("NVIDIA GeForce RTX 2070", "sm_75", 36, 7982), "nv.sm_75.half"),
    (nvidia("NVIDIA GeForce GTX 1650", "sm_75", 14, 3909), "nv.sm_75.notc"),
    (nvidia("NVIDIA T400 4GB", "sm_75", 6, 3888), "nv.sm_75.notc"),
    (nvidia("NVIDIA T1000 8GB", "sm_75", 14, 7972), "nv.sm_75.notc"),
    (nvidia("Quadro T2000", "sm_75", 16, 3911), "nv.sm_75.notc"),
    (nvidia("NVIDIA GeForce MX450", "sm_75", 14, 2002), "nv.sm_75.notc"),
    (nvidia("Quadro RTX 4000", "sm_75", 36, 7981), "nv.sm_75.full"),
    (nvidia("NVIDIA TITAN RTX", "sm_75", 72, 24212), "nv.sm_75.full"),
    (nvidia("NVIDIA CMP 40HX", "sm_75", 36, 8192), "nv.sm_75.full"),
    (nvidia("NVIDIA RTX A4000", "sm_86", 48, 16101), "nv.sm_86.full"),
    (nvidia("NVIDIA GeForce MX570", "sm_86", 16, 2048), "nv.sm_86.half"),
    (nvidia("NVIDIA A16", "sm_86", 10, 15109), "nv.sm_86.half"),
    (nvidia("NVIDIA RTX 4000 Ada Generation", "sm_89", 48, 20475), "nv.sm_89.full"),
    (nvidia("NVIDIA GeForce RTX 4090", "sm_89", 128, 24217), "nv.sm_89.full"),  # here the only class
    # several products alike: neither is claimed
    (nvidia("NVIDIA Hopper prototype", "sm_90", 132, 81008), "nv.sm_90"),
    # the nearest older capability of the same major version; CC is no order across them
    (nvidia("NVIDIA Future", "sm_88", 30, 32000), "nv.sm_87"),
    (nvidia("NVIDIA GB10", "sm_121", 48, 122570), "nv.sm_120.half"),
    (nvidia("NVIDIA B300 SXM6 AC", "sm_103", 148, 275040), "nv.sm_100"),
    # relatives among gfx targets
    (amd("AMD Instinct MI300A", "gfx940", 228, 131072), "amd.gfx942"),
    (amd("AMD Radeon RX 7600", "gfx1102", 32, 8176), "amd.gfx1100"),
    (amd("AMD Radeon Graphics", "gfx1152", 8, 16384), "amd.gfx1150"),
    (amd("AMD Radeon Graphics", "gfx90c", 8, 4096), "amd.gfx900"),
    (amd("AMD Radeon Graphics", "gfx1150", 12, 16384), "amd.gfx1150"),
    (intel("Intel(R) Data Center GPU Max 1450", "intel_gpu_pvc", 60, 65536), "intel.xehpc"),
    (Properties(backend="mps", name="Apple M9", isa="metal", units=12, memory_bytes=12 * GIB), "apple.gpu"),
]


@pytest.mark.parametrize(("properties", "profile"), CLASSES, ids=[f"{p.name}-{p.isa}" for p, _ in CLASSES])
def test_unknown_products_stand_for_their_class_and_say_so(properties, profile):
    found = match(properties, SMALL)
    assert (found.architecture, found.estimated, found.confidence) == (profile, True, "C")
    assert (found.units, found.memory_bytes, found.isa) == (properties.units, properties.memory_bytes, properties.isa)
    assert (found.id, found.name) == (class_id(profile), properties.name)
    reference = SMALL.device(SMALL.architectures[profile].reference)
    share = properties.units / reference.units
    assert found.peak("fp32") == pytest.approx(reference.peak("fp32") * share)
    assert found.memory_bandwidth == pytest.approx(reference.memory_bandwidth * share)
    assert SMALL.resolve(found.id).id == found.id, "the id can be typed"


def test_a_name_is_never_matched_by_a_part_of_it():
    for name, isa in (("NVIDIA L400", "sm_89"), ("NVIDIA T40", "sm_75"), ("NVIDIA A1", "sm_86"), ("H20", "sm_90")):
        assert match(nvidia(name, isa, 7, 1000), SMALL).name == name


def test_a_name_does_not_outweigh_the_instruction_set():
    found = match(nvidia("NVIDIA H200", "sm_100", 140, 160000), SMALL)
    assert (found.id, found.isa) == ("nv-sm-100", "sm_100")


def test_an_unknown_name_is_placed_by_its_structure_if_that_fits_one_product():
    found = match(nvidia("NVIDIA A30X", "sm_80", 56, 24576), SMALL)
    assert (found.id, found.name, found.estimated, found.confidence) == ("a30", "NVIDIA A30X", True, "A")


def test_structure_does_not_outweigh_the_class_that_the_name_tells():
    found = match(nvidia("NVIDIA GeForce RTX 2050", "sm_86", 26, 12288), SMALL)  # alike an RTX A2000, at half its rate
    assert found.architecture == "nv.sm_86.half"


@pytest.mark.parametrize(
    ("properties", "device", "bandwidth"),
    [
        (nvidia("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "sm_90", 16, 9984, l2_bytes=6553600), "h100", 413e9),
        (nvidia("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "sm_90", 60, 40320), "h100", 1668e9),
        (nvidia("NVIDIA A100 80GB PCIe MIG 1g.10gb", "sm_80", 14, 9728), "a100-pcie-80gb", 232e9),
        (nvidia("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "sm_80", 14, 19968), "a100-sxm4-40gb", 769e9),
        (nvidia("GRID A100D-1-20C", "sm_80", 14, 20480), "a100-pcie-80gb", 488e9),
        (nvidia("NVIDIA A100-1-5CME", "sm_80", 14, 4864), "a100-pcie-40gb", 188e9),
        # virtual GPUs that take turns have all units, and the whole bandwidth while they run
        (nvidia("GRID A100-10C", "sm_80", 108, 10240), "a100-pcie-40gb", 1555e9),
        (nvidia("GRID A100DX-40C", "sm_80", 108, 40960), "a100", 2039e9),
        (nvidia("NVIDIA A40-8Q", "sm_86", 84, 8192), "a40", 696e9),
        (nvidia("GRID T4-4Q", "sm_75", 40, 4096), "t4", 320e9),
        (nvidia("NVIDIA L40S-12Q", "sm_89", 142, 12288), "l40s", 864e9),
        (nvidia("NVIDIA H100L-47C", "sm_90", 132, 48128), "h100-nvl", 3938e9),
        # siblings under one name, partitions, and a whole card where stacks are usual
        (amd("AMD Instinct MI300X", "gfx942", 38, 24574), "mi300x", 662e9),
        (nvidia("NVIDIA GeForce RTX 3060", "sm_86", 26, 12044), "rtx-3060", 360e9),
        (intel("Intel(R) Data Center GPU Max 1550", "intel_gpu_pvc", 56, 65536), "max-1550", 1638e9),
        (intel("Intel(R) Data Center GPU Max 1550", "intel_gpu_pvc", 128, 131072), "max-1550", 3276e9),
        (Properties(backend="mps", name="Apple M3 Max", isa="metal", units=38, memory_bytes=20 * GIB), "m3-max", 400e9),
    ],
)
def test_slices_and_siblings_are_scaled(properties, device, bandwidth):
    found, whole = match(properties, SMALL), SMALL.device(device)
    assert (found.id, found.estimated) == (device, True)
    assert (found.units, found.memory_bytes) == (properties.units, properties.memory_bytes)
    for format in ("fp32", "fp16"):
        assert found.peak(format) == pytest.approx(whole.peak(format) * properties.units / whole.units)
    assert found.memory_bandwidth == pytest.approx(bandwidth, rel=0.003)
    assert found.l2_bytes == (properties.l2_bytes or int(whole.l2_bytes * min(1, found.units / whole.units)))


def test_estimates_use_what_the_runtime_tells():
    found = match(
        nvidia("NVIDIA RTX prototype", "sm_120", 100, 24000, clock_mhz=2000, bandwidth=1e12, l2_bytes=7 * MIB), SMALL
    )
    assert (found.vector_clock_mhz, found.memory_bandwidth, found.l2_bytes) == (2000, 1e12, 7 * MIB)
    assert found.peak("fp16") == pytest.approx(100 * 1024 * 2000e6)
    assert found.vector_peak("fp32") == pytest.approx(100 * 256 * 2000e6)


def test_estimates_keep_the_tensor_clock_below_boost():
    found = match(nvidia("NVIDIA Hopper prototype", "sm_90", 100, 60000, clock_mhz=1755), SMALL)
    assert found.matrix_clock_mhz == pytest.approx(1755 * 1830 / 1980)
    assert found.peak("fp16") == pytest.approx(100 * 4096 * 1755e6 * 1830 / 1980)


@pytest.mark.parametrize(
    ("properties", "what"),
    [
        (nvidia("NVIDIA GeForce GTX 1080", "sm_61", 20, 8192), "sm_61"),
        (nvidia("NVIDIA Thor", "sm_110", 20, 125000), "sm_110"),
        # gfx950 is no gfx942: its fp8 bits mean something else; gfx908 is not gfx90a, nor gfx906 gfx900
        (amd("AMD Instinct MI350X", "gfx950", 256, 294896), "gfx950"),
        (amd("AMD Instinct MI100", "gfx908", 120, 32752), "gfx908"),
        (amd("AMD Instinct MI50", "gfx906", 60, 16368), "gfx906"),
        (nvidia("Iluvatar BI-V150", "sm_80", 32, 32768), "Iluvatar BI-V150"),
        (intel("Intel(R) Graphics [0xb080]", "intel_gpu_30_0", 12, 16384), "intel_gpu_30_0"),
        (Properties(backend="mps", name="AMD Radeon Pro 5500M", memory_bytes=4 * GIB), "AMD Radeon Pro 5500M"),
        (Properties(backend="npu", name="Ascend910Z", memory_bytes=64 * GIB), "torch.npu"),
        (Properties(backend="cuda"), "a device without a name"),
    ],
)
def test_devices_of_no_known_class_are_refused(properties, what):
    with pytest.raises(UndetectedHardwareError) as caught:
        match(properties, SMALL)
    assert what in str(caught.value) and properties.name in str(caught.value)
    assert "`dsmp hardware list`" in str(caught.value)


@pytest.mark.parametrize(
    ("properties", "profile", "vendor"),
    [
        (cpu_properties(vendor="AuthenticAMD", family=25), "cpu.avx2", "amd"),
        (cpu_properties(), "cpu.avx2", "intel"),
        (cpu_properties(flags=AVX512), "cpu.avx512", "intel"),
        (cpu_properties(flags=BF16), "cpu.avx512_bf16", "intel"),
        (cpu_properties(flags=BF16, vendor="AuthenticAMD", family=25), "cpu.zen4", "amd"),
        (cpu_properties(flags=BF16, vendor="AuthenticAMD", family=26), "cpu.avx512_bf16", "amd"),
        (cpu_properties(flags=AMX), "cpu.amx", "intel"),
        (cpu_properties(flags="avx2 fma f16c avx512_bf16"), "cpu.avx2", "intel"),
        (cpu_properties(flags="avx2 fma3 f16c avx512_f avx512_bw", vendor=""), "cpu.avx512", "intel"),
        (cpu_properties(flags=NEON, vendor="HiSilicon", family=0xD01), "cpu.neon", "huawei"),
        (cpu_properties(flags=f"{NEON} asimdfhm", vendor="ARM"), "cpu.neon", "arm"),
        (cpu_properties(flags=f"{NEON} asimdfhm", vendor="Apple"), "cpu.apple", "apple"),
        # a name whose features are masked, and one that two products share
        (cpu_properties("Intel(R) Xeon(R) Platinum 8480+", BF16), "cpu.avx512_bf16", "intel"),
        (cpu_properties("Neoverse-N1", NEON, "ARM", 0xD0C), "cpu.neon", "arm"),
    ],
)
def test_cpus_stand_for_their_features(properties, profile, vendor):
    found = match(properties, SMALL)
    assert (found.id, found.architecture, found.name) == (class_id(profile), profile, properties.name)
    assert (found.vendor, found.kind, found.estimated, found.confidence) == (vendor, "cpu", True, "C")


@pytest.mark.parametrize(
    ("properties", "device"),
    [
        (cpu_properties("AMD EPYC 7763 64-Core Processor", vendor="AuthenticAMD", family=25), "epyc-7763"),
        (cpu_properties("INTEL(R) XEON(R) PLATINUM 8480+", AMX), "xeon-8480"),
        (cpu_properties("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", AVX512), "xeon-8380"),
        (cpu_properties("Neoverse-N1", NEON, "ARM", 0xD0C, cores=80), "altra"),
        (cpu_properties("Apple M1", f"{NEON} asimdfhm", "Apple"), "m1-cpu"),
    ],
)
def test_known_cpus_are_recognised_and_still_estimated(properties, device):
    found = match(properties, SMALL)
    assert (found.id, found.estimated, found.confidence) == (device, True, "A")
    assert (found.units, found.memory_bytes) == (properties.units, properties.memory_bytes)


def test_a_cpu_is_scaled_to_the_cores_in_use():
    one, two, many = (match(cpu_properties(cores=n), SMALL) for n in (1, 2, 64))
    assert two.peak("fp32") == 2 * one.peak("fp32") == pytest.approx(179.2e9)
    assert (one.memory_bandwidth, two.memory_bandwidth, many.memory_bandwidth) == (20e9, 40e9, 205e9)
    assert (one.l2_bytes, many.l2_bytes) == (MIB // 2, 32 * MIB)
    assert one.memory_bytes == 8 * GIB
    assert match(Properties(backend="cpu", flags=frozenset({"avx2", "fma", "f16c"})), SMALL).units == 64


@pytest.mark.parametrize("flags", ["avx f16c", "asimd", ""])
def test_cpus_without_any_profile_are_refused(flags):
    with pytest.raises(UndetectedHardwareError, match="Some CPU has none of the known sets of features"):
        match(cpu_properties(flags=flags), SMALL)
