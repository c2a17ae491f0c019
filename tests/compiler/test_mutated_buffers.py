"""A buffer that the forward pass updates and uses: the backward pass must not read its new value for the old one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn


class MovingScale(nn.Module):
    """Multiplies by a moving average that it updates first, as normalisers with running statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.scale.mul_(0.9).add_(y.detach().mean(0))
        return y * self.scale


class Halving(nn.Module):
    """Only elementwise operators lie between the old value and the product: the partitioner would recompute them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5)
        return self.linear(x) * self.scale.view(2, 4).reshape(8)


@pytest.mark.parametrize("hardware", ["cpu-avx2", "h800", "cpu-amx", "a100"])
@pytest.mark.parametrize("model_class", [MovingScale, Halving])
def test_gradients_use_the_value_of_the_forward_pass(model_class: type[nn.Module], hardware: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = model_class()
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="dsmp", options={"hardware": hardware, "executor": "eager"})
    for _ in range(2):
        x = torch.randn(4, 8)
        eager(x).sum().backward()
        compiled(x).sum().backward()
    for wanted, found in zip(eager.parameters(), ours.parameters(), strict=True):
        assert wanted.grad is not None and found.grad is not None
        assert (found.grad - wanted.grad).norm() / wanted.grad.norm() < 0.02
    (wanted_buffer,), (found_buffer,) = eager.buffers(), ours.buffers()
    assert torch.allclose(wanted_buffer, found_buffer, rtol=0.02, atol=1e-3)
