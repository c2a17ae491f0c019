"""What the compiler's tests share: fresh caches for every test, and one strict replay of a plan for every zoo model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from compiling import Replay, Seen, compiled, gradients, one_thread, watch

import dsmp
import dsmp.compiler.backend as backend
from dsmp.compiler.capture import Capture
from dsmp.compiler.pipeline import make_plan
from dsmp.passes.select_default import select_default


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """One thread: operations this small wait for other threads longer than they compute."""
    with one_thread():
        torch.manual_seed(0)
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The keys of every graph that the dsmp backend compiles in this test."""
    return watch(monkeypatch)


@pytest.fixture(scope="session")
def replayed(captured: Callable[..., Capture], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Replay]:
    """`replayed(name)`: the step on an H800, made once a session."""
    folder = tmp_path_factory.mktemp("plans")

    @functools.cache
    def of(name: str) -> Replay:
        with one_thread(), pytest.MonkeyPatch.context() as patch:
            return _replay(name, captured(name), folder / f"{name}.json", patch)

    return of


def _replay(name: str, capture: Capture, path: Path, patch: pytest.MonkeyPatch) -> Replay:
    device = dsmp.resolve_hardware("h800")
    plan = make_plan(capture, device, predict_memory=False)
    plan.save(path)
    seen = watch(patch)
    other: list[str] = []
    apply = backend.apply_decisions

    def compare(gm: torch.fx.GraphModule, decisions: Any, **kwargs: Any) -> Any:
        for made in select_default(gm, device, parameters=kwargs["parameters"]).decisions:
            planned = decisions.get(made.key)
            if planned is None or not planned.same_formats(made):
                other.append(made.key)
        return apply(gm, decisions, **kwargs)

    patch.setattr(backend, "apply_decisions", compare)
    warnings: list[str] = []
    patch.setattr(logging.getLogger("dsmp"), "warning", lambda text, *args: warnings.append(text % args))
    torch._dynamo.reset()
    case = zoo.build(name)
    model = compiled(case.model, plan=str(path), strict=True)
    loss = zoo.scalar(model(*case.args, **case.kwargs))
    loss.backward()
    audit = dsmp.audit(model)
    torch._dynamo.reset()
    return Replay(
        plan=plan,
        offline=[g.key_texts() for g in capture],
        keys=seen.graphs,
        unmatched=seen.unmatched,
        other=other,
        warnings=warnings,
        audit=audit,
        gradients=[g.clone() for g in gradients(case.model)],
    )
