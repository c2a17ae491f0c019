"""Packed weights of this process, each made once per weight and again when the weight changes (packed_weights.h)."""

from __future__ import annotations

import torch


def packed_bytes() -> int:
    """Bytes of all packed weights whose own weights are alive; the others are dropped."""
    return int(torch.ops.dsmp_cpu.packed_bytes()) if hasattr(torch.ops.dsmp_cpu, "packed_bytes") else 0


def clear() -> None:
    """Forget all packed weights; the next calls pack anew."""
    if hasattr(torch.ops.dsmp_cpu, "forget_packed"):
        torch.ops.dsmp_cpu.forget_packed()
