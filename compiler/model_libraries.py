"""Models of torchvision, timm and transformers by name, with the inputs they are made for.

All three libraries are optional. transformers models come from their class's default config, changed by a
JSON file and `key=value` overrides (`part.key=value` for a nested config), with scaled_dot_product_attention
where the model has it and without a key-value cache. Mistakes raise ModelSpecError or InputSpecError.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputSpecError, ModelSpecError
from .input_spec import (
    TensorSpec,
    did_you_mean,
    forward_parameters,
    image_spec,
    name_positional,
    transformers_specs,
)
from .model_building import (
    LoadedModel,
    ModelRequest,
    build_module,
    cause,
    finish,
    import_library,
    unknown_name,
)

# what near names of a class are searched in: heads are ...ForTask, the others end in Model
_MODEL_ENDINGS = ("Model", "LM", "Generation", "Classification", "Answering", "CTC")


def load_torchvision(request: ModelRequest) -> LoadedModel:
    """`torchvision:NAME`, fed with a batch of images of the size that the model's weights were made for."""
    models = import_library("torchvision").models
    name, known = request.name.lower(), models.list_models()
    if name not in known:
        raise unknown_name("torchvision model", request.name, known, "torchvision.models.list_models()")
    # detection and segmentation builders otherwise download a backbone although weights=None
    has_backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
    options = {"weights": None, **({"weights_backbone": None} if has_backbone else {})}
    specs = request.specs or _torchvision_specs(models, name)
    module, device = build_module(request, lambda: models.get_model(name, **options))
    return finish(request, module.train(request.training), device, specs)


def _torchvision_specs(models: Any, name: str) -> tuple[TensorSpec, ...]:
    """Default inputs by the kind and size of the preprocessing that belongs to the model's weights."""
    weights = models.get_model_weights(name).DEFAULT
    preset = weights.transforms()
    kind = type(preset).__name__
    size = list(getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None) or [224])
    size = size * 2 if len(size) == 1 else size
    if kind == "VideoClassification":
        return (image_spec([16, *size], batch=2),)
    if kind == "OpticalFlow":  # two frames; 128 pixels is the least that the correlation pyramid takes
        return (image_spec([128, 128], batch=1),) * 2
    if kind == "ObjectDetection":
        raise InputSpecError(
            f"torchvision:{name} takes a list of images and a list of target dicts, which no SPEC describes. "
            "Write a factory that returns (module, inputs) and pass file.py:factory."
        )
    return (image_spec(size),)


def load_timm(request: ModelRequest) -> LoadedModel:
    """`timm:NAME` or `timm:NAME.TAG`, fed with a batch of images of the size in its pretrained config."""
    timm = import_library("timm")
    if not timm.is_model(request.name):
        raise unknown_name("timm model", request.name, timm.list_models(), "timm.list_models()")
    module, device = build_module(request, lambda: timm.create_model(request.name, pretrained=False))
    pretrained: Any = module.pretrained_cfg
    channels, *size = pretrained.get("input_size", (3, 224, 224))
    specs = request.specs or (image_spec(size, channels=channels),)
    return finish(request, module.train(request.training), device, specs)


def load_transformers(request: ModelRequest) -> LoadedModel:
    """`transformers:CLASS[,key=value...]`, fed by name with what `transformers_specs` derives."""
    transformers = import_library("transformers")
    name, *pairs = (part.strip() for part in request.name.split(","))
    cls: Any = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, "config_class")):
        if hasattr(cls, "from_config"):
            raise ModelSpecError(
                f"{name} only chooses another class and has no config of its own. Name a concrete class, e.g. "
                "transformers:LlamaForCausalLM."
            )
        known = [n for n in dir(transformers) if n[0].isupper() and n.endswith(_MODEL_ENDINGS)]
        raise unknown_name("transformers model class", name, known, "dir(transformers)")
    overrides = parse_overrides(pairs)
    attention = overrides.pop("attn_implementation", None)
    config = _transformers_config(cls, overrides, request)

    def build() -> nn.Module:
        if attention is not None:
            return _random(cls, config, attention)
        try:
            return _random(cls, config, "sdpa")
        except (ValueError, ImportError):  # the model, or one of its parts, has no sdpa
            return _random(cls, config, "eager")

    module, device = build_module(request, build)
    specs = transformers_specs(module, name_positional(request.specs, module), training=request.training)
    contrastive = request.training and "return_loss" in forward_parameters(module)
    extra = {"return_loss": True} if contrastive else {}
    return finish(request, module.train(request.training), device, list(specs.values()), **extra)


def _random(cls: Any, config: Any, attention: str) -> nn.Module:
    # _from_config and not cls(config): it honours the config's dtype, and parts get the attention too
    module: nn.Module = cls._from_config(copy.deepcopy(config), attn_implementation=attention)
    return module


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts to values: true, false, none, integers and floats as such, the rest stays text.

    Raises ModelSpecError for a pair without `=` or a key given twice.
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise ModelSpecError(f"cannot read {pair!r}; config overrides are key=value, e.g. num_hidden_layers=2.")
        if key in overrides:
            raise ModelSpecError(f"config key {key!r} is given twice; give it once.")
        overrides[key] = _parse_value(text)
    return overrides


def _parse_value(text: str) -> object:
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _transformers_config(cls: Any, overrides: Mapping[str, Any], request: ModelRequest) -> Any:
    """The config of `cls`: its defaults, the JSON file, then the overrides; no cache, no pretrained parts."""
    config_class, name = cls.config_class, cls.__name__
    values = _read_config_file(request.config, config_class) if request.config is not None else {}
    try:
        start = config_class.from_dict(copy.deepcopy(values)) if values else config_class()
        for key, value in overrides.items():
            _override(values, start, key, value, name)
        config = config_class.from_dict(values) if overrides else start
    except ModelSpecError:
        raise
    except Exception as exc:
        raise ModelSpecError(f"{config_class.__name__} refuses these values for {name}: {cause(exc)}.") from exc
    cache_is_wanted = any(key.rpartition(".")[2] == "use_cache" for key in overrides)
    for part in [config, *(getattr(config, sub, None) for sub in getattr(config, "sub_configs", {}))]:
        if hasattr(part, "use_cache") and not cache_is_wanted:
            part.use_cache = False  # a key-value cache is state between calls, no part of one graph
        if getattr(part, "use_pretrained_backbone", False):
            part.use_pretrained_backbone = False
    return config


def _override(values: dict[str, Any], config: Any, key: str, value: object, where: str) -> None:
    """Set `key` ("a" or "part.a") in the nested dict `values`. `config` says which fields there are."""
    head, dot, tail = key.partition(".")
    known = {n for n in vars(config) if not n.startswith("_")} | set(getattr(config, "attribute_map", {}))
    known |= {n for n in inspect.signature(type(config)).parameters if n not in ("kwargs", "args")}
    known |= {"num_labels", "rope_theta"} if hasattr(config, "rope_parameters") else {"num_labels"}
    if head not in known:
        raise ModelSpecError(
            f"the config of {where} has no {head!r}.{did_you_mean(head, known)} Known: {', '.join(sorted(known))}."
        )
    part: Any = getattr(config, head, None)
    if not dot:
        if hasattr(part, "to_dict"):
            raise ModelSpecError(f"{head!r} in the config of {where} is a config itself; set {head}.KEY=VALUE.")
        values[head] = value
    elif hasattr(part, "to_dict"):
        nested = values.setdefault(head, {"model_type": part.model_type})
        _override(nested, part, tail, value, f"{where}.{head}")
    else:
        raise ModelSpecError(f"{head!r} in the config of {where} is no config, so {key!r} does not exist.")


def _read_config_file(path: Path, config_class: Any) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelSpecError(f"cannot read config file {path}: {exc.strerror}. Give a JSON file.") from exc
    except ValueError as exc:
        raise ModelSpecError(f"config file {path} is no JSON: {exc}.") from exc
    if not isinstance(values, dict):
        raise ModelSpecError(f"config file {path} holds a {type(values).__name__}; a config is a JSON object.")
    kind = values.get("model_type", config_class.model_type)
    if kind != config_class.model_type:
        raise ModelSpecError(
            f"config file {path} is for model type {kind!r}, but {config_class.__name__} is for "
            f"{config_class.model_type!r}. Name a class of {kind!r}."
        )
    return values
