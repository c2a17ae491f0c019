"""What values a tensor holds: its largest magnitude, a histogram of binary exponents, and from these how much of it a
format would flush to zero or overflow.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from ..hardware_db.formats import get_format
from .plan_fields import PlanModel


class Range(PlanModel):
    """The range of one tensor over all calibration batches.

    `exponents` counts the values with floor(log2 |x|) = e by e; `zeros` and `nonfinite` (inf, NaN) are counted apart.
    `low` and `high` are the smallest and largest finite value, None where that was not looked at.
    """

    absmax: float = Field(ge=0)
    exponents: dict[int, int]
    zeros: int = Field(default=0, ge=0)
    nonfinite: int = Field(default=0, ge=0)
    low: float | None = None
    high: float | None = None

    @property
    def count(self) -> int:
        """Values that were seen."""
        return sum(self.exponents.values()) + self.zeros + self.nonfinite

    @property
    def ends(self) -> tuple[float, float] | None:
        """The smallest and the largest finite value, where they are known."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def flushed(self, format_name: str, *, scaled: bool = False) -> float:
        """The part of the values that a format rounds to zero, unscaled or with the tensor's largest value at the top
        of the format. Values in the binade of half the smallest subnormal are counted whole."""
        fmt = get_format(format_name)
        shift = self._shift(format_name) if scaled else 0
        smallest = fmt.min_exponent - fmt.mantissa_bits - 1 + shift if fmt.kind == "float" else shift - 1
        return sum(n for e, n in self.exponents.items() if e < smallest) / max(1, self.count)

    def overflowed(self, format_name: str) -> float:
        """The part of the values beyond a format's largest, unscaled; the binade of the largest counts as within."""
        top = math.floor(math.log2(get_format(format_name).max))
        return sum(n for e, n in self.exponents.items() if e > top) / max(1, self.count)

    def _shift(self, format_name: str) -> int:
        return math.ceil(math.log2(self.absmax / get_format(format_name).max)) if self.absmax > 0 else 0

    def reaching(self, low: float | None, high: float | None) -> Range:
        """This range with ends that reach as far as these, where both are known and finite."""
        ends = [low, high, self.low, self.high]
        if not all(e is not None and math.isfinite(e) for e in ends):
            return self
        update = {"low": min(e for e in ends if e is not None), "high": max(e for e in ends if e is not None)}
        return self.model_copy(update=update)

    def merged(self, other: Range) -> Range:
        """The range of both together."""
        exponents = dict(self.exponents)
        for e, n in other.exponents.items():
            exponents[e] = exponents.get(e, 0) + n
        return Range(
            absmax=max(self.absmax, other.absmax),
            exponents=dict(sorted(exponents.items())),
            zeros=self.zeros + other.zeros,
            nonfinite=self.nonfinite + other.nonfinite,
            low=self.low,
            high=self.high,
        ).reaching(other.low, other.high)


_BIAS, _MANTISSA = 127, 23


def range_of(tensor: Tensor) -> Range:
    """The range of a floating-point tensor of any shape; fp64 values beyond fp32's range are non-finite or zero."""
    bits = tensor.detach().reshape(-1).to(torch.float32).view(torch.int32)
    binades = torch.bincount((bits >> _MANTISSA) & 0xFF, minlength=256).tolist()
    magnitudes = bits.bitwise_and(0x7FFFFFFF)
    zeros = int((magnitudes == 0).sum()) if binades[0] else 0
    finite = magnitudes if not binades[255] else magnitudes[magnitudes < 0x7F800000]
    absmax = float(finite.max().view(torch.float32)) if finite.numel() else 0.0
    exponents = {e - _BIAS: n for e, n in enumerate(binades) if n and 0 < e < 255}
    if binades[0] > zeros:
        exponents[-_BIAS] = binades[0] - zeros  # fp32's own subnormals, in one bin
    values = tensor.detach().reshape(-1)
    values = values if not binades[255] else values[values.isfinite()]
    low, high = (float(e) for e in torch.aminmax(values)) if values.numel() else (None, None)
    return Range(
        absmax=absmax,
        exponents=dict(sorted(exponents.items())),
        zeros=zeros,
        nonfinite=binades[255],
        low=low,
        high=high,
    )
