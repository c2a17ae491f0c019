"""Fused regions: which values leave the group of operators that a compiler fuses into one kernel."""

from __future__ import annotations

from torch import fx

from .dataflow import readers
from .gemm import gemm_op
from .graph import is_backward


def leaves_region(node: fx.Node) -> bool:
    """Whether a value is read by a GEMM, by the other half of the joint graph or by the caller, and so is stored."""
    return any(
        user.op != "call_function" or gemm_op(user) is not None or is_backward(user) != is_backward(node)
        for _, user in readers(node)
    )


def rounds_for_others(node: fx.Node) -> bool:
    """Whether storing a value narrower rounds it for somebody who would not round it anyway: it leaves its region, and
    not only GEMMs read it."""
    return leaves_region(node) and any(user.op != "call_function" or gemm_op(user) is None for _, user in readers(node))
