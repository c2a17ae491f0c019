"""Run a model for its graphs and leave no trace: what the run changes is put back, compiled parts run plain."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves


class ModelState:
    """What one call of a model may change: attributes and buffers of its modules, tensors among its inputs, and the
    random states of torch, Python and NumPy. The modules of a function are those that it can reach (`modules_of`).

    Parameters are not copied: a model that overwrites its parameters in its own forward pass keeps what it wrote.
    Modules that find their shapes at the first call (`nn.LazyLinear`) stay initialised.
    """

    def __init__(self, model: nn.Module | Callable[..., Any], inputs: Any) -> None:
        modules = modules_of(model)
        settled = [m for m in modules if not (isinstance(m, LazyModuleMixin) and m.has_uninitialized_params())]
        self.attributes = [(m, _contents(m.__dict__)) for m in settled]
        buffers = [b for m in settled for b in m.buffers(recurse=False)]
        tensors = {id(t): t for t in [*buffers, *tree_leaves(inputs)] if _holds_data(t)}
        self.values = [(t, t.detach().clone()) for t in tensors.values()]
        self.random = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        on_cuda = any(
            t.is_cuda for t in [*tensors.values(), *(p for m in settled for p in m.parameters(recurse=False))]
        )
        self.random_cuda = torch.cuda.get_rng_state_all() if on_cuda else []

    def restore(self) -> None:
        """Put everything back."""
        for module, contents in self.attributes:
            _put_back(module.__dict__, contents)
        for tensor, value in self.values:
            if not torch.equal(tensor, value):  # version counters do not tell: batch norm writes past them
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(value)
        python, numpy, cpu = self.random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, state in enumerate(self.random_cuda):
            torch.cuda.set_rng_state(state, device)


def modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a call of a module, function, bound method, partial or callable object can reach, each once:
    through its object, closure, default arguments and the globals that its code names, in containers and plain objects
    and in functions that it calls, down to `_DEPTH` steps. Code of torch itself is not searched."""
    found: dict[int, nn.Module] = {}
    seen: dict[int, Any] = {}  # holds what was visited, so that no id is given out twice
    level = [model]
    for _ in range(_DEPTH):
        reached = []
        for value in level:
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, nn.Module):
                found.update((id(m), m) for m in value.modules())
            else:
                reached += _held(value)
        level = reached
    return list(found.values())


_DEPTH = 6


def _held(value: Any) -> list[Any]:
    """What a value that is no module holds and a call of it may use."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        if (value.__module__ or "").partition(".")[0] == "torch":
            return []
        cells = [_in_cell(c) for c in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, getattr(value, "__wrapped__", None), *_named(value)]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (type, types.ModuleType, torch.Tensor)) or not hasattr(value, "__dict__"):
        return []
    call = inspect.getattr_static(type(value), "__call__", None)
    return [*vars(value).values(), *([call] if isinstance(call, types.FunctionType) else [])]


def _named(function: types.FunctionType) -> list[Any]:
    """The globals that a function's code and the functions inside it name, and what they name in imported files."""
    names: dict[str, None] = {}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(dict.fromkeys(code.co_names))
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    known = function.__globals__
    values = [known[n] for n in names if n in known]
    files = [v for v in values if isinstance(v, types.ModuleType) and v.__name__.partition(".")[0] != "torch"]
    return [*values, *(vars(f)[n] for f in files for n in names if n in vars(f))]


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


@contextlib.contextmanager
def uncompiled(model: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The model with every compiled part of it, itself included, running plain: those graphs would go elsewhere."""
    plain = model._orig_mod if isinstance(model, OptimizedModule) else model
    changed: list[tuple[nn.Module, dict[str, Any]]] = []
    for module in plain.modules() if isinstance(plain, nn.Module) else ():
        if isinstance(module, OptimizedModule):
            changed.append((module, dict(module.__dict__)))
            module.__dict__["forward"] = module._orig_mod.__call__
        elif module._compiled_call_impl is not None:
            changed.append((module, dict(module.__dict__)))
            module._compiled_call_impl = None
    try:
        yield plain
    finally:
        for module, attributes in changed:
            for name in ("forward", "_compiled_call_impl"):
                if name in attributes:
                    module.__dict__[name] = attributes[name]


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's attributes, one level into those that are dicts (buffers, hooks, children)."""
    return {k: (v, dict(v)) if isinstance(v, dict) else (v, None) for k, v in attributes.items()}


def _put_back(attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    for name in [n for n in attributes if n not in contents]:
        del attributes[name]
    for name, (value, items) in contents.items():
        if attributes.get(name) is not value:
            attributes[name] = value
        if items is not None and (list(value) != list(items) or any(value[k] is not items[k] for k in items)):
            value.clear()
            value.update(items)


def _holds_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"
