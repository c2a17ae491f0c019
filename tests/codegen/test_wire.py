"""Payloads of collectives: sizes, error bounds, what becomes of NaN and inf, and what decoding and encoding again does.

Bounds follow from the formats: half a unit in the last place for casts, half a scale for integers, 2^-4 for e4m3.
"""

from __future__ import annotations

import math

import pytest
import torch
from graph_helpers import aten_graph
from hypothesis import given, settings
from hypothesis import strategies as st

import dsmp.codegen.wire  # noqa: F401 - registers the operators
from dsmp.errors import InvalidWireFormatError, UnknownWireFormatError
from dsmp.passes.wire_formats import BLOCK_NAMES, WIRE_NAMES, WireFormat, parse_wire

FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "int8:32", "fp8:16", "int4:64", "topk", "topk:0.3")
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
TOP = torch.finfo(torch.float32).max

encode, decode, reduce = (getattr(torch.ops.dsmp, f"wire_{name}") for name in ("encode", "decode", "reduce"))


def there_and_back(x: torch.Tensor, wire: str, rows: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x after a payload, in its own shape."""
    count = -(-x.numel() // rows)
    (found,) = decode(encode([x], rows, wire), [count], wire, dtype)
    assert found.shape == (rows, count) and found.dtype == dtype
    return found.reshape(-1)[: x.numel()].reshape(x.shape)


def blocks_of(x: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    """The largest magnitude of the block that each value stands in, by hand."""
    flat, count = x.reshape(-1), -(-x.numel() // rows)
    out = torch.empty_like(flat)
    for row in range(rows):
        for start in range(row * count, min((row + 1) * count, flat.numel()), block):
            stop = min(start + block, (row + 1) * count)
            out[start:stop] = flat[start:stop].abs().max()
    return out.reshape(x.shape)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Values of one or many magnitudes, with zeros, of any length, some of them not contiguous."""
    length, seed = draw(st.integers(0, 700)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator)
    spread = draw(st.sampled_from([0.0, 1.0, 30.0]))
    x *= torch.exp(spread * torch.randn(length, generator=generator)).clamp(1e-30, 1e30)
    x *= torch.rand(length, generator=generator) > draw(st.sampled_from([0.0, 0.5, 0.95]))
    if draw(st.booleans()):
        x = x.repeat_interleave(2)[::2]
    return x.reshape(2, -1).T if length % 2 == 0 and draw(st.booleans()) else x


@pytest.mark.parametrize("wire", FORMATS)
def test_a_value_for_each_rank_with_strides_of_more(wire: str) -> None:
    for count in (1, 3):
        x = torch.arange(2.0 * count)[::2]
        assert torch.equal(encode([x], count, wire), encode([x.clone()], count, wire))


@settings(max_examples=150, deadline=None)
@given(x=tensors(), wire=st.sampled_from(FORMATS), rows=st.sampled_from([1, 2, 3, 8]))
def test_sizes_bounds_and_stability(x: torch.Tensor, wire: str, rows: int) -> None:
    format = parse_wire(wire)
    count = -(-x.numel() // rows)
    payload = encode([x], rows, wire)
    assert payload.shape == (rows, format.payload_bytes(count)) and payload.dtype == torch.uint8
    assert torch.equal(payload, encode([x.clone()], rows, wire)), "the same values give the same bytes"
    found = there_and_back(x, wire, rows)
    assert (found[x == 0] == 0).all(), "zeros stay zeros"
    error = (found - x).abs()
    if format.has_blocks:
        scale = (blocks_of(x, format.block, rows) / LARGEST[format.name] * (1 + 2.0**-8)).clamp_min(2.0**-126)
        bound = scale * 0.5 if format.name != "fp8" else torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)
        assert (error <= bound * (1 + 1e-6)).all()
    elif format.is_sparse:
        sent = found != 0
        assert torch.equal(found[sent], x[sent])
        flat = x.reshape(-1)
        for row in range(rows):
            mine = slice(row * count, (row + 1) * count)
            kept, magnitudes = (found.reshape(-1)[mine] != 0), flat[mine].abs()
            assert int(kept.sum()) == min(format.kept(count), int((magnitudes > 0).sum()))
            if kept.any() and not kept.all():
                assert magnitudes[kept].min() >= magnitudes[~kept].max()
    else:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[format.name]
        assert torch.equal(found, x.to(dtype).float())
    assert torch.equal(there_and_back(found, wire, rows), found), "what was decoded is sent without a further error"


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(wire: str, special: float) -> None:
    x = torch.linspace(-1, 1, 1000)
    x[300] = special
    found = there_and_back(x, wire)
    assert not found[300].isfinite()
    block = parse_wire(wire).block if parse_wire(wire).has_blocks else 1
    inside = torch.arange(1000) // block == 300 // block
    assert found[~inside].isfinite().all()


def test_all_of_one_tensor_not_finite() -> None:
    for wire in FORMATS:
        assert not there_and_back(torch.full((130,), math.inf), wire).isfinite().all()
        assert there_and_back(torch.full((130,), math.nan), wire).isnan().any()


def test_what_overflows_fp16_becomes_inf() -> None:
    found = there_and_back(torch.tensor([1e5, -1e6, 1.0]), "fp16")
    assert found.tolist() == [math.inf, -math.inf, 1.0]


@pytest.mark.parametrize("wire", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("magnitude", [TOP, TOP / 3, 2.0**-125, 2.0**-140])
def test_the_ends_of_the_range(wire: str, magnitude: float) -> None:
    """At the top everything stays finite; below 2^-126 the scale cannot follow, and the error is its half."""
    x = magnitude * torch.tensor([1.0, -1.0, 0.5, 0.25, 0.0])
    found = there_and_back(x, wire)
    assert found.isfinite().all()
    step = max(magnitude / LARGEST[wire] * (1 + 2.0**-6), 2.0**-126)
    loss = step if magnitude == TOP else step / 2  # the largest scale is cut, which costs up to half a step more
    bound = torch.maximum(x.abs() * 2.0**-4, torch.tensor(2.0**-126)) if wire == "fp8" else loss
    assert ((found - x).abs() <= bound).all()
    assert torch.equal(there_and_back(found, wire), found)


def test_the_largest_value_keeps_its_code() -> None:
    """bf16's scale is off by up to 2^-8, too little to move the largest value from the largest code."""
    x = torch.exp(torch.linspace(-80, 80, 20001)).reshape(-1, 1).expand(-1, 2) * torch.tensor([1.0, -1.0])
    for wire, largest in (("int8", 127), ("int4", 7)):
        codes = torch.cat([encode([row], 1, wire) for row in x[::100]])[:, 0]
        assert (
            (codes.view(torch.int8) == 127).all() if wire == "int8" else (codes == largest | (16 - largest) << 4).all()
        )


@pytest.mark.parametrize("wire", FORMATS)
def test_sums_are_fp32_sums_of_what_the_ranks_sent(wire: str) -> None:
    """Contributions that overflow or vanish in a narrow sum: 300 of them, each the largest of its block."""
    sent = torch.full((300, 200), 1000.0)
    sent[0] = torch.linspace(-3, 3, 200)
    payload = torch.cat([encode([row], 1, wire) for row in sent])
    decoded = torch.stack([there_and_back(row, wire) for row in sent])
    (total,) = reduce(payload, [200], wire, torch.float32, False)
    (mean,) = reduce(payload, [200], wire, torch.float32, True)
    assert torch.allclose(total, decoded.double().sum(0).float(), rtol=1e-6)
    assert torch.allclose(mean, decoded.double().mean(0).float(), rtol=1e-6)
    if wire == "int8":
        assert total[0] > 290_000


@pytest.mark.parametrize("wire", FORMATS)
def test_several_tensors_stand_side_by_side(wire: str) -> None:
    shapes = [(3, 5), (256,), (1,), (0,), (7, 33), ()]
    given = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]
    counts = [-(-t.numel() // 2) for t in given]
    together = decode(encode(given, 2, wire), counts, wire, torch.float32)
    for x, count, found in zip(given, counts, together, strict=True):
        assert found.shape == (2, count)
        assert torch.equal(found.reshape(-1)[: x.numel()].reshape(x.shape), there_and_back(x, wire, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", FORMATS)
def test_other_dtypes(dtype: torch.dtype, wire: str) -> None:
    x = torch.randn(5, 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = there_and_back(x, wire, dtype=dtype)
    assert torch.equal(found, there_and_back(x.float(), wire).to(dtype))
    if parse_wire(wire).has_blocks:
        largest = torch.full((4,), min(torch.finfo(dtype).max, TOP), dtype=dtype)
        assert there_and_back(largest, wire, dtype=dtype).isfinite().all()


@pytest.mark.parametrize("wire", FORMATS)
def test_operators_as_compilers_see_them(wire: str) -> None:
    x, y = torch.randn(6, 50), torch.randn(33)[::2]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(encode, ([x, y], 2, wire), test_utils=checks)
    payload = encode([x, y], 2, wire)
    torch.library.opcheck(decode, (payload, [150, 9], wire, torch.bfloat16), test_utils=checks)
    torch.library.opcheck(reduce, (payload, [150, 9], wire, torch.float32, True), test_utils=checks)
    gm = aten_graph(lambda a: decode(encode([a], 1, wire), [300], wire, torch.float32)[0], x)
    assert torch.equal(gm(x).reshape(6, 50), there_and_back(x, wire))


def test_bytes() -> None:
    n = 1 << 20
    share = {name: WireFormat(name).payload_bytes(n) / (4 * n) for name in WIRE_NAMES}
    assert share["fp32"] == 1 and share["bf16"] == share["fp16"] == 0.5
    assert share["fp8"] == share["int8"] <= 0.255
    assert share["int4"] <= 0.13
    assert share["topk"] == pytest.approx(0.02, abs=1e-5)


def test_names() -> None:
    for text in FORMATS:
        assert str(parse_wire(text)) == text
    assert parse_wire("int8:128") == WireFormat("int8")
    assert {f.name for f in map(parse_wire, FORMATS)} == set(WIRE_NAMES) and set(WIRE_NAMES) > BLOCK_NAMES
    with pytest.raises(UnknownWireFormatError, match="Did you mean 'int8'"):
        parse_wire("int88")
    for wrong in ("int8:x", "int8:1", "topk:0", "topk:2", "bf16:3", "int4:0.5"):
        with pytest.raises(InvalidWireFormatError, match=wrong.split(":")[0]):
            parse_wire(wrong)
