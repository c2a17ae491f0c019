"""Weight-only GEMM for few rows (decoding): out = activation(x @ dequantised(w)^T + bias), weights of 8 or 4 bits.

Weights stay narrow in memory, which is what bounds a product of few rows. In registers they become integers of x's
dtype (exact: |q| < 2^8), are multiplied with x and summed up in fp32; a group's scale is applied to the fp32 sums. So
no weight is ever rounded to x's dtype:

    out[m, n] = sum over groups g of scale[n, g] * sum over k in g of x[m, k] * (q[n, k] - zero[n, g])

`packed_weights` has the layout of q, scales and zero points.

The product is formed as w @ x^T: matrix instructions have 16 and more rows but as few as 8 columns, and x is the narrow
one. With SPLIT_K > 1, programs share K: each writes its sums, and a second kernel adds them up in a fixed order, so
that results do not change from run to run.
"""

# Triton looks up the names of annotations and finds but its own
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...hardware_db.capability import Verdict
from ..kernel_call import Config, KernelCall
from ..running import require_target, running_device
from ..targets import Target
from .block_product import finish
from .dot import activate, dot, narrow, widen
from .gemm_configs import has_gemm
from .packed_weights import dequantize_weight

X_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
GROUPS = (32, 64, 128)
"""Sizes of groups that share a scale, besides K itself."""


@triton.jit
def weight_only_tiles(
    x,
    packed,
    scale,
    zero,
    bias,
    out,
    m,
    n,
    k,
    group,
    stride_x_m,
    stride_x_k,
    stride_w_n,
    stride_w_k,
    stride_s_n,
    stride_s_g,
    stride_z_n,
    stride_z_g,
    stride_bias,
    stride_out_split,
    stride_out_m,
    stride_out_n,
    BITS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One tile of out, or one split's sums of it, per program. A step takes UNROLL times BLOCK_K weights of a row;
    each BLOCK_K of them lie in one group. With BLOCK_M = 1 there is no matrix product: lanes add up their own k, and
    one reduction ends the loop.

    Grid: (cdiv(n, BLOCK_N) * cdiv(m, BLOCK_M), SPLIT_K)
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows and columns beyond the edge compute what some other does, and are not stored
    x_rows = (rows % m).to(tl.int64)
    w_rows = (columns % n).to(tl.int64)
    WIDTH: tl.constexpr = BLOCK_K if BLOCK_M == 1 else BLOCK_M
    acc = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    steps = tl.cdiv(tl.cdiv(k, BLOCK_K * UNROLL), SPLIT_K)
    for step in range(split * steps, split * steps + steps):
        for part in tl.static_range(UNROLL):
            start = (step * UNROLL + part) * BLOCK_K
            depth = start + tl.arange(0, BLOCK_K)
            x_tile = tl.load(
                x + x_rows[None, :] * stride_x_m + depth[:, None].to(tl.int64) * stride_x_k,
                mask=depth[:, None] < k,
                other=0.0,
            )
            # beyond the end the group is one that there is: x is 0 there
            g = 0 if ONE_GROUP else tl.minimum(start, k - 1) // group
            q = _integers(
                packed, zero, w_rows, start, g, k, stride_w_n, stride_w_k, stride_z_n, stride_z_g, BITS, BLOCK_K
            )
            if BLOCK_M == 1:
                sums = q.to(tl.float32) * tl.trans(widen(x_tile, INTERPRETED))
            else:
                weights = q.to(tl.float32 if INTERPRETED else x.dtype.element_ty)
                start_value = acc if ONE_GROUP else tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                sums = dot(weights, x_tile, start_value, INTERPRETED)
            if not ONE_GROUP:
                factors = tl.load(scale + w_rows * stride_s_n + g * stride_s_g)
                sums *= widen(factors, INTERPRETED)[:, None]
            acc = sums if ONE_GROUP and BLOCK_M > 1 else acc + sums
    if BLOCK_M == 1:
        acc = tl.sum(acc, axis=1, keep_dims=True)
    if ONE_GROUP:
        acc *= widen(tl.load(scale + w_rows * stride_s_n), INTERPRETED)[:, None]
    if SPLIT_K == 1:
        if bias is not None:
            acc += widen(tl.load(bias + w_rows * stride_bias), INTERPRETED)[:, None]
        acc = activate(acc, ACTIVATION)
    offsets = split.to(tl.int64) * stride_out_split + rows[None, :].to(tl.int64) * stride_out_m
    offsets += columns[:, None].to(tl.int64) * stride_out_n
    inside = (rows < m)[None, :] & (columns < n)[:, None]
    tl.store(out + offsets, narrow(acc, out.dtype.element_ty, False, INTERPRETED), mask=inside)


@triton.jit
def _integers(
    packed,
    zero,
    rows,
    start,
    g,
    k,
    stride_w_n,
    stride_w_k,
    stride_z_n,
    stride_z_g,
    BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """q - zero of BLOCK_K consecutive k from `start` on, [rows, BLOCK_K], int8."""
    if BITS == 8:
        depth = start + tl.arange(0, BLOCK_K)
        pointers = packed + rows[:, None] * stride_w_n + depth[None, :].to(tl.int64) * stride_w_k
        q = tl.load(pointers, mask=depth[None, :] < k, other=0)
    else:
        pair = start // 2 + tl.arange(0, BLOCK_K // 2)
        pointers = packed + rows[:, None] * stride_w_n + pair[None, :].to(tl.int64) * stride_w_k
        pairs = tl.load(pointers, mask=pair[None, :] < (k + 1) // 2, other=0)
        nibbles = tl.join((pairs & 0xF).to(tl.int8), (pairs >> 4).to(tl.int8))
        q = tl.reshape(nibbles, (pairs.shape[0], BLOCK_K))
        if zero is not None:
            q -= tl.load(zero + rows * stride_z_n + g * stride_z_g).to(tl.int8)[:, None]
        else:
            q -= 8
    return q


@triton.jit
def add_splits(
    partial,
    bias,
    out,
    m,
    n,
    stride_bias,
    stride_out_m,
    stride_out_n,
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """out = activation(sum of partial [SPLITS, m, n], contiguous fp32, + bias), added up from the first split on.

    Grid: (m, cdiv(n, BLOCK_N))
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n
    total = tl.zeros((BLOCK_N,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (row + split * m) * n + columns, mask=inside, other=0.0)
    if bias is not None:
        total += widen(tl.load(bias + columns * stride_bias, mask=inside, other=0.0), INTERPRETED)
    result = narrow(activate(total, ACTIVATION), out.dtype.element_ty, False, INTERPRETED)
    tl.store(out + row * stride_out_m + columns.to(tl.int64) * stride_out_n, result, mask=inside)


def weight_only_calls(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    group: int,
    config: Config,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
) -> list[KernelCall]:
    """The launches that fill `out`: one, or with SPLIT_K > 1 two with a buffer of sums between them.

    x: [M, K] bf16, fp16 or fp32. packed: int8 [N, K] or uint8 [N, ceil(K / 2)]. scale: [N, ceil(K / group)] fp32, bf16
    or fp16; zero: uint8 of that shape, 4 bits only. bias: [N]. out: [M, N], fp32, bf16 or fp16. Any strides.

    Raises ValueError for shapes, dtypes or blocks that do not fit together.
    """
    _check(x, packed, scale, zero, bias, out, group, config)
    (m, k), n = x.shape, packed.size(0)
    blocks, splits = config.blocks, config.blocks["SPLIT_K"]
    bits = 8 if packed.dtype is torch.int8 else 4
    scale = scale if k else scale.new_ones(n, 1)  # the kernel reads one in any case
    target = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    strides = target.stride() if splits > 1 else (0, *out.stride())
    name = f"weight_only_int{bits}_{X_DTYPES[x.dtype]}"
    call = KernelCall(
        name=name if splits == 1 else f"{name}_split",
        kernel=weight_only_tiles,
        arguments={
            "x": x, "packed": packed, "scale": scale, "zero": zero, "bias": bias if splits == 1 else None,
            "out": target, "m": m, "n": n, "k": k, "group": group,
            "stride_x_m": x.stride(0), "stride_x_k": x.stride(1),
            "stride_w_n": packed.stride(0), "stride_w_k": packed.stride(1),
            "stride_s_n": scale.stride(0), "stride_s_g": scale.stride(1),
            "stride_z_n": 0 if zero is None else zero.stride(0), "stride_z_g": 0 if zero is None else zero.stride(1),
            "stride_bias": 0 if bias is None else bias.stride(0),
            "stride_out_split": strides[0], "stride_out_m": strides[1], "stride_out_n": strides[2],
        },
        constants={"BITS": bits, "ONE_GROUP": group >= k, "ACTIVATION": activation, **blocks},
        grid=(-(-n // blocks["BLOCK_N"]) * -(-m // blocks["BLOCK_M"]), splits),
        config=config,
        operand_format=X_DTYPES[x.dtype],
    )  # fmt: skip
    if splits == 1:
        return [call]
    width = 1024 if x.device.type == "cpu" else 256
    adding = KernelCall(
        name="add_splits",
        kernel=add_splits,
        arguments={"partial": target, "bias": bias, "out": out, "m": m, "n": n,
                   "stride_bias": 0 if bias is None else bias.stride(0),
                   "stride_out_m": out.stride(0), "stride_out_n": out.stride(1)},
        constants={"SPLITS": splits, "ACTIVATION": activation, "BLOCK_N": width},
        grid=(m, -(-n // width)),
        config=Config(blocks={"BLOCK_N": width}, num_warps=4, num_stages=1),
    )  # fmt: skip
    return [call, adding]


def weight_only_configs(
    m: int, n: int, k: int, group: int, bits: int, dtype: torch.dtype, target: Target, *, units: int = 128
) -> list[Config]:
    """What to measure for x [m, k] of `dtype` and weights [n, k], best guess first; never empty.

    units: of the device. K is split while there are fewer programs than about two per unit: reading the weights needs
    loads in flight on all of them.
    """
    fp32, rdna = dtype is torch.float32, target.isa.startswith("gfx1")
    # vector units keep both operands of a product in registers; so does RDNA, whose waves are narrow
    block_k = min(128 if group >= k else group, (16 if rdna and m > 16 else 32) if fp32 else 64 if rdna else 128)
    found = _tiles(16 if m <= 16 else 32 if m <= 32 else 64, block_k, m, n, k, bits, dtype, target, units)
    if m == 1:
        vector = _tiles(1, min(128 if group >= k else group, 64), m, n, k, bits, dtype, target, units)
        found = [*vector, *found] if fp32 else [*found, *vector]
    return found


def _tiles(
    block_m: int, block_k: int, m: int, n: int, k: int, bits: int, dtype: torch.dtype, target: Target, units: int
) -> list[Config]:
    found = []
    matrix = dtype is not torch.float32
    unroll = max(1, 64 // block_k) if matrix and block_m > 1 else 1
    for block_n in (64, 32, 128) if matrix or block_m == 16 else (32, 16, 64):
        programs = -(-n // block_n) * -(-m // block_m)
        longest = max(1, -(-k // (4 * block_k * unroll)))  # a program takes at least four steps
        splits = min(16, longest, max(1, -(-2 * units // programs)))
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "UNROLL": unroll,
                  "SPLIT_K": 1 << (splits.bit_length() - 1)}  # fmt: skip
        few_registers = target.isa.startswith("gfx1") and block_m * block_n >= 4096
        first = [] if few_registers else [(4, 3 if target.backend == "cuda" else 2)]
        for warps, stages in (*first, (8, 2), (4, 1)):
            narrow_bytes = stages * block_n * block_k * unroll * bits // 8
            wide_bytes = (stages * block_m * unroll + block_n) * block_k * dtype.itemsize
            if narrow_bytes + wide_bytes <= target.shared_bytes:
                found.append(Config(blocks=blocks, num_warps=warps, num_stages=stages))
    return found


def has_weight_only(dtype: torch.dtype, target: Target) -> Verdict:
    """Whether the kernel runs for activations of a dtype; its reason says on which units."""
    if dtype not in X_DTYPES:
        return Verdict(False, f"activations of {dtype} have no weight-only kernel: use {', '.join(X_DTYPES.values())}.")
    return has_gemm(X_DTYPES[dtype], target)


def interpreter_config(m: int, n: int, k: int, group: int) -> Config:
    """Few big tiles: the interpreter takes about 10 ms for each step."""
    block_k = min(512, _extent(k)) if group >= k else group
    blocks = {"BLOCK_M": min(128, _extent(m)), "BLOCK_N": min(512, _extent(n)), "BLOCK_K": block_k, "UNROLL": 1,
              "SPLIT_K": 1}  # fmt: skip
    return Config(blocks=blocks)


def weight_only(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    *,
    group: int,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """`weight_only_calls` with out allocated, in x's dtype if none is given; x: [..., K]. Interpreted on the CPU."""
    rows = x.reshape(-1, x.size(-1)) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.size(-1))
    (m, k), n = rows.shape, packed.size(0)
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    if config is None and x.device.type == "cpu":
        config = interpreter_config(m, n, k, group)
    elif config is None:
        target = require_target(lambda t: has_weight_only(x.dtype, t))
        bits = 8 if packed.dtype is torch.int8 else 4
        config = weight_only_configs(m, n, k, group, bits, x.dtype, target, units=running_device().units)[0]
    for call in weight_only_calls(
        rows, packed, scale, out, group=group, config=config, zero=zero, bias=bias, activation=activation
    ):
        call.run()
    return out.reshape(*x.shape[:-1], n)


def weight_only_reference(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    *,
    group: int,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`weight_only` in plain torch: dequantised and multiplied in fp64, then rounded to out_dtype."""
    product = x.double() @ dequantize_weight(packed, scale, x.size(-1), group, zero).mT
    return finish(product, bias, None, activation).to(out_dtype)


def _extent(size: int) -> int:
    """The power of two, 16 at least, that holds a size."""
    return max(16, 1 << max(0, size - 1).bit_length())


def _check(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    group: int,
    config: Config,
) -> None:
    (m, k), n = x.shape, packed.size(0)
    if x.dtype not in X_DTYPES or out.dtype not in X_DTYPES or scale.dtype not in X_DTYPES:
        raise ValueError(f"x, scale and out are fp32, bf16 or fp16, not {x.dtype}, {scale.dtype} and {out.dtype}.")
    if packed.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"packed weights are int8 (8 bits) or uint8 (4 bits), not {packed.dtype}.")
    columns = k if packed.dtype is torch.int8 else -(-k // 2)
    if packed.shape != (n, columns) or out.shape != (m, n) or scale.shape != (n, -(-k // group)):
        raise ValueError(
            f"x {list(x.shape)}, packed {list(packed.shape)}, scale {list(scale.shape)} and out {list(out.shape)} do "
            f"not fit together for groups of {group}: expected packed [N, {columns}], scale [N, {-(-k // group)}]."
        )
    if zero is not None and (zero.shape != scale.shape or zero.dtype is not torch.uint8 or packed.dtype is torch.int8):
        raise ValueError("zero points are uint8 of the scale's shape, and of weights of 4 bits.")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {list(bias.shape)}, not [{n}].")
    if group < k and (group not in GROUPS or group % config.blocks["BLOCK_K"]):
        raise ValueError(
            f"groups of {group} with BLOCK_K {config.blocks['BLOCK_K']}: a group is {GROUPS} or all of K, and BLOCK_K "
            "divides it."
        )
