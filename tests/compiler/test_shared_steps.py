"""Modules that differ in static steps alone are compiled once, and each computes in its own steps."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from narrow_plans import Cnn, narrow_plan, needs_operators
from torch import Tensor, nn

import dsmp
from dsmp.passes.plan import Decision, PrecisionPlan

pytestmark = needs_operators


class Stack(nn.Module):
    """Layers whose inputs differ in range."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x * (i + 1)) for i, layer in enumerate(self.layers)])


def ranged(plan: PrecisionPlan, different: tuple[str, ...] = ("layers", "second")) -> PrecisionPlan:
    """A plan in which the ranges of layers, and within them those of modules of a name, differ."""

    def change(d: Decision) -> Decision:
        if d.static_range is None:
            return d
        _, number, *path = d.module.split(".")
        factor = 1.0 + int(number) * ("layers" in different) + 0.5 * bool(set(path) & set(different))
        return d.model_copy(update={"static_range": (-2.0 * factor, 3.0 * factor)})

    return plan.model_copy(update={"nodes": [change(d) for d in plan]})


def planned(layers: int = 2) -> tuple[nn.Module, Tensor, PrecisionPlan]:
    torch.manual_seed(0)
    model, x = Stack(*(Cnn() for _ in range(layers))).eval(), torch.randn(2, 3, 16, 16)
    return model, x, ranged(narrow_plan(model, x, "static"))


def whole(model: nn.Module, x: Tensor, plan: PrecisionPlan, **options: object) -> Tensor:
    """What the model computes if it is compiled as one."""
    compiled = torch.compile(
        copy.deepcopy(model), backend="dsmp", options={"plan": plan, "executor": "eager", **options}
    )
    with torch.no_grad():
        return compiled(x)


def graphs_made(model: nn.Module, *calls: Tensor) -> tuple[list[Tensor], int]:
    """What a model computes, and how many graphs were compiled for that."""
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        outputs = [model(x) for x in calls]
    return outputs, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_layers_that_differ_in_steps_share_what_is_compiled(released: bool, kernels: str) -> None:
    model, x, plan = planned()
    if released:
        dsmp.release_weights(model, plan)
    expected = whole(model, x, plan, kernels=kernels)
    assert len({float(y.abs().max()) for y in expected}) == 2
    kinds = dsmp.compile_modules(model, plan, "layers.*", executor="eager", strict=kernels == "auto", kernels=kernels)
    (got,), graphs = graphs_made(model, x)
    assert kinds == [["layers.0", "layers.1"]] and graphs == 1
    assert torch.equal(got, expected)


def test_steps_that_are_equal_in_other_places_make_other_graphs() -> None:
    """Where neighbours read in one another's steps, values are handed on in bytes."""
    model, x, plan = planned(3)
    nodes = [
        d if d.module.startswith("layers.0") or d.static_range is None else
        d.model_copy(update={"static_range": (-1.0, 2.0 + int(d.module.split(".")[1]))}) for d in plan
    ]  # fmt: skip
    plan = plan.model_copy(update={"nodes": nodes})
    expected = whole(model, x, plan)
    assert dsmp.compile_modules(model, plan, "layers.*", executor="eager") == [["layers.0"], ["layers.1", "layers.2"]]
    (got,), graphs = graphs_made(model, x)
    assert graphs == 2 and torch.equal(got, expected)


def test_equal_steps_stay_numbers_of_the_graph() -> None:
    model, x, plan = planned()
    plan = ranged(plan, different=("second",))
    dsmp.compile_modules(model, plan, "layers.*", executor="eager")
    assert not any("WithSteps" in type(layer._compiled_call_impl).__name__ for layer in model.layers)
    (got,), graphs = graphs_made(model, x)
    assert graphs == 1 and torch.equal(got, whole(model, x, plan))


def test_batches_of_other_sizes() -> None:
    model, x, plan = planned()
    wide = torch.randn(5, 3, 16, 16)
    expected = [whole(model, batch, plan) for batch in (x, wide)]
    dsmp.compile_modules(model, plan, "layers.*", executor="eager", dynamic=True)
    got, graphs = graphs_made(model, x, wide)
    assert graphs == 1 and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class Broken(nn.Module):
    """A layer that Dynamo compiles in two graphs, both with static steps, once it was planned as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cnn(), nn.Linear(10, 10)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(y)


def test_all_graphs_of_a_layer_read_its_steps() -> None:
    torch.manual_seed(0)
    model, x = Stack(Broken(), Broken()).eval(), torch.randn(2, 3, 16, 16)
    plan = ranged(narrow_plan(model, x, "static"), different=("layers",))
    expected = whole(model, x, plan)
    for layer in model.layers:
        layer.breaks = True
    dsmp.compile_modules(model, plan, "layers.*", executor="eager")
    (got,), graphs = graphs_made(model, x)
    assert graphs == 2 and torch.equal(got, expected)


class Apart(nn.Module):
    """A layer whose first part is called between its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cnn(), nn.Linear(10, 10)

    @torch.compiler.disable(recursive=False)
    def between(self, x: Tensor) -> Tensor:
        return self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(x) if self.training else self.first(x))


def test_a_part_that_is_compiled_alone_reads_its_own_steps() -> None:
    torch.manual_seed(0)
    model, x = Stack(Apart(), Apart()).eval(), torch.randn(2, 3, 16, 16)
    plan = ranged(narrow_plan(model, x, "static"))
    expected = whole(model, x, plan)
    for layer in model.layers:
        layer.training = True  # its parts are in evaluation
    assert len(dsmp.compile_modules(model, plan, "layers.*.first", executor="eager")) == 1
    assert len(dsmp.compile_modules(model, plan, ["layers.0", "layers.1"], executor="eager")) == 1
    (got,), graphs = graphs_made(model, x)
    assert graphs == 2 and torch.equal(got, expected)


def test_threads_that_call_different_layers() -> None:
    model, x, plan = planned()
    expected = whole(model, x, plan)
    dsmp.compile_modules(model, plan, "layers.*", executor="eager")
    graphs_made(model, x)
    wrong: list[int] = []

    def call(i: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(model.layers[i](x * (i + 1)), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_whose_layers_share_is_compiled_as_a_whole() -> None:
    """Dynamo looks into modules that were compiled alone, and decides anew."""
    model, x, plan = planned()
    expected = whole(model, x, plan)
    dsmp.compile_modules(model, plan, "layers.*", executor="eager")
    (got,), _ = graphs_made(torch.compile(model, backend="dsmp", options={"plan": plan, "executor": "eager"}), x)
    assert torch.equal(got, expected)


def test_whichever_layer_is_called_first_is_the_one_that_is_compiled() -> None:
    model, x, plan = planned()
    expected = whole(model, x, plan)
    dsmp.compile_modules(model, plan, "layers.*", executor="eager")
    with torch.no_grad():
        assert torch.equal(model.layers[1](x * 2), expected[1])  # the second is the one that is compiled
        assert torch.equal(model.layers[0](x), expected[0])
    assert copy.deepcopy(model).layers[1]._compiled_call_impl is None


def test_gradients_of_layers_that_share() -> None:
    """A plan of inference is called with gradients: simulated, and in its own steps all the same."""
    model, x, plan = planned()
    alone = copy.deepcopy(model)
    for i, layer in enumerate(alone.layers):
        layer.compile(backend="dsmp", options={"plan": dsmp.module_plan(plan, f"layers.{i}"), "executor": "eager"})
    dsmp.compile_modules(model, plan, "layers.*", executor="eager")
    for one in (model, alone):
        one(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_operators_read_rows_as_they_take_numbers() -> None:
    torch.manual_seed(0)
    ops = torch.ops.dsmp_cpu
    table = torch.tensor([[0.03, 40], [0.05, 3], [0.02, 64]], dtype=torch.float64)
    rows = [(scale, int(zero)) for scale, zero in table.tolist()]
    x, w, b = torch.randn(2, 16, 8, 8), torch.randn(16, 16, 3, 3), torch.randn(16)
    rest = (b, None, None, None, None, 0.0, torch.randn(2, 16, 8, 8), [1, 1], [1, 1], [1, 1], 1)
    packed, size = ops.int8_pack(w, 1), list(w.shape)
    for out in (-1, 2):
        numbers = (*rows[0], *rows[1], "relu", *(rows[out] if out >= 0 else (0.0, 0)))
        shared = (table, 0, 1, "relu", out)
        expected = ops.int8_convolution(x, w, *rest, *numbers)
        assert torch.equal(ops.int8_convolution.shared(x, w, *rest, *shared), expected)
        assert torch.equal(ops.int8_convolution_packed.shared(x, *packed, size, *rest, *shared), expected)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.int8_convolution.shared, (x, w, *rest, *shared), test_utils=checks)
        torch.library.opcheck(ops.int8_convolution_packed.shared, (x, *packed, size, *rest, *shared), test_utils=checks)
    for row, at in itertools.product((x, x[:, :, ::2]), range(3)):
        assert torch.equal(ops.int8_quantise.shared(row, None, table, at), ops.int8_quantise(row, None, *rows[at]))
    x, w = torch.randn(5, 32), torch.randn(16, 32)
    expected = ops.int8_linear(x, w, b, *rows[1], "relu")
    assert torch.equal(ops.int8_linear.shared(x, w, b, table, 1, "relu"), expected)
    packed = ops.int8_pack(w, 1)
    assert torch.equal(ops.int8_linear_packed.shared(x, *packed, [16, 32], b, table, 1, "relu"), expected)


@pytest.mark.parametrize("steps", [torch.ones(1, 2), torch.ones(1, 2, dtype=torch.float64), torch.ones(4).double()])
def test_rows_that_are_not_there(steps: Tensor) -> None:
    with pytest.raises(RuntimeError, match="row 1 of steps is read from contiguous fp64"):
        torch.ops.dsmp_cpu.int8_linear.shared(torch.randn(2, 8), torch.randn(4, 8), None, steps, 1, "none")
