"""From properties to devices, over the shipped catalogue: every name of it, real reports, and any properties at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_helpers import AMX, NEON, SMALL, amd, intel, nvidia

from dsmp.errors import UndetectedHardwareError
from dsmp.hardware_db.catalog import load_catalog
from dsmp.hardware_db.matching import BACKENDS, Properties, match
from dsmp.hardware_db.runtime_names import VGPU_BOARDS, product_key

SHIPPED = load_catalog()

_BACKENDS_OF = {
    "nvidia": "cuda",
    "iluvatar": "cuda",
    "metax": "cuda",
    "amd": "rocm",
    "hygon": "rocm",
    "intel": "xpu",
    "apple": "mps",
    "huawei": "npu",
    "moore-threads": "musa",
    "cambricon": "mlu",
}
_PLANNING_ONLY = {"google", "aws", "tenstorrent"}  # no torch attribute of theirs is read


def _as_reported(row, name="", pci_id=""):
    """What the runtime says on a shipped product."""
    profile = SHIPPED.architectures[row.arch]
    if profile.kind == "cpu":
        return Properties(backend="cpu", name=name, units=row.units, memory_bytes=row.memory_bytes,
                          flags=frozenset(profile.cpu_flags), vendor=profile.cpu_vendor or "",
                          family=profile.cpu_family or 0)  # fmt: skip
    backend = "hpu" if profile.isa.startswith("hpu") else _BACKENDS_OF[row.vendor or profile.vendor]
    told = backend in ("cuda", "rocm", "xpu", "mps")
    isa = "sm_80" if profile.vendor in ("iluvatar", "metax") else profile.isa
    return Properties(backend=backend, name=name, pci_id=pci_id, isa=isa if told else "",
                      units=row.units if told else 0, memory_bytes=row.memory_bytes)  # fmt: skip


_RUNNABLE = [
    r
    for r in SHIPPED.rows.values()
    if (r.vendor or SHIPPED.architectures[r.arch].vendor) not in _PLANNING_ONLY
    or SHIPPED.architectures[r.arch].kind == "cpu"
]


@pytest.mark.parametrize(
    ("row", "name"), [pytest.param(r, n, id=f"{r.id}-{n}") for r in _RUNNABLE for n in r.detect_names]
)
def test_every_shipped_runtime_name_is_recognised(row, name):
    found = match(_as_reported(row, name), SHIPPED)
    profile = SHIPPED.architectures[row.arch]
    assert (found.id, found.estimated) == (row.id, profile.totals_only or profile.kind == "cpu")


@pytest.mark.parametrize(
    ("row", "pci_id"), [pytest.param(r, p, id=f"{r.id}-{p}") for r in _RUNNABLE for p in r.pci_ids]
)
def test_every_shipped_pci_id_is_recognised(row, pci_id):
    found = match(_as_reported(row, pci_id=pci_id), SHIPPED)
    twins = [r for r in _RUNNABLE if pci_id in r.pci_ids and (r.units, r.memory_bytes) == (row.units, row.memory_bytes)]
    if len(twins) == 1:
        assert (found.id, found.estimated) == (row.id, False)
    else:
        assert (found.architecture, found.units, found.estimated) == (row.arch, row.units, True)


def test_the_names_of_most_shipped_gpus_are_known():
    gpus = [r for r in _RUNNABLE if SHIPPED.architectures[r.arch].kind == "gpu"]
    assert sum(bool(r.detect_names) for r in gpus) / len(gpus) > 0.9


def test_virtual_gpu_boards_are_shipped_names():
    names = {product_key(n) for r in SHIPPED.rows.values() for n in r.detect_names}
    assert {product_key(board) for board in VGPU_BOARDS.values()} <= names


_REAL = [
    (nvidia("Tesla V100-SXM2-32GB", "sm_70", 80, 32510), "v100"),
    (nvidia("NVIDIA H800", "sm_90", 132, 81008), "h800"),
    (nvidia("NVIDIA H20", "sm_90", 78, 97285), "h20"),
    (nvidia("NVIDIA B300 SXM6 AC", "sm_103", 148, 275040), "b300"),
    (nvidia("NVIDIA GeForce RTX 3060", "sm_86", 28, 12044), "rtx-3060"),
    (nvidia("NVIDIA GeForce GTX 1660 Ti", "sm_75", 24, 5936), "gtx-1660-ti"),
    (nvidia("NVIDIA L40S", "sm_89", 142, 45589), "l40s"),
    (nvidia("NVIDIA L4", "sm_89", 58, 22700), "l4"),
    (nvidia("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", 188, 97887), "rtx-pro-6000"),
    (amd("AMD Instinct MI250X/MI250", "gfx90a", 110, 65520), "mi250x"),
    (amd("AMD Instinct MI300X", "gfx942", 304, 196592), "mi300x"),
    (amd("AMD Radeon RX 9070 XT", "gfx1201", 64, 16304), "rx-9070-xt"),
    (amd("Radeon 8060S Graphics", "gfx1151", 40, 64038), "radeon-8060s"),
    (amd("AMD Radeon(TM) 8060S Graphics", "gfx1151", 40, 80065), "radeon-8060s"),
    (intel("Intel(R) Arc(TM) A770 Graphics", "intel_gpu_dg2", 32, 15473), "arc-a770"),
    (intel("Intel(R) Arc(TM) Pro B60 Graphics", "intel_gpu_bmg", 20, 23256, "e211"), "arc-pro-b60"),
    (intel("Intel(R) Graphics [0x64a0]", "intel_gpu_lnl", 8, 16870), "arc-140v"),
]


@pytest.mark.parametrize(("properties", "device"), _REAL, ids=[p.name for p, _ in _REAL])
def test_what_runtimes_were_seen_to_report(properties, device):
    found = match(properties, SHIPPED)
    assert (found.id, found.estimated, found.memory_bytes) == (device, False, properties.memory_bytes)


def test_an_mi250x_is_two_devices_of_half_its_card():
    found = match(amd("AMD Instinct MI250X", "gfx90a", 110, 65520), SHIPPED)
    assert (found.logical_devices, found.units) == (2, 110)
    assert found.peak("fp16") == pytest.approx(383e12 / 2, rel=0.01)


def test_an_a10g_is_no_a10():
    found = match(nvidia("NVIDIA A10G", "sm_86", 80, 22587), SHIPPED)
    assert (found.id, found.units) == ("a10g", 80)
    a10 = match(nvidia("NVIDIA A10", "sm_86", 72, 22731), SHIPPED)
    assert found.peak("fp16") / found.units < 0.7 * a10.peak("fp16") / a10.units


_NAMES = st.one_of(
    st.text(max_size=24),
    st.sampled_from([n for r in SHIPPED.rows.values() for n in r.detect_names]),
    st.builds(
        "{}{}".format,
        st.sampled_from(["GRID A100D", "NVIDIA A40", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 9999", "Quadro Z1"]),
        st.sampled_from(["", "-8Q", "-1-20C", " MIG 1g.10gb", " MIG 1c.3g.40gb"]),
    ),
)
_ISAS = st.one_of(
    st.sampled_from(
        sorted({p.isa for p in SHIPPED.architectures.values()} | {"", "sm_88", "sm_999", "gfx90c", "gfx1036"})
    ),
    st.from_regex(r"(sm_\d{2,3}|gfx[0-9a-f]{3,4}|[a-z_0-9]{1,12})", fullmatch=True),
)
_ANY = st.builds(
    Properties,
    backend=st.sampled_from(BACKENDS),
    name=_NAMES,
    isa=_ISAS,
    pci_id=st.sampled_from(["", "740c", "74a1", "e211", "ffff"]),
    units=st.integers(0, 2048),
    memory_bytes=st.integers(0, 2**42),
    clock_mhz=st.sampled_from([0.0, 1.0, 1410.0, 9000.0]),
    bandwidth=st.sampled_from([0.0, 1e9, 5e12]),
    l2_bytes=st.integers(0, 2**28),
    flags=st.sets(st.sampled_from([*AMX.split(), *NEON.split(), "sve", "sve2", "bf16", "i8mm"])).map(frozenset),
    vendor=st.sampled_from(["", "GenuineIntel", "AuthenticAMD", "ARM", "Apple"]),
    family=st.sampled_from([0, 6, 25, 26]),
)

# what is reported on a shipped product, under its own name or another, with all, some or none of its units and memory
_PLAUSIBLE = st.builds(
    lambda reported, name, units, memory: replace(
        reported,
        name=reported.name if name is None else name,
        units=int(reported.units * units),
        memory_bytes=int(reported.memory_bytes * memory),
    ),
    st.sampled_from([_as_reported(r, n) for r in _RUNNABLE for n in r.detect_names or ("",)]),
    st.none() | _NAMES,
    st.sampled_from([0, 0.14, 0.5, 1, 2]),
    st.sampled_from([0, 0.12, 0.5, 0.95, 1, 2]),
)

_CATALOGUES = {"small": SMALL, "shipped": SHIPPED}


def test_an_intel_gpu_is_no_gaudi():
    with pytest.raises(UndetectedHardwareError, match="GAUDI"):
        match(Properties(backend="xpu", name="GAUDI", units=1), SHIPPED)
    assert match(Properties(backend="hpu", name="GAUDI", units=1), SHIPPED).units == 8


@pytest.mark.parametrize("size", list(_CATALOGUES))
@settings(max_examples=300, deadline=None)
@given(properties=_PLAUSIBLE | _ANY)
def test_any_properties_give_the_runtimes_device_or_are_refused(size, properties):
    catalog = _CATALOGUES[size]
    try:
        found = match(properties, catalog)
    except UndetectedHardwareError as error:
        assert properties.name in str(error)
        return
    # the vendor's totals are of a whole chip
    counted = 0 if found.profile.totals_only else properties.units
    assert found.units == (counted or found.units) > 0
    assert found.memory_bytes == (properties.memory_bytes or found.memory_bytes) > 0
    assert found.memory_bandwidth > 0 and (found.l2_bytes is None or found.l2_bytes >= 0)
    assert all(0 < p < 1e20 for p in (*found.vector_peaks.values(), *found.matrix_peaks.values()))
    assert (found.kind == "cpu") == (properties.backend == "cpu")
    reference = catalog.resolve(found.id)
    assert reference.architecture == found.architecture, "the id can be typed and means the same kind of device"
    if found.units != reference.units or found.kind == "cpu" or found.name != reference.name:
        assert found.estimated
    assert match(properties, catalog) == found
