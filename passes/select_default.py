"""Decide without calibration: the device's tier, the op-rule table, vetoes, verdicts and the cost model.

For a GEMM the device's ladder is walked from the most aggressive choice down. A choice is passed over when it is no
narrower than the traced dtype, when a veto bars it, when the device's verdict refuses it, or, for 8-bit formats and for
inference on CPUs, when converting its operands costs more than the faster multiplication saves. On a calibrated device
a format whose GEMMs of about this shape were measured to be no faster than fp32's is passed over as well. What was
passed over, and why, is told in the reason. Every other operator keeps its traced precision; its result is stored in
the tier's storage format when only narrow GEMMs read it. User rules come last and win.

This module writes decisions and never touches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from torch import fx

from ..hardware_db.capability import Device
from ..hardware_db.formats import get_format, keeps_wide, packs_weight, split_recipe
from ..hardware_db.schema import Choice, OpClass, natural_accumulator
from .cast_motion import operand_storage
from .cost import CostModel, format_of
from .dataflow import readers
from .forced import forced_choice, require
from .gemm import gemm_op, operand_nodes
from .graph import FLOAT_DTYPES, calls, float_dtype, is_joint, root, shape_of, tensors_of, value_of
from .keys import WGRAD, NodeKey, key_of
from .op_rules import Policy, class_of, is_known, rule_of
from .plan import Decision
from .plan_fields import Reason
from .rules import Rule
from .vetoes import Veto, find_vetoes
from .workload import flops_of, gemm_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The decisions for one graph and the predicted time of one pass over it, as planned and as traced; `traced_us`
    has the latter node by node, in the order of the decisions."""

    decisions: list[Decision]
    time_us: float
    traced_us: list[float]

    @property
    def time_us_traced(self) -> float:
        """The time of everything as traced."""
        return sum(self.traced_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Formats:
    """The formats of one node before costs are known."""

    compute: str
    recipe: str
    accumulate: str
    output: str
    reason: Reason
    time_us: dict[str, float] = field(default_factory=dict)


def select_default(
    gm: fx.GraphModule, device: Device, *, parameters: frozenset[fx.Node], rules: Sequence[Rule] = ()
) -> Selection:
    """Decide for every keyed node of a joint or inference graph.

    Raises PlanHardwareError when a rule asks for a format that the device cannot do.
    """
    return _Selector(gm, device, parameters, rules).run()


class _Selector:
    def __init__(
        self, gm: fx.GraphModule, device: Device, parameters: frozenset[fx.Node], rules: Sequence[Rule]
    ) -> None:
        self.device = device
        self.parameters = parameters
        self.rules = rules
        self.cost = CostModel(device, parameters)
        self.nodes = [(n, k) for n in calls(gm) if (k := key_of(n)) is not None]
        self.joint = is_joint(gm)
        self.vetoes = find_vetoes(gm)
        self.formats: dict[fx.Node, _Formats] = {}
        self.flops = {n: flops_of(n) for n, _ in self.nodes}

    def run(self) -> Selection:
        for node, key in self.nodes:
            if rule_of(node).policy is Policy.LADDER:
                self.formats[node] = self._gemm(node, key)
        for node, key in reversed(self.nodes):
            if rule_of(node).policy is Policy.KEEP:
                self.formats[node] = self._kept(node, key)
        for node, _ in self.nodes:
            if rule_of(node).policy is Policy.VIEW:
                self.formats[node] = self._view(node)
        return self._priced()

    # GEMMs

    def _gemm(self, node: fx.Node, key: NodeKey) -> _Formats:
        traced = _traced(node)
        forced = self._forced(str(key))
        if forced is not None:
            return self._gemm_forced(node, key, traced, forced)
        refusals: list[str] = []
        allowed = [c for c in self._ladder(node, key) if self._allowed(node, key, traced, c, refusals)]
        allowed.append(Choice(format=traced, accumulate=natural_accumulator(traced)))
        flops = self.flops[node]
        times = {c.format: self._gemm_time(node, key, traced, flops, c) for c in reversed(allowed)}
        chosen = allowed[0]
        code = "tier"
        paying = self._paying(allowed, times)
        if paying != chosen:
            extra = "quantisation" if get_format(chosen.format).storage_bits <= 8 else "casts"
            refusals.append(
                f"{chosen.format} does not pay: {1e6 * times[chosen.format]:.1f} us with {extra}, "
                f"{paying.format} takes {1e6 * times[paying.format]:.1f} us"
            )
            chosen, code = paying, "cost"
        if code == "tier" and refusals:
            code = self._refusal_code(node, key, traced)
        text = f"{self.device.id} tier for {key.op}: {chosen.format}"
        if chosen.format == traced:
            text = f"kept in {traced} as traced"
            verdict = self.device.supports(_class(key), None, traced, chosen.accumulate)
            if not verdict.ok:
                timed = "" if self.device.rated(traced, chosen.accumulate) else ", timed as fp32"
                refusals.append(f"emulated{timed}: {verdict.reason.rstrip('.')}")
        elif chosen.recipe != "none":
            text += f" scaled {self._recipe(node, chosen)}"
        text += "".join(f"; {r}" for r in refusals)
        return _Formats(
            compute=chosen.format,
            recipe=self._recipe(node, chosen),
            accumulate=chosen.accumulate,
            output=self._gemm_output(key, traced, chosen.format),
            reason=Reason(code=code if chosen.format != traced or refusals else "tier", text=text),
            time_us={f: 1e6 * t for f, t in times.items()},
        )

    def _paying(self, allowed: Sequence[Choice], times: Mapping[str, float]) -> Choice:
        """The first choice that is faster than the next wider one. Down to 16 bits the tier decides, but for inference
        on CPUs: a product of few rows does not earn back that its weights are converted at every call."""
        for choice, wider in pairwise(allowed):
            bits = get_format(choice.format).storage_bits
            if bits <= 8:
                wider = next(c for c in allowed if get_format(c.format).storage_bits > 8)
            elif self.device.kind != "cpu" or self.joint:
                return choice
            if times[choice.format] < times[wider.format]:
                return choice
        return allowed[-1]

    def _allowed(self, node: fx.Node, key: NodeKey, traced: str, choice: Choice, refusals: list[str]) -> bool:
        if not _narrower(choice.format, traced):
            return False
        for veto in self.vetoes.get(key, ()):
            if veto.bars(choice.format):
                refusals.append(f"no {choice.format}: {veto.text}")
                return False
        slow = self._slower(node, choice.format, choice.accumulate) if traced == "fp32" else None
        if slow is not None:
            refusals.append(
                f"no {choice.format}: GEMMs of about this shape measured {slow:.2g} times as fast as fp32's "
                f"({', '.join(self.device.overlays)})"
            )
            return False
        verdict = self.device.supports(_class(key), None, choice.format, choice.accumulate)
        if not verdict.ok:
            refusals.append(verdict.reason.rstrip("."))
        return verdict.ok

    def _ladder(self, node: fx.Node, key: NodeKey) -> tuple[Choice, ...]:
        """The device's ladder, below the 16-bit formats that were measured to be slow and so must be spoken of."""
        ladder = self.device.ladder(_class(key))
        named = {c.format for c in ladder}
        slow = [f for f in ("bf16", "fp16") if f not in named and self._slower(node, f) is not None]
        return (*map(Choice, slow), *ladder)

    def _slower(self, node: fx.Node, format_name: str, accumulate: str | None = None) -> float | None:
        """How fast a format was measured to be near this GEMM's shape, in terms of fp32, if no faster."""
        if self.device.measured is None:
            return None
        return self.device.slower_than_fp32(format_name, accumulate, gemm_shape(node))

    def _refusal_code(self, node: fx.Node, key: NodeKey, traced: str) -> str:
        ladder = [c for c in self._ladder(node, key) if _narrower(c.format, traced)]
        barring: list[Veto] = [v for v in self.vetoes.get(key, ()) if ladder and v.bars(ladder[0].format)]
        if barring:
            return barring[0].code
        measured = ladder and self._slower(node, ladder[0].format, ladder[0].accumulate) is not None
        return "measured" if measured else "verdict"

    def _gemm_forced(self, node: fx.Node, key: NodeKey, traced: str, rule: Rule) -> _Formats:
        choice = forced_choice(
            rule, node, str(key), _class(key), traced, self.device, self.parameters, training=self.joint
        )
        flops = self.flops[node]
        choices = {c.format: c for c in (choice, Choice(format=traced, accumulate=natural_accumulator(traced)))}
        return _Formats(
            compute=choice.format,
            recipe=self._recipe(node, choice) if choice.format != traced else "none",
            accumulate=choice.accumulate,
            output=traced if packs_weight(choice.recipe) else self._gemm_output(key, traced, choice.format),
            reason=Reason(code="rule", text=f"the rule {rule.match!r} asks for {rule.asked}"),
            time_us={f: 1e6 * self._gemm_time(node, key, traced, flops, c) for f, c in choices.items()},
        )

    def _gemm_time(self, node: fx.Node, key: NodeKey, traced: str, flops: int, choice: Choice) -> float:
        """Predicted seconds; a traced format of which nothing is known is timed as fp32, in which it is emulated."""
        if keeps_wide(choice.recipe):
            return self.cost.narrow_weights_time(node, flops, choice.format, traced)
        if not self.device.rated(choice.format, choice.accumulate):
            choice = Choice(format="fp32")
        recipes = split_recipe(self._recipe(node, choice))
        output = self._gemm_output(key, traced, choice.format)
        storage = operand_storage(self.device.storage, traced, choice.format)
        return self.cost.gemm_time(node, flops, choice.format, recipes, choice.accumulate, output, storage)

    def _recipe(self, node: fx.Node, choice: Choice) -> str:
        """The ladder's `activation/weight` recipe in the order of this node's operands."""
        activation, weight = split_recipe(choice.recipe)
        names = [
            (weight if root(n, through_casts=True) in self.parameters else activation).name
            for n in operand_nodes(node)[:2]
        ]
        return "none" if set(names) == {"none"} else "/".join(names)

    def _gemm_output(self, key: NodeKey, traced: str, compute: str) -> str:
        narrow = get_format(compute).storage_bits <= 16
        if traced != "fp32" or not narrow:
            return traced
        # On GPUs a library GEMM of narrow operands can write fp32: a parameter's gradient is not rounded twice.
        if key.phase == WGRAD and key.op != "conv" and self.device.kind == "gpu":
            return traced
        return self.device.storage

    # everything else

    def _kept(self, node: fx.Node, key: NodeKey) -> _Formats:
        rule = rule_of(node)
        traced = _traced(node)
        accumulate = natural_accumulator(traced)
        forced = self._forced(str(key))
        if forced is not None and value_of(node) is not None:
            require(self.device, str(key), class_of(node), forced.format, accumulate)
            text = f"the rule {forced.match!r} stores it in {forced.format}"
            return _Formats(
                compute=traced, recipe="none", accumulate=accumulate, output=forced.format,
                reason=Reason(code="rule", text=text),
            )  # fmt: skip
        narrow = self._wanted_by_all(node) if traced == "fp32" else None
        if narrow is not None:
            reason = Reason(code="storage", text=f"{rule.why}; stored in {narrow}: only narrow GEMMs read it")
        else:
            reason = Reason(code="policy" if is_known(node) else "unknown-op", text=rule.why)
        return _Formats(compute=traced, recipe="none", accumulate=accumulate, output=narrow or traced, reason=reason)

    def _wanted_by_all(self, node: fx.Node) -> str | None:
        """The storage format when every reader is a GEMM operand that wants it, else None."""
        if self.device.storage == "fp32" or len(tensors_of(node)) != 1:
            return None
        reads = list(readers(node))
        wants = all(
            user in self.formats
            and gemm_op(user) is not None
            and value in operand_nodes(user)
            and self._operand_storage(user) == self.device.storage
            for value, user in reads
        )
        return self.device.storage if reads and wants else None

    def _operand_storage(self, gemm: fx.Node) -> str:
        return operand_storage(self.device.storage, _traced(gemm), self.formats[gemm].compute)

    def _view(self, node: fx.Node) -> _Formats:
        source = root(node)
        known = self.formats.get(source)
        if known is None and isinstance(source.args[0] if source.args else None, fx.Node):
            known = self.formats.get(source.args[0])  # type: ignore[arg-type]
        held = known.output if known else _traced(node)
        return _Formats(
            compute=held, recipe="none", accumulate=natural_accumulator(held), output=held,
            reason=Reason(code="view", text="no arithmetic: takes the format of what it reads"),
        )  # fmt: skip

    def _forced(self, key: str) -> Rule | None:
        return next((r for r in reversed(self.rules) if r.concerns(key)), None)

    # costs

    def _priced(self) -> Selection:
        outputs = {n: f.output for n, f in self.formats.items()}
        planned_read: set[tuple[fx.Node, bool]] = set()
        traced_read: set[tuple[fx.Node, bool]] = set()
        decisions, total, as_traced = [], 0.0, []
        for node, key in self.nodes:
            formats = self.formats[node]
            traced = _traced(node)
            if rule_of(node).policy is Policy.LADDER:
                moved = self.cost.gemm_bytes(node, formats.compute, formats.output)
                times = formats.time_us
                spent, spent_traced = times.get(formats.compute, 0.0), times.get(traced, 0.0)
            else:
                moved = self.cost.border_bytes(node, outputs, planned_read)
                spent = 1e6 * self.cost.memory_time(moved)
                spent_traced = 1e6 * self.cost.memory_time(self.cost.border_bytes(node, {}, traced_read))
                times = {formats.compute: spent}
            total += spent
            as_traced.append(spent_traced)
            decisions.append(
                Decision(
                    key=str(key), op=key.op if gemm_op(node) else class_of(node), aten=str(node.target),
                    phase=key.phase, module=key.fqn, shapes=shapes_of(node), flops=self.flops[node],
                    bytes=moved, traced=traced,
                    compute=formats.compute, recipe=formats.recipe, accumulate=formats.accumulate,
                    output=formats.output, reason=formats.reason,
                    time_us={f: round(t, 3) for f, t in times.items()},
                )
            )  # fmt: skip
        return Selection(decisions=decisions, time_us=total, traced_us=as_traced)


def _class(key: NodeKey) -> OpClass:
    """The op class of a GEMM's key: its operator part names it."""
    return cast(OpClass, key.op)


def shapes_of(node: fx.Node) -> list[list[int]]:
    """Operand shapes of a GEMM, then the shapes of the result(s); result shapes only for other nodes."""
    shapes = []
    if rule_of(node).policy is Policy.LADDER:
        shapes = [list(shape_of(v)) for n in operand_nodes(node) if (v := value_of(n)) is not None]
    return shapes + [list(shape_of(t)) for t in tensors_of(node)]


def _traced(node: fx.Node) -> str:
    dtype = float_dtype(node)
    assert dtype in FLOAT_DTYPES
    return format_of(dtype) or "fp32"


def _narrower(candidate: str, traced: str) -> bool:
    """Whether a format is a cheaper way to compute what was traced: fewer bits, or fp32's shorter mantissas."""
    if candidate == traced or traced == "fp64":
        return False
    if traced == "fp32":
        return candidate not in ("fp64", "fp32")
    return get_format(candidate).storage_bits < get_format(traced).storage_bits


def rules_without_a_node(rules: Sequence[Rule], decisions: Mapping[str, Decision]) -> list[Rule]:
    """The rules that no node can follow: their glob matches no key, or only nodes that they are not for."""
    return [r for r in rules if not any(r.concerns(k) for k in decisions)]
