"""The precision plan: one decision per float-valued node, with its reasons, as a reviewable and replayable JSON file.

Shapes are lists of sizes, `flops` counts multiply and add apart, `bytes` is what the node reads and writes at the
planned formats, times are microseconds on the planned hardware, saved bytes are what the forward pass keeps for the
backward pass.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ..errors import NotCalibratedError, PlanFileError, PlanSchemaError
from ..hardware_db.schema import natural_accumulator
from .budget_text import parse_budget, parse_memory
from .files import write_atomically
from .keys import Phase
from .mesh_plan import MeshPlan
from .plan_fields import (
    GEMM_CLASSES,
    FormatName,
    KeyText,
    PlanModel,
    Reason,
    RecipeName,
    StaticRange,
    StoredName,
    first_error,
)
from .program import Program, Solution
from .rules import Rule, given_keys, parse_rules
from .solve import Solved, force, solve_program

SCHEMA = 2


class Decision(PlanModel):
    """What was decided for one node.

    `traced` is the format in which the model was written. `compute` is the format of the operands that are multiplied
    (or of the arithmetic, for other nodes), `recipe` how their scales are attached (`lhs/rhs`), `accumulate` the
    format of the running sum, `output` the format in which the result is stored. `static_range` is the smallest and the
    largest value that an operand with static steps was seen to take.
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
    static_range: StaticRange = None
    reason: Reason
    time_us: dict[FormatName, float]
    sensitivity: dict[FormatName, float] | None = None

    def same_formats(self, other: Decision) -> bool:
        """Whether another decision asks for the same formats and recipe."""
        mine = (self.compute, self.recipe, self.accumulate, self.output, self.static_range)
        return mine == (other.compute, other.recipe, other.accumulate, other.output, other.static_range)


class ModelInfo(PlanModel):
    """Which model a plan was made for."""

    source: str
    fingerprint: str
    nodes: int = Field(ge=0)


class Prediction(PlanModel):
    """Predicted step time and saved-activation bytes, with the plan and with everything in fp32."""

    time_us: float = Field(ge=0)
    time_us_fp32: float = Field(ge=0)
    saved_bytes: int | None = Field(default=None, ge=0)
    saved_bytes_fp32: int | None = Field(default=None, ge=0)


class Budget(PlanModel):
    """What the user allowed: `amount` as written (a share of 1) of the loss or of the outputs, and saved bytes."""

    amount: float | None = Field(default=None, ge=0)
    saved_bytes: int | None = Field(default=None, ge=0)


class PlanDifference(PlanModel):
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


class PrecisionPlan(PlanModel):
    """All decisions for one model on one device.

    `hardware_data` says, one sentence each, what a reader should know of the device's figures: recalled or estimated
    ones, the user's files that changed them, the measurement that replaced them. Empty where they are as published.
    With a `mesh` all shapes, times and bytes are those of one rank.
    """

    schema_version: Literal[2] = Field(default=2, alias="schema")
    dsmp: str
    torch: str
    hardware: str
    hardware_data: list[str] = Field(default_factory=list)
    model: ModelInfo
    budget: Budget | None = None
    prediction: Prediction
    mesh: MeshPlan | None = None
    solution: Solution | None = None
    program: Program | None = None
    rules: list[Rule] = Field(default_factory=list)
    nodes: list[Decision]

    model_config = PlanModel.model_config | {"populate_by_name": True}

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
        where = self.hardware
        if self.mesh is not None:
            where += f" x {' x '.join(f'{name} {size}' for name, size in self.mesh.mesh.items())}"
        return (
            f"PrecisionPlan({self.model.source} on {where}: {len(self.nodes)} nodes; "
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
        formats = [[d.key, d.compute, d.recipe, d.accumulate, d.output, *(d.static_range or ())] for d in self.nodes]
        text = json.dumps([SCHEMA, self.hardware, formats])
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON; the file is replaced in one step, so a reader never sees half a plan.

        A link stays a link: what it points to is replaced. Raises PlanFileError where no file can be written.
        """
        return write_atomically(path, self.to_json(), PlanFileError, "plan")

    def solve(
        self,
        *,
        budget: float | str | None = None,
        memory: int | str | None = None,
        rules: Mapping[str, str] | Iterable[Rule | Mapping[str, str]] | None = None,
    ) -> PrecisionPlan:
        """This plan solved again for another budget (a share of 1, or "0.5%"; see `Program.limit`), another memory
        (saved bytes, "2GB", or a share of what is saved as traced) or more rules, from what was measured for it.

        The result has no measured drift: nothing is run. Raises NotCalibratedError for a plan without measurements,
        BudgetError when no choice meets the budgets, RuleError and PlanHardwareError for rules that nothing can follow.
        """
        if self.program is None:
            raise NotCalibratedError(self.model.source)
        given = parse_rules(rules)
        amount = None if budget is None else parse_budget(budget)
        saved = parse_memory(memory, self.prediction.saved_bytes_fp32)
        program = self.program if not given else force(self.program, given_keys(given, self.program))
        solved = solve_program(
            program,
            drift=math.inf if amount is None else program.limit(amount),
            saved_bytes=math.inf if saved is None else saved,
        )
        solution = solved.solution
        return self.model_copy(
            update={
                "budget": Budget(amount=amount, saved_bytes=saved),
                "prediction": self.prediction.model_copy(
                    update={"time_us": round(solution.time_us, 3), "saved_bytes": solution.saved_bytes}
                ),
                "solution": solution,
                "program": program,
                "rules": [*self.rules, *given],
                "nodes": follow(self.nodes, program, solved),
            }
        )

    def diff(self, other: PrecisionPlan) -> list[PlanDifference]:
        """The nodes on which `other` decides otherwise, in this plan's order, then what only `other` has."""
        keys = [*self.by_key, *(k for k in other.by_key if k not in self.by_key)]
        found = []
        for key in keys:
            before, after = self.by_key.get(key), other.by_key.get(key)
            if before is None or after is None or not before.same_formats(after):
                found.append(PlanDifference(key=key, before=before, after=after))
        return found


def follow(decisions: Iterable[Decision], program: Program, solved: Solved) -> list[Decision]:
    """Decisions brought in line with a solved program; a view takes the format of what it reads."""
    stored: dict[str, str] = {}
    found = []
    for d in decisions:
        chosen = solved.chosen.get(d.key)
        if chosen is not None:
            times: dict[str, float] = {}
            drifts: dict[str, float] = {}
            for c in program.candidates[d.key]:
                name = c.compute if d.op in GEMM_CLASSES else c.output
                times[name] = min(round(c.time_us, 3), times.get(name, math.inf))
                if c.drift is not None:
                    drifts[name] = min(c.drift, drifts.get(name, math.inf))
            changed = {
                "compute": chosen.compute, "recipe": chosen.recipe, "accumulate": chosen.accumulate,
                "output": chosen.output, "static_range": chosen.static_range, "bytes": chosen.bytes,
                "reason": solved.reasons[d.key], "time_us": times, "sensitivity": drifts or None,
            }  # fmt: skip
            d = d.model_copy(update=changed)
        elif d.op == "view" and (sources := program.reads.get(d.key)) and sources[0] in stored:
            held = stored[sources[0]]
            update = {"compute": held, "accumulate": natural_accumulator(held), "output": held}
            d = d.model_copy(update=update)
        stored[d.key] = d.output
        found.append(d)
    return found


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
        raise PlanSchemaError(f"plan {source}: {first_error(error)}{tail}.") from None
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
