"""Grouped GEMM of a mixture of experts: rows sorted by expert, each group multiplied with its own weights.

`offsets` is int32 [E], the cumulative ends of the groups (the convention of torch._grouped_mm): group e is the rows
offsets[e - 1] ... offsets[e] - 1, any number of them, none too. One launch computes all groups and nobody waits for
offsets on the host: programs find their group on the device, and the grid has as many as M rows in E groups can need.

    rows     c[m, n] = sum over k of a[m, k] b[e(m), n, k]           fprop: b = w [E, N, K]; dgrad: b = w.mT
    columns  c[e, n, k] = sum over m in group e of a[m, n] b[m, k]   wgrad: a = dy [M, N], b = x [M, K]

Values are bf16 or fp16, added up in fp32, or scaled by blocks of 128 along the contraction as in `block_gemm`. In
`columns` the blocks are counted from each group's first row, so that no block has rows of two groups. Block j of group
e has its scales in row offsets[e - 1] // 128 + e + j of a scale tensor of M // 128 + E rows (`scale_row` computes it
for every row, on the device). Groups do not meet there: ceil(s / 128) <= floor((o + s) / 128) - floor(o / 128) + 1 for
a group of s rows that starts at o. Some rows of the scale tensor stay unused.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...hardware_db.capability import Verdict
from ..kernel_call import Config, KernelCall
from ..running import require_target
from ..targets import Target
from .block_gemm import BLOCK, FORMAT_OF, block_gemm_available, dequantize_blocks, shared_rows
from .block_product import block_product, finish, is_wide, stride_arguments, tile_configs, write_tile
from .dot import swizzle

INTERPRETER_CONFIG = Config(blocks={"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128})

_PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def grouped_rows(
    a, b, c, offsets, scale_a, scale_b, bias, residual, M, N, K, E, stride_am, stride_ak, stride_be, stride_bn,
    stride_bk, stride_cm, stride_cn, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias_e,
    stride_bias_n, stride_rm, stride_rn, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K:
    tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """c of the rows of each group. EXPERTS: a power of two above E. Rows behind the last group become zero."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile, tile_n = swizzle(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n, 8)
    # lane e is group e, lane E the rows behind the last group
    lanes = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + lanes, mask=lanes < E, other=M)
    starts = tl.load(offsets + lanes - 1, mask=(lanes > 0) & (lanes <= E), other=0)
    starts = tl.where(lanes <= E, starts, M)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    past = tl.cumsum(tiles, 0)
    expert = tl.sum((past <= tile).to(tl.int32), 0)
    mine = lanes == expert
    row = tl.sum(tl.where(mine, starts + (tile - past + tiles) * BLOCK_M, 0), 0)
    rows = tl.sum(tl.where(mine, ends, 0), 0) - row  # not positive where there are more programs than tiles
    column = (tile_n * BLOCK_N).to(tl.int64)
    columns = N - tile_n * BLOCK_N
    if expert < E:
        group = expert.to(tl.int64)
        if ROWS_A:
            scale_a += row.to(tl.int64) * stride_sam
            scale_b += group * stride_sbe + column // ROWS_B * stride_sbn
        if bias is not None:
            bias += group * stride_bias_e
        acc = block_product(
            a + row.to(tl.int64) * stride_am, b + group * stride_be + column * stride_bn, scale_a, scale_b, rows,
            columns, K, stride_am, stride_ak, stride_bn, stride_bk, stride_sam, stride_sak, stride_sbn, stride_sbk,
            ROWS_A, ROWS_B, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDE, INTERPRETED,
        )  # fmt: skip
        write_tile(
            acc, c, bias, residual, row, column, rows, columns, stride_cm, stride_cn, stride_bias_n, stride_rm,
            stride_rn, ACTIVATION, WIDE, INTERPRETED,
        )  # fmt: skip
    else:
        zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        write_tile(
            zero, c, None, None, row, column, rows, columns, stride_cm, stride_cn, 0, 0, 0, "none", WIDE, INTERPRETED
        )


@triton.jit
def grouped_columns(
    a, b, c, offsets, scale_a, scale_b, M, N, stride_ak, stride_am, stride_bk, stride_bn, stride_ce, stride_cm,
    stride_cn, stride_sak, stride_sam, stride_sbk, stride_sbn, SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N:
    tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """c[e] [M, N] = a[rows of e]^T @ b[rows of e]; a: [rows, M], b: [rows, N]; grid (tiles, E)."""
    tile_m, tile_n = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    expert = tl.program_id(1)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    size = tl.load(offsets + expert) - start
    first = start.to(tl.int64)
    row = (tile_m * BLOCK_M).to(tl.int64)
    column = (tile_n * BLOCK_N).to(tl.int64)
    if SCALED:
        block = first // 128 + expert
        scale_a += block * stride_sak + row * stride_sam
        scale_b += block * stride_sbk + column * stride_sbn
    acc = block_product(
        a + first * stride_ak + row * stride_am, b + first * stride_bk + column * stride_bn, scale_a, scale_b, M -
        tile_m * BLOCK_M, N - tile_n * BLOCK_N, size, stride_am, stride_ak, stride_bn, stride_bk, stride_sam,
        stride_sak, stride_sbn, stride_sbk, SCALED, SCALED, BLOCK_M, BLOCK_N, BLOCK_K, False, WIDE, INTERPRETED,
    )  # fmt: skip
    c += expert.to(tl.int64) * stride_ce
    rows, columns = M - tile_m * BLOCK_M, N - tile_n * BLOCK_N
    write_tile(acc, c, None, None, row, column, rows, columns, stride_cm, stride_cn, 0, 0, 0, "none", WIDE, INTERPRETED)


def grouped_gemm_available(dtype: torch.dtype, target: Target) -> Verdict:
    """Whether matrix instructions of a target multiply values of this dtype, as Triton compiles them."""
    if dtype in _PLAIN:
        return Verdict(True, f"{target.isa} multiplies {_PLAIN[dtype]}")
    return block_gemm_available(dtype, target)


def grouped_gemm_configs(m: int, n: int, target: Target, *, dtype: torch.dtype) -> list[Config]:
    """The tiles to try, best guess first: m rows of a group on average (or of one output), n columns."""
    if dtype in _PLAIN:
        return tile_configs(m, n, target, block_k=64, element_size=2, accumulators=1)
    return tile_configs(m, n, target, block_k=BLOCK, element_size=1, accumulators=2)


def grouped_rows_call(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offsets: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    config: Config,
) -> KernelCall:
    """The launch that writes `out` [M, N]; arguments as in `grouped_gemm`."""
    m, n = out.shape
    experts, k = b.size(0), b.size(-1)
    blocks = config.blocks
    # each of the E groups and the rows behind them may end in a partial tile; every tile has a row
    most = min(m, (m + (experts + 1) * (blocks["BLOCK_M"] - 1)) // blocks["BLOCK_M"])
    tensors = {"a": a, "b": b, "c": out, "scale_a": scale_a, "scale_b": scale_b, "bias": bias, "residual": residual}
    dims = {"a": (a, "mk"), "b": (b, "enk"), "c": (out, "mn"), "sa": (scale_a, "mk"), "sb": (scale_b, "enk")}
    return KernelCall(
        name=_name("grouped_rows", a, out),
        kernel=grouped_rows,
        arguments={
            **tensors,
            "offsets": offsets,
            "M": m,
            "N": n,
            "K": k,
            "E": experts,
            **stride_arguments(dims | {"bias_": (bias, "en"), "r": (residual, "mn")}),
        },
        constants={
            "ROWS_A": 0 if scale_a is None else 1,
            "ROWS_B": 0 if scale_b is None else shared_rows(n, scale_b.size(-2)),
            "EXPERTS": 1 << experts.bit_length(),
            "ACTIVATION": activation,
            **blocks,
            "EVEN_K": k % blocks["BLOCK_K"] == 0,
            "WIDE": is_wide(config, *tensors.values()),
        },
        grid=(most * math.ceil(n / blocks["BLOCK_N"]),),
        config=config,
        operand_format=_format(a),
    )


def grouped_columns_call(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offsets: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    config: Config,
) -> KernelCall:
    """The launch that writes `out` [E, N, K]; arguments as in `grouped_gemm_columns`."""
    experts, m, n = out.shape
    tensors = {"a": a, "b": b, "c": out, "scale_a": scale_a, "scale_b": scale_b}
    dims = {"a": (a, "km"), "b": (b, "kn"), "c": (out, "emn"), "sa": (scale_a, "km"), "sb": (scale_b, "kn")}
    return KernelCall(
        name=_name("grouped_columns", a, out),
        kernel=grouped_columns,
        arguments={**tensors, "offsets": offsets, "M": m, "N": n, **stride_arguments(dims)},
        constants={
            "SCALED": 0 if scale_a is None else 1,
            **config.blocks,
            "WIDE": is_wide(config, *tensors.values()),
        },
        grid=(math.ceil(m / config.blocks["BLOCK_M"]) * math.ceil(n / config.blocks["BLOCK_N"]), experts),
        config=config,
        operand_format=_format(a),
    )


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """activation(a[rows of e] @ b[e]^T + bias[e]) + residual, [M, N] in `dtype`; rows behind the last group are zero.

    a: [M, K]; b: [E, N, K]; any strides; both bf16, both fp16, or fp8 or int8 with scales: scale_a fp32 [M, ceil(K /
    128)], scale_b fp32 [E, ceil(N / 128) or N, ceil(K / 128)]. bias: [E, N]; residual: [M, N]. offsets: int32 [E].

    Raises ValueError for shapes that do not fit, KernelUnavailableError where the device cannot multiply the values.
    """
    _check(a, b, a.size(-1), b.size(-1), offsets, b.size(0), scale_a, scale_b)
    out = torch.empty((a.size(0), b.size(1)), dtype=dtype, device=a.device)
    config = _pick(a, out, a.size(0) // max(1, b.size(0)))
    grouped_rows_call(
        a, b, out, offsets, scale_a, scale_b, bias=bias, residual=residual, activation=activation, config=config
    ).run()
    return out


def grouped_gemm_columns(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a[rows of e]^T @ b[rows of e] for every group, [E, N, K] in `dtype`; zero for a group without rows.

    a: [M, N]; b: [M, K]; any strides and the dtypes of `grouped_gemm`. scale_a: fp32 [M // 128 + E, N]; scale_b: fp32
    [M // 128 + E, K]; their rows as the module's docstring says. offsets: int32 [E]. Raises as `grouped_gemm`.
    """
    experts = offsets.size(0)
    _check(a, b, a.size(0), b.size(0), offsets, experts, scale_a, scale_b)
    out = torch.empty((experts, a.size(1), b.size(1)), dtype=dtype, device=a.device)
    grouped_columns_call(a, b, out, offsets, scale_a, scale_b, config=_pick(a, out, a.size(1))).run()
    return out


def scale_row(offsets: Tensor, rows: int) -> Tensor:
    """int64 [rows]: the row of a scale tensor of `grouped_gemm_columns` that has the scales of each row's block.

    Rows behind the last group are taken for a group E; what a scale tensor has for them is never read.
    """
    index = torch.arange(rows, device=offsets.device)
    group = torch.searchsorted(offsets.long(), index, right=True)
    start = torch.cat([offsets.new_zeros(1), offsets]).long()[group]
    return start // BLOCK + group + (index - start) // BLOCK


def grouped_gemm_reference(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`grouped_gemm` in plain torch, one group after the other in fp64, then rounded to `dtype`."""
    left = a.double() if scale_a is None else dequantize_blocks(a, scale_a)
    right = b.double() if scale_b is None else dequantize_blocks(b, scale_b)
    out = left.new_zeros(a.size(0), b.size(1))
    start = 0
    for e, end in enumerate(offsets.tolist()):
        rows = slice(start, end)
        added = residual[rows] if residual is not None else None
        out[rows] = finish(left[rows] @ right[e].T, bias[e] if bias is not None else None, added, activation)
        start = end
    return out.to(dtype)


def grouped_gemm_columns_reference(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`grouped_gemm_columns` in plain torch, one group after the other in fp64, then rounded to `dtype`."""
    where = scale_row(offsets, a.size(0))
    out = torch.zeros((offsets.size(0), a.size(1), b.size(1)), dtype=torch.float64, device=a.device)
    start = 0
    for e, end in enumerate(offsets.tolist()):
        rows = slice(start, end)
        left, right = a[rows].double(), b[rows].double()
        if scale_a is not None and scale_b is not None:
            left, right = left * scale_a[where[rows]].double(), right * scale_b[where[rows]].double()
        out[e] = left.T @ right
        start = end
    return out.to(dtype)


def _name(kernel: str, a: Tensor, out: Tensor) -> str:
    return f"{kernel}_{_format(a)}_{str(out.dtype).removeprefix('torch.')}"


def _format(a: Tensor) -> str:
    return _PLAIN.get(a.dtype) or FORMAT_OF[a.dtype]


def _pick(a: Tensor, out: Tensor, rows: int) -> Config:
    if out.device.type == "cpu":
        return INTERPRETER_CONFIG
    return grouped_gemm_configs(
        rows, out.size(-1), require_target(functools.partial(grouped_gemm_available, a.dtype)), dtype=a.dtype
    )[0]


def _check(a: Tensor, b: Tensor, k: int, other: int, offsets: Tensor, experts: int, *scales: Tensor | None) -> None:
    if k != other:
        raise ValueError(f"the contractions differ: a is {list(a.shape)}, b is {list(b.shape)}")
    if offsets.dtype is not torch.int32 or offsets.shape != (experts,):
        raise ValueError(f"offsets are {offsets.dtype} {list(offsets.shape)}; they are int32 [{experts}]")
    plain = a.dtype in _PLAIN and a.dtype == b.dtype
    if any(s is not None for s in scales) if plain else any(s is None or s.dtype is not torch.float32 for s in scales):
        raise ValueError(f"{a.dtype} and {b.dtype}: fp8 and int8 have fp32 scales, bf16 and fp16 none")
