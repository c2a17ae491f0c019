"""The MODEL argument: from one line of text to a module (or an exported program) and inputs for it.

    torchvision:NAME                     timm:NAME
    transformers:CLASS[,key=value...]    the class's default config; keys override its fields
    module:factory, file.py:factory      an nn.Module, or a callable that returns one or (module, inputs)
    archive.pt2                          a torch.export archive

Library models start from random values drawn with `seed`; nothing is ever downloaded. A library model with
more than 2e9 bytes of parameters is built on the meta device, where it costs no memory, and so are its
inputs.

The three libraries are optional and imported on first use. All mistakes raise ModelSpecError, or
InputSpecError when the inputs do not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputSpecError, ModelSpecError, near_matches
from .input_spec import GRAMMAR, check_call, make_inputs, parse_tensor_spec, required_inputs
from .model_building import Device, LoadedModel, ModelRequest, cause, finish
from .model_libraries import load_timm, load_torchvision, load_transformers
from .user_code import place_of, user_code

__all__ = ["MODEL_FORMS", "LoadedModel", "load_model", "with_inputs"]

MODEL_FORMS = (
    "torchvision:NAME, timm:NAME, transformers:CLASS[,key=value...], module:factory, file.py:factory or archive.pt2"
)

_LIBRARIES: dict[str, Callable[[ModelRequest], LoadedModel]] = {
    "torchvision": load_torchvision,
    "timm": load_timm,
    "transformers": load_transformers,
}


def load_model(
    model: str,
    *,
    inputs: Sequence[str] = (),
    config: Path | None = None,
    training: bool = True,
    on_meta: bool | None = None,
    seed: int = 0,
    inputs_later: bool = False,
) -> LoadedModel:
    """Load what MODEL names, with inputs from the SPECs in `inputs` or sensible defaults.

    `inputs`: SPECs (see `input_spec`); for `transformers` those left out are derived, otherwise they are all
    inputs. `config`: a JSON config file, for `transformers:CLASS` only. `training`: library models are put in
    training mode and `transformers` models get labels; otherwise every module is put in eval mode. A
    factory's module keeps the modes that its factory chose when training (an instance is used itself, and
    copied only to go to meta). `on_meta`: None means meta for library models over META_BYTES (and the CPU
    where a constructor refuses meta); True and False force it. `seed` draws weights and inputs; the global
    random state is left as it was. `inputs_later`: a factory's module may come without inputs; the result then says
    which it `lacks` (see `with_inputs`).

    Raises ModelSpecError for a MODEL that cannot be loaded, InputSpecError for inputs that do not fit it.
    """
    prefix, colon, rest = model.strip().partition(":")
    specs = tuple(map(parse_tensor_spec, inputs))
    request = ModelRequest(
        source=model.strip(),
        name=rest,
        specs=specs,
        config=config,
        training=training,
        on_meta=on_meta,
        seed=seed,
        inputs_later=inputs_later,
    )
    if config is not None and prefix != "transformers":
        raise ModelSpecError(f"a config file goes with transformers:CLASS only, not with {model!r}. Leave it out.")
    if colon and prefix in _LIBRARIES:
        return _LIBRARIES[prefix](request)
    if request.source.endswith(".pt2"):
        return _load_archive(request)
    if colon and prefix and rest:
        return _load_factory(request)
    near = near_matches(prefix, _LIBRARIES)
    hint = f" Did you mean {near[0]}:NAME?" if near else ""
    raise ModelSpecError(f"cannot read model {model!r}.{hint} MODEL is one of {MODEL_FORMS}.")


# ---- factories and archives --------------------------------------------------------------------------------


def _load_factory(request: ModelRequest) -> LoadedModel:
    near = near_matches(request.source.rpartition(":")[0], _LIBRARIES)
    hint = f"Did you mean {near[0]}:NAME? " if near else ""
    forms = f"{hint}MODEL is one of {MODEL_FORMS}."
    with user_code(request.source, ModelSpecError, "factory or an nn.Module", forms) as found:
        module, inputs = _call_factory(found, request)
    kinds = {t.device.type for t in (*module.parameters(), *module.buffers())}
    if other := kinds - {"cpu", "meta"}:
        raise ModelSpecError(
            f"{request.source} lies on {', '.join(sorted(other))}; build it on the CPU (or on meta): dsmp plans there."
        )
    if request.on_meta is False and "meta" in kinds:
        raise ModelSpecError(f"{request.source} is built on meta; leave on_meta open or build it on the CPU.")
    device: Device = "meta" if request.on_meta or "meta" in {p.device.type for p in module.parameters()} else "cpu"
    if device == "meta" and any(not t.is_meta for t in (*module.parameters(), *module.buffers())):
        module = _meta_copy(module)
    if not request.training:
        module.eval()
    if request.specs or inputs is None:
        needed = required_inputs(module.forward)
        if not request.specs and needed and request.inputs_later:
            return LoadedModel(module=module, source=request.source, device=device, lacks=tuple(needed))
        if not request.specs and needed:
            raise InputSpecError(
                f"{request.source} comes without inputs. Let the factory return (module, inputs) or give "
                f"one SPEC for each of {', '.join(needed)}: {GRAMMAR}."
            )
        return finish(request, module, device, request.specs)
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), _split_inputs(inputs))
    check_call(module, args, kwargs)
    return LoadedModel(module=module, args=args, kwargs=kwargs, source=request.source, device=device)


def with_inputs(loaded: LoadedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LoadedModel:
    """A model that was loaded without inputs, with those of a calibration batch. Raises InputSpecError if they do not
    fit."""
    assert loaded.module is not None
    moved: tuple[tuple[Any, ...], dict[str, Any]]
    moved = pytree.tree_map_only(Tensor, lambda t: t.to(loaded.device), (tuple(args), dict(kwargs)))
    check_call(
        loaded.module, *moved, what="calibration batch 1",
        remedy="Each batch is what the model is called with, or with a loss a pair (inputs, target).",
    )  # fmt: skip
    return replace(loaded, args=moved[0], kwargs=moved[1], lacks=())


def _call_factory(found: object, request: ModelRequest) -> tuple[nn.Module, object]:
    source, allowed = request.source, "an nn.Module or (nn.Module, inputs)"
    result = found
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise ModelSpecError(f"{source} is a {type(found).__name__}, neither a callable nor an nn.Module.")
        if needed := required_inputs(found):
            raise ModelSpecError(
                f"{source} requires arguments ({', '.join(needed)}); a factory is called without any. "
                f"Wrap it: def factory(): return {request.source.rpartition(':')[2]}(...)."
            )
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta" if request.on_meta else "cpu"):
                torch.default_generator.manual_seed(request.seed)
                result = found()
        except (Exception, SystemExit) as exc:
            raise ModelSpecError(f"{source} failed: {cause(exc)}{place_of(exc)}.") from exc
    if isinstance(result, nn.Module):
        return result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        return result
    raise ModelSpecError(f"{source} returned a {type(result).__name__}; it must return {allowed}.")


def _split_inputs(inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A factory's inputs as (args, kwargs): it may give a tensor, args, kwargs, or both as (args, kwargs)."""
    match inputs:
        case (tuple() | list() as args, dict() as kwargs):
            return tuple(args), kwargs
        case tuple() | list():
            return tuple(inputs), {}
        case dict():
            return (), inputs
    return (inputs,), {}


def _meta_copy(module: nn.Module) -> nn.Module:
    """The same module with all tensors on meta. The caller's keeps its weights; ties stay ties."""
    moved: dict[int, object] = {}
    for parameter in module.parameters():
        moved[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        moved[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, moved)


def _load_archive(request: ModelRequest) -> LoadedModel:
    path = Path(request.source)
    if not path.is_file():
        raise ModelSpecError(f"there is no file {path}. Save one with torch.export.save(program, {path.name!r}).")
    if request.on_meta:
        raise ModelSpecError(f"{path} carries its weights, so it cannot be put on meta. Leave on_meta open.")
    try:
        program = torch.export.load(path)
    except Exception as exc:
        raise ModelSpecError(
            f"{path} is no readable torch.export archive: {cause(exc)}. Save it with "
            f"torch.export.save and this torch ({torch.__version__})."
        ) from exc
    tensors = (*program.state_dict.values(), *program.constants.values())
    device: Device = "meta" if any(isinstance(t, Tensor) and t.is_meta for t in tensors) else "cpu"
    if request.specs:
        args, kwargs = make_inputs(request.specs, device, request.seed)
    elif program.example_inputs is not None:
        args, kwargs = program.example_inputs
    else:
        raise InputSpecError(f"{path} carries no example inputs. Give one SPEC per input: {GRAMMAR}.")
    _check_archive_inputs(program, args, kwargs, path)
    return LoadedModel(
        module=None, exported=program, args=tuple(args), kwargs=kwargs, source=request.source, device=device
    )


def _check_archive_inputs(
    program: torch.export.ExportedProgram, args: Sequence[object], kwargs: Mapping[str, object], path: Path
) -> None:
    """Raise InputSpecError unless number, names, dtypes and fixed dimensions are those that were exported."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    users = [values.get(name) if isinstance(name, str) else name for name in program.graph_signature.user_inputs]
    expected_args, expected_kwargs = pytree.tree_unflatten(users, program.call_spec.in_spec)
    if len(args) != len(expected_args) or kwargs.keys() != expected_kwargs.keys():
        by_name = f" and {', '.join(expected_kwargs)} by name" if expected_kwargs else ""
        raise InputSpecError(
            f"{path} takes {len(expected_args)} positional inputs{by_name}; got {len(args)}"
            + (f" and {', '.join(kwargs)} by name." if kwargs else ".")
        )
    pairs = [*zip(expected_args, args, strict=True), *((expected_kwargs[k], kwargs[k]) for k in kwargs)]
    for index, (expected, given) in enumerate(pairs):
        if not isinstance(given, Tensor) or not isinstance(expected, Tensor):
            continue
        fits = given.dtype == expected.dtype and len(given.shape) == len(expected.shape)
        sizes = zip(given.shape, expected.shape, strict=False)
        if not fits or any(isinstance(want, int) and want != got for got, want in sizes):
            raise InputSpecError(
                f"input {index} of {path} was exported as {expected.dtype} {list(expected.shape)}, got "
                f"{given.dtype} {list(given.shape)}. Give a SPEC that fits."
            )
