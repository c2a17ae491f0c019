"""Formats that a CPU would run simulated only: not chosen for their predicted speed on the CPU that plans for itself.

A plan for another device is executed simulated anyway, and is a study of what that device can do: nothing is barred
there. A GPU's narrow products have kernels of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ..codegen.emission.plan_kernels import product_from
from ..codegen.registry import SIMULATION, choose
from ..errors import DsmpError
from ..hardware_db.capability import Device
from ..hardware_db.detect import resolve_hardware
from ..passes.legalize import is_native
from ..passes.plan import Decision
from ..passes.plan_fields import GEMM_CLASSES, Reason
from ..passes.program import Candidate, Program
from .trial import decided


def without_simulated(program: Program, decisions: Mapping[str, Decision], device: Device) -> Program:
    """A program in which the running CPU may multiply only in what it multiplies natively, or as the model was written.

    Nodes for which a rule leaves nothing else keep what the rule asks for, and so do those that are tied to them. On
    any other device the program stays as it is.
    """
    if not is_running_cpu(device):
        return program
    gemms = [key for key in program.keys if key in decisions and decisions[key].op in GEMM_CLASSES]
    asked = {key for key in gemms if all(_simulated(c, decisions[key], device) for c in program.allowed[key])}
    # nodes that are tied to such a node have to be able to follow it
    asked |= {key for group in program.ties if asked & set(group) for key in group}
    barred = {key: _barred(program.candidates[key], decisions[key], device) for key in gemms if key not in asked}
    return program.model_copy(update={"candidates": {**program.candidates, **barred}})


def is_running_cpu(device: Device) -> bool:
    """Whether a device is the CPU that this process runs on."""
    with contextlib.suppress(DsmpError):  # a CPU that is not known is no device of a plan
        return device.kind == "cpu" and device.id == resolve_hardware("cpu").id
    return False


def _simulated(candidate: Candidate, decision: Decision, device: Device) -> bool:
    """Whether a product's candidate would run simulated on the device it is planned for."""
    asked = decided(decision, candidate)
    as_traced = candidate.compute == decision.traced and candidate.recipe == "none"
    if as_traced or is_native(asked, same_device=True):
        return False
    return choose(product_from(asked), device).implementation is SIMULATION


def _barred(candidates: list[Candidate], decision: Decision, device: Device) -> list[Candidate]:
    """A product's candidates with those blocked that would run simulated."""
    return [
        c.model_copy(update={"blocked": Reason(code="simulated", text=_text(c, decision, device))})
        if c.blocked is None and _simulated(c, decision, device)
        else c
        for c in candidates
    ]


def _text(candidate: Candidate, decision: Decision, device: Device) -> str:
    return (
        f"no {candidate.label}: on {device.id} dsmp only simulates it, slower than {decision.traced}; a rule that asks "
        "for it, or a plan for another device, would take it"
    )
