"""What kernels of scaled GEMMs share: the loop over one tile's contraction, the epilogue, and the choice of tiles."""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..kernel_call import Config
from ..targets import Target
from .dot import activate, dot, narrow, widen


@triton.jit
def block_product(
    a, b, scale_a, scale_b, rows, columns, contraction, stride_am, stride_ak, stride_bn, stride_bk, stride_sam,
    stride_sak, stride_sbn, stride_sbk, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N:
    tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of the product, [BLOCK_M, BLOCK_N] in fp32.

    All pointers are at the tile's first row (of a, of b) and the first element of the contraction; `rows` and
    `columns` are those that are left from there. ROWS_A, ROWS_B: how many rows share a scale, 1 or 128, the tile
    starting at a multiple of it; 0: there are no scales. EVEN_K: the contraction is a multiple of BLOCK_K. WIDE:
    offsets within a tile pass 2^31.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        m, n, k = m.to(tl.int64), n.to(tl.int64), k.to(tl.int64)
    offsets_a = m[:, None] * stride_am + k[None, :] * stride_ak
    offsets_b = k[:, None] * stride_bk + n[None, :] * stride_bn
    step_a = tl.full((), BLOCK_K, tl.int64) * stride_ak
    step_b = tl.full((), BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, contraction, BLOCK_K):
        mask_a = m[:, None] < rows
        mask_b = n[None, :] < columns
        if not EVEN_K:
            mask_a &= k[None, :] < contraction - start
            mask_b &= k[:, None] < contraction - start
        # the scales are asked for first: they come while the values are multiplied
        if ROWS_A:
            first = _scales(scale_a, m, rows, stride_sam, ROWS_A, BLOCK_M)
            second = _scales(scale_b, n, columns, stride_sbn, ROWS_B, BLOCK_N)
            scale_a += stride_sak
            scale_b += stride_sbk
        x = tl.load(a + offsets_a, mask=mask_a, other=0.0)
        y = tl.load(b + offsets_b, mask=mask_b, other=0.0)
        a += step_a
        b += step_b
        if ROWS_A:
            if x.dtype == tl.int8:
                partial = dot(x, y, tl.zeros((BLOCK_M, BLOCK_N), tl.int32), INTERPRETED).to(tl.float32)
            else:
                partial = dot(x, y, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), INTERPRETED)
            if BLOCK_M <= ROWS_A and BLOCK_N <= ROWS_B:
                acc += partial * (first * second)
            elif BLOCK_M <= ROWS_A:
                acc += partial * (first * second)[None, :]
            elif BLOCK_N <= ROWS_B:
                acc += partial * (first * second)[:, None]
            else:
                acc += partial * first[:, None] * second[None, :]
        else:
            acc = dot(x, y, acc, INTERPRETED)
    return acc


@triton.jit
def _scales(scale, lanes, extent, stride, SHARED: tl.constexpr, LANES: tl.constexpr):
    """The scales of a tile's rows: one where all share it, else one per row."""
    if LANES <= SHARED:
        scales = tl.load(scale)
    else:
        scales = tl.load(scale + lanes // SHARED * stride, mask=lanes < extent, other=0.0)
    return scales


@triton.jit
def write_tile(
    acc, c, bias, residual, row, column, rows, columns, stride_cm, stride_cn, stride_bias, stride_rm, stride_rn,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store activation(acc + bias) + residual, computed in fp32, as the tile of c that starts at (row, column).

    `rows` and `columns`: how many are left from there. bias: [N]; bias and residual may be None.
    """
    m = tl.arange(0, acc.shape[0])
    n = tl.arange(0, acc.shape[1])
    if WIDE:
        m, n = m.to(tl.int64), n.to(tl.int64)
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    row = row.to(tl.int64)
    column = column.to(tl.int64)
    if bias is not None:
        start = bias + column * stride_bias
        acc += widen(tl.load(start + n * stride_bias, mask=n < columns, other=0.0), INTERPRETED)[None, :]
    acc = activate(acc, ACTIVATION)
    if residual is not None:
        start = residual + row * stride_rm + column * stride_rn
        added = tl.load(start + m[:, None] * stride_rm + n[None, :] * stride_rn, mask=inside, other=0.0)
        acc += widen(added, INTERPRETED)
    start = c + row * stride_cm + column * stride_cn
    value = narrow(acc, c.dtype.element_ty, False, INTERPRETED)
    tl.store(start + m[:, None] * stride_cm + n[None, :] * stride_cn, value, mask=inside)


def is_wide(config: Config, *tensors: Tensor | None) -> bool:
    """Whether an offset within a tile passes 2^31, given the tensors' strides."""
    largest = max((abs(s) for t in tensors if t is not None for s in t.stride()), default=0)
    return 2 * max(config.blocks.values()) * largest >= 2**31


def finish(product: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """What `write_tile` computes, of an fp64 product."""
    if bias is not None:
        product = product + bias.double()
    if activation in ("gelu", "gelu_tanh"):
        product = functional.gelu(product, approximate="tanh" if activation == "gelu_tanh" else "none")
    elif activation != "none":
        product = {"relu": functional.relu, "silu": functional.silu}[activation](product)
    return product + residual.double() if residual is not None else product


def stride_arguments(tensors: Mapping[str, tuple[Tensor | None, str]]) -> dict[str, int]:
    """Run-time arguments `stride_<name><dimension>`, 0 for a tensor that is not there: {"a": (a, "mk")}."""
    return {
        f"stride_{name}{dimension}": tensor.stride(i) if tensor is not None else 0
        for name, (tensor, dimensions) in tensors.items()
        for i, dimension in enumerate(dimensions)
    }


# Registers of a thread that accumulators and tiles on their way to shared memory may fill. The rest of what there is
# goes to addresses, masks and, but where matrix units read shared memory themselves, to operands. Found by compiling.
_LIVE = {"sm_90": 160, "sm_100": 160, "gfx90a": 160, "gfx942": 160, "gfx950": 160, "gfx1100": 88, "gfx1200": 88}
_LIVE_OTHER = 96
_UNITS = 128  # of a large GPU, roughly: fewer tiles than that leave some idle
_LEAST_ROWS = {"sm_90": 64, "sm_100": 64}  # below, Triton multiplies fp8 in fp16 there
_TILES = (
    (128, 128, 8),
    (128, 64, 4),
    (64, 128, 4),
    (128, 64, 8),
    (64, 128, 8),
    (64, 64, 4),
    (64, 64, 8),
    (32, 128, 4),
    (32, 64, 4),
    (16, 128, 4),
    (16, 64, 4),
)


def tile_configs(m: int, n: int, target: Target, *, block_k: int, element_size: int, accumulators: int) -> list[Config]:
    """Tiles for an [m, n] output that a target's registers and shared memory hold, best guess first; never empty.

    block_k: elements of the contraction per step; element_size: bytes of an operand's element; accumulators: fp32
    tiles that live at once, two where partial sums are promoted.
    """
    found = []
    for block_m, block_n, warps in _TILES:
        threads = warps * target.warp_size
        buffer = (block_m + block_n) * block_k * element_size
        live = (accumulators * block_m * block_n + buffer // 4) // threads
        stages = min(target.shared_bytes // buffer, 2 if target.backend == "hip" else 4)
        fits = live <= _LIVE.get(target.isa, _LIVE_OTHER) and stages >= 1
        if fits and block_m >= _LEAST_ROWS.get(target.isa, 0):
            blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
            found.append(Config(blocks=blocks, num_warps=warps, num_stages=stages))

    def cost(config: Config) -> tuple[int, int]:
        """Area computed by the units one after the other, rows and columns in vain too; then what is read for it."""
        block_m, block_n = config.blocks["BLOCK_M"], config.blocks["BLOCK_N"]
        tiles = -(-m // block_m) * -(-n // block_n)
        return -(-tiles // _UNITS) * block_m * block_n, tiles * (block_m + block_n)

    return sorted(found, key=cost)
