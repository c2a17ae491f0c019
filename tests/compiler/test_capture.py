"""Capture: all graphs of a model, from wherever it comes, and the model exactly as it was."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from compiling import gemms_of, numbered
from torch import nn

import dsmp
from dsmp.compiler.batches import split_inputs
from dsmp.compiler.capture import Capture, capture
from dsmp.errors import CaptureError


def keys(found: Capture) -> list[list[str]]:
    return [g.key_texts() for g in found]


def gemms(found: Capture) -> list[str]:
    return gemms_of([k for g in found for k in g.key_texts()])


class Busy(nn.Module):
    """Changes all that a module can change while it runs: buffers in place and by assignment, attributes, hooks' lists,
    random states, its training flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("history", torch.zeros(3))
        self.calls = 0
        self.cache: dict[str, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        self.history.add_(1)
        self.calls += 1
        self.cache["calls"] = self.calls
        self.last = x * 2
        self.norm.training = False
        y = self.dropout(self.norm(self.linear(x)))
        return y + random.random() + float(np.random.rand())


class Counted(nn.Module):
    """A batch norm and nothing that Dynamo breaks at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(self.norm(x)), 0.5, training=self.training)


def photograph(model: nn.Module) -> list[Any]:
    """Identities and values of all that belongs to a model."""
    return [
        (
            type(m),
            {k: id(v) if not isinstance(v, (bool, int)) else v for k, v in vars(m).items()},
            {k: {n: id(x) for n, x in v.items()} for k, v in vars(m).items() if isinstance(v, dict)},
        )
        for m in model.modules()
    ] + [t.detach().tolist() for t in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("build", [Busy, Counted])
def test_the_model_is_left_as_it_was(build: Callable[[], nn.Module], training: bool) -> None:
    model = build()
    model.linear.weight.grad = torch.ones(4, 4)
    before = photograph(model)
    value = torch.randn(6, 4)
    capture(model, (value,), training=training)
    assert photograph(model) == before
    assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))
    assert model.linear.bias.grad is None


def test_a_failing_model_is_left_as_it_was_too() -> None:
    class Fails(Busy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("the last layer is missing")

    model = Fails()
    before = photograph(model)
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(6, 4),))
    assert photograph(model) == before


def test_random_states_are_left_as_they_were() -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    model, value = Busy(), torch.ones(6, 4)
    before = states()
    capture(model, (value,))
    assert states() == before
    model(value)
    assert all(now != then for now, then in zip(states(), before, strict=True)), "the model draws from all three"


def test_inputs_are_left_as_they_were() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
            cache["seen"].add_(x)
            return cache["seen"] * 2

    x, cache = torch.ones(3), {"seen": torch.zeros(3)}
    assert len(capture(Writes(), (x, cache)).graphs) == 1
    assert x.tolist() == [1, 1, 1] and cache["seen"].tolist() == [0, 0, 0]


def test_global_state_is_left_as_it_was() -> None:
    config = torch._dynamo.config.save_config()
    with torch.no_grad():
        assert capture(nn.Linear(4, 4), (torch.randn(2, 4),)).joint, "training=True asks for gradients by itself"
        assert not torch.is_grad_enabled()
    capture(nn.Linear(4, 4), (torch.randn(2, 4),), training=False)
    assert torch.is_grad_enabled()
    assert torch._dynamo.config.save_config() == config
    assert torch.get_default_dtype() is torch.float32


def test_hooks_stay_and_parameters_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fired: list[int] = []
    model[0].register_forward_hook(lambda *_: fired.append(1))
    capture(model, (torch.randn(2, 4),))
    assert fired == [1]
    model(torch.randn(2, 4))
    assert fired == [1, 1]
    assert all(p.grad is None for p in model.parameters())


def test_a_compiled_model_is_captured_whole_and_stays_compiled() -> None:
    value = torch.randn(2, 4)
    plain = keys(capture(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))), (value,)))
    calls: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(1)
        return gm.forward

    around = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))), backend=backend)
    in_place = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    in_place.compile(backend=backend)
    part = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Sequential(nn.Linear(4, 4)), backend=backend))
    part_in_place = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    part_in_place[1].compile(backend=backend)
    for model in (around, in_place, part, part_in_place):
        assert keys(capture(model, (value,))) == plain
        assert calls == [], "capture must not compile with the model's own backend"
        model(value)
        assert calls == [1], "the model stays compiled"
        calls.clear()


def test_modules_that_find_their_shapes_at_the_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2))
    found = capture(model, (torch.randn(3, 5),))
    assert gemms(found) == sorted([*numbered("0", "fprop wgrad"), *numbered("1")])
    assert model(torch.randn(3, 5)).shape == (3, 2)


# what is captured


def test_training_gives_a_joint_graph_and_inference_does_not() -> None:
    model, value = nn.Linear(4, 4), torch.randn(2, 4)
    assert capture(model, (value,)).joint
    assert not capture(model, (value,), training=False).joint
    assert gemms(capture(model, (value,), training=False)) == ["|fprop|linear|0"]


def test_nothing_to_differentiate_gives_an_inference_graph() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    assert not capture(model, (torch.randn(2, 4),)).joint
    assert capture(model, (torch.randn(2, 4, requires_grad=True),)).joint


def test_a_frozen_layer_has_no_weight_gradient_but_is_a_linear() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    assert gemms(capture(model, (torch.randn(2, 4),))) == sorted(
        [*numbered("0", "fprop wgrad"), *numbered("1", "fprop dgrad")]
    )


def test_a_function_is_captured() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    found = capture(lambda x: torch.relu(x @ weight), (torch.randn(2, 4),))
    assert found.source == "function" and found.joint
    assert gemms(found) == sorted(numbered("", "fprop wgrad", op="matmul"))


def test_keyword_inputs_nested_inputs_and_dict_outputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, batch: dict[str, torch.Tensor], *, scale: float, bias: torch.Tensor | None = None) -> Any:
            return {"y": self.linear(batch["x"]) * scale, "parts": [batch["x"] + 1, None], "count": 3}

    found = capture(Nested(), ({"x": torch.randn(3, 4)},), {"scale": 2.0})
    assert gemms(found) == sorted(numbered("linear", "fprop wgrad"))
    plan = dsmp.plan(Nested(), {"batch": {"x": torch.randn(3, 4)}, "scale": 2.0}, hardware="a100")
    assert [d.compute for d in plan if d.op == "linear"] == ["tf32", "tf32"]


def test_graph_breaks_give_several_graphs_in_order() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            x = self.b(x)
            torch._dynamo.graph_break()
            return self.c(x)

    found = capture(Broken(), (torch.randn(2, 4),))
    names = [{k.split("|")[0] for k in gemms_of(g.key_texts())} for g in found]
    assert names == [{"a"}, {"b"}, {"c"}]
    assert len(dsmp.plan(Broken(), torch.randn(2, 4), hardware="a100")) == sum(len(k) for k in keys(found))


def test_data_dependent_control_flow_takes_the_branch_of_the_inputs() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.yes(x) if x.sum() > 0 else self.no(x)

    model = Branch()
    assert {k.split("|")[0] for k in gemms(capture(model, (torch.ones(2, 4),)))} == {"yes"}
    assert {k.split("|")[0] for k in gemms(capture(model, (-torch.ones(2, 4),)))} == {"no"}


def test_capturing_again_and_again_gives_the_same() -> None:
    """More often than Dynamo recompiles one piece of code before it gives up."""
    model, value = zoo.Mlp(), torch.randn(4, 64)
    first = keys(capture(model, (value,)))
    assert len(first) == 1
    assert all(keys(capture(model, (value,))) == first for _ in range(10))


@pytest.mark.parametrize("name", ["normed", "convnet", "sdpa", "router"])
def test_a_second_capture_is_not_changed_by_the_first_ones_plan(name: str) -> None:
    """Planning works on copies: a capture can be planned for one device after the other."""
    case = zoo.build(name)
    found = capture(case.model, case.args, case.kwargs)
    before = [g.gm.code for g in found]
    device = dsmp.resolve_hardware("h800")
    plans = [sys.modules["dsmp.compiler.pipeline"].make_plan(found, device) for _ in range(2)]
    assert [g.gm.code for g in found] == before
    assert plans[0] == plans[1]


# the meta device


def test_a_model_on_meta_has_the_keys_of_the_real_one() -> None:
    case = zoo.build("sdpa")
    real = keys(capture(case.model, case.args))
    on_meta = capture(copy.deepcopy(case.model).to("meta"), tuple(a.to("meta") for a in case.args))
    assert keys(on_meta) == real


def test_a_model_too_large_for_memory_is_planned_on_meta() -> None:
    resource = pytest.importorskip("resource")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(200_000, 200_000), nn.GELU(), nn.Linear(200_000, 200_000))
        value = torch.empty(4096, 200_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = dsmp.plan(model, value, hardware="h800")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"
    assert plan.by_key["0|fprop|linear|0"].flops == 2 * 4096 * 200_000**2
    assert plan.by_key["0|wgrad|linear|0"].compute == "fp8_e4m3"


def test_buffers_and_constants_on_meta() -> None:
    class WithMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("mask", torch.ones(8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = torch.arange(8, device=x.device, dtype=x.dtype)
            return self.norm(self.linear(x)) * self.mask + shift

    real = keys(capture(WithMask(), (torch.randn(4, 8),)))
    with torch.device("meta"):
        model, value = WithMask(), torch.empty(4, 8)
    assert keys(capture(model, (value,))) == real
    assert all(t.device.type == "meta" for t in [*model.parameters(), *model.buffers()])


# exported programs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["mlp", "normed", "tied", "twice", "convnet", "sdpa", "router", "positions"])
def test_a_saved_program_has_the_keys_of_its_module(name: str, training: bool, tmp_path: Path) -> None:
    case = zoo.build(name)
    torch.export.save(torch.export.export(case.model, case.args, dict(case.kwargs)), tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2")
    found = capture(program, training=training)
    assert found.joint == training
    assert keys(found) == keys(capture(case.model, case.args, case.kwargs, training=training))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet18"])
def test_a_saved_architecture_has_the_gemms_of_its_module(name: str, captured: Any, tmp_path: Path) -> None:
    case = zoo.build(name)
    torch.export.save(torch.export.export(case.model, case.args, dict(case.kwargs)), tmp_path / "m.pt2")
    assert gemms(capture(torch.export.load(tmp_path / "m.pt2"))) == gemms(captured(name))


def test_an_exported_program_is_left_as_it_was_and_can_be_captured_again() -> None:
    case = zoo.build("convnet")
    program = torch.export.export(case.model, case.args)
    code, state = program.graph_module.code, copy.deepcopy(program.state_dict)
    first = keys(capture(program))
    assert program.graph_module.code == code
    assert all(torch.equal(state[k], v) for k, v in program.state_dict.items())
    assert keys(capture(program)) == first


def test_a_frozen_exported_program_has_no_backward_pass() -> None:
    case = zoo.build("mlp")
    program = torch.export.export(case.model.requires_grad_(False), case.args)
    assert not capture(program).joint


def test_an_exported_program_with_a_dynamic_batch_and_keyword_inputs() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, gain: torch.Tensor, twice: bool = False) -> torch.Tensor:
            return self.linear(x) * gain * (2 if twice else 1)

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Scaled(),
        (torch.randn(4, 8),),
        {"twice": True, "gain": torch.ones(8)},
        dynamic_shapes={"x": {0: batch}, "twice": None, "gain": None},
    )
    assert gemms(capture(program)) == sorted(numbered("linear", "fprop wgrad"))
    plan = dsmp.plan(program, hardware="a100")
    assert plan.by_key["linear|fprop|linear|0"].shapes == [[4, 8], [8, 8], [4, 8]]


# failures


class Refuses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("batch must be even.")


@pytest.mark.parametrize(
    ("model", "args", "told"),
    [
        (Refuses(), (torch.ones(3),), "Refuses failed on the example inputs: ValueError: batch must be even. Check"),
        (nn.Linear(4, 4), (torch.ones(2, 5),), "a and b must have same reduction dim"),
        (nn.Linear(4, 4), (), "missing 1 required positional argument: 'input'"),
        (nn.Embedding(4, 4), (torch.tensor([7]),), "index out of range"),
        (nn.Identity(), (torch.ones(3),), "Identity gave no graph to plan: it computes nothing with tensors"),
        (lambda n: n + 1, (3,), "computes nothing with tensors"),
        (3, (torch.ones(3),), "int failed"),
    ],
)
def test_a_model_that_fails_is_one_clear_error(model: Any, args: tuple[Any, ...], told: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, args)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value) and ".." not in str(caught.value)


def test_a_graph_that_cannot_be_traced_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason must survive Dynamo's own wrapping, also where Dynamo is told to hide errors."""

    def fail(*_: Any) -> None:
        raise RuntimeError("the partitioner is out")

    monkeypatch.setattr("dsmp.compiler.tracing.compile_eagerly", fail)
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(CaptureError, match="the partitioner is out"):
        capture(nn.Linear(4, 4), (torch.randn(2, 4),))


def test_inputs_of_every_form() -> None:
    x = torch.ones(2)
    assert split_inputs(x) == ((x,), {})
    assert split_inputs([x, 3], {"a": 1}) == ((x, 3), {"a": 1})
    assert split_inputs({"x": x}, {"a": 1}) == ((), {"x": x, "a": 1})
