"""What a capture puts back, of modules that functions, methods and plain objects hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsmp
from dsmp.compiler.capture_state import modules_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


GLOBAL = net()
INPUT = torch.linspace(-1, 1, 32).reshape(4, 8)


def from_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


def through_another(x: Tensor) -> Tensor:
    return from_global(x) + 1


class Holder:
    """No module, but holds one."""

    def __init__(self, held: nn.Module) -> None:
        self.parts = {"net": [held]}

    def run(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts["net"][0](x)
        return y

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


def closure(held: nn.Module) -> Callable[..., Any]:
    return lambda x: held(x)


def default(held: nn.Module) -> Callable[..., Any]:
    def call(x: Tensor, module: nn.Module = held) -> Tensor:
        y: Tensor = module(x)
        return y

    return call


def keyword_default(held: nn.Module) -> Callable[..., Any]:
    def call(x: Tensor, *, module: nn.Module = held) -> Tensor:
        y: Tensor = module(x)
        return y

    return call


def nested(held: nn.Module) -> Callable[..., Any]:
    inner = closure(held)
    return lambda x: inner(x)


MAKERS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "module": lambda held: held,
    "module method": lambda held: held.forward,
    "closure": closure,
    "nested closure": nested,
    "default": default,
    "keyword default": keyword_default,
    "method of an object": lambda held: Holder(held).run,
    "callable object": Holder,
    "partial": lambda held: functools.partial(lambda module, x: module(x), held),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_modules_are_found(kind: str) -> None:
    held = net()
    assert list(map(id, modules_of(MAKERS[kind](held)))) == list(map(id, held.modules()))


def test_modules_of_globals_are_found() -> None:
    assert GLOBAL in modules_of(from_global)
    assert GLOBAL in modules_of(through_another)
    assert modules_of(torch.relu) == modules_of(lambda x: torch.relu(x)) == []


@pytest.mark.parametrize("kind", ["closure", "default", "method of an object"])
def test_statistics_stay_as_they_were(kind: str) -> None:
    held = net()
    before = {k: v.clone() for k, v in held.state_dict().items()}
    plan = dsmp.plan(MAKERS[kind](held), INPUT, hardware="a100")
    assert any(d.op == "linear" for d in plan)
    assert all(torch.equal(v, before[k]) for k, v in held.state_dict().items())


def test_statistics_of_a_global_stay_as_they_were() -> None:
    before = {k: v.clone() for k, v in GLOBAL.state_dict().items()}
    dsmp.plan(through_another, INPUT, hardware="a100")
    assert all(torch.equal(v, before[k]) for k, v in GLOBAL.state_dict().items())
