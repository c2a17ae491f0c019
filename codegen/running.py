"""The device that kernels are launched on, asked once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..errors import KernelUnavailableError
from ..hardware_db.capability import Device, Verdict
from ..hardware_db.detect import resolve_hardware
from .targets import TARGETS, Target, target_of


@functools.cache
def running_device() -> Device:
    """The machine's accelerator; detecting it takes too long for every launch."""
    return resolve_hardware()


def running_target() -> Target:
    """The target of the running GPU; of one that is not known, one whose limits every such GPU has."""
    return target_of(running_device()) or TARGETS["gfx90a" if torch.version.hip else "sm_80"]


def require_target(available: Callable[[Target], Verdict]) -> Target:
    """The target of the running GPU. Raises KernelUnavailableError where it is none, or not one for this kernel."""
    device = running_device()
    target = target_of(device)
    if target is None:
        raise KernelUnavailableError(
            f"there are no kernels for {device.name} ({device.isa}). Simulate the format there."
        )
    if not (verdict := available(target)):
        raise KernelUnavailableError(f"{verdict.reason.rstrip('.')}. Choose another format, or simulate this one.")
    return target
