"""Packed weights of one process: each is made once per weight, and again when the weight changes.

An entry is found by where its weight lies and how (address, sizes, strides) and by the kind of packing. It holds while
the weight's storage is the one it was made of and is alive, the weight's version counter stands where it stood, and the
fingerprint of 64 of its numbers is unchanged: edits through `.data` leave the counter alone. Tensors of inference mode
count no versions: they are packed at every call. Entries of dead storages are dropped when another one is made or asked
about, and when the tensor that they were made of goes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry:
    storage: StorageWeakRef
    version: int
    fingerprint: int
    made: Any
    owner: Any  # a weak reference whose end is a sign to look for dead storages


_lock = threading.RLock()
_table: dict[tuple[Any, ...], _Entry] = {}


def packed(weight: Tensor, kind: str, build: Callable[[Tensor], T]) -> T:
    """What `build` makes of `weight` (CPU, not of inference mode alone), made anew when the weight has changed.

    Threads that ask for one weight at once may each build it; all get right ones. `build` must not depend on anything
    but the weight and `kind`.
    """
    if weight.is_inference():
        return build(weight)
    key = (kind, weight.data_ptr(), weight.shape, weight.stride())
    version, sampled = weight._version, fingerprint(weight)
    entry = _table.get(key)
    if entry is not None and entry.version == version and entry.fingerprint == sampled:
        storage = entry.storage
        if storage.cdata == weight.untyped_storage()._cdata and not storage.expired():  # type: ignore[no-untyped-call]
            made: T = entry.made
            return made
    made = build(weight.detach())
    storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
    with _lock:
        _sweep()
        _table[key] = _Entry(storage, version, sampled, made, weakref.ref(weight, _owner_gone))
    return made


def packed_bytes() -> int:
    """Bytes of all tensors in packed weights of living storages, those of the C++ operators among them."""
    native = int(torch.ops.dsmp_cpu.int8_packed_bytes()) if hasattr(torch.ops.dsmp_cpu, "int8_packed_bytes") else 0
    with _lock:
        _sweep()
        return native + sum(t.numel() * t.element_size() for e in _table.values() for t in _tensors(e.made))


def clear() -> None:
    """Forget all packed weights; the next calls pack anew."""
    if hasattr(torch.ops.dsmp_cpu, "int8_forget"):
        torch.ops.dsmp_cpu.int8_forget()
    with _lock:
        _table.clear()


def fingerprint(weight: Tensor) -> int:
    """A hash of 64 of a weight's numbers, the last among them. Needs the C++ operators, as packing does."""
    return int(torch.ops.dsmp_cpu.fingerprint(weight))


def _sweep() -> None:
    for key in [k for k, e in _table.items() if e.storage.expired()]:  # type: ignore[no-untyped-call]
        del _table[key]


def _owner_gone(_: Any) -> None:
    with _lock:
        _sweep()


def _tensors(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    return [t for part in made for t in _tensors(part)] if isinstance(made, (tuple, list)) else []
