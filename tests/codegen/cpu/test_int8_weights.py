"""Packed weights follow the weights that they were made of."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from int8_models import Int8, needs_operators
from torch import Tensor, nn

from dsmp.codegen.cpu.packs import clear, packed_bytes

OPERATORS = torch.ops.dsmp_cpu


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    clear()
    yield
    clear()


def native(weight: Tensor) -> Tensor:
    return OPERATORS.int8_weight(weight, 1)


def alone(weight: Tensor) -> Tensor:
    """What a linear by a weight of int8 multiplies by."""
    matrix = weight.flatten(1)
    product: Tensor = OPERATORS.narrow_linear(torch.eye(matrix.shape[1]), matrix, None, "int8", False)
    return product.t().reshape(weight.shape)


BOTH = [native, alone]
pytestmark = needs_operators


def tripled(weight: Tensor) -> None:
    with torch.no_grad():
        weight *= 3


def copied(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.randn_like(weight))


def through_data(weight: Tensor) -> None:
    weight.data.mul_(3)


def swapped(weight: Tensor) -> None:
    weight.data = torch.randn_like(weight)


def stepped(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


@pytest.mark.parametrize("change", [tripled, copied, through_data, swapped, stepped])
@pytest.mark.parametrize("pack", BOTH)
def test_changes_are_followed(pack: Callable[[Tensor], Tensor], change: Callable[[Tensor], None]) -> None:
    weight = nn.Parameter(torch.randn(16, 8, 3, 3))
    for _ in range(3):
        made = pack(weight)
        assert (made - weight).abs().max() <= weight.abs().max() / 100
        change(weight)


@pytest.mark.parametrize("pack", BOTH)
def test_memory_goes_with_its_weight_and_is_not_taken_for_another(pack: Callable[[Tensor], Tensor]) -> None:
    for _ in range(20):  # allocators hand out the same address again
        weight = torch.randn(16, 8, 3, 3)
        assert (pack(weight) - weight).abs().max() <= weight.abs().max() / 100
        assert 0 < packed_bytes() <= 16 * 8 * 9 * 4
        del weight
    gc.collect()
    assert packed_bytes() == 0


def test_a_weight_is_packed_once() -> None:
    weight, x = torch.randn(64, 64), torch.eye(64)

    def product(format: str, transposed: bool = False) -> Tensor:
        found: Tensor = OPERATORS.narrow_linear(x, weight, None, format, transposed)
        return found

    first = product("fp16")
    weight.data[0, 1] += 1  # a single number: neither the version counter nor the fingerprint tells
    assert torch.equal(product("fp16"), first)
    assert packed_bytes() == 64 * 64 * 2
    assert torch.equal(product("fp16", True), weight.half().float()), "transposed it is packed of its own"
    product("int8")
    assert packed_bytes() == 2 * 64 * 64 * 2 + 64 * 64 + 64 * 4
    clear()
    assert packed_bytes() == 0
    assert torch.equal(product("fp16"), weight.t().half().float())


@pytest.mark.parametrize("pack", BOTH)
def test_tensors_of_inference_mode_are_packed_at_every_call(pack: Callable[[Tensor], Tensor]) -> None:
    with torch.inference_mode():
        weight = torch.randn(16, 8, 3, 3)
        assert (pack(weight) - weight).abs().max() <= weight.abs().max() / 100
        weight[0, 0, 0, 1] = 50.0
        assert pack(weight)[0, 0, 0, 1] == pytest.approx(50.0)
    assert packed_bytes() == 0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()


def test_a_compiled_model_follows_its_weights() -> None:
    net, other, x = model(), model(), torch.randn(2, 3, 12, 12)
    for parameter in other.parameters():
        parameter.data = parameter.data.flip(0).clone()
    int8 = Int8(net)

    before = [torch.zeros(1)]

    def follows() -> None:
        with torch.no_grad():
            wanted = net(x)
        assert (wanted - before[0]).norm() > 0.1 * wanted.norm()  # else nothing is tested
        assert (int8(x) - wanted).norm() <= 0.04 * wanted.norm()
        before[0] = wanted

    follows()
    net.load_state_dict(other.state_dict(), assign=True)
    follows()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x).square().mean().backward()
    optimizer.step()
    follows()
    net[0].weight.data.neg_()
    follows()
    with torch.no_grad():
        net[1].running_mean += 0.2
        net[1].weight *= 0.8
        net[3].weight[:, 1] = 0.2
    follows()


def test_threads_share_one_model() -> None:
    net, x = model(), torch.randn(4, 2, 3, 12, 12)
    int8 = Int8(net)
    wanted = [int8(part) for part in x]
    clear()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            clear()
            for found, alone in zip(pool.map(int8, [*x] * 4), wanted * 4, strict=True):
                assert torch.equal(found, alone)
