"""Packed weights unpack to the nearest values of their format; fingerprints notice edits; fakes tell the truth."""

from __future__ import annotations

import pytest
import torch
from small_linears import FORMATS, needs_kernels, pack
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

SHAPES = [(1, 1), (3, 7), (17, 130), (1000, 33), (16, 512)]
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture(autouse=True)
def _kernels() -> None:
    needs_kernels()


def random(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 3


@pytest.mark.parametrize("shape", SHAPES)
def test_floats_are_exact(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    assert torch.equal(pack(weight, "fp32").values, weight)
    assert torch.equal(pack(weight, "fp16").values, weight.half().float())
    assert torch.equal(pack(weight.t(), "fp32").values, weight.t())


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_the_nearest_of_255_values(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    weight[0] = 0
    scale = weight.abs().amax(1, keepdim=True) / 127
    nearest = torch.where(scale > 0, (weight / scale).round(), 0.0) * scale
    assert torch.equal(pack(weight, "int8").values, nearest)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_the_nearest_of_16_values(shape: tuple[int, int], group: int, symmetric: bool, half: bool) -> None:
    weight = random(*shape) + 1.5
    weight[-1, :32] = 0
    ops = torch.ops.dsmp_cpu
    n, k = shape
    payload, scales, zeros = ops.pack_int4(weight, group, symmetric, half)
    values = ops.unpack_int4(payload, scales, zeros, n, k, group)
    for start in range(0, k, group):
        part = weight[:, start : start + group]
        least, greatest = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        if symmetric:
            scale, zero = torch.where(-least >= greatest, least, greatest) / -8, torch.tensor(8.0)
        else:
            scale, zero = greatest / 15 - least / 15, None
        scale = scale.half().float() if half else scale
        if zero is None:
            zero = torch.where(scale > 0, (-least / scale).round().clamp(0, 15), 8.0)
        q = torch.where(scale != 0, ((part / scale).round() + zero).clamp(0, 15), zero)
        assert torch.equal(values[:, start : start + group], scale * (q - zero))


def test_weights_packed_again_are_the_same() -> None:
    """Unpacked values are on the format's grid already."""
    for format in ("fp32", "fp16", "int8"):
        values = pack(random(17, 130), format).values
        assert torch.allclose(pack(values, format).values, values, rtol=2e-7, atol=0)


def test_payloads_are_as_small_as_their_format() -> None:
    weight = random(160, 512)
    ops = torch.ops.dsmp_cpu
    sizes = [ops.pack_fp32(weight), ops.pack_fp16(weight), ops.pack_int8(weight)[0]]
    sizes += ops.pack_int4(weight, 128, True, True)[:1]
    assert [t.nbytes for t in sizes] == [160 * 512 * bits // 8 for bits in (32, 16, 8, 4)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_integers_cannot_hold(bad: float) -> None:
    weight = random(17, 130)
    weight[3, 4] = bad
    with pytest.raises(ValueError, match="no integer format"):
        torch.ops.dsmp_cpu.pack_int8(weight)
    with pytest.raises(ValueError, match="no integer format"):
        torch.ops.dsmp_cpu.pack_int4(weight, 32, True, False)
    assert torch.equal(pack(weight, "fp16").values, weight.half().float()) or bad != bad


def test_weights_that_are_no_fp32_matrix() -> None:
    for weight in (torch.randn(3), torch.randn(3, 4).double(), torch.randn(3, 4, 5)):
        with pytest.raises(ValueError, match="fp32 matrix"):
            torch.ops.dsmp_cpu.pack_fp32(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (7, 9), (64, 64), (300, 300)])
def test_fingerprints_notice_edits_that_bump_no_version(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fingerprint = torch.ops.dsmp_cpu.fingerprint
    weight = torch.randn(shape).mul(50).to(dtype)
    before, version = fingerprint(weight), weight._version
    assert fingerprint(weight) == before
    weight.data.add_(1)
    assert weight._version == version and fingerprint(weight) != before
    assert fingerprint(weight.clone()) != fingerprint(weight)  # another place


@pytest.mark.parametrize("size", [32, 64, 128, 512])
def test_fingerprints_notice_masks(size: int) -> None:
    fingerprint = torch.ops.dsmp_cpu.fingerprint
    weight = torch.randn(size, size)
    before = fingerprint(weight)
    row, column = torch.arange(size)[:, None], torch.arange(size)[None]
    masks = (row >= column, row != column % 2, (row + column) % 2 == 0, column < size // 2, row < size // 2)
    for mask in masks:
        kept = weight.clone()
        weight.data.mul_(mask)
        assert fingerprint(weight) != before
        weight.data.copy_(kept)
        assert fingerprint(weight) == before


def test_fingerprints_of_strided_and_empty_weights() -> None:
    fingerprint = torch.ops.dsmp_cpu.fingerprint
    weight = torch.randn(200, 300)
    view = weight[:, ::2]
    before = fingerprint(view)
    weight.data[:, 1::2] = 0  # what the view does not show
    assert fingerprint(view) == before
    weight.data[:, ::2] *= 2
    assert fingerprint(view) != before
    last = fingerprint(weight)
    weight.data[-1, -1] += 1
    assert fingerprint(weight) != last
    assert isinstance(fingerprint(torch.empty(0, 5)), int)


@pytest.mark.parametrize("m", [0, 1, 5])
@pytest.mark.parametrize(("n", "k"), [(17, 130), (1, 1), (32, 256)])
def test_fakes(n: int, k: int, m: int) -> None:
    ops = torch.ops.dsmp_cpu
    weight, x, bias = random(n, k), torch.randn(2, m, k), torch.randn(n)

    def check(op: torch._ops.OpOverload, *arguments: object) -> object:
        torch.library.opcheck(op, arguments, test_utils=CHECKS)
        return op(*arguments)

    for format in ("fp32", "fp16"):
        payload = check(getattr(ops, f"pack_{format}").default, weight)
        check(getattr(ops, f"unpack_{format}").default, payload, n, k)
        check(getattr(ops, f"linear_{format}").default, x, payload, bias, n)
    packed = check(ops.pack_int8.default, weight)
    check(ops.unpack_int8.default, *packed, n, k)
    for op in (ops.linear_int8, ops.linear_int8_a16):
        check(op.default, x, *packed, bias, n)
    for symmetric in (True, False):
        packed = check(ops.pack_int4.default, weight, 32, symmetric, symmetric)
        check(ops.unpack_int4.default, *packed, n, k, 32)
        for op in (ops.linear_int4, ops.linear_int4_a16, ops.linear_int4_a8):
            check(op.default, x, *packed, None, n, 32)


def test_every_operator_has_a_fake() -> None:
    """But the fingerprint, which answers for real memory only."""
    with FakeTensorMode():
        weight, x = torch.empty(17, 130), torch.empty(3, 130)
        for format in FORMATS:
            packed = pack(weight, format)
            assert packed.values.shape == (17, 130)
            assert all(product(x, None).shape == (3, 17) for product in packed.products.values())


@pytest.mark.slow
def test_inductor_keeps_products_whole() -> None:
    weight, x = random(20, 40), torch.randn(3, 40)
    product = pack(weight, "int8").products["linear_int8"]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: product(x * 2, None).relu(), fullgraph=True)
    assert torch.equal(compiled(x), product(x * 2, None).relu())
