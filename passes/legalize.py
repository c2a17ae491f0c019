"""Make a graph compute what its decisions say: the only pass that inserts casts.

Every value of the traced graph keeps its traced dtype for whoever asks for it; a GEMM whose decision differs asks for
its operands in another form and gets

    native      operand --cast--> compute dtype                            and the operator runs in that dtype
    simulated   operand --cast--> storage dtype --widen--> fp32 --round--> and the operator runs in fp32
                weight  --round-->                                         (weights stay stored as they are)

where `round` is the exact rounding of the planned format with its scales. A result that is stored narrower is cast
once and widened for readers that want the traced dtype.

Casts are minimal and shared: one per (value, form), put on the value that computed the numbers, above views and
expansions (never above a slice, which would cast more than is read), so forward and weight-gradient GEMMs read one
narrow tensor and the partitioner saves that one. What is derived from a parameter, or widened for simulation, is
marked to be recomputed in the backward pass: it must not be saved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..hardware_db.formats import split_recipe
from .cast_motion import DTYPES, ValueForms, carrier_of
from .gemm import GEMM_OPS, GemmOp, gemm_op, operand_slots, scaling
from .graph import (
    aten,
    calls,
    float_dtype,
    node_op,
    value_of,
)  # fmt: skip
from .keys import key_of
from .op_rules import Policy, rule_of
from .plan import Decision

_UNFUSED = {"aten.addmm": aten.mm.default, "aten.baddbmm": aten.bmm.default}
_WIDE_RESULT = {"aten.mm": aten.mm, "aten.addmm": aten.mm, "aten.bmm": aten.bmm, "aten.baddbmm": aten.bmm}


@dataclass(frozen=True, kw_only=True, slots=True)
class LegalizeReport:
    """What legalisation did: casts inserted, keys run natively and simulated in a format that was not traced, and keys
    of GEMMs for which there was no decision (they stay as traced, as every other operator does by default)."""

    casts: int
    native: tuple[str, ...]
    simulated: tuple[str, ...]
    undecided: tuple[str, ...]


def legalize(
    gm: fx.GraphModule,
    decisions: Mapping[str, Decision],
    *,
    same_device: bool,
    storage: str,
    parameters: frozenset[fx.Node],
) -> LegalizeReport:
    """Apply decisions (by key) to a keyed joint or inference graph, in place.

    `same_device`: the plan is for the device that will run it, so what torch's own operators can do (see `is_native`)
    runs natively; everything else is simulated. `storage` is the planned device's format of activations between
    nodes.
    """
    return _Legalizer(gm, decisions, same_device, storage, parameters).run()


def is_native(decision: Decision, same_device: bool) -> bool:
    """Whether torch's own operators compute a GEMM's decision on the running device: plain 16-bit operands."""
    return same_device and decision.compute in ("bf16", "fp16") and decision.recipe == "none"


class _Legalizer:
    def __init__(
        self,
        gm: fx.GraphModule,
        decisions: Mapping[str, Decision],
        same_device: bool,
        storage: str,
        parameters: frozenset[fx.Node],
    ) -> None:
        self.gm = gm
        self.decisions = decisions
        self.same_device = same_device
        self.forms = ValueForms(gm, storage, parameters)
        self.replaced: list[fx.Node] = []

    def run(self) -> LegalizeReport:
        ran_native: list[str] = []
        simulated: list[str] = []
        undecided: list[str] = []
        for node in list(calls(self.gm)):
            key = key_of(node)
            if key is None:
                continue
            decision = self.decisions.get(str(key))
            if decision is None:
                if gemm_op(node) is not None:
                    undecided.append(str(key))
                continue
            traced = float_dtype(node)
            assert traced is not None
            if gemm_op(node) is None:
                if (
                    rule_of(node).policy is Policy.KEEP
                    and DTYPES[decision.output] != traced
                    and value_of(node) is not None
                ):
                    self.forms.opaque = not self.same_device
                    self._store(node, node, DTYPES[decision.output], traced)
                continue
            if (
                DTYPES.get(decision.compute) == DTYPES[decision.output] == traced
                and decision.compute != "tf32"
                and decision.recipe == "none"
            ):
                continue
            natively = is_native(decision, self.same_device)
            self.forms.opaque = not natively
            (ran_native if natively else simulated).append(str(key))
            self._gemm(node, decision, traced, natively)
        self.forms.erase_dead(self.replaced)
        self.forms.settle_regions()
        self.gm.recompile()
        return LegalizeReport(
            casts=self.forms.casts, native=tuple(ran_native), simulated=tuple(simulated), undecided=tuple(undecided)
        )

    # one GEMM

    def _gemm(self, node: fx.Node, decision: Decision, traced: torch.dtype, natively: bool) -> None:
        carrier = DTYPES[decision.compute] if natively else carrier_of(decision.compute)
        op = GEMM_OPS[node_op(node)]
        args = list(node.args)
        slots = operand_slots(node)
        recipes = [r.name for r in split_recipe(decision.recipe)]
        for position, (index, _) in enumerate(slots):
            operand = args[index]
            assert isinstance(operand, fx.Node)
            if natively:
                args[index] = self.forms.cast(operand, carrier)
            else:
                recipe = recipes[position] if position < 2 else recipes[0]
                if recipe == "wide":
                    continue
                if recipe == "static":
                    args[index] = self._static(operand, decision)
                    continue
                if recipe == "dynamic":
                    args[index] = self._dynamic(operand, scaling(node, position, "row")[1])
                    continue
                args[index] = self.forms.rounded(operand, decision.compute, *scaling(node, position, recipe))
        output = DTYPES[decision.output]
        if natively and node_op(node) in _UNFUSED:
            self._unfused(node, args, output, traced)
            return
        used = {index for index, _ in slots}
        for index, arg in enumerate(args):
            if index not in used and isinstance(arg, fx.Node):
                args[index] = self._side_input(op, index, arg, carrier)
        target = node.target
        kwargs = {
            k: self._side_input(op, k, v, carrier) if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()
        }
        if natively and output == torch.float32 and carrier != output and self._can_widen(node):
            target, args = _WIDE_RESULT[node_op(node)].dtype, [*args, output]
        fresh = self.forms.call(target, tuple(args), kwargs, after=None, before=node, like=node)
        self._hand_over(node, fresh, output, traced)

    def _static(self, operand: fx.Node, decision: Decision) -> fx.Node:
        """An operand rounded to the steps that reach over the decision's range."""
        assert decision.static_range is not None
        target = torch.ops.dsmp.fake_quantize_static.default
        return self.forms.call(target, (operand, *decision.static_range), {}, after=operand, like=operand)

    def _dynamic(self, operand: fx.Node, axis: int) -> fx.Node:
        """An operand with each row along the axis of the sum rounded to steps of its own."""
        target = torch.ops.dsmp.fake_quantize_dynamic.default
        return self.forms.call(target, (operand, axis), {}, after=operand, like=operand)

    def _unfused(self, node: fx.Node, args: list[Any], output: torch.dtype, traced: torch.dtype) -> None:
        """A narrow product with its bias added in the traced dtype: the bias is not rounded, nor the sum twice."""
        op = gemm_op(node)
        assert op is not None and op.bias is not None
        left, right = (args[i] for i in op.operands)
        target = _UNFUSED[node_op(node)]
        product_args: tuple[Any, ...] = (left, right)
        if output == torch.float32 and self._can_widen(node):
            target, product_args = _WIDE_RESULT[node_op(node)].dtype, (left, right, output)
        product = self.forms.call(target, product_args, {}, before=node, like=node)
        product.meta["dsmp_key"] = key_of(node)
        wide = self.forms.widen_to(product, traced)
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        bias = args[op.bias]
        if alpha != 1:
            wide = self.forms.call(aten.mul.Tensor, (wide, alpha), {}, before=node, like=node)
            self.forms.release(wide)
        if beta not in (0, 1):
            bias = self.forms.call(aten.mul.Tensor, (bias, beta), {}, before=node, like=node)
            self.forms.release(bias)
        if beta != 0:
            wide = self.forms.call(aten.add.Tensor, (wide, bias), {}, before=node, like=node)
            self.forms.release(wide)
        node.replace_all_uses_with(wide)
        self.replaced.append(node)

    def _side_input(self, op: GemmOp, place: int | str, arg: fx.Node, carrier: torch.dtype) -> fx.Node:
        """A float input that is no operand of the product: a bias, a mask, the log-sum-exp of attention."""
        value = value_of(arg)
        if value is None or value.dtype not in DTYPES.values() or value.dtype == carrier:
            return arg
        if op.kind != "sdpa":
            return self.forms.cast(arg, carrier)
        # A mask has the dtype of the query; on CPUs it may be fp32 with any.
        if place != op.mask or (value.dtype == torch.float32 and not value.is_cuda):
            return arg
        bounds = torch.finfo(carrier)
        if bounds.max < torch.finfo(value.dtype).max:
            # A mask of finfo.min must not become -inf: a row that is masked throughout would turn NaN.
            arg = self.forms.call(aten.clamp.default, (arg, bounds.min, bounds.max), {}, after=arg, like=arg)
        return self.forms.cast(arg, carrier)

    def _can_widen(self, node: fx.Node) -> bool:
        value = value_of(node)
        return value is not None and value.is_cuda and node_op(node) in _WIDE_RESULT

    def _hand_over(self, node: fx.Node, fresh: fx.Node, output: torch.dtype, traced: torch.dtype) -> None:
        """Give the readers of `node` the result of `fresh`, stored as `output`, in the traced dtype."""
        fresh.meta["dsmp_key"] = key_of(node)
        self.replaced.append(node)
        if not isinstance(node.meta["val"], (tuple, list)):
            self._store(node, fresh, output, traced)
            return
        products = GEMM_OPS[node_op(node)].results
        for item in [u for u in node.users if u.target is operator.getitem]:
            part = self.forms.call(operator.getitem, (fresh, item.args[1]), {}, after=fresh, like=item)
            if products is None or item.args[1] in products:
                self._store(item, part, output, traced)
            else:
                item.replace_all_uses_with(part)
            self.replaced.append(item)

    def _store(self, old: fx.Node, fresh: fx.Node, output: torch.dtype, traced: torch.dtype) -> None:
        """Store `fresh` as `output`; readers of `old` get the traced dtype back, other casts find the stored one."""
        value = value_of(fresh)
        assert value is not None
        readers = [u for u in old.users if u is not fresh]
        stored = fresh if value.dtype == output else self.forms.convert(fresh, output)
        self.forms.save_stored(fresh, stored)
        wide = stored if output == traced else self.forms.widen_to(stored, traced)
        for reader in readers:
            if reader is not stored:
                reader.replace_input_with(old, wide)
        if wide is not stored:
            self.forms.remember_stored(wide, output, stored)

    # forms of a value
