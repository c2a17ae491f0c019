"""The default executor: Inductor computes what was planned, and its caches never mix plans up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
from compiling import compiled, gradients, relative
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import dsmp
import dsmp.compiler.backend as backend
from dsmp.compiler.backend import PrecisionPass
from dsmp.compiler.identity import module_paths
from dsmp.compiler.options import parse_options
from dsmp.passes.keys import ModuleNames

X = torch.linspace(-1, 1, 6 * 32).reshape(6, 32)


@pytest.fixture(scope="module", autouse=True)
def _own_caches() -> Iterator[None]:
    """Caches that start empty: what earlier runs left there must not answer."""
    with fresh_cache():
        yield


def by_inductor(model: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    return compiled(model, executor="inductor", **options)


def cached() -> int:
    """How many whole graphs came from Inductor's caches in this test."""
    return counters["aot_autograd"]["autograd_cache_hit"]


def step(f: Callable[..., torch.Tensor], model: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = f(value)
    out.square().sum().backward()
    return [out.detach().clone(), *(g.clone() for g in gradients(model))]


# what a cached graph is keyed by


def uuid(
    names: tuple[str, ...] = ("up",), indices: tuple[int, ...] = (0,), running: str = "cpu-avx2", **options: Any
) -> str:
    device = dsmp.resolve_hardware(running)
    return PrecisionPass(parse_options(options), device, ModuleNames(), frozenset(indices), names).uuid()


def test_the_same_question_has_the_same_uuid() -> None:
    plan = dsmp.plan(zoo.build("normed").model, X, hardware="h800")
    again = plan.model_copy(update={"dsmp": "other", "prediction": plan.prediction})
    for options in ({}, {"hardware": "h800"}, {"hardware": "h800", "rules": {"*": "bf16"}}):
        assert uuid(**options) == uuid(**options)
    assert uuid(plan=plan) == uuid(plan=again), "only what is decided counts"
    assert uuid(hardware="h800", executor="eager") == uuid(hardware="h800")


def test_what_changes_the_graph_changes_the_uuid() -> None:
    model = zoo.build("normed").model
    plan = dsmp.plan(model, X, hardware="h800")
    edited = plan.model_copy(
        update={"nodes": [d.model_copy(update={"output": "fp32"}) if d.op == "linear" else d for d in plan]}
    )
    other = dsmp.plan(model, X, hardware="h800", rules={"up|*": "fp32"})
    found = [
        uuid(),
        uuid(hardware="h800"),
        uuid(hardware="v100"),
        uuid(hardware="h800", running="cpu-amx"),
        uuid(hardware="h800", rules={"*": "bf16"}),
        uuid(hardware="h800", rules={"*": "fp32"}),
        uuid(hardware="h800", rules={"*": "fp32", "up|*": "bf16"}),
        uuid(hardware="h800", rules={"up|*": "bf16", "*": "fp32"}),
        uuid(plan=plan),
        uuid(plan=edited),
        uuid(plan=other),
        uuid(plan=plan, hardware="h100"),
        uuid(plan=plan, rules={"up|*": "fp32"}),
        uuid(plan=plan, strict=True),
        uuid(hardware="h800", names=("down",)),
        uuid(hardware="h800", names=("up", "up")),
        uuid(hardware="h800", indices=(0, 1)),
    ]
    assert len(set(found)) == len(found)


def test_another_version_of_the_code_has_another_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    before = uuid(hardware="h800")
    monkeypatch.setattr(backend, "_source_hash", lambda: "changed")
    assert uuid(hardware="h800") != before


def test_the_paths_of_nodes_in_subgraphs_count_too() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    def traced(name: str) -> torch.fx.GraphModule:
        gm = torch.fx.symbolic_trace(nn.Sequential(Inner()))
        inner = torch.fx.symbolic_trace(Inner())
        for node in inner.graph.nodes:
            node.meta["nn_module_stack"] = {"1": (f"L['self'].{name}", Inner)}
        gm.add_submodule("body", inner)
        return gm

    assert module_paths(traced("a"), ModuleNames()) != module_paths(traced("b"), ModuleNames())


# small graphs, compiled


class Gram(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()


class Either(nn.Module):
    """Two modules without parameters: the graphs of both calls look alike, down to the last character."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Gram(), Gram()

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


@pytest.mark.slow
def test_graphs_that_differ_in_module_names_only_are_not_mixed_up() -> None:
    model = Either()
    with torch.no_grad():
        f = by_inductor(model, hardware="h800", rules={"*": "fp32", "right|*matmul*": "bf16"})
        assert relative([f(X, True)], [X @ X.t()]) < 1e-6
        assert relative([f(X, False)], [X @ X.t()]) > 1e-5


def test_two_plans_share_nothing_and_one_plan_is_found_again() -> None:
    counters.clear()
    model = zoo.build("mlp").model
    value = torch.randn(4, 64)
    exact = step(model, model, value)
    fine = step(by_inductor(model, hardware="cpu-avx2"), model, value)
    assert cached() == 0 and relative(fine, exact) < 1e-5
    coarse = step(by_inductor(model, hardware="h800"), model, value)
    assert cached() == 0
    assert 1e-3 < relative(coarse, exact) < 2e-2
    wanted = step(compiled(model, hardware="h800"), model, value)
    assert relative(coarse, wanted) < 0.2 * relative(coarse, exact), "both executors round at the same places"
    again = step(by_inductor(model, hardware="h800"), model, value)
    assert cached() == 1, "the same question is answered from the cache"
    assert all(torch.equal(a, c) for a, c in zip(again, coarse, strict=True))


@pytest.mark.slow
def test_inference_dynamic_shapes_and_changed_weights() -> None:
    model = zoo.build("normed").model
    f = by_inductor(model, hardware="h800")
    with torch.no_grad():
        for size in (6, 3, 17):
            value = torch.randn(size, 32)
            assert relative([f(value)], [model(value)]) < 2e-2
        model.up.weight.mul_(2)
        assert relative([f(value)], [model(value)]) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "sdpa", "tied", "router"])
@pytest.mark.parametrize("hardware", ["v100", "h800", "cpu-avx2"])
def test_both_executors_agree(name: str, hardware: str) -> None:
    case = zoo.build(name)
    exact = copy.deepcopy(case.model)
    found = []
    for f, model in (
        (exact, exact),
        (compiled(case.model, hardware=hardware), case.model),
        (by_inductor(case.model, hardware=hardware), case.model),
    ):
        model.zero_grad()
        zoo.scalar(f(*case.args, **case.kwargs)).backward()
        found.append([g.clone() for g in gradients(model)])
    wanted, eager, inductor = found
    if hardware == "cpu-avx2":
        assert relative(inductor, eager) < 1e-5
    else:
        # Sums in another order round a few values to the other side; more must not differ.
        error = relative(eager, wanted)
        assert relative(inductor, wanted) < 1.5 * error and relative(inductor, eager) < 1.5 * error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "convnet"])
def test_an_all_fp32_plan_is_plain_inductor(name: str) -> None:
    """Outputs and gradients equal those of torch.compile without dsmp, to fp32 rounding; bench.identity has more."""
    found = []
    for make in (lambda m: torch.compile(m), lambda m: by_inductor(m, hardware="cpu-avx2")):
        torch._dynamo.reset()
        case = zoo.build(name)
        case.model.eval()  # no dropout: the random numbers of two compilations differ
        loss = zoo.scalar(make(case.model)(*case.args, **case.kwargs))
        loss.backward()
        found.append([loss.detach().reshape(1), *(g.clone() for g in gradients(case.model))])
    assert relative(found[1], found[0]) < 1e-5
    assert abs(found[1][0] - found[0][0]) < 1e-5 * abs(found[0][0])


@pytest.mark.parametrize("trains", [True, False])
def test_a_graph_from_inductor_s_cache_has_its_plan_and_audit(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    apply = PrecisionPass.apply

    def count(self: PrecisionPass, gm: torch.fx.GraphModule) -> None:
        ran.append(True)
        apply(self, gm)

    monkeypatch.setattr(PrecisionPass, "apply", count)
    found = []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
            run = torch.compile(model, backend="dsmp", options={"hardware": "a100"})
            with torch.set_grad_enabled(trains):
                loss = run(torch.randn(4, 64)).sum()
            if trains:
                loss.backward()
            ran.append(False)
            found.append((dsmp.plan_of(run), dsmp.audit(run)))
    # the pass ran while compiling; the second time only when somebody asked
    assert ran == [True, False, False, True]
    (plan, audit), (again, audited) = found
    assert [d.key for d in again] == [d.key for d in plan]
    assert [(e.key, e.implementation, e.ran) for e in audited] == [(e.key, e.implementation, e.ran) for e in audit]
    assert {e.key for e in audited} == {d.key for d in plan}
    assert ({d.phase for d in again} == {"fprop"}) != trains
