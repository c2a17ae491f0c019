"""What the ways to load a model share: the request, the result, how a module is built and gets its inputs.

Library models start from random values and are built without downloads. Building on the meta device comes
first: it is cheap, tells the size, and is kept when the parameters exceed META_BYTES.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from ..errors import ModelSpecError
from .input_spec import TensorSpec, check_call, did_you_mean, make_inputs

META_BYTES = 2_000_000_000

Device = Literal["cpu", "meta"]


@dataclass(kw_only=True, slots=True)
class LoadedModel:
    """A model ready to be captured: exactly one of `module` and `exported` is set.

    `args` and `kwargs` are its inputs, on `device`; `source` is the MODEL text. A `transformers` model that
    is loaded for training returns its own output object, whose `loss` is the scalar to differentiate. `lacks`
    names the inputs that a factory did not give, where that was allowed.
    """

    module: nn.Module | None
    exported: torch.export.ExportedProgram | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: str
    device: Device = "cpu"
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """The arguments of load_model, read."""

    source: str
    name: str
    specs: tuple[TensorSpec, ...]
    config: Path | None
    training: bool
    on_meta: bool | None
    seed: int
    inputs_later: bool = False


def import_library(name: str) -> ModuleType:
    """Import one of the optional libraries. Raises ModelSpecError that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise ModelSpecError(
                f"{name} cannot be imported: {exc}. Run pip install --upgrade 'dsmp[models]'."
            ) from exc
        raise ModelSpecError(f"{name} is not installed. Run pip install 'dsmp[models]'.") from exc
    except Exception as exc:  # a build for another torch fails in many ways
        raise ModelSpecError(f"{name} is installed but cannot be imported: {exc}. Reinstall 'dsmp[models]'.") from exc


def unknown_name(kind: str, name: str, known: Sequence[str], listing: str) -> ModelSpecError:
    """The error for a library's model name; `listing` is the call that lists all names."""
    return ModelSpecError(f"unknown {kind} {name!r}.{did_you_mean(name, known)} {listing} lists all.")


def _no_download(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("it wants to download weights, which dsmp never does")


@contextlib.contextmanager
def _patched(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _building(seed: int, device: Device) -> Iterator[None]:
    """Seeded, offline and quiet, on `device`; leaves the CPU's random state untouched."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)
        stack.enter_context(_patched(torch.hub, "download_url_to_file", _no_download))
        if (hub := sys.modules.get("huggingface_hub.constants")) is not None:
            stack.enter_context(_patched(hub, "HF_HUB_OFFLINE", True))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # notes on how fresh weights start: no weight is kept
        stack.enter_context(torch.device(device))
        yield


def build_module(request: ModelRequest, build: Callable[[], nn.Module]) -> tuple[nn.Module, Device]:
    """Call `build` on meta or on the CPU, as request and size say. Raises ModelSpecError if it fails."""
    if request.on_meta is not False:
        try:
            with _building(request.seed, "meta"):
                module = build()
        except Exception as exc:
            if request.on_meta:
                raise ModelSpecError(f"{request.source} cannot be built on meta: {cause(exc)}.") from exc
            # some constructors read values of tensors, which meta has not: the CPU's answer decides
        else:
            size = sum(p.numel() * p.element_size() for p in module.parameters())
            if request.on_meta or size > META_BYTES:
                return module.to("meta"), "meta"
    try:
        with _building(request.seed, "cpu"):
            return build(), "cpu"
    except Exception as exc:
        raise ModelSpecError(f"{request.source} cannot be built: {cause(exc)}.") from exc


def cause(exc: BaseException) -> str:
    """An exception in one line, without its last full stop."""
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}".rstrip(" .:")


def finish(
    request: ModelRequest, module: nn.Module, device: Device, specs: Sequence[TensorSpec], **extra: object
) -> LoadedModel:
    """Make the inputs for `module` and check that they fit. Raises InputSpecError if not."""
    args, tensors = make_inputs(specs, device, request.seed)
    kwargs = {**tensors, **extra}
    check_call(module, args, kwargs)
    return LoadedModel(module=module, args=args, kwargs=kwargs, source=request.source, device=device)
