"""Run Triton kernels on CPU tensors, in any process: values without a GPU.

Triton's interpreter (triton/runtime/interpreter.py) executes a kernel's Python source program by program with NumPy.
Triton itself decides once, when a kernel is defined and by an environment variable, whether it is interpreted. Here
that is decided at each launch: the same `@triton.jit` function is compiled for GPUs and interpreted for CPU tensors.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_LOCK = threading.RLock()  # the interpreter keeps its program index in a global and patches triton.language


def interpret(kernel: JITFunction, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """Run every program of `grid` one after the other; `arguments` by name, tensors on the CPU."""
    if 0 in grid:
        return
    with _LOCK, _device_functions():
        _interpreted(kernel.fn)[grid](**arguments)


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Any:
    return interpreter.InterpretedFunction(function)


def _call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """A device function called by an interpreted kernel, with the language patched for its module just while it
    runs."""
    patched = interpreter._patch_lang(function.fn)
    try:
        return _interpreted(function.fn).rewrite()(*args, **kwargs)
    finally:
        patched.restore()


@contextlib.contextmanager
def _device_functions() -> Iterator[None]:
    """While a kernel is interpreted, the compiled functions that it calls (Triton's own too) are interpreted."""
    original = JITFunction.__call__
    JITFunction.__call__ = _call
    try:
        yield
    finally:
        JITFunction.__call__ = original
