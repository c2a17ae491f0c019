"""Names and numbers as runtimes give them: boards, classes, CPUs, instruction sets."""

from __future__ import annotations

import re

import pytest

from dsmp.hardware_db.instruction_sets import intel_isa, nearest_isa, nvidia_isa, units_per_multiprocessor
from dsmp.hardware_db.runtime_names import cpu_key, product_classes, product_key, read_board


@pytest.mark.parametrize(
    ("name", "board", "takes_turns"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "NVIDIA H100 80GB HBM3", False),
        ("NVIDIA A40-8Q", "NVIDIA A40", True),
        ("NVIDIA RTXA6000-48Q", "NVIDIA RTX A6000", True),
        ("NVIDIA RTX6000-Ada-8Q", "NVIDIA RTX 6000 Ada Generation", True),
        ("GRID V100DX-1B4", "Tesla V100-SXM2-32GB", True),
        ("GRID A100X-40C", "NVIDIA A100-SXM4-40GB", True),
        ("NVIDIA A100X", "NVIDIA A100X", False),
        ("NVIDIA H200-141C", "NVIDIA H200 NVL", True),
        ("NVIDIA H200", "NVIDIA H200", False),
        ("GRID A100D-1-20C", "NVIDIA A100 80GB PCIe", False),
        ("GRID A100D-1-20C MIG 1g.20gb", "NVIDIA A100 80GB PCIe", False),
        ("NVIDIA DC-1-24Q", "NVIDIA RTX PRO 6000 Blackwell Server Edition", False),
        # these end in no virtual GPU's decoration
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", False),
        ("NVIDIA H20-3e", "NVIDIA H20-3e", False),
        ("Tesla P100-PCIE-16GB", "Tesla P100-PCIE-16GB", False),
    ],
)
def test_boards_are_read_out_of_names(name, board, takes_turns):
    read = read_board(name)
    assert (read.key, read.takes_turns) == (product_key(board), takes_turns)


def test_words_tell_classes_and_parts_of_words_do_not():
    assert product_classes("NVIDIA GeForce RTX 4090") == ("half",)
    assert product_classes("NVIDIA T4") == product_classes("NVIDIA A100-SXM4-80GB") == ()
    assert product_classes("GTX 1650") == ("notc", "half")
    assert product_classes("MegaForce GTXX") == ()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("AMD EPYC 7763 64-Core Processor", "epyc7763"),
        ("AMD Ryzen 7 7840U with Radeon 780M Graphics", "ryzen77840u"),
        ("Intel(R) Xeon(R) CPU E5-2699 v4 @ 2.20GHz", "xeone52699v4"),
        ("Intel(R) Xeon(R) Platinum 8480+", "xeonplatinum8480"),
        ("Neoverse-V2", "neoversev2"),
    ],
)
def test_cpu_names_lose_their_decoration(name, key):
    assert cpu_key(name) == key


@pytest.mark.parametrize(
    ("isa", "known", "nearest"),
    [
        ("sm_90", ["sm_80", "sm_90"], "sm_90"),
        ("sm_88", ["sm_80", "sm_86", "sm_89", "sm_90"], "sm_86"),
        ("sm_121", ["sm_100", "sm_103", "sm_120"], "sm_120"),
        ("sm_110", ["sm_100", "sm_103"], None),
        ("sm_100", ["sm_90"], None),
        ("gfx1036", ["gfx1030", "gfx1032", "gfx1100"], "gfx1032"),
        ("gfx940", ["gfx942", "gfx950"], "gfx942"),
        ("gfx902", ["gfx900", "gfx90a"], "gfx900"),
        ("gfx902", ["gfx900", "gfx902"], "gfx902"),
        ("gfx909", ["gfx908", "gfx90a"], None),
        ("gfx90b", ["gfx90a"], None),
        ("", ["sm_90"], None),
        ("intel_gpu_30_0", ["intel_gpu_bmg"], None),
    ],
)
def test_the_nearest_instruction_set(isa, known, nearest):
    assert nearest_isa(isa, known) == nearest


def test_instruction_sets_as_runtimes_number_them():
    assert [nvidia_isa(*c) for c in ((8, 6), (9, 0), (12, 1), (10, 1), (11, 0))] == [
        "sm_86", "sm_90", "sm_121", "sm_110", "sm_110",
    ]  # fmt: skip
    assert [units_per_multiprocessor(i) for i in ("gfx906", "gfx942", "gfx1030", "gfx1201")] == [1, 1, 2, 2]
    # DPC++'s architecture numbers of acm_g10, pvc, mtl_h, bmg_g21, lnl_m
    numbers = (0x30DC00800, 0x30F000700, 0x311C00400, 0x500400400, 0x501000400, 0)
    names = ["intel_gpu_dg2", "intel_gpu_pvc", "intel_gpu_mtl", "intel_gpu_bmg", "intel_gpu_lnl", ""]
    assert [intel_isa(n) for n in numbers] == names
    assert re.fullmatch(r"intel_gpu_30_\d+", intel_isa(0x780000000))
