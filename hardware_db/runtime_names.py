"""What runtimes call devices: how to read the product out of a device's or CPU's name.

A name is compared as a whole, never by what it contains: "L4" is in "L40S", "T4" in "T400", "A10" in "A10G". What may
differ are case, punctuation, vendor words (names.py), the suffix of a MIG slice and the decoration of a virtual GPU:

    NVIDIA H100 80GB HBM3 MIG 1g.10gb      a slice of an NVIDIA H100 80GB HBM3
    NVIDIA A40-8Q                          a share, in turns with others, of an NVIDIA A40
    GRID A100D-1-20C                       a slice of an NVIDIA A100 80GB PCIe
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .names import normalise, strip_vendor

_MIG = re.compile(r"\s+MIG\s+\S+$")
_VGPU = re.compile(r"^(?P<board>.+?)(?P<slice>-\d+)?-\d+[ABCQ](\d|ME|GFX)?$")
_GRID = re.compile(r"^(NVIDIA\s+)?GRID\s+")
_MARK = re.compile(r"\((R|TM|C)\)", re.IGNORECASE)
_GENERIC = frozenset({"", "graphics", "arcgraphics", "graphicsdevice", "device"})
_CPU_DECORATION = re.compile(r"@.*$|\bCPU\b|\b(\d+-Core )?Processor\b|\bwith Radeon.*$", re.IGNORECASE)

# Virtual GPUs name their board by a code; left out are codes that are the board's name (T4, A40, L40S).
# NVIDIA AI Enterprise documentation, tables of boards and their vGPU types (peer-to-peer, NVSwitch); V100 and Ada codes
# as seen in listings of hypervisors.
VGPU_BOARDS = {
    "v100": "Tesla V100-PCIE-16GB",
    "v100d": "Tesla V100-PCIE-32GB",
    "v100x": "Tesla V100-SXM2-16GB",
    "v100dx": "Tesla V100-SXM2-32GB",
    "v100s": "Tesla V100S-PCIE-32GB",
    "rtx6000": "Quadro RTX 6000",
    "rtx6000p": "Quadro RTX 6000",
    "rtx8000": "Quadro RTX 8000",
    "rtx8000p": "Quadro RTX 8000",
    "a100": "NVIDIA A100-PCIE-40GB",
    "a100d": "NVIDIA A100 80GB PCIe",
    "a100x": "NVIDIA A100-SXM4-40GB",
    "a100dx": "NVIDIA A100-SXM4-80GB",
    "a800": "NVIDIA A800 40GB Active",
    "a800d": "NVIDIA A800 80GB PCIe",
    "a800dx": "NVIDIA A800-SXM4-80GB",
    "rtx5000ada": "NVIDIA RTX 5000 Ada Generation",
    "rtx5880ada": "NVIDIA RTX 5880 Ada Generation",
    "rtx6000ada": "NVIDIA RTX 6000 Ada Generation",
    "h100": "NVIDIA H100 PCIe",
    "h100l": "NVIDIA H100 NVL",
    "h100xm": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200 NVL",
    "h200x": "NVIDIA H200",
    "h20x": "NVIDIA H20-3e",
    "h800": "NVIDIA H800 PCIe",
    "h800xm": "NVIDIA H800",
    "dc": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}

# Words of a name that tell the class of an NVIDIA product where one instruction set has several (profile keys end in
# the class); the first match counts. TU117 and TU116 have no tensor cores whatever they are sold as.
_CLASSES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), classes)
    for pattern, classes in (
        (r"\bGTX 16\d\d\b|\bMX ?\d{3}\b|\b(Quadro )?T\d{3,4}\b", ("notc", "half")),
        (r"\bGeForce\b|\bGTX\b", ("half",)),
        (r"\bRTX A\d+\b|\bQuadro\b|\bRTX PRO\b|\bAda Generation\b|\bTITAN RTX\b|\bTesla\b", ("full",)),
    )
)


@dataclass(frozen=True, slots=True)
class BoardName:
    """The product in a runtime name. `key` is its comparable spelling, "" if the name names no product.
    `takes_turns`: a virtual GPU that uses all units and the whole bandwidth while it runs."""

    key: str
    takes_turns: bool = False


def product_key(name: str) -> str:
    """A product name as it is compared: letters and digits, without trademark signs and leading vendor words."""
    return strip_vendor(normalise(_MARK.sub("", name)))


def read_board(name: str) -> BoardName:
    """The product that a GPU's runtime name stands for, without MIG suffix and virtual GPU decoration."""
    sliced = _MIG.search(name) is not None
    name = _GRID.sub("", _MIG.sub("", name.strip()))
    virtual = _VGPU.match(name)
    if virtual is None:
        return BoardName(product_key(name))
    code = product_key(virtual["board"])
    board = product_key(VGPU_BOARDS.get(code, code))
    return BoardName(board, takes_turns=virtual["slice"] is None and not sliced)


def is_generic(name: str) -> bool:
    """Whether a GPU's runtime name is one that drivers give to many products, such as "AMD Radeon Graphics"."""
    return product_key(name) in _GENERIC


def product_classes(name: str) -> tuple[str, ...]:
    """The classes ("full", "half", "notc") that an NVIDIA product's name speaks for, best first; none if silent."""
    return next((classes for pattern, classes in _CLASSES if pattern.search(name)), ())


def cpu_key(name: str) -> str:
    """A CPU's model name as it is compared: "AMD EPYC 7763 64-Core Processor" -> "epyc7763"."""
    return product_key(_CPU_DECORATION.sub(" ", name))
