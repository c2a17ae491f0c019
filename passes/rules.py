"""A user's rules: which format, and if they like which recipe, the nodes of a glob take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

from pydantic import ValidationError, model_validator

from ..errors import RuleError
from ..hardware_db.formats import is_static, packs_weight, split_recipe
from .keys import NodeKey
from .labels import SCORED_ARITHMETIC
from .plan_fields import GEMM_CLASSES, STORED_FORMATS, FormatName, PlanModel, RecipeName, first_error
from .program import Program

CONCERNS = "tf32, formats below 16 bits and recipes are for GEMMs, recipes with wide or dynamic for linears"
"""Which nodes a rule can be for."""


class Rule(PlanModel):
    """A user's rule: nodes whose key matches the glob `match` compute in `format`. The last matching rule wins.

    `recipe` (activation/weight) is the device's own where none is given; `"int8 wide/row"` as a format gives both.
    """

    match: str
    format: FormatName
    recipe: RecipeName | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, data: Any) -> Any:
        text = data.get("format") if isinstance(data, Mapping) else None
        if not isinstance(text, str) or "recipe" in data or len(parts := text.split()) != 2:
            return data
        return {**data, "format": parts[0], "recipe": parts[1]}

    @model_validator(mode="after")
    def _scales_fit(self) -> Self:
        if self.recipe is None:
            return self
        if is_static(self.recipe):
            raise ValueError("the steps of static recipes come from calibration: budgets choose them, rules do not")
        if (self.format, self.recipe) not in SCORED_ARITHMETIC:
            known = [r for f, r in SCORED_ARITHMETIC if f == self.format and r != "none" and not is_static(r)]
            raise ValueError(f"{self.format} takes {' or '.join(known) or 'no recipe'}, not {self.recipe!r}")
        return self

    def __str__(self) -> str:
        return f"{self.match} → {self.asked}"

    @property
    def asked(self) -> str:
        """The format with its recipe, as a user writes it."""
        return self.format if self.recipe is None else f"{self.format} {self.recipe}"

    def fits(self, compute: str, recipe: str) -> bool:
        """Whether a GEMM's format and recipe are what is asked for; its operands may come in the other order."""
        scales = self.recipe is None or set(split_recipe(self.recipe)) == set(split_recipe(recipe))
        return compute == self.format and scales

    def applies(self, key: str) -> bool:
        """Whether the glob matches a node's key."""
        return fnmatchcase(key, self.match)

    def concerns(self, key: str) -> bool:
        """Whether the glob matches a node's key and the node is of a kind that can follow the rule."""
        if not self.applies(key):
            return False
        op = NodeKey.parse(key).op
        if self.recipe is not None and packs_weight(self.recipe):
            return op == "linear"
        return op in GEMM_CLASSES or (self.recipe is None and self.format in STORED_FORMATS)


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
        detail = first_error(error) if isinstance(error, ValidationError) else str(error)
        raise RuleError(
            f"rules {rules!r}: {detail}. Allowed: {{glob: format}} or a list of {{'match': glob, 'format': name}}, "
            "the glob over keys such as 'layers.*.mlp.*|fprop|linear|*'."
        ) from None


def given_keys(rules: Sequence[Rule], program: Program) -> list[tuple[Rule, list[str]]]:
    """Each rule with the keys of a program that it forces: the last rule that concerns a key. Raises RuleError for a
    rule that no node can follow."""
    found: list[tuple[Rule, list[str]]] = [(r, []) for r in rules]
    for key in program.keys:
        last = next((i for i in reversed(range(len(rules))) if rules[i].concerns(key)), None)
        if last is not None:
            found[last][1].append(key)
    for rule in rules:
        if not any(rule.concerns(k) for k in program.keys):
            raise nothing_follows(rule, program.keys[0])
    return found


def nothing_follows(rule: Rule, example: str) -> RuleError:
    """The error of a rule that no node can follow; `example` is a node's key."""
    return RuleError(
        f"rule {rule.match!r} -> {rule.asked} matches no node that can follow it ({CONCERNS}). Keys have the form "
        f"fqn|phase|op|ordinal, for example {example!r}."
    )
