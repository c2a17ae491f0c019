"""Operands of grouped GEMMs, group by group."""

from __future__ import annotations

import torch

from dsmp.passes.rounding import quantize

E4M3 = torch.float8_e4m3fn


def ends(sizes):
    return torch.tensor(sizes).cumsum(0).int()


def slices(sizes):
    """(group, its rows) of groups that have some."""
    stops = ends(sizes).tolist()
    return [(e, slice(stop - size, stop)) for e, (stop, size) in enumerate(zip(stops, sizes, strict=True)) if size]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def fp8(x, recipe, axis=-1):
    q = quantize(x, "fp8_e4m3", recipe, axis=axis)
    return q.values.to(E4M3), q.scale, q.values.double() * _spread(q)


def _spread(q):
    """The scale of every element: from the blocks that `quantize` says it has used."""
    scale = q.scale.double()
    for dim, step in enumerate(q.block):
        scale = scale.repeat_interleave(step, dim).narrow(dim, 0, q.values.size(dim))
    return scale


def close(out, exact, magnitude, contraction):
    """Within the error of fp32 sums of scaled products."""
    return ((out.double() - exact).abs() <= (contraction + 16) * 2.0**-24 * magnitude + 1e-30).all()


def scattered(x, sizes):
    """Operand of wgrad: each group quantised on its own along its rows, scales put where the kernel looks for them."""
    values = torch.zeros(x.shape, dtype=E4M3)
    wide = torch.zeros(x.shape, dtype=torch.float64)
    scale = torch.full((x.size(0) // 128 + len(sizes), x.size(1)), torch.nan)  # what is unused must not be read
    for e, rows in slices(sizes):
        values[rows], blocks, wide[rows] = fp8(x[rows], "1x128", 0)
        first = rows.start // 128 + e
        assert scale[first : first + len(blocks)].isnan().all(), "groups meet"
        scale[first : first + len(blocks)] = blocks
    return values, scale, wide
