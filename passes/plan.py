"""The precision plan: one decision per float-valued node, with its reasons, as a reviewable and replayable JSON file.

Shapes are lists of sizes, `flops` counts multiply and add apart, `bytes` is what the node reads and writes at the
planned formats, times are microseconds on the planned hardware, saved bytes are what the forward pass keeps for the
backward pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import DsmpError, PlanFileError, PlanSchemaError, RuleError
from ..hardware_db.formats import get_format, split_recipe
from .keys import NodeKey, Phase

SCHEMA = 1
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


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Reason(_Model):
    """Why a decision was taken: a short code that programs can group by and one sentence for people."""

    code: str
    text: str


class Decision(_Model):
    """What was decided for one node.

    `traced` is the format in which the model was written. `compute` is the format of the operands that are multiplied
    (or of the arithmetic, for other nodes), `recipe` how their scales are attached (`lhs/rhs`), `accumulate` the
    format of the running sum, `output` the format in which the result is stored.
    """

    key: KeyText
    op: str
    aten: str
    phase: Phase
    module: str
    shapes: list[list[int]]
    flops: int = Field(ge=0)
    bytes: int = Field(ge=0)
    traced: FormatName = "fp32"
    compute: FormatName
    recipe: RecipeName = "none"
    accumulate: FormatName
    output: StoredName
    reason: Reason
    time_us: dict[FormatName, float]
    sensitivity: dict[FormatName, float] | None = None

    def same_formats(self, other: Decision) -> bool:
        """Whether another decision asks for the same formats and recipe."""
        mine = (self.compute, self.recipe, self.accumulate, self.output)
        return mine == (other.compute, other.recipe, other.accumulate, other.output)


class Rule(_Model):
    """A user's rule: nodes whose key matches the glob `match` compute in `format`. The last matching rule wins."""

    match: str
    format: FormatName

    def applies(self, key: str) -> bool:
        return fnmatchcase(key, self.match)


class ModelInfo(_Model):
    """Which model a plan was made for."""

    source: str
    fingerprint: str
    nodes: int = Field(ge=0)


class Prediction(_Model):
    """Predicted step time and saved-activation bytes, with the plan and with everything in fp32."""

    time_us: float = Field(ge=0)
    time_us_fp32: float = Field(ge=0)
    saved_bytes: int | None = Field(default=None, ge=0)
    saved_bytes_fp32: int | None = Field(default=None, ge=0)


class PlanDifference(_Model):
    """One node on which two plans differ; None where a plan lacks the node."""

    key: str
    before: Decision | None
    after: Decision | None

    def __str__(self) -> str:
        def side(d: Decision | None) -> str:
            if d is None:
                return "absent"
            recipe = "" if d.recipe == "none" else f" {d.recipe}"
            return f"{d.compute}{recipe} -> {d.output}"

        return f"{self.key}: {side(self.before)}  =>  {side(self.after)}"


class PrecisionPlan(_Model):
    """All decisions for one model on one device.

    `hardware_data` says, one sentence each, what a reader should know of the device's figures: recalled or estimated
    ones, the user's files that changed them, the measurement that replaced them. Empty where they are as published.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    dsmp: str
    torch: str
    hardware: str
    hardware_data: list[str] = Field(default_factory=list)
    model: ModelInfo
    budget: float | None = None
    prediction: Prediction
    rules: list[Rule] = Field(default_factory=list)
    nodes: list[Decision]

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @cached_property
    def by_key(self) -> Mapping[str, Decision]:
        """Decisions by node key."""
        return {d.key: d for d in self.nodes}

    def __iter__(self) -> Iterator[Decision]:  # type: ignore[override]
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        p = self.prediction
        counts: dict[str, int] = {}
        for d in self.nodes:
            if d.flops and d.op in GEMM_CLASSES:
                counts[d.compute] = counts.get(d.compute, 0) + d.flops
        total = sum(counts.values()) or 1
        shares = ", ".join(f"{f} {100 * c / total:.1f}%" for f, c in sorted(counts.items(), key=lambda i: -i[1]))
        speed = p.time_us_fp32 / p.time_us if p.time_us else 1.0
        return (
            f"PrecisionPlan({self.model.source} on {self.hardware}: {len(self.nodes)} nodes; "
            f"GEMM FLOPs {shares or 'none'}; predicted {p.time_us:,.0f} us, {speed:.2f}x as fast as fp32)"
        )

    __str__ = __repr__

    def to_json(self) -> str:
        """The plan as JSON text, in a stable order, one node a line, so that two plans can be compared line by line."""
        data = self.model_dump(mode="json", by_alias=True)
        nodes = data.pop("nodes")
        head = json.dumps(data, indent=1, ensure_ascii=False)[:-2]
        lines = ",\n".join("  " + json.dumps(n, ensure_ascii=False) for n in nodes)
        return f'{head},\n "nodes": [\n{lines}\n ]\n}}\n'

    @cached_property
    def digest(self) -> str:
        """A hash of the decisions: two plans with one digest compile to the same graph."""
        formats = [[d.key, d.compute, d.recipe, d.accumulate, d.output] for d in self.nodes]
        text = json.dumps([SCHEMA, self.hardware, formats])
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON; the file is replaced in one step, so a reader never sees half a plan.

        A link stays a link: what it points to is replaced. Raises PlanFileError where no file can be written.
        """
        target = Path(os.path.realpath(path))
        if target.is_dir() or not target.parent.is_dir():
            what = "is a folder" if target.is_dir() else "has no folder to lie in"
            raise PlanFileError(f"plan {os.fspath(path)!r}: {what}. Name a file in an existing folder.")
        try:
            return self._replace(target)
        except OSError as error:
            raise PlanFileError(
                f"plan {os.fspath(path)!r}: cannot be written ({error.strerror or error}). Name a file you may write."
            ) from error

    def _replace(self, target: Path) -> Path:
        if target.exists():
            mode = target.stat().st_mode & 0o777
        else:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
        fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return target

    def diff(self, other: PrecisionPlan) -> list[PlanDifference]:
        """The nodes on which `other` decides otherwise, in this plan's order, then what only `other` has."""
        keys = [*self.by_key, *(k for k in other.by_key if k not in self.by_key)]
        found = []
        for key in keys:
            before, after = self.by_key.get(key), other.by_key.get(key)
            if before is None or after is None or not before.same_formats(after):
                found.append(PlanDifference(key=key, before=before, after=after))
        return found


GEMM_CLASSES = frozenset({"linear", "matmul", "conv", "sdpa", "grouped_mm"})


def parse_rules(rules: Mapping[str, str] | Iterable[Rule | Mapping[str, str]] | str | None) -> list[Rule]:
    """Rules from what a user writes: `{glob: format}` or a list of `{"match": glob, "format": name}`.

    Raises RuleError naming the faulty rule and what is allowed.
    """
    if rules is None:
        return []
    if isinstance(rules, str):
        raise RuleError(
            f"rules {rules!r} are text; allowed: {{glob: format}} or a list of {{'match': glob, 'format': name}}."
        )
    items: Sequence[Any]
    try:
        items = [{"match": m, "format": f} for m, f in rules.items()] if isinstance(rules, Mapping) else list(rules)
        return [r if isinstance(r, Rule) else Rule.model_validate(r) for r in items]
    except (ValidationError, TypeError) as error:
        detail = _first_error(error) if isinstance(error, ValidationError) else str(error)
        raise RuleError(
            f"rules {rules!r}: {detail}. Allowed: {{glob: format}} or a list of {{'match': glob, 'format': name}}, "
            "the glob over keys such as 'layers.*.mlp.*|fprop|linear|*'."
        ) from None


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"])
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    expected = first.get("ctx", {}).get("expected")
    allowed = f" (allowed: {expected})" if expected else ""
    return f"field {where or '(top)'}: {message}{allowed}"


def load_plan(path: str | os.PathLike[str]) -> PrecisionPlan:
    """Read a plan file.

    Raises PlanSchemaError with the field and what it may hold, or saying that the file is missing or no JSON.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanSchemaError(
            f"plan {source}: cannot be read ({error}). Give the path of a file `dsmp plan -o` wrote."
        ) from None
    return parse_plan(text, str(source))


def parse_plan(text: str, source: str = "<text>") -> PrecisionPlan:
    """A plan from JSON text; `source` names it in errors. Raises PlanSchemaError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError also for a number of thousands of digits
        raise PlanSchemaError(f"plan {source}: no JSON ({error}). Write plans with `dsmp plan -o plan.json`.") from None
    if not isinstance(data, dict):
        raise PlanSchemaError(f"plan {source}: a {type(data).__name__} where an object with a 'nodes' list belongs.")
    if data.get("schema") != SCHEMA:
        raise PlanSchemaError(
            f"plan {source}: field schema is {data.get('schema')!r}; this version reads {SCHEMA}. Make the plan anew."
        )
    try:
        plan = PrecisionPlan.model_validate(data)
    except ValidationError as error:
        more = error.error_count() - 1
        tail = f"; {more} more" if more else ""
        raise PlanSchemaError(f"plan {source}: {_first_error(error)}{tail}.") from None
    if len(plan.by_key) != len(plan.nodes):
        seen: set[str] = set()
        double = next(d.key for d in plan.nodes if d.key in seen or seen.add(d.key))  # type: ignore[func-returns-value]
        raise PlanSchemaError(f"plan {source}: key {double!r} stands twice; every node key may appear once.")
    return plan


def fingerprint(entries: Iterable[tuple[str, str, Sequence[Sequence[int]]]]) -> str:
    """Hash over (key, operator, shapes) of all planned nodes: the identity of a captured model."""
    digest = hashlib.sha256()
    for key, aten, shapes in sorted((k, a, [list(s) for s in sh]) for k, a, sh in entries):
        digest.update(json.dumps([key, aten, shapes]).encode())
    return digest.hexdigest()[:16]
