"""Figures with their units as people read them, chosen by the unit that a name ends in. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from ..console import bytes_text
from .facts import Value

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30

_WORDS = {
    "isa": "instruction set",
    "l2": "L2",
    "llc": "last-level cache",
    "sparsity factor": "structured sparsity",
    "tdp per card": "power limit per card",
}


def significant(value: float) -> str:
    """A number with four significant digits, never in exponent form: 0.01234, 989.4, 1,979."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return text if "e" not in text else f"{value:.10f}".rstrip("0").rstrip(".")


def tflops_text(flop_per_s: float) -> str:
    """FLOP/s in units of 10^12."""
    return significant(flop_per_s / 1e12)


def rate_text(bytes_per_s: float) -> str:
    """Bytes per second in powers of 1000: `3.352 TB/s`."""
    if bytes_per_s >= 1e12:
        return f"{significant(bytes_per_s / 1e12)} TB/s"
    return f"{significant(bytes_per_s / 1e9)} GB/s"


def memory_text(size: float) -> str:
    """A device's memory: `85.1 GB = 79.26 GiB`."""
    return f"{bytes_text(size)} = {size / _GIB:.4g} GiB"


def cache_text(size: float) -> str:
    """A cache or scratchpad in KiB or MiB."""
    return f"{size / _MIB:.4g} MiB" if size >= _MIB else f"{size / _KIB:.4g} KiB"


def share_text(share: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * share:.3g} %"


def deviation_text(deviation: float) -> str:
    """How far a derived figure is from a stated one: `+0.3 %`."""
    percent = round(100 * deviation, 1)
    return f"{percent:+.1f} %" if percent else "0.0 %"


_UNITS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("_bytes_per_s_per_device", " per device", rate_text),
    ("_bytes_per_s_per_link", " per link", rate_text),
    ("_bytes_per_s", "", rate_text),
    ("_flop_per_s", "", lambda v: f"{tflops_text(v)} TFLOPS"),
    ("_bytes_per_unit", " per unit", cache_text),
    ("_w_per_card", " per card", lambda v: f"{significant(v)} W"),
    ("_hz", "", lambda v: f"{v / 1e6:,.0f} MHz"),
    ("_share", " share", share_text),
    ("_bytes", "", cache_text),
    ("_s", "", lambda v: f"{significant(v * 1e6)} µs"),
)
"""The end of a fact's name, what of it remains in words, and how its values are written."""


def value_text(fact: str, value: Value) -> str:
    """The value of a fact with the unit that its name ends in; `–` where nothing is known."""
    name, _, of = fact.partition(".")
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if name == "memory_bytes":
        return memory_text(value)
    if name == "sparsity_factor":
        return "none" if value == 1 else f"up to {value} times the dense rates"
    if name == "year":
        return str(value)
    if of.startswith("int"):
        return f"{tflops_text(value)} TOPS"
    return next((text(value) for unit, _, text in _UNITS if name.endswith(unit)), f"{value:,}")


def fact_text(fact: str) -> str:
    """The name of a fact in words, without its unit: `memory_bandwidth_bytes_per_s` is `memory bandwidth`.

    What stands behind a dot is kept as it is: `matrix_peak_flop_per_s.fp8_e4m3@fp32` is `matrix peak fp8_e4m3@fp32`.
    """
    name, _, of = fact.partition(".")
    for unit, words, _ in _UNITS:
        if name.endswith(unit):
            name = f"{name.removesuffix(unit)}{words}"
            break
    name = name.replace("_", " ")
    return f"{_WORDS.get(name, name)} {of}".rstrip()
