"""What accelerators and CPUs exist and what they can do. Pure data and queries; only detect.py imports torch.

* `resolve("h800")`: a device of the catalogue, by any usual name (catalog.py)
* `detect.resolve_hardware("auto")`: the running device (detect.py)
* `Device.supports`: a verdict per op class, operand, format and accumulator (capability.py)
* `Device.ladder`, `Device.peak`: its precision tier and its derived peaks
* `Device.achievable`, `Device.time`: what kernels reach of them, measured or assumed
* `load_catalog().resolve_node("dgx-h100")`: a machine of several devices and its collectives (topology.py)
"""

from __future__ import annotations

from .capability import Device, Verdict
from .catalog import load_catalog, names, resolve
from .formats import FORMATS, RECIPES, Format, get_format
from .schema import OP_CLASSES, Choice, OpClass
from .work import GemmShape, Work

__all__ = [
    "FORMATS",
    "OP_CLASSES",
    "RECIPES",
    "Choice",
    "Device",
    "Format",
    "GemmShape",
    "OpClass",
    "Verdict",
    "Work",
    "get_format",
    "load_catalog",
    "names",
    "resolve",
]
