"""Public bug reports about mixed precision, as small models: none of their faults may be dsmp's.

The reports lie in a folder beside the checkout; without it there is nothing to run here.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from dsmp.compiler.backend import dsmp as backend

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
FILES = sorted(CASES.glob("b[0-9]*.py"))
DEVICES = ("h800", "v100", "cpu", "a100", "mi250x", "mi300x")
OFTEN = {"v100": ("b01", "b13", "b33", "b35", "b37", "b68"), "cpu": ("b06", "b20", "b34")}
"""Cases that run always: everything on h800, on v100 those about fp16's range, some that need no narrow format."""

pytestmark = pytest.mark.skipif(not FILES, reason=f"there is no folder {CASES}")


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"case_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_options(**options: Any) -> Callable[..., Any]:
    return lambda gm, inputs, **kwargs: backend(gm, inputs, options=options, **kwargs)


def fresh(inputs: Any) -> Any:
    return tree_map(
        lambda t: t.clone(memory_format=torch.preserve_format) if isinstance(t, torch.Tensor) else t, inputs
    )


def run_case(file: Path, compile_with: Callable[..., Any]) -> None:
    """`run(backend)` of the case, or its model under both grad modes, called twice, held against eager by `check`."""
    case = load(file)
    torch.manual_seed(0)
    if hasattr(case, "run"):
        case.run(compile_with)
        return
    for grad in (False, True):
        torch._dynamo.reset()
        model, inputs = case.make()
        reference = copy.deepcopy(model)
        with torch.set_grad_enabled(grad):
            torch.manual_seed(1)
            wanted = reference(*fresh(inputs))
            f = torch.compile(model, backend=compile_with)
            for _ in range(2):
                torch.manual_seed(1)
                case.check(wanted, f(*fresh(inputs)))


def _is_fast(file: Path, hardware: str) -> bool:
    return hardware == "h800" or file.stem.split("_")[0] in OFTEN.get(hardware, ())


@pytest.mark.parametrize(
    ("file", "hardware"),
    [
        pytest.param(f, h, id=f"{f.stem}-{h}", marks=() if _is_fast(f, h) else pytest.mark.slow)
        for h in DEVICES
        for f in FILES
    ],
)
def test_a_reported_fault_is_not_dsmps(file: Path, hardware: str) -> None:
    run_case(file, with_options(hardware=hardware, executor="eager"))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_nor_with_the_default_executor(file: Path) -> None:
    run_case(file, with_options(hardware="cpu"))


def test_the_cases_can_fail() -> None:
    """A backend that casts every result to half precision fails some of them."""

    def careless(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        def halve(value: Any) -> Any:
            return value.bfloat16() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

        return lambda *args: tree_map(halve, gm.forward(*args))

    failed = 0
    for file in FILES:
        if file.stem.startswith(("b47", "b12", "b42")):
            torch._dynamo.reset()
            try:
                run_case(file, careless)
            except AssertionError:
                failed += 1
    assert failed
