"""What a device is asked to do, in numbers: the shape of a matrix product, and the work of one operator."""

from __future__ import annotations

import math
from dataclasses import dataclass

TILES = (16, 32, 64, 128)
"""Rows and columns of the output tiles that library GEMMs give to one unit; 128 x 128 where the result is large enough
(NVIDIA, Matrix Multiplication Background User's Guide)."""
SPLIT = 1024
"""Contraction length below which splitting a tile's contraction over several units does not pay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmShape:
    """`batch` independent products of [m, k] and [k, n]."""

    batch: int = 1
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """A multiply-add counts as two."""
        return 2 * self.batch * self.m * self.n * self.k

    def distance(self, other: GemmShape) -> float:
        """How unlike two shapes are: Euclidean distance of the base-2 logarithms of their sizes."""
        sizes = ((self.batch, other.batch), (self.m, other.m), (self.n, other.n), (self.k, other.k))
        return math.sqrt(sum(math.log2(max(a, 1) / max(b, 1)) ** 2 for a, b in sizes))

    def occupancy(self, units: int) -> float:
        """Share of a GPU's matrix units kept busy with useful work, 1 at best.

        Tile quantisation (the last tile of a row or column is partly padding) times wave quantisation (the last wave
        of tiles leaves units idle), both as in NVIDIA's Matrix Multiplication Background User's Guide; a long
        contraction may be split over units.
        """
        if min(self.batch, self.m, self.n, self.k) < 1:
            return 1.0
        tile_m, tile_n = _tile(self.m), _tile(self.n)
        rows, columns = math.ceil(self.m / tile_m), math.ceil(self.n / tile_n)
        useful = (self.m * self.n) / (rows * columns * tile_m * tile_n)
        tiles = self.batch * rows * columns * max(1.0, self.k / SPLIT)
        return useful * tiles / (math.ceil(tiles / units) * units)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One operator: floating-point operations, bytes read and written, and the shape of its product if it has one."""

    flops: float
    moved_bytes: float
    gemm: GemmShape | None = None


def _tile(size: int) -> int:
    return next((t for t in TILES if t >= size), TILES[-1])
