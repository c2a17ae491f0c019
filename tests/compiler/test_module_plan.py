"""Parts of a plan for modules that are compiled alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import dsmp
from dsmp.errors import InvalidOptionError, PlanMismatchError, UnknownOptionError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_with_equal_decisions_share_one_part() -> None:
    plan = dsmp.plan(Stack(), (torch.randn(8, 32),), hardware="h800", training=False, rules={"layers.1.up|*": "fp32"})
    first, second, third = (dsmp.module_plan(plan, f"layers.{i}") for i in range(3))
    assert first is third and first is not second
    assert first.by_key.keys() == second.by_key.keys() and "up|fprop|linear|0" in first.by_key
    assert [p.by_key["up|fprop|linear|0"].compute for p in (first, second)] == ["bf16", "fp32"]


def test_a_layer_compiled_alone_follows_its_part() -> None:
    model, x = Stack(), torch.randn(8, 32)
    rules = {"*|linear|*": "fp32", "layers.1.up|*": "fp8_e4m3"}
    plan = dsmp.plan(model, (x,), hardware="h800", training=False, rules=rules)
    whole = torch.compile(model, backend="dsmp", options={"plan": plan, "executor": "eager", "strict": True})
    with torch.no_grad():
        expected, wide = whole(x), model(x)
    assert not torch.allclose(expected, wide, rtol=1e-4)
    torch._dynamo.reset()
    for i, layer in enumerate(model.layers):
        options = {"plan": dsmp.module_plan(plan, f"layers.{i}"), "executor": "eager", "strict": True}
        layer.compile(backend="dsmp", options=options)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # layers 0 and 2 are compiled once


FORMATS = list(itertools.product(("fp32", "bf16", "fp16", "tf32"), repeat=2))


def test_more_kinds_of_modules_than_torch_recompiles_are_all_compiled() -> None:
    """Dynamo gives up on a frame after `recompile_limit` kinds of it."""
    model, x = Stack(len(FORMATS) + 1), torch.randn(8, 32)
    formats = [*FORMATS, FORMATS[0]]
    rules = {f"layers.{i}.{name}|*": pair[j] for i, pair in enumerate(formats) for j, name in enumerate(("up", "down"))}
    plan = dsmp.plan(model, (x,), hardware="h800", training=False, rules=rules)
    kinds = dsmp.compile_modules(model, plan, "layers.*", executor="eager", strict=True)
    last = f"layers.{len(FORMATS)}"
    assert kinds == [["layers.0", last], *([f"layers.{i}"] for i in range(1, len(FORMATS)))]
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        model(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(FORMATS) > torch._dynamo.config.recompile_limit
    for layer, pair in zip(model.layers[:-1], FORMATS, strict=True):  # the last one runs what the first one compiled
        found = dsmp.plan_of(layer).by_key
        assert tuple(found[f"{name}|fprop|linear|0"].compute for name in ("up", "down")) == pair


def test_modules_compiled_in_place_compute_what_the_whole_does() -> None:
    model, x = Stack(4), torch.randn(8, 32)
    seen = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    plan = dsmp.plan(model, (x,), hardware="h800", rules={"*|linear|*": "fp32", "layers.1.up|*": "fp8_e4m3"})
    whole = torch.compile(copy.deepcopy(model), backend="dsmp", options={"plan": plan, "executor": "eager"})
    expected = whole(x).sum()
    expected.backward()
    kinds = dsmp.compile_modules(model, plan, ["layers.0", "layers.[1-3]"], executor="eager")
    assert kinds == [["layers.0"], ["layers.1"], ["layers.2", "layers.3"]]  # the first one's input has no gradient
    got = model(x).sum()
    got.backward()
    assert torch.equal(got, expected) and seen[-1] == x.shape
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert copy.deepcopy(model).layers[0]._compiled_call_impl is None


def test_of_modules_in_one_another_the_outer_one_is_compiled() -> None:
    model, x = nn.Sequential(Stack(1), nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 32)
    plan = dsmp.plan(model, (x,), hardware="h800", training=False)
    assert dsmp.compile_modules(model, plan, "*") == [["0"], ["1"], ["2"]]
    assert dsmp.compile_modules(torch.compile(model), plan, ["0.layers.*", "2"]) == [["0.layers.0"], ["2"]]


def test_modules_and_options_that_are_not_there() -> None:
    plan = dsmp.plan(Stack(), (torch.randn(8, 32),), hardware="h800", training=False)
    with pytest.raises(PlanMismatchError, match=r"is named 'layer\.0'.*layers\.0"):
        dsmp.compile_modules(Stack(), plan, "layer.0")
    with pytest.raises(PlanMismatchError, match="is named 'layers'"):  # a list of modules is never called
        dsmp.compile_modules(Stack(), plan, "layers")
    for nothing in ([], 3, [3]):
        with pytest.raises(InvalidOptionError, match=r"a name or glob such as 'layers\.\*'"):
            dsmp.compile_modules(Stack(), plan, nothing)
    with pytest.raises(InvalidOptionError, match="all modules follow the plan"):
        dsmp.compile_modules(Stack(), plan, "layers.*", budget=0.01)
    with pytest.raises(UnknownOptionError, match="executer"):
        dsmp.compile_modules(Stack(), plan, "layers.*", executer="eager")


def test_a_module_that_is_not_there() -> None:
    plan = dsmp.plan(Stack(), (torch.randn(8, 32),), hardware="h800")
    with pytest.raises(PlanMismatchError, match=r"no node of the module 'layer\.0'.*layers\.0"):
        dsmp.module_plan(plan, "layer.0")


class Twice(nn.Module):
    """A block that runs two times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x).relu())


@pytest.mark.parametrize("alike", [True, False])
def test_a_block_that_runs_twice_in_different_formats_is_not_compiled_alone_in_silence(
    alike: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Twice(), torch.randn(8, 32)
    second = {} if alike else {"block.up|fprop|linear|1": "fp32"}
    plan = dsmp.plan(model, (x,), hardware="h800", training=False, rules={"*|linear|*": "bf16", **second})
    part = dsmp.module_plan(plan, "block")

    def run(strict: bool) -> None:
        torch._dynamo.reset()
        options = {"plan": part, "executor": "eager", "strict": strict}
        with torch.no_grad():
            torch.compile(model.block, backend="dsmp", options=options)(x)

    run(strict=False)
    told = [r.message for r in caplog.records if "all runs of up|fprop|linear|0 follow" in r.message]
    assert len(told) == (0 if alike else 1)
    if alike:
        run(strict=True)
    else:
        with pytest.raises(Exception, match=r"has block\.up|up\|fprop\|linear\|1 in fp32"):
            run(strict=True)


def test_a_plan_of_inference_says_so_to_a_training_step(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Stack(), torch.randn(8, 32)
    plan = dsmp.plan(model, (x,), hardware="h800", training=False)
    torch.compile(model, backend="dsmp", options={"plan": plan, "executor": "eager"})(x)
    (told,) = [r.message for r in caplog.records if "not in the plan" in r.message]
    assert "no backward pass" in told and "torch.no_grad()" in told
