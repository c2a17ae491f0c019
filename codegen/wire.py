"""Tensors as payloads for collectives and back, as operators that compilers do not look into.

`passes/wire_formats.py` has the formats and the sizes of payloads. A payload is uint8 of shape [rows, bytes]: row r is
what rank r gets, or what rank r sent. Each tensor of n values is cut into rows of ceil(n / rows) values, the last one
filled up with zeros, and its rows are written down independently; tensors of one payload stand side by side.

Block formats (fp8 is e4m3). A block of values x has the scale s = bf16(amax / max), max being 448, 127 or 7, at least
2^-126; its codes are round(x / s), saturating. A block of zeros has the scale 2^-126 and gives zeros.

* bf16 has 8 significant bits, so amax / s is within max * (1 +- 2^-8) and rounds to max itself: |x - code * s| <= s / 2
  for ints, and nothing is lost to saturation. At the top of fp32's range s is cut to the largest value for which
  max * s is finite.
* code * s has at most 15 significant bits and is exact in fp32: what was decoded encodes to the same payload again.
* A block with an inf or NaN has a NaN scale and decodes to NaN alone. fp16 overflows to inf; top-k ranks inf and NaN
  above every number. So a gradient scaler sees what it would have seen.

Sums are never formed in a narrow format: `reduce` decodes the ranks' contributions and adds them up in fp32, in the
order of ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from ..hardware_db.formats import get_format
from ..passes.rounding import round_to
from ..passes.wire_formats import WireFormat, parse_wire

_CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODES = {"fp8": "fp8_e4m3", "int8": "int8", "int4": "int4"}
_LEAST_SCALE = 2.0**-126


@torch.library.custom_op("dsmp::wire_encode", mutates_args=())
def encode(tensors: Sequence[Tensor], rows: int, wire: str) -> Tensor:
    """The payload of some tensors, uint8 [rows, sum of payload_bytes(ceil(n / rows))].

    tensors: any shapes, strides and floating-point dtypes; values go through fp32. wire: a WireFormat as text.
    """
    format = parse_wire(wire)
    return torch.cat([_encode_rows(_as_rows(t, rows), format) for t in tensors], dim=1)


@encode.register_fake
def _(tensors: Sequence[Tensor], rows: int, wire: str) -> Tensor:
    format = parse_wire(wire)
    width = sum(format.payload_bytes(row_length(t.numel(), rows)) for t in tensors)
    return tensors[0].new_empty((rows, width), dtype=torch.uint8)


@torch.library.custom_op("dsmp::wire_decode", mutates_args=())
def decode(payload: Tensor, counts: Sequence[int], wire: str, dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a payload, [rows, count] each, in `dtype`; counts are values per row."""
    format = parse_wire(wire)
    return [_narrowed(x, format, dtype) for x in _decoded(payload, counts, format)]


@decode.register_fake
def _(payload: Tensor, counts: Sequence[int], wire: str, dtype: torch.dtype) -> list[Tensor]:
    return [payload.new_empty((payload.shape[0], count), dtype=dtype) for count in counts]


@torch.library.custom_op("dsmp::wire_encode_rows", mutates_args=())
def encode_rows(x: Tensor, wire: str) -> Tensor:
    """The payload of the rows of x [rows, count], uint8 [rows, payload_bytes(count)]: no block has parts of two rows,
    so that a payload may be cut between any two. There may be no rows.
    """
    format = parse_wire(wire)
    return _encode_rows(x.detach().to(torch.float32, copy=format.name == "fp32"), format)


@encode_rows.register_fake
def _(x: Tensor, wire: str) -> Tensor:
    return x.new_empty((x.shape[0], parse_wire(wire).payload_bytes(x.shape[1])), dtype=torch.uint8)


@torch.library.custom_op("dsmp::wire_decode_rows", mutates_args=())
def decode_rows(payload: Tensor, count: int, wire: str, dtype: torch.dtype) -> Tensor:
    """The rows of a payload of `encode_rows`, [rows, count] in `dtype`."""
    format = parse_wire(wire)
    return _narrowed(_decode_rows(payload, count, format), format, dtype)


@decode_rows.register_fake
def _(payload: Tensor, count: int, wire: str, dtype: torch.dtype) -> Tensor:
    return payload.new_empty((payload.shape[0], count), dtype=dtype)


@torch.library.custom_op("dsmp::wire_reduce", mutates_args=())
def reduce(payload: Tensor, counts: Sequence[int], wire: str, dtype: torch.dtype, average: bool) -> list[Tensor]:
    """The sums (means, with `average`) over the rows of a payload: formed in fp32, [count] each, in `dtype`."""
    sums = [x.sum(0) for x in _decoded(payload, counts, parse_wire(wire))]
    return [(s / payload.shape[0] if average else s).to(dtype) for s in sums]


@reduce.register_fake
def _(payload: Tensor, counts: Sequence[int], wire: str, dtype: torch.dtype, average: bool) -> list[Tensor]:
    return [payload.new_empty((count,), dtype=dtype) for count in counts]


def row_length(count: int, rows: int) -> int:
    """How many values of a tensor of `count` stand in each of `rows` rows: ceil(count / rows)."""
    return (count + rows - 1) // rows


def _as_rows(x: Tensor, rows: int) -> Tensor:
    """x in row-major order as fp32 [rows, ceil(n / rows)], filled up with zeros."""
    flat = x.detach().reshape(-1).float()
    missing = row_length(flat.numel(), rows) * rows - flat.numel()
    return (pad(flat, (0, missing)) if missing else flat).reshape(rows, -1) if flat.numel() else flat.reshape(rows, 0)


def _encode_rows(x: Tensor, wire: WireFormat) -> Tensor:
    """fp32 [rows, count] as uint8 [rows, payload_bytes(count)]."""
    if x.shape[1] == 0:
        return x.to(torch.uint8)
    if wire.name in _CASTS:
        return _bytes(x.to(_CASTS[wire.name]))
    if wire.is_sparse:
        found = x.abs().topk(wire.kept(x.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values
        return torch.cat([_bytes(x.gather(1, found)), _bytes(found.to(torch.int32))], dim=1)
    codes, scale = _quantised(x, wire)
    return torch.cat([_packed(codes, wire), _bytes(scale)], dim=1)


def _decoded(payload: Tensor, counts: Sequence[int], wire: WireFormat) -> list[Tensor]:
    """The fp32 [rows, count] of each tensor of a payload; none shares memory with another or with the payload."""
    parts = payload.split_with_sizes([wire.payload_bytes(count) for count in counts], dim=1)
    return [_decode_rows(p, count, wire) for p, count in zip(parts, counts, strict=True)]


def _decode_rows(payload: Tensor, count: int, wire: WireFormat) -> Tensor:
    if count == 0:
        return payload.new_empty((payload.shape[0], 0), dtype=torch.float32)
    if wire.name in _CASTS:
        return _values(payload, _CASTS[wire.name]).float()
    if wire.is_sparse:
        values, found = payload.chunk(2, dim=1)
        x = payload.new_zeros((payload.shape[0], count), dtype=torch.float32)
        return x.scatter_(1, _values(found, torch.int32).long(), _values(values, torch.float32))
    scales = wire.blocks(count)
    codes, scale = payload.split_with_sizes([payload.shape[1] - 2 * scales, 2 * scales], dim=1)
    blocks = _in_blocks(_unpacked(codes, count, wire), wire.block)
    x = (blocks * _values(scale, torch.bfloat16).float().unsqueeze(2)).flatten(1)
    return x if x.shape[1] == count else x[:, :count].contiguous()


def _quantised(x: Tensor, wire: WireFormat) -> tuple[Tensor, Tensor]:
    """Codes as fp32 [rows, count] and bf16 scales [rows, blocks]."""
    format = get_format(_CODES[wire.name])
    blocks = _in_blocks(x, wire.block)
    amax = torch.maximum(blocks.amax(2), blocks.amin(2).neg_())
    scale = (amax / _constant(format.max)).bfloat16().float().clamp_(_LEAST_SCALE, _largest_scale(format.max))
    finite = amax < _constant(math.inf)
    scale = torch.where(finite, scale, _constant(math.nan))
    codes = round_to((blocks / scale.unsqueeze(2)).nan_to_num_(0.0), format, saturate=True)
    codes = codes.flatten(1)[:, : x.shape[1]]
    return codes, scale.bfloat16()


def _packed(codes: Tensor, wire: WireFormat) -> Tensor:
    """Codes as bytes, [rows, count], for int4 [rows, ceil(count / 2)]: the first of a pair in the low bits."""
    if wire.name == "fp8":
        return codes.to(torch.float8_e4m3fn).view(torch.uint8)
    whole = codes.to(torch.int8).view(torch.uint8)
    if wire.name == "int8":
        return whole
    if whole.shape[1] % 2:
        whole = pad(whole, (0, 1))
    pairs = whole.reshape(whole.shape[0], whole.shape[1] // 2, 2)
    return (pairs[..., 0] & 0x0F) | (pairs[..., 1] << 4)


def _unpacked(codes: Tensor, count: int, wire: WireFormat) -> Tensor:
    """The inverse of `_packed`, fp32 [rows, count]."""
    if wire.name == "fp8":
        return _values(codes, torch.float8_e4m3fn).float()
    if wire.name == "int8":
        return _values(codes, torch.int8).float()
    pairs = torch.stack([codes & 0x0F, codes >> 4], dim=2).flatten(1)[:, :count]
    return (pairs ^ 8).to(torch.int8).sub_(8).float()  # the sign bit of 4 bits moved to where int8 has it


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """x [rows, count] as [rows, blocks, values of a block], the last block filled up with zeros."""
    size = min(block, x.shape[1])
    missing = -x.shape[1] % size
    whole = pad(x, (0, missing)) if missing else x
    return whole.reshape(whole.shape[0], whole.shape[1] // size, size)  # of no rows -1 would say nothing


def _narrowed(x: Tensor, wire: WireFormat, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; a block's largest value may have been rounded past what a narrow dtype holds, and is cut there."""
    if wire.has_blocks and dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        x = x.clamp_(-largest, largest)
    return x.to(dtype)


def _bytes(x: Tensor) -> Tensor:
    x = x.contiguous()
    if x.stride(-1) != 1:  # one column is contiguous whatever its stride
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


def _values(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes read as values; copied, since values must start where their dtype may."""
    return payload.clone(memory_format=torch.contiguous_format).view(dtype)


@functools.cache
def _largest_scale(largest_code: float) -> float:
    """The largest bf16 value whose product with the largest code is finite in fp32."""
    mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / largest_code)
    return math.ldexp(math.floor(mantissa * 256), exponent - 8)


@functools.cache
def _constant(value: float) -> Tensor:
    with _disable_current_modes():
        return torch.tensor(value)
