"""The vocabulary of plan files: checked names of formats, recipes and node keys, and the reason of a decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from ..errors import DsmpError
from ..hardware_db.formats import get_format, split_recipe
from .keys import NodeKey
from .static_steps import has_steps

GEMM_CLASSES = frozenset({"linear", "matmul", "conv", "sdpa", "grouped_mm"})
STORED_FORMATS = ("fp64", "fp32", "bf16", "fp16")


def _known_format(name: str) -> str:
    return _as_value_error(get_format, name)


def _stored_format(name: str) -> str:
    if _known_format(name) not in STORED_FORMATS:
        raise ValueError(f"results are stored in one of {', '.join(STORED_FORMATS)}, not in {name!r}")
    return name


def _known_recipe(text: str) -> str:
    return _as_value_error(split_recipe, text)


def _known_key(text: str) -> str:
    NodeKey.parse(text)
    return text


def _as_value_error(check: Any, text: str) -> str:
    try:
        check(text)
    except DsmpError as error:
        raise ValueError(str(error)) from None
    return text


FormatName = Annotated[str, AfterValidator(_known_format)]
StoredName = Annotated[str, AfterValidator(_stored_format)]
RecipeName = Annotated[str, AfterValidator(_known_recipe)]
KeyText = Annotated[str, AfterValidator(_known_key)]


def _a_range(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    if ends is not None and ends[0] > ends[1]:
        raise ValueError(f"a range goes from its smallest to its largest value, not from {ends[0]:g} to {ends[1]:g}")
    if ends is not None and not has_steps(*ends):
        raise ValueError(f"values from {ends[0]:g} to {ends[1]:g} have no steps: the range must reach a normal number")
    return ends


StaticRange = Annotated[tuple[float, float] | None, AfterValidator(_a_range)]


class PlanModel(BaseModel):
    """Base of everything in a plan file: no unknown fields, no NaN, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what has static steps has a range to write down, only a rule that names one a recipe."""
        data: dict[str, Any] = handler(self)
        for name in ("static_range", "recipe"):
            if data.get(name, 0) is None:
                del data[name]
        return data

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, which remembers nothing that was computed from the old ones."""
        copied = super().model_copy(update=update, deep=deep)
        for name in [n for n in copied.__dict__ if n not in type(self).model_fields]:
            del copied.__dict__[name]
        return copied


class Reason(PlanModel):
    """Why a decision was taken: a short code that programs can group by and one sentence for people."""

    code: str
    text: str


def first_error(error: ValidationError) -> str:
    """What is wrong with a plan, rule or field, and what it may hold, from what pydantic says."""
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"])
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    expected = first.get("ctx", {}).get("expected")
    allowed = f" (allowed: {expected})" if expected else ""
    return f"field {where or '(top)'}: {message}{allowed}"
