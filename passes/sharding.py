"""Where every parameter, input and output of a model lies on a mesh of devices: the sharding part of a plan.

Placements are written as in DTensor's own text, `replicate` or `shard(DIM)`, per named mesh dimension. A parameter has
up to three of them: where it is stored, how it is computed with, and where its gradient ends. On mesh dimensions in
`gathered` (data parallel ones) a stored shard is gathered before use, so (stored, gradient) there is the ZeRO stage:
(replicate, replicate) is 1 or none, (replicate, shard) 2, (shard, shard) 3.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..errors import ShardingPlanError, did_you_mean

_RULES = ("parameters", "inputs", "outputs")
_SHARD = re.compile(r"shard\((-?\d+)\)")

Placements = tuple[Placement, ...]


def placement(text: str) -> Placement:
    """`replicate` or `shard(DIM)` as a placement. Raises ShardingPlanError on any other text."""
    if text == "replicate":
        return Replicate()
    found = _SHARD.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ShardingPlanError(f"{text!r} is no placement; allowed: 'replicate' and 'shard(DIM)', e.g. 'shard(0)'.")
    return Shard(int(found[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingRule:
    """A glob over names, and placements per mesh dimension; `gradients` where they differ from the parameter's."""

    pattern: str
    placements: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ShardingPlanError(f"a sharding rule has the pattern {self.pattern!r}; allowed: a glob over names.")
        for kind in (self.placements, self.gradients):
            if not isinstance(kind, Mapping):
                raise ShardingPlanError(
                    f"the sharding rule {self.pattern!r} has {kind!r}; allowed: placements by mesh dimension, such as "
                    "{'tp': 'shard(0)'}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """Rules for parameters (and buffers), inputs and outputs; of the rules that match a name the last wins, per mesh
    dimension, and what no rule names is replicated.

    `mesh` gives the ranks of each mesh dimension, outermost first. Inputs are named by the argument they belong to
    (`ids`, `batch.mask`), outputs by their position. Parameters that a glob in `local` matches (experts) are computed
    with as they are stored on all mesh dimensions, which then exchange rows of tokens in place of weights. On mesh
    dimensions in `sequence` the values between tensor-parallel regions hold a part of each sequence (dimension 1).
    """

    mesh: Mapping[str, int]
    parameters: tuple[ShardingRule, ...] = ()
    inputs: tuple[ShardingRule, ...] = ()
    outputs: tuple[ShardingRule, ...] = ()
    gathered: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.mesh.values() if isinstance(self.mesh, Mapping) else (0,)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise ShardingPlanError(
                f"mesh is {self.mesh!r}; allowed: ranks by dimension, such as {{'dp': 2, 'tp': 4}}."
            )
        for kind in _RULES:
            rules = getattr(self, kind)
            if not isinstance(rules, (tuple, list)) or not all(isinstance(r, ShardingRule) for r in rules):
                raise ShardingPlanError(f"the rules for {kind} are {rules!r}; allowed: a list of dsmp.ShardingRule.")
        rules = (*self.parameters, *self.inputs, *self.outputs)
        named = [*self.gathered, *self.sequence, *(d for r in rules for d in (*r.placements, *r.gradients))]
        for dim in named:
            if dim not in self.mesh:
                known = ", ".join(self.mesh)
                hint = did_you_mean(dim, self.mesh)
                raise ShardingPlanError(f"the mesh has no dimension {dim!r}; it has {known}. {hint}".rstrip())
        for rule in rules:
            for text in (*rule.placements.values(), *rule.gradients.values()):
                placement(text)

    @property
    def dims(self) -> tuple[tuple[str, int], ...]:
        """(name, ranks) per mesh dimension."""
        return tuple(self.mesh.items())

    def stored(self, name: str) -> Placements:
        """How a parameter or buffer lies in memory between steps."""
        return self._placements(self.parameters, name)

    def computed(self, name: str) -> Placements:
        """How a parameter or buffer is computed with: as it is stored, whole on the `gathered` mesh dimensions."""
        if self.is_local(name):
            return self.stored(name)
        pairs = zip(self.stored(name), self.mesh, strict=True)
        return tuple(Replicate() if dim in self.gathered else p for p, dim in pairs)

    def is_local(self, name: str) -> bool:
        """Whether a parameter is never gathered."""
        return any(fnmatchcase(name, pattern) for pattern in self.local)

    @property
    def expert_dims(self) -> tuple[str, ...]:
        """Mesh dimensions that divide parameters which are never gathered."""
        rules = [r for r in self.parameters if r.pattern in self.local]
        return tuple(d for d in self.mesh if any(r.placements.get(d, "replicate") != "replicate" for r in rules))

    @property
    def whole_dims(self) -> tuple[str, ...]:
        """Mesh dimensions whose ranks compute with the same samples."""
        return tuple(d for d in self.mesh if d not in self.gathered)

    def gradient(self, name: str) -> Placements:
        """Where a parameter's gradient ends."""
        own = self._found(self.parameters, name, "gradients")
        return tuple(placement(own[d]) if d in own else p for d, p in zip(self.mesh, self.stored(name), strict=True))

    def input(self, name: str) -> Placements:
        return self._placements(self.inputs, name)

    def output(self, position: int) -> Placements:
        return self._placements(self.outputs, str(position))

    def check_names(self, parameters: Iterable[str], inputs: Iterable[str]) -> None:
        """Raise ShardingPlanError when a rule for parameters or inputs, or a glob in `local`, matches nothing."""
        names_of_parameters = tuple(parameters)
        for rules, names, kind in (
            (self.parameters, names_of_parameters, "parameter or buffer"),
            (self.inputs, tuple(inputs), "input"),
        ):
            for rule in rules:
                if rule.pattern != "*" and not any(fnmatchcase(n, rule.pattern) for n in names):
                    hint = did_you_mean(rule.pattern, names) or f"there are {', '.join(names[:8])}"
                    raise ShardingPlanError(f"no {kind} matches the rule {rule.pattern!r} of the sharding plan; {hint}")
        for pattern in self.local:
            if not any(fnmatchcase(n, pattern) for n in names_of_parameters):
                hint = did_you_mean(pattern, names_of_parameters) or f"there are {', '.join(names_of_parameters[:8])}"
                raise ShardingPlanError(f"no parameter matches {pattern!r} in local of the sharding plan; {hint}")

    def with_rules(self, rules: Sequence[ShardingRule]) -> ShardingPlan:
        """This plan with rules for parameters that win over its own."""
        if not isinstance(rules, (tuple, list)):
            raise ShardingPlanError(f"rules is {rules!r}; allowed: a list of dsmp.ShardingRule.")
        return replace(self, parameters=(*self.parameters, *rules))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardingPlan:
        """The inverse of `to_dict`. Raises ShardingPlanError on unknown or missing fields."""
        try:
            rules: Any = {k: tuple(ShardingRule(**r) for r in values.get(k, ())) for k in _RULES}
            names: Any = {k: tuple(values.get(k, ())) for k in ("gathered", "local", "sequence")}
            unknown = set(values) - {"mesh", *rules, *names}
            if unknown:
                raise ShardingPlanError(f"a sharding plan has no field {', '.join(sorted(unknown))}.")
            return cls(mesh={k: int(v) for k, v in values["mesh"].items()}, **rules, **names)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ShardingPlanError(f"this is no sharding plan: {error!r}.") from error

    def digest(self) -> str:
        """A hash that is equal exactly when two plans are."""
        text = json.dumps([self.dims, self.to_dict()], sort_keys=True)  # the order of mesh dimensions counts, too
        return hashlib.sha256(text.encode()).hexdigest()

    def _placements(self, rules: Sequence[ShardingRule], name: str) -> Placements:
        own = self._found(rules, name, "placements")
        return tuple(placement(own.get(dim, "replicate")) for dim in self.mesh)

    @staticmethod
    def _found(rules: Sequence[ShardingRule], name: str, part: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for rule in rules:
            if fnmatchcase(name, rule.pattern):
                found.update(getattr(rule, part))
        return found
