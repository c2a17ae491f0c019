"""From a row and its profile to a device: where peaks are derived."""

from __future__ import annotations

from .capability import Device
from .device_row import DeviceRow
from .formats import get_format
from .schema import Architecture


def derive_peaks(row: DeviceRow, profile: Architecture) -> tuple[dict[str, float], dict[str, float]]:
    """(vector, matrix) dense FLOP/s of one logical device by `format@accumulate`: derived from the profile's rates, or
    the vendor's totals where the profile has none."""
    if profile.totals_only:
        return _totals(row)
    vector_clock = row.vector_clock_mhz or 0.0  # the catalogue has refused rated devices without a clock
    matrix_clock = row.matrix_clock_mhz or vector_clock
    vector = {k: row.units * rate * vector_clock * 1e6 for k, rate in profile.vector.items()}
    matrix = {
        k: row.units * rate * (vector_clock if k.startswith("fp64@") else matrix_clock) * 1e6
        for k, rate in profile.matrix.items()
    }
    return vector, matrix


def _totals(row: DeviceRow) -> tuple[dict[str, float], dict[str, float]]:
    per_device = 1e12 / row.logical_devices
    vector = {k: v * per_device for k, v in row.stated_vector_tflops_per_card.items()}
    matrix = {k: v * per_device for k, v in row.stated_matrix_tflops_per_card.items()}
    if "fp32@fp32" not in vector and "fp32@fp32" not in matrix and row.assumed_fp32_share is not None:
        wide = [matrix[k] for k in ("bf16@fp32", "fp16@fp32") if k in matrix]
        bits = {k: get_format(k.partition("@")[0]).storage_bits for k in matrix}
        narrow = [peak * bits[k] / 16 for k, peak in matrix.items() if bits[k] < 16]
        if wide or narrow:
            vector["fp32@fp32"] = row.assumed_fp32_share * max(wide or narrow)
    return vector, matrix


def device_from_row(row: DeviceRow, profile: Architecture, overlays: tuple[str, ...] = ()) -> Device:
    """A catalogue device: exactly what its row and profile say."""
    vector, matrix = derive_peaks(row, profile)
    return Device(
        id=row.id,
        name=row.name,
        vendor=row.vendor or profile.vendor,
        isa=profile.isa,
        kind=profile.kind,
        units=row.units,
        vector_clock_mhz=row.vector_clock_mhz,
        matrix_clock_mhz=row.matrix_clock_mhz or row.vector_clock_mhz,
        vector_peaks=vector,
        matrix_peaks=matrix,
        memory_bytes=row.memory_bytes,
        memory_bandwidth=row.memory_bandwidth_bytes_per_s,
        l2_bytes=row.l2_bytes,
        link_bandwidth=row.interconnect.bidirectional_bytes_per_s / 2 if row.interconnect else None,
        logical_devices=row.logical_devices,
        estimated=profile.totals_only,
        confidence=row.worst_confidence,
        profile=profile,
        overlays=overlays,
    )
