"""What rounding errors cost on average, from gradients and step sizes alone: no value is rounded.

An element x that is rounded to nearest moves by a step of the format at x times a number that is uniform in +-1/2, so a
quantity with gradient g at x moves by g^2 step^2 / 12 in the mean square. Steps of a floating-point format are
2^(floor(log2 |x|) - mantissa bits), no smaller than its smallest subnormal times the scale; steps of an integer format
are its scale. So three kinds of sums over a tensor serve all formats and recipes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..hardware_db.formats import get_format
from .static_steps import TOP


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What shares a scale under "row": all values along the `summed` axis, or all with one index of the `kept` axis;
    without either the whole tensor."""

    summed: int | None = None
    kept: int | None = None

    def maxima(self, value: Tensor) -> Tensor:
        """The largest magnitude of each row; fp32."""
        value = value.float()
        if value.numel() == 0:
            return value.new_zeros(1)
        by_row = self._matrix(value)
        if by_row is None:
            low, high = torch.aminmax(value, dim=self.summed) if self.summed is not None else torch.aminmax(value)
        else:
            low, high = torch.aminmax(by_row, dim=1)
        return torch.maximum(high, low.neg())

    def square_sums(self, value: Tensor) -> Tensor:
        """The sum of squares of each row; fp32, in the order of `maxima`."""
        by_row = self._matrix(value)
        if by_row is not None:
            return (by_row * by_row).sum(1)
        return (
            value.square().sum(self.summed)
            if self.summed is not None
            else torch.dot(value.reshape(-1), value.reshape(-1))
        )

    def _matrix(self, value: Tensor) -> Tensor | None:
        """The value as [rows, elements of a row] where that costs no copy."""
        if self.kept is not None and value.dim():
            moved = value if self.kept == 0 else value.movedim(self.kept, 0)
            return moved.reshape(moved.shape[0], -1)
        last = self.summed is not None and value.dim() > 1 and self.summed % value.dim() == value.dim() - 1
        return value.reshape(-1, value.shape[-1]) if last else None


@dataclass(kw_only=True, slots=True)
class Spread:
    """Sums over the elements x of a tensor with gradients g, over any number of batches.

    `relative` is the sum of g^2 4^floor(log2 |x|); `plain` the sum of g^2; `by_row` and `by_tensor` the sums of
    g^2 amax^2 with amax the largest |x| of the row and of the whole tensor. Blocks are charged as rows, which hold at
    least as large an amax.
    """

    relative: float = 0.0
    plain: float = 0.0
    by_row: float = 0.0
    by_tensor: float = 0.0

    def add(self, gradient: Tensor, value: Tensor, amax: Tensor | None = None, rows: Rows | None = None) -> None:
        """Take in one tensor and its gradient; `amax` is `rows.maxima(value)`, None where nothing is scaled."""
        gradient, value = gradient.float(), value.float()
        binade = value.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
        self.relative += _square_sum(gradient * binade)
        if amax is None or rows is None:
            self.plain += _square_sum(gradient)
            return
        squares = rows.square_sums(gradient)
        total = float(squares.sum())
        self.plain += total
        self.by_row += _square_sum(squares.reshape(-1).sqrt() * amax.reshape(-1))
        self.by_tensor += total * float(amax.max()) ** 2

    def variance(self, compute: str, recipe: str) -> float:
        """Sum of g^2 step^2 / 12 in a format under a recipe."""
        if recipe == "wide":
            return 0.0
        fmt = get_format(compute)
        if recipe in ("static", "dynamic"):  # a range on one side of 0 has finer steps
            return (self.by_tensor if recipe == "static" else self.by_row) * (2 / TOP) ** 2 / 12
        scaled = {"none": self.plain * fmt.max**2, "tensor": self.by_tensor}.get(recipe, self.by_row) / fmt.max**2
        if fmt.kind == "int":
            return scaled / 12
        smallest = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        return (self.relative * 4.0**-fmt.mantissa_bits + scaled * smallest**2) / 12


def _square_sum(value: Tensor) -> float:
    flat = value.reshape(-1)
    return float(torch.dot(flat, flat))
