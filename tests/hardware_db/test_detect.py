"""Detection: tables of what runtimes were seen to report, and the traps in them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsmp.errors import UndetectedHardwareError, UnknownHardwareError
from dsmp.hardware_db.detect import (
    Properties,
    cpu_properties,
    detect,
    gpu_properties,
    match,
    read_cpu,
    resolve_hardware,
)

MIB = 2**20
AVX2 = "avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
BF16 = f"{AVX512} avx512_vnni avx512_bf16"
AMX = f"{BF16} amx_tile amx_bf16 amx_int8"


def _cuda(name: str, major: int, minor: int, units: int, mib: int, **more: int) -> Properties:
    raw = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=units, total_memory=mib * MIB, **more
    )
    return gpu_properties(raw, hip=False)


def _rocm(name: str, gcn: str, units: int, mib: int) -> Properties:
    raw = SimpleNamespace(
        name=name,
        major=9,
        minor=4,
        gcnArchName=gcn,
        multi_processor_count=units,
        total_memory=mib * MIB,
        L2_cache_size=4 * MIB,
    )
    return gpu_properties(raw, hip=True)


def _cpu(flags: str, vendor: str = "GenuineIntel", family: int = 6, amx: bool = True, cores: int = 4) -> Properties:
    info = (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: Some CPU\nflags\t\t: {flags}\n"
    )
    return cpu_properties(info, amx=amx, cores=cores, memory_bytes=8 * 2**30)


@pytest.mark.parametrize(
    ("properties", "device"),
    [
        (_cuda("Tesla V100-SXM2-32GB", 7, 0, 80, 32510), "v100"),
        (_cuda("Tesla T4", 7, 5, 40, 15095), "t4"),
        (_cuda("NVIDIA T4", 7, 5, 40, 15095), "t4"),
        (_cuda("NVIDIA A100-SXM4-80GB", 8, 0, 108, 81251), "a100"),
        (_cuda("A100-SXM4-80GB", 8, 0, 108, 81251), "a100"),
        (_cuda("NVIDIA H100 80GB HBM3", 9, 0, 132, 81008), "h100"),
        (_cuda("NVIDIA H800", 9, 0, 132, 81008), "h800"),
        (_cuda("NVIDIA H200", 9, 0, 132, 144384), "h200"),
        (_cuda("NVIDIA H20", 9, 0, 78, 97285), "h20"),
        (_cuda("NVIDIA B200", 10, 0, 148, 182642), "b200"),
        (_rocm("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", 110, 65520), "mi250x"),
        (_rocm("AMD Instinct MI250X/MI250", "gfx90a:sramecc+:xnack-", 110, 65520), "mi250x"),
        (_rocm("AMD Radeon Graphics", "gfx90a:sramecc+:xnack-", 110, 65520), "mi250x"),
        (_rocm("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304, 196592), "mi300x"),
        (_rocm("", "gfx942:sramecc+:xnack-", 304, 196592), "mi300x"),
    ],
)
def test_known_devices_are_recognised(properties, device):
    found = match(properties)
    assert (found.id, found.estimated) == (device, False)
    assert found.memory_bytes == properties.memory_bytes, "the runtime's memory, not the name's"


@pytest.mark.parametrize(
    ("properties", "profile"),
    [
        # names that contain a known device's name, or are contained in one
        (_cuda("NVIDIA L40S", 8, 9, 142, 45589), "nv.sm_89.half"),
        (_cuda("NVIDIA L4", 8, 9, 58, 22700), "nv.sm_89.half"),
        (_cuda("NVIDIA A10G", 8, 6, 80, 22587), "nv.sm_86.half"),
        (_cuda("NVIDIA RTX A1000", 8, 6, 18, 8192), "nv.sm_86.half"),
        (_cuda("NVIDIA T400 4GB", 7, 5, 6, 4096), "nv.sm_75.full"),
        (_cuda("NVIDIA H100 PCIe", 9, 0, 114, 81008), "nv.sm_90"),
        (_cuda("NVIDIA H200 NVL", 9, 0, 132, 144384), "nv.sm_90"),
        # a sibling that differs in memory
        (_cuda("NVIDIA A100-SXM4-40GB", 8, 0, 108, 40370), "nv.sm_80"),
        (_cuda("Tesla V100-SXM2-16GB", 7, 0, 80, 16151), "nv.sm_70"),
        # instruction sets without a device row, or without any profile of their own
        (_cuda("NVIDIA GeForce RTX 3090", 8, 6, 82, 24245), "nv.sm_86.half"),
        (_cuda("Orin", 8, 7, 16, 62841), "nv.sm_86.half"),
        (_cuda("NVIDIA GeForce RTX 5090", 12, 0, 170, 32607), "nv.sm_120.half"),
        (_cuda("NVIDIA GB10", 12, 1, 48, 122570), "nv.sm_120.half"),
        (_cuda("NVIDIA B300 SXM6 AC", 10, 3, 148, 275040), "nv.sm_103"),
        (_rocm("AMD Instinct MI325X", "gfx942:sramecc+:xnack-", 304, 262128), "amd.gfx942"),
    ],
)
def test_unknown_gpus_take_the_nearest_class_and_say_so(properties, profile):
    found = match(properties)
    assert (found.architecture, found.estimated) == (profile, True)
    assert (found.units, found.memory_bytes) == (properties.units, properties.memory_bytes)
    assert found.isa == properties.isa


def test_the_gpu_unlike_its_name_keeps_its_own_units():
    found = match(_rocm("AMD Instinct MI250X/MI250", "gfx90a:sramecc+:xnack-", 104, 65520))
    assert (found.architecture, found.units, found.estimated) == ("amd.gfx90a", 104, True)
    assert found.peak("fp16") == pytest.approx(181e12, rel=0.01)  # an MI250's 362 TFLOPS are two such devices


def test_an_unknown_name_is_placed_by_its_structure_if_that_fits_one_device():
    a800 = match(_cuda("NVIDIA A800-SXM4-80GB", 8, 0, 108, 81251))
    assert (a800.id, a800.name, a800.estimated) == ("a100", "NVIDIA A800-SXM4-80GB", True)
    either = match(_cuda("NVIDIA Hopper prototype", 9, 0, 132, 81008))  # H100 or H800
    assert (either.id, either.architecture) == ("nvidia-hopper-prototype", "nv.sm_90")


def test_a_name_does_not_outweigh_the_instruction_set():
    found = match(_cuda("NVIDIA H20", 10, 0, 148, 182642))
    assert found.isa == "sm_100" and found.id != "h20"


def test_a_mig_slice_is_scaled():
    whole = match(_cuda("NVIDIA H100 80GB HBM3", 9, 0, 132, 81008))
    part = match(_cuda("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9, 0, 16, 9984, L2_cache_size=6553600))
    assert (part.id, part.estimated, part.units, part.l2_bytes) == ("h100", True, 16, 6553600)
    assert part.peak("bf16") == pytest.approx(whole.peak("bf16") * 16 / 132)
    assert part.memory_bandwidth == pytest.approx(419e9, rel=0.03)  # as the driver reports for this slice
    assert part.memory_bytes == 9984 * MIB


def test_estimates_use_what_the_runtime_tells():
    told = match(
        _cuda(
            "NVIDIA GeForce RTX 3090",
            8,
            6,
            82,
            24245,
            clock_rate=1695000,
            memory_clock_rate=9751000,
            memory_bus_width=384,
        )
    )
    assert told.memory_bandwidth == pytest.approx(936e9, rel=0.001)
    assert told.vector_clock_mhz == 1695
    assert told.peak("bf16") == pytest.approx(71.2e12, rel=0.01)
    assert told.id == "nvidia-geforce-rtx-3090" and told.confidence == "C"
    untold = match(_cuda("NVIDIA GeForce RTX 3090", 8, 6, 82, 24245))
    assert untold.memory_bandwidth == pytest.approx(936e9, rel=0.01)


def test_estimates_keep_the_tensor_clock_below_boost():
    found = match(_cuda("NVIDIA H100 PCIe", 9, 0, 114, 81008, clock_rate=1755000))
    assert found.matrix_clock_mhz / found.vector_clock_mhz == pytest.approx(1830 / 1980)


@pytest.mark.parametrize(
    ("properties", "what"),
    [
        (_cuda("NVIDIA GeForce GTX 1080", 6, 1, 20, 8192), "sm_61"),
        (_cuda("NVIDIA Thor", 11, 0, 20, 125000), "sm_110"),
        (_rocm("AMD Radeon RX 7900 XTX", "gfx1100", 48, 24560), "gfx1100"),
        # HIP's (9, 4) is no CUDA capability, and gfx950 is no gfx942: its fp8 bits mean something else
        (_rocm("AMD Instinct MI350X", "gfx950:sramecc+:xnack-", 256, 294896), "gfx950"),
    ],
)
def test_gpus_without_any_profile_are_refused(properties, what):
    with pytest.raises(UndetectedHardwareError) as caught:
        match(properties)
    assert what in str(caught.value) and properties.name in str(caught.value)
    assert "Name the nearest known hardware" in str(caught.value) and "mi300x" in str(caught.value)


@pytest.mark.parametrize(
    ("properties", "device"),
    [
        (_cpu(AVX2, "AuthenticAMD", 25), "cpu-avx2"),
        (_cpu(AVX512), "cpu-avx512"),
        (_cpu(BF16), "cpu-avx512-bf16"),
        (_cpu(BF16, "AuthenticAMD", 25), "cpu-zen4"),
        (_cpu(BF16, "AuthenticAMD", 26), "cpu-avx512-bf16"),
        (_cpu(AMX), "cpu-amx"),
        (_cpu(AMX, amx=False), "cpu-avx512-bf16"),
        (_cpu(f"{AVX2} avx512_bf16"), "cpu-avx2"),
    ],
)
def test_cpus_by_their_flags(properties, device):
    found = match(properties)
    assert (found.id, found.estimated, found.kind) == (device, True, "cpu")
    assert found.name == "Some CPU"


def test_a_cpu_is_scaled_to_the_cores_in_use():
    one, two, many = (match(_cpu(AVX2, cores=n)) for n in (1, 2, 64))
    assert two.peak("fp32") == 2 * one.peak("fp32") == pytest.approx(179.2e9)
    assert (one.memory_bandwidth, two.memory_bandwidth, many.memory_bandwidth) == (20e9, 40e9, 205e9)
    assert one.memory_bytes == 8 * 2**30


def test_torchs_flag_names_mean_the_kernels():
    torchs = ["avx2", "fma3", "f16c", "avx512_f", "avx512_bw", "avx512_vnni", "avx512_bf16"]
    properties = cpu_properties("", extra_flags=torchs, amx=False, cores=2, memory_bytes=0)
    found = match(properties)
    assert found.id == "cpu-avx512-bf16"
    assert found.memory_bytes > 0, "nominal where the runtime does not tell"


@pytest.mark.parametrize("flags", ["avx f16c", "asimd fphp bf16 i8mm sve", ""])
def test_cpus_without_any_profile_are_refused(flags):
    with pytest.raises(UndetectedHardwareError, match="has none of the known flag sets"):
        match(_cpu(flags))


def test_the_running_cpu():
    device = resolve_hardware("cpu")
    assert device.kind == "cpu" and device.estimated
    assert device.units == torch.get_num_threads()
    assert device.memory_bytes > 10**8
    assert resolve_hardware(" CPU ") == device == match(read_cpu())


def test_auto_and_none_mean_the_running_device():
    assert resolve_hardware("auto") == resolve_hardware(None) == resolve_hardware() == detect()
    assert (detect().kind == "gpu") == torch.cuda.is_available()


def test_other_names_come_from_the_catalogue():
    assert resolve_hardware("H800-SXM").id == "h800"
    with pytest.raises(UnknownHardwareError, match="Use 'auto' for the running device"):
        resolve_hardware("h900")
    with pytest.raises(UnknownHardwareError):
        resolve_hardware("")
