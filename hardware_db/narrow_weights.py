"""Linears whose weights alone are narrow: stored in a format of few bits and widened as the product reads them.

Activations, products and sums keep the traced format, so such a linear gains what it does not read, and pays for
widening every weight once for each block of rows of its activations.
"""

from __future__ import annotations

import math

from .capability import Device, Verdict
from .work import Work

ROWS_PER_PASS = 4
"""Rows of activations that share one widened weight: more would not fit into the registers of an AVX2 core."""

CALL_S = 2e-6
"""Seconds that a call takes beyond a library's product: measured on a Zen 4 core, 3.1 against 1.0 microseconds for 16
columns (it looks up what was packed)."""


def stores_weights(device: Device, format: str) -> Verdict:
    """Whether a device has linears whose weights alone are stored in a format."""
    offered = device.profile.weights
    if format in offered:
        return Verdict(True, f"{device.name} ({device.isa}) widens {format} weights as a linear reads them.")
    names = ", ".join(offered) or "none"
    return Verdict(False, f"{device.name} ({device.isa}) has no linears with {format} weights alone; it has: {names}.")


def narrow_weights_time(device: Device, work: Work, format: str, traced: str = "fp32") -> float:
    """Predicted seconds of a linear whose weights are stored in `format`; `work.moved_bytes` counts them so.

    max(arithmetic in the traced format, bytes / bandwidth, weights to widen / rate) + launch overhead + CALL_S. What
    was measured of the library's products in the traced format says nothing of these kernels. Raises KeyError for a
    format that `stores_weights` refuses.
    """
    assert work.gemm is not None
    shape, clock = work.gemm, (device.vector_clock_mhz or 0.0) * 1e6
    passes = math.ceil(shape.m / ROWS_PER_PASS)
    widening = passes * shape.batch * shape.n * shape.k / (device.profile.weights[format] * clock * device.units)
    arithmetic = work.flops / (device.peak(traced) * device.efficiency.compute_for(traced))
    return max(arithmetic, work.moved_bytes / device.achieved_bandwidth, widening) + device.launch_overhead_s + CALL_S
