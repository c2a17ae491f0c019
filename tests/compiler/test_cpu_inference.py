"""Compiled models with narrow weights on CPUs follow their parameters, serve threads, and do without a compiler."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compiling import compiled
from narrow_plans import FORMS, narrow_plan, needs_operators, sample
from torch import Tensor, nn

import dsmp
from dsmp.codegen.audit import Ran
from dsmp.codegen.cpu import extension
from dsmp.errors import SilentFallbackError
from dsmp.hardware_db.capability import Verdict

NARROW = {"fp16": 2e-3, "int8": 0.03, "int4": 0.3, "dynamic": 0.05, "static": 0.08}
"""How far results may be from those of fp32 weights, relative in L2: an edit that is missed moves them by more."""


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def products(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def optimizer_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([m.weight for m in products(model)], lr=1.0)
    for m in products(model):
        m.weight.grad = 2 * m.weight.detach()
    optimizer.step()  # weights become their negatives


def loaded(*, assign: bool) -> Callable[[nn.Module], None]:
    def load(model: nn.Module) -> None:
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                state[f"{name}.weight"].neg_()
        model.load_state_dict(state, assign=assign)

    return load


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for m in products(model):
            m.weight.neg_()


def one_row(model: nn.Module) -> None:
    """The counter of versions alone tells of this: hardly any of the numbers that are sampled changes."""
    with torch.no_grad():
        products(model)[-1].weight[1].mul_(-100)


def through_data(model: nn.Module) -> None:
    for m in products(model):
        m.weight.data.neg_()


def new_data(model: nn.Module) -> None:
    for m in products(model):
        m.weight.data = -m.weight.data


def new_parameter(model: nn.Module) -> None:
    for m in products(model):
        m.weight = nn.Parameter(-m.weight.detach())


EDITS = {
    "optimizer": optimizer_step,
    "load": loaded(assign=False),
    "assign": loaded(assign=True),
    "in place": in_place,
    "one row": one_row,
    ".data edit": through_data,
    ".data =": new_data,
    "parameter =": new_parameter,
}


def follows(form: str, edit: Callable[[nn.Module], None], executor: str) -> None:
    """Edits change the compiled model as they change the model; and it then computes what one that is compiled after
    the edit computes."""
    model, x = sample(form)
    plan = narrow_plan(model, x, form)
    run = compiled(model, plan=plan, executor=executor, strict=True)
    with torch.no_grad():
        old, before = run(x).clone(), model(x)
        assert distance(old, before) < NARROW[form]
        edit(model)
        found, wanted = run(x), model(x)
        assert distance(before, wanted) > 3 * NARROW[form], "the edit is too small to be seen"
        assert distance(found, wanted) < NARROW[form]
        torch._dynamo.reset()
        assert torch.equal(found, compiled(copy.deepcopy(model), plan=plan, executor=executor)(x))


@needs_operators
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("edit", EDITS)
def test_follows_edits_of_weights(form: str, edit: str) -> None:
    follows(form, EDITS[edit], "eager")


@needs_operators
@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "static"])
def test_follows_edits_of_weights_with_inductor(form: str) -> None:
    for edit in ("optimizer", "assign", ".data edit"):
        torch._dynamo.reset()
        follows(form, EDITS[edit], "inductor")


@needs_operators
@pytest.mark.parametrize("form", FORMS)
def test_threads(form: str) -> None:
    model, x = sample(form)
    run = compiled(model, plan=narrow_plan(model, x, form), strict=True)
    inputs = [torch.randn_like(x) for _ in range(32)]

    def call(value: Tensor) -> Tensor:
        with torch.no_grad():  # of each thread alone
            return run(value)

    wanted = [call(value) for value in inputs]
    for _ in range(3):
        in_place(model)  # all threads find the packed weights stale at once
        in_place(model)
        with ThreadPoolExecutor(4) as pool:
            assert all(map(torch.equal, pool.map(call, inputs), wanted))


@needs_operators
@pytest.mark.parametrize("form", FORMS)
def test_inference_mode(form: str) -> None:
    model, x = sample(form)
    run = compiled(model, plan=narrow_plan(model, x, form), strict=True)
    with torch.no_grad():
        wanted = run(x)
    with torch.inference_mode():
        assert torch.equal(run(x), wanted)
    with torch.no_grad():
        in_place(model)
        edited = run(x)
    assert not torch.equal(edited, wanted)
    with torch.inference_mode():
        assert torch.equal(run(x), edited)
        inside = copy.deepcopy(model)  # parameters of inference mode count no versions
        again = compiled(inside, plan=narrow_plan(model, x, form))
        assert torch.equal(again(x), edited)
        in_place(inside)
        assert torch.equal(again(x), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_without_a_compiler(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = sample(form)
    plan = narrow_plan(model, x, form)
    verdict = Verdict(ok=False, reason="there is no C++ compiler here")
    monkeypatch.setattr(extension, "_answers", [verdict])
    run = compiled(model, plan=plan)
    with torch.no_grad():
        assert 0 < distance(run(x), model(x)) < NARROW[form]
        narrow = [e for e in dsmp.audit(run) if e.op in ("linear", "conv") and e.recipe != "none"]
        assert len(narrow) == len(products(model))
        assert all(e.ran is Ran.FELL_BACK and "there is no C++ compiler here" in e.reason for e in narrow)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="no C\\+\\+ compiler") as caught:
            compiled(model, plan=plan, strict=True)(x)
    assert isinstance(caught.value, SilentFallbackError) or SilentFallbackError.__name__ in str(caught.value)


PROCESS = """
import sys, torch
from torch._dynamo.utils import counters
model, x = torch.load(sys.argv[1], weights_only=False)
run = torch.compile(model, backend="dsmp", options={"plan": sys.argv[2]})
with torch.no_grad():
    print(repr(run(x).double().sum().item()), counters["inductor"]["fxgraph_cache_hit"],
          counters["aot_autograd"]["autograd_cache_hit"], sep=",")
"""
"""It must not ask for the operators by importing this folder's models."""


@needs_operators
@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "static"])
def test_graphs_of_a_cache_find_their_operators(form: str, tmp_path: Path) -> None:
    """The second process takes the graph from the first one's cache: no pass runs that would load the operators."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).eval(),
        torch.randn(2, 3, 8, 8),
    )
    narrow_plan(model, x, form).save(tmp_path / "plan.json")
    torch.save((model, x), tmp_path / "model.pt")
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(dsmp.__file__).resolve().parent.parent),
    }
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "model.pt"), str(tmp_path / "plan.json")]
    outputs = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout.strip().split(","))
    (first_sum, *missed), (second_sum, *hit) = outputs
    assert first_sum == second_sum
    assert set(missed) == {"0"} and "1" in hit
