"""One pass over gradients: unscale, look for inf and NaN, count exponents, find the largest magnitude, cast.

With a loss scale S, gradients arrive as S g. Per element u = fp32(S g) * (1 / S), one rounding, and y = u rounded to
the output's format. What is counted is u; what is searched for inf and NaN is y, as a cast may overflow too (for fp32
outputs it is u, as in `torch.amp.GradScaler`). All results are integers or maxima: no order of programs shows.

The histogram counts u by its biased fp32 exponent: bin 0 holds zeros and fp32's subnormals, bin e of 1 ... 254 the
magnitudes of [2^(e - 127), 2^(e - 126)), bin 255 inf and NaN. `flush_and_overflow` reads from it what a narrower format
would lose. Bins are int32: of a call, at most 2^31 - 1 elements may fall into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...hardware_db.formats import Format, get_format
from ..kernel_call import Config, KernelCall
from ..running import running_target
from ..targets import TRITON_TYPES, Target
from .dot import narrow, widen
from .scales import INFINITE, magnitude_bits

BINS = 256
_MAX_PROGRAMS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientStatistics:
    """found_inf: fp32 scalar, 1 if any written value is inf or NaN, else 0. histogram: int32 [256], amax: fp32 scalar
    (NaN if there is one), both of the unscaled gradients."""

    found_inf: Tensor
    histogram: Tensor
    amax: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeLoss:
    """What a format would lose of values, as fractions of those that are finite and in no zero bin.

    flushed: surely rounded to zero. subnormal: surely below the normal range and not flushed (they lose bits).
    overflowed: surely beyond the largest magnitude. top: in the binade of the largest magnitude, where what lies above
    it overflows or saturates too.
    """

    flushed: float
    subnormal: float
    overflowed: float
    top: float


@triton.jit
def gradients_kernel(
    x: tl.tensor, y: tl.tensor, inverse_scale: tl.tensor, found_inf: tl.tensor, histogram: tl.tensor,
    amax: tl.tensor, size: tl.tensor, x_stride: tl.tensor, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """Blocks p, p + programs, ... of x for program p. The three outputs are accumulated into: zero before."""
    lanes = tl.arange(0, BLOCK)
    factor = tl.load(inverse_scale)
    counts = tl.zeros((256,), tl.int32)
    largest = tl.zeros((BLOCK,), tl.int32)
    largest_written = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + lanes
        inside = offsets < size
        values = widen(tl.load(x + offsets * x_stride, mask=inside, other=0.0), INTERPRETED) * factor
        # where the factor is not finite, what is outside is not 0 either
        bits = tl.where(inside, magnitude_bits(values), 0)
        counts += tl.histogram(bits >> 23, 256, mask=inside)
        largest = tl.maximum(largest, bits)
        if y is not None:
            written = narrow(values, y.dtype.element_ty, False, INTERPRETED)
            tl.store(y + offsets, written, mask=inside)
            written_bits = magnitude_bits(widen(written, INTERPRETED))
            largest_written = tl.maximum(largest_written, tl.where(inside, written_bits, 0))
    tl.atomic_add(histogram + tl.arange(0, 256), counts)
    largest_bits = tl.max(largest, axis=0)
    tl.atomic_max(amax, largest_bits)
    written_max = tl.maximum(largest_bits, tl.max(largest_written, axis=0))
    # 1.0 and 0.0 are ordered as their patterns are
    tl.atomic_max(found_inf, tl.where(written_max >= INFINITE, 0x3F800000, 0))


def gradients_call(
    x: Tensor,
    y: Tensor | None,
    inverse_scale: Tensor,
    statistics: GradientStatistics,
    *,
    config: Config,
) -> KernelCall:
    """x [n], any stride, fp32, bf16 or fp16; y [n] contiguous, of these, may be x itself where dtypes agree, or None.

    inverse_scale: fp32 scalar. The statistics are accumulated into (by atomic additions and maxima of integers), so
    they may be shared by several calls, and are to be 0 before the first.
    """
    blocks = -(-x.shape[0] // config.blocks["BLOCK"])
    return KernelCall(
        name=f"gradients_{TRITON_TYPES[x.dtype]}_{TRITON_TYPES[x.dtype if y is None else y.dtype]}",
        kernel=gradients_kernel,
        arguments={
            "x": x,
            "y": y,
            "inverse_scale": inverse_scale,
            "found_inf": statistics.found_inf.view(torch.int32),
            "histogram": statistics.histogram,
            "amax": statistics.amax.view(torch.int32),
            "size": x.shape[0],
            "x_stride": x.stride(0),
        },
        constants=dict(config.blocks),
        grid=(min(blocks, _MAX_PROGRAMS),),
        config=config,
    )


def gradients_configs(size: int, target: Target) -> list[Config]:
    """Blocks that leave a thread 16, 8 or 32 values."""
    return [
        Config(blocks={"BLOCK": values * warps * target.warp_size}, num_warps=warps, num_stages=1)
        for values in (16, 8, 32)
        for warps in (256 // target.warp_size, 512 // target.warp_size, 128 // target.warp_size)
    ]


def unscale_gradients(
    gradients: Sequence[Tensor],
    inverse_scale: Tensor,
    *,
    output: torch.dtype | None = None,
    in_place: bool = False,
) -> tuple[list[Tensor | None], list[GradientStatistics]]:
    """Every gradient (any shape, a device's) times `inverse_scale`, in dtype `output`, and each one's statistics.

    in_place: written to the gradients themselves, whose dtypes stay. Neither: nothing is written, statistics only.
    found_inf is one tensor for all; histogram and amax are views of [tensors, 256] and [tensors].
    """
    if not gradients:
        return [], []
    first = gradients[0]
    found_inf = first.new_zeros((), dtype=torch.float32)
    histograms = first.new_zeros(len(gradients), BINS, dtype=torch.int32)
    largest = first.new_zeros(len(gradients), dtype=torch.float32)
    outputs: list[Tensor | None] = []
    found: list[GradientStatistics] = []
    for index, gradient in enumerate(gradients):
        statistics = GradientStatistics(found_inf=found_inf, histogram=histograms[index], amax=largest[index])
        flat = gradient.detach().reshape(-1)
        written: Tensor | None = None
        if in_place:
            # a gradient that is not contiguous was copied to be flat
            written = flat
        elif output is not None:
            written = torch.empty_like(flat, dtype=output, memory_format=torch.contiguous_format)
        _run(flat, written, inverse_scale, statistics)
        if in_place and flat.data_ptr() != gradient.data_ptr():
            gradient.detach().copy_(flat.view(gradient.shape))
        outputs.append(gradient if in_place else None if written is None else written.view(gradient.shape))
        found.append(statistics)
    return outputs, found


def _run(flat: Tensor, written: Tensor | None, inverse_scale: Tensor, statistics: GradientStatistics) -> None:
    if flat.device.type == "cpu":
        size = max(1, min(1 << 18, triton.next_power_of_2(flat.shape[0])))
        config = Config(blocks={"BLOCK": size})
    else:
        config = gradients_configs(flat.shape[0], running_target())[0]
    gradients_call(flat, written, inverse_scale, statistics, config=config).run()


def gradients_reference(
    x: Tensor, inverse_scale: Tensor, output: torch.dtype = torch.float32
) -> tuple[Tensor, GradientStatistics]:
    """The same of one tensor in plain torch: a product of two fp32 numbers is exact in fp64, so fp32 rounds it once."""
    unscaled = (x.double() * inverse_scale.double()).float()
    written = unscaled.to(output)
    magnitudes = unscaled.abs().flatten()
    exponents = magnitudes.view(torch.int32) >> 23
    return written, GradientStatistics(
        found_inf=(~written.isfinite()).any().float(),
        histogram=torch.bincount(exponents, minlength=BINS).int(),
        amax=magnitudes.max() if magnitudes.numel() else magnitudes.new_zeros(()),
    )


def flush_and_overflow(histogram: Tensor, format: str | Format) -> RangeLoss:
    """What a format would lose, without a scale, of the values that a histogram [256] counts.

    Values of [2^k, 2^(k + 1)) with 2^(k + 1) at most half the smallest subnormal are rounded to zero (the half itself
    too, to even); those with 2^k beyond the largest magnitude overflow.
    """
    fmt = get_format(format) if isinstance(format, str) else format
    counts = histogram.detach().to(device="cpu", dtype=torch.int64)[1:255]
    exponents = torch.arange(1, 255) - 127
    total = max(1, int(counts.sum()))

    def fraction(which: Tensor) -> float:
        return int(counts[which].sum()) / total

    smallest = fmt.min_exponent - (fmt.mantissa_bits if fmt.kind == "float" else 0)
    flushed = exponents < smallest - 1
    return RangeLoss(
        flushed=fraction(flushed),
        subnormal=fraction((exponents < fmt.min_exponent) & ~flushed),
        overflowed=fraction(exponents > fmt.max_exponent),
        top=fraction(exponents == fmt.max_exponent),
    )
