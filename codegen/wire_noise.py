"""How much of a tensor's power a wire format loses: measured on the format's own encoding of normal values."""

from __future__ import annotations

import functools

import torch

from ..passes.wire_formats import WireFormat
from .wire import decode, encode

_VALUES = 1 << 14


@functools.cache
def relative_noise(wire: WireFormat) -> float:
    """Mean squared error over mean square of normal values that are encoded and decoded once."""
    x = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0))
    (sent,) = decode(encode([x], 1, str(wire)), [_VALUES], str(wire), torch.float32)
    return float((sent.reshape(-1) - x).square().sum() / x.square().sum())
