"""The SPEC argument: what tensors a model is fed with, in one line of text.

    SPEC  = [ NAME "=" ] DTYPE "[" [ DIM { "," DIM } ] "]" [ "<" UPPER ]

`float32[8,3,224,224]` is a positional input, `input_ids=int64[1,128]<32000` a keyword input with integers in
[0, 32000). Values: standard normal for floats (what normalised images look like), uniform in [0, UPPER) for
integers (UPPER is 2 if left out), fair coins for bool. `str(spec)` is the canonical text and parses back to
an equal spec.

All mistakes raise InputSpecError.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputSpecError, near_matches

GRAMMAR = '[NAME=]DTYPE[DIM,DIM,...][<UPPER], e.g. "float32[8,3,224,224]" or "input_ids=int64[1,128]<32000"'

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTEGERS, torch.bool)}
_UNBOUNDED_UPPER = 2

_SPEC = re.compile(
    r"\s*(?:(?P<name>\w+)\s*=\s*)?(?P<dtype>\w+)\s*\[(?P<shape>[^\[\]]*)\]\s*(?:<\s*(?P<upper>[-+]?\d{1,19}))?\s*",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input tensor.

    `upper` is the exclusive bound of its integers (None: 2), `name` its keyword (None: positional). Raises
    InputSpecError for a dtype that is no input dtype, a dimension below 1, a name that is no identifier, and
    a bound on anything but integers or beyond their range.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    upper: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES.values():
            raise InputSpecError(f"dtype {self.dtype} cannot be an input; allowed: {', '.join(_DTYPES)}.")
        if bad := [size for size in self.shape if size < 1]:
            raise InputSpecError(f"dimension {bad[0]} in {self} is not positive; every dimension must be at least 1.")
        if self.name is not None and not self.name.isidentifier():
            raise InputSpecError(f"input name {self.name!r} is no Python identifier. SPEC is {GRAMMAR}.")
        if self.upper is None:
            return
        if self.dtype not in _INTEGERS:
            raise InputSpecError(f"{self} has an upper bound, which only integers take. Leave out <{self.upper}.")
        # randint's own bound is an int64, so for int64 the largest value itself cannot be drawn
        limit = torch.iinfo(self.dtype).max + (self.dtype != torch.int64)
        if not 1 <= self.upper <= limit:
            raise InputSpecError(f"upper bound {self.upper} in {self} is out of range; allowed: 1 to {limit}.")

    def __str__(self) -> str:
        prefix = f"{self.name}=" if self.name is not None else ""
        suffix = f"<{self.upper}" if self.upper is not None else ""
        return f"{prefix}{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]{suffix}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The sentence "Did you mean A or B?" with a space in front, or nothing when no known name is near."""
    near = near_matches(name, known)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def parse_tensor_spec(text: str) -> TensorSpec:
    """Read one SPEC, ignoring spaces between its parts. Raises InputSpecError with grammar and example."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise InputSpecError(f"cannot read input {text!r}. SPEC is {GRAMMAR}.")
    name, dtype, upper = match["name"], match["dtype"], match["upper"]
    if dtype not in _DTYPES:
        hint = did_you_mean(dtype, _DTYPES)
        raise InputSpecError(f"unknown dtype {dtype!r} in input {text!r}.{hint} Known: {', '.join(_DTYPES)}.")
    sizes = [size.strip() for size in match["shape"].split(",")] if match["shape"].strip() else []
    if bad := [size for size in sizes if not re.fullmatch(r"-?\d{1,18}", size, re.ASCII)]:
        raise InputSpecError(f"dimension {bad[0]!r} in input {text!r} is no size. SPEC is {GRAMMAR}.")
    return TensorSpec(_DTYPES[dtype], tuple(map(int, sizes)), int(upper) if upper is not None else None, name)


def make_tensor(spec: TensorSpec, device: str | torch.device, generator: torch.Generator | None) -> Tensor:
    """A tensor as `spec` says, on `device`; on `meta` no value is drawn and no memory is used.

    `generator` lives on the CPU: values are drawn there, so they are equal on all devices. Raises
    InputSpecError when it does not fit into memory.
    """
    if torch.device(device).type == "meta":
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    try:
        if spec.dtype in _FLOATS:
            drawn = torch.double if spec.dtype == torch.double else torch.float
            tensor = torch.randn(spec.shape, generator=generator, dtype=drawn)
        else:
            upper = spec.upper if spec.upper is not None else _UNBOUNDED_UPPER
            tensor = torch.randint(upper, spec.shape, generator=generator, dtype=torch.int64)
        return tensor.to(device=device, dtype=spec.dtype)
    except RuntimeError as exc:  # in practice: not enough memory
        raise InputSpecError(f"input {spec} cannot be made: {exc}. Use a smaller shape.") from exc


def make_inputs(
    specs: Iterable[TensorSpec], device: str | torch.device, seed: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """`(args, kwargs)` for the model: specs without a name in their order, the others by name.

    Raises InputSpecError when a name comes twice.
    """
    generator = torch.Generator().manual_seed(seed)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for spec in specs:
        if spec.name in kwargs:
            raise InputSpecError(f"input {spec.name!r} is given twice; name each keyword input once.")
        tensor = make_tensor(spec, device, generator)
        if spec.name is None:
            args.append(tensor)
        else:
            kwargs[spec.name] = tensor
    return tuple(args), kwargs


def forward_parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The named parameters of `module.forward` in order, without *args and **kwargs."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters
    return {name: p for name, p in parameters.items() if p.kind not in variadic}


def required_inputs(call: Callable[..., object]) -> list[str]:
    """The arguments that `call` cannot do without. Callables without a signature have none that is known."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]


def check_call(
    module: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    what: str = "these inputs",
    remedy: str | None = None,
) -> None:
    """Raise InputSpecError when `module(*args, **kwargs)` does not fit the signature of its forward; `what` and
    `remedy` speak of inputs that are no SPECs."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        given = f"{len(args)} positional" + (f" and {', '.join(kwargs)} by name" if kwargs else "")
        raise InputSpecError(
            f"{type(module).__name__}.forward{_short(signature)} does not take {what} ({given}): "
            f"{exc}. {remedy or f'Give one SPEC per required input: {GRAMMAR}.'}"
        ) from exc


def _short(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


# ---- default inputs of image models ------------------------------------------------------------------------


def image_spec(size: Sequence[int], *, batch: int = 8, channels: int = 3, name: str | None = None) -> TensorSpec:
    """float32[batch, channels, *size]: a batch of images, or of clips when `size` has frames in front."""
    return TensorSpec(torch.float32, (batch, channels, *size), None, name)


# ---- default inputs of transformers models -----------------------------------------------------------------

_MAX_LENGTH = 2048
_LENGTH_WITHOUT_POSITIONS = 512
_POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_source_positions", "max_seq_len")
_LANGUAGE_HEADS = (
    "ForCausalLM",
    "ForMaskedLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForPreTraining",
    "MTModel",
    "WithLMHead",
)
_CLASS_HEADS = tuple(f"For{kind}Classification" for kind in ("Sequence", "Image", "Audio", "Video"))
_CHOICES = 2
_CONFIG_PARTS = ("text_config", "decoder", "vision_config", "encoder", "backbone_config")


def name_positional(specs: Sequence[TensorSpec], module: nn.Module) -> dict[str, TensorSpec]:
    """Specs by the names of the forward's parameters: those without a name take the parameters in order.

    Raises InputSpecError for a name that forward lacks (it would vanish in **kwargs) or that comes twice, and
    for one input too many.
    """
    parameters = list(forward_parameters(module))
    kind = type(module).__name__
    if len(specs) > len(parameters):
        raise InputSpecError(f"{kind} takes at most {len(parameters)} inputs, got {len(specs)}.")
    named: dict[str, TensorSpec] = {}
    for index, spec in enumerate(specs):
        name = spec.name if spec.name is not None else parameters[index]
        if name not in parameters:
            hint = did_you_mean(name, parameters)
            raise InputSpecError(f"{kind} has no input {name!r}.{hint} Known: {', '.join(parameters)}.")
        if name in named:
            raise InputSpecError(f"input {name!r} of {kind} is given twice; name each input once.")
        named[name] = TensorSpec(spec.dtype, spec.shape, spec.upper, name)
    return named


def transformers_specs(module: Any, given: Mapping[str, TensorSpec], *, training: bool) -> dict[str, TensorSpec]:
    """The inputs of a `transformers` model by name: those `given`, the missing ones derived from its config.

    Text: `input_ids` int64[1, min(2048, positions)] below the vocabulary size; encoder-decoders get
    `decoder_input_ids` too. Images: `pixel_values` float[8, channels, *image_size]. Speech: `input_features`
    (log-mel, as in Whisper) or `input_values` (a second of 16 kHz sound, or a spectrogram). When training,
    the labels that make the model return a loss. Batch and length follow the given inputs, so
    `input_ids=int64[4,64]<100` also shapes the labels. Models that none of this fits fall back to their
    `dummy_inputs`, without labels. An unusable fallback raises InputSpecError.
    """
    parameters = forward_parameters(module)
    specs = dict(given)
    main = module.main_input_name
    if main not in specs:
        main_input = _main_input(module, main, parameters)
        if main_input is None:
            return _dummies(module, parameters) | specs
        specs[main] = main_input
    if "decoder_input_ids" in parameters and module.config.is_encoder_decoder:
        specs.setdefault("decoder_input_ids", _decoder_ids(module.config, specs[main]))
    if "return_loss" in parameters and "pixel_values" in parameters:
        specs.setdefault("pixel_values", _pixels(module, _image_size(module.config), specs[main].shape[0]))
    if training:
        for label in _labels(module, specs, parameters):
            if label.name in parameters:
                specs.setdefault(str(label.name), label)
    return specs


def _find(config: Any, *fields: str) -> Any:
    """The first positive value of any of `fields` in the config itself, then in its parts."""
    parts = (getattr(config, part, None) for part in _CONFIG_PARTS)
    for owner in (config, *parts):
        for field in fields:
            value = getattr(owner, field, None)
            if isinstance(value, list | tuple) or (isinstance(value, int) and value > 0):
                return value
    return None


def _float_dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.dtype in _FLOATS), torch.float32)


def _positions(module: nn.Module, config: Any) -> int:
    """How many positions the model has: a table with a padding row starts behind it (RoBERTa: 514 - 2)."""
    length = _find(config, *_POSITION_FIELDS) or _LENGTH_WITHOUT_POSITIONS
    for name, table in module.named_modules():
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings"):
            rows_before = 0 if table.padding_idx is None else table.padding_idx + 1
            length = min(length, table.num_embeddings - rows_before)
    return int(min(_MAX_LENGTH, length))


def _image_size(config: Any) -> tuple[int, ...]:
    size = _find(config, "image_size", "input_size")
    return tuple(size) if isinstance(size, list | tuple) else (size or 224,) * 2


def _pixels(module: Any, size: tuple[int, ...], batch: int) -> TensorSpec:
    channels = _find(module.config, "num_channels", "in_channels", "in_chans") or 3
    frames = (module.config.num_frames,) if getattr(module.config, "num_frames", None) else ()
    return TensorSpec(_float_dtype(module), (batch, *frames, channels, *size), None, "pixel_values")


def _main_input(module: Any, main: str, parameters: Mapping[str, object]) -> TensorSpec | None:
    config, floats = module.config, _float_dtype(module)
    vocabulary = _find(config, "vocab_size")
    mels, sources = _find(config, "num_mel_bins"), _find(config, "max_source_positions")
    if main == "pixel_values":
        return _pixels(module, _image_size(config), 2 if getattr(config, "num_frames", None) else 8)
    if main == "input_ids" and vocabulary:
        choices = (_CHOICES,) if type(module).__name__.endswith("ForMultipleChoice") else ()
        batch = 8 if "return_loss" in parameters else 1  # a contrastive loss compares the pairs of a batch
        return TensorSpec(torch.int64, (batch, *choices, _positions(module, config)), vocabulary, main)
    if main == "input_features" and mels and sources:
        # the encoder's second convolution has stride 2, so it reads two frames per position
        return TensorSpec(floats, (1, mels, 2 * sources), None, main)
    if main == "input_values" and _find(config, "conv_stride"):
        return TensorSpec(floats, (1, 16_000), None, main)
    if main == "input_values" and mels and _find(config, "max_length"):
        return TensorSpec(floats, (1, config.max_length, mels), None, main)
    return None


def _dummies(module: Any, parameters: Mapping[str, object]) -> dict[str, TensorSpec]:
    dummies = {name: _like_tensor(value, name) for name, value in module.dummy_inputs.items() if torch.is_tensor(value)}
    if not dummies or not dummies.keys() <= parameters.keys():
        raise InputSpecError(
            f"no default inputs are known for {type(module).__name__}. Give one SPEC per input ({GRAMMAR}); "
            f"its inputs: {', '.join(parameters)}."
        )
    return dummies


def _like_tensor(tensor: Tensor, name: str) -> TensorSpec:
    """The spec of a tensor like this one; integers keep the range up to the largest that occurs."""
    upper = int(tensor.max()) + 1 if tensor.dtype in _INTEGERS and tensor.numel() else None
    return TensorSpec(tensor.dtype, tuple(tensor.shape), upper if upper is None or upper > 0 else None, name)


def _decoder_ids(config: Any, main: TensorSpec) -> TensorSpec:
    vocabulary = _find(config, "decoder_vocab_size", "vocab_size")
    longest = _find(config, "max_target_positions", "max_position_embeddings") or _LENGTH_WITHOUT_POSITIONS
    length = min(_MAX_LENGTH, longest, main.shape[-1] if main.dtype == torch.int64 else longest)
    return TensorSpec(torch.int64, (main.shape[0], length), vocabulary, "decoder_input_ids")


def _labels(module: Any, specs: Mapping[str, TensorSpec], parameters: Mapping[str, object]) -> list[TensorSpec]:
    """What this head's loss reads. `transformers` names heads by the ending of the class name."""
    kind, config = type(module).__name__, module.config
    main = specs[module.main_input_name]
    batch, classes = main.shape[0], getattr(config, "num_labels", 2)
    text = specs.get("decoder_input_ids") or specs.get("input_ids")
    if kind.endswith(_LANGUAGE_HEADS) and text is not None:
        pairs = [name for name in ("next_sentence_label", "sentence_order_label") if name in parameters]
        # a pre-training head without a sentence task is a discriminator: was this token replaced or not
        upper = 2 if kind.endswith("ForPreTraining") and not pairs else text.upper
        sentences = [TensorSpec(torch.int64, (batch,), 2, name) for name in pairs]
        return [TensorSpec(torch.int64, text.shape, upper, "labels"), *sentences]
    if kind.endswith(_CLASS_HEADS):
        problem = getattr(config, "problem_type", None)
        if problem == "multi_label_classification" or problem == "regression" or classes == 1:
            shape = (batch,) if classes == 1 else (batch, classes)
            return [TensorSpec(_float_dtype(module), shape, None, "labels")]
        return [TensorSpec(torch.int64, (batch,), classes, "labels")]
    if kind.endswith("ForTokenClassification"):
        return [TensorSpec(torch.int64, main.shape, classes, "labels")]
    if kind.endswith("ForMultipleChoice"):
        return [TensorSpec(torch.int64, (batch,), main.shape[1], "labels")]
    if kind.endswith("ForNextSentencePrediction"):
        return [TensorSpec(torch.int64, (batch,), 2, "labels")]
    if kind.endswith("ForSemanticSegmentation"):
        return [TensorSpec(torch.int64, (batch, *main.shape[2:]), classes, "labels")]
    if kind.endswith("ForQuestionAnswering"):
        borders = ("start_positions", "end_positions")
        return [TensorSpec(torch.int64, (batch,), main.shape[-1], name) for name in borders]
    return []
