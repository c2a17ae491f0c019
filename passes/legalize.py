"""Make a graph compute what its decisions say: the only pass that inserts casts.

Every value of the traced graph keeps its traced dtype for whoever asks for it; a GEMM whose decision differs asks for its
operands in another form and gets

    native      operand --cast--> compute dtype                            and the operator runs in that dtype
    simulated   operand --cast--> storage dtype --widen--> fp32 --round--> and the operator runs in fp32

where `round` is the exact rounding of the planned format with its scales. A result that is stored narrower is cast once and
widened for readers that want the traced dtype.

Casts are minimal and shared: one per (value, form), put on the value that computed the numbers, above views and expansions
(never above a slice, which would cast more than is read), so forward and weight-gradient GEMMs read one narrow tensor and the
partitioner saves that one. What is derived from a parameter, or widened for simulation, is marked to be recomputed in the
backward pass: it must not be saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy

from ..hardware_db.formats import get_format, split_recipe
from .gemm import GEMM_OPS, GemmOp, gemm_op, operand_slots
from .graph import (
    VIEW_OPS,
    aten,
    calls,
    float_dtype,
    is_backward,
    is_joint,
    node_op,
    numel_of,
    placeholders,
    prims,
    root,
    tensors_of,
    value_of,
)  # fmt: skip
from .keys import key_of
from .op_rules import Policy, rule_of
from .plan import Decision
from .rounding_ops import cast_op, fake_quantize_op

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
_UNFUSED = {"aten.addmm": aten.mm.default, "aten.baddbmm": aten.bmm.default}
_WIDE_RESULT = {"aten.mm": aten.mm, "aten.addmm": aten.mm, "aten.bmm": aten.bmm, "aten.baddbmm": aten.bmm}


@dataclass(frozen=True, kw_only=True, slots=True)
class LegalizeReport:
    """What legalisation did: casts inserted, keys run natively and simulated in a format that was not traced, and keys
    of the graph for which there was no decision (they stay as traced)."""

    casts: int
    native: tuple[str, ...]
    simulated: tuple[str, ...]
    undecided: tuple[str, ...]


def operand_storage(storage: str, traced: str, compute: str) -> str:
    """The format in which a GEMM's activations lie in memory before they are quantised or multiplied.

    `storage` is the device's storage format; only values traced in fp32 and multiplied in 16 bits or fewer are stored
    narrower than traced.
    """
    return storage if traced == "fp32" and get_format(compute).storage_bits <= 16 else traced


def legalize(
    gm: fx.GraphModule,
    decisions: Mapping[str, Decision],
    *,
    same_device: bool,
    storage: str,
    parameters: frozenset[fx.Node],
) -> LegalizeReport:
    """Apply decisions (by key) to a keyed joint or inference graph, in place.

    `same_device`: the plan is for the device that will run it, so what torch's own operators can do (see `is_native`) runs
    natively; everything else is simulated. `storage` is the planned device's format of activations between nodes.
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
        self.graph = gm.graph
        self.gm = gm
        self.decisions = decisions
        self.same_device = same_device
        self.storage = storage
        self.parameters = parameters
        self.joint = is_joint(gm)
        self.last_placeholder = (placeholders(gm) or [None])[-1]
        self.forms: dict[tuple[Any, ...], fx.Node] = {}
        self.made: list[fx.Node] = []
        self.replaced: list[fx.Node] = []
        self.opaque = False

    def run(self) -> LegalizeReport:
        ran_native, simulated, undecided = [], [], []
        for node in list(calls(self.gm)):
            key = key_of(node)
            if key is None:
                continue
            decision = self.decisions.get(str(key))
            if decision is None:
                undecided.append(str(key))
                continue
            traced = float_dtype(node)
            assert traced is not None
            if gemm_op(node) is None:
                if rule_of(node).policy is Policy.KEEP and DTYPES[decision.output] != traced and value_of(node) is not None:
                    self.opaque = not self.same_device
                    self._store(node, node, DTYPES[decision.output], traced)
                continue
            if DTYPES.get(decision.compute) == traced and decision.compute != "tf32" and decision.recipe == "none":
                continue
            natively = is_native(decision, self.same_device)
            self.opaque = not natively
            (ran_native if natively else simulated).append(str(key))
            self._gemm(node, decision, traced, natively)
        self._erase_dead()
        casts = sum(1 for n in self.made if n.target is not operator.getitem and _is_cast(n) and not n._erased)
        self.gm.recompile()
        return LegalizeReport(
            casts=casts, native=tuple(ran_native), simulated=tuple(simulated), undecided=tuple(undecided)
        )

    # one GEMM

    def _gemm(self, node: fx.Node, decision: Decision, traced: torch.dtype, natively: bool) -> None:
        carrier = DTYPES[decision.compute] if natively else _carrier(decision.compute)
        op = GEMM_OPS[node_op(node)]
        args = list(node.args)
        slots = operand_slots(node)
        recipes = [r.name for r in split_recipe(decision.recipe)]
        for position, (index, axis) in enumerate(slots):
            operand = args[index]
            assert isinstance(operand, fx.Node)
            if natively:
                args[index] = self._cast(operand, carrier)
            else:
                recipe = recipes[position] if position < 2 else recipes[0]
                args[index] = self._rounded(operand, decision.compute, recipe, axis)
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
        fresh = self._call(target, tuple(args), kwargs, after=None, before=node, like=node)
        self._hand_over(node, fresh, output, traced)

    def _unfused(self, node: fx.Node, args: list[Any], output: torch.dtype, traced: torch.dtype) -> None:
        """A narrow product with its bias added in the traced dtype: the bias is not rounded, nor the sum twice."""
        op = gemm_op(node)
        assert op is not None and op.bias is not None
        left, right = (args[i] for i in op.operands)
        target = _UNFUSED[node_op(node)]
        product_args: tuple[Any, ...] = (left, right)
        if output == torch.float32 and self._can_widen(node):
            target, product_args = _WIDE_RESULT[node_op(node)].dtype, (left, right, output)
        product = self._call(target, product_args, {}, before=node, like=node)
        product.meta["dsmp_key"] = key_of(node)
        wide = self._widen_to(product, traced)
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        if alpha != 1:
            wide = self._call(aten.mul.Tensor, (wide, alpha), {}, after=wide, like=node)
        if beta != 0:
            bias = args[op.bias]
            if beta != 1:
                bias = self._call(aten.mul.Tensor, (bias, beta), {}, after=wide, like=node)
                wide_after = bias
            else:
                wide_after = wide
            wide = self._call(aten.add.Tensor, (wide, bias), {}, after=wide_after, like=node)
        node.replace_all_uses_with(wide)
        self.replaced.append(node)

    def _side_input(self, op: GemmOp, place: int | str, arg: fx.Node, carrier: torch.dtype) -> fx.Node:
        """A float input that is no operand of the product: a bias, a mask, the log-sum-exp of attention."""
        value = value_of(arg)
        if value is None or value.dtype not in DTYPES.values() or value.dtype == carrier:
            return arg
        if op.kind != "sdpa":
            return self._cast(arg, carrier)
        if place != op.mask or not value.is_cuda or carrier.itemsize > value.dtype.itemsize:
            return arg
        # A mask of finfo.min must not become -inf: a row that is masked throughout would turn NaN.
        bounds = torch.finfo(carrier)
        return self._cast(self._call(aten.clamp.default, (arg, bounds.min, bounds.max), {}, after=arg, like=arg), carrier)

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
            part = self._call(operator.getitem, (fresh, item.args[1]), {}, after=fresh, like=item)
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
        stored = fresh if value.dtype == output else self._convert(fresh, output)
        wide = stored if output == traced else self._widen_to(stored, traced)
        for reader in readers:
            if reader is not stored:
                reader.replace_input_with(old, wide)
        if wide is not stored:
            self.forms["cast", wide, output] = stored

    # forms of a value

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`value` in another dtype, the cast hoisted above views."""
        tensor = value_of(value)
        if tensor is None or tensor.dtype == dtype:
            return value
        return self._form(("cast", value, dtype), lambda: self._convert(value, dtype), lambda s: self._cast(s, dtype))

    def _rounded(self, value: fx.Node, compute: str, recipe: str, axis: int | None) -> fx.Node:
        """`value` as simulation multiplies it: the exact numbers of the compute format in the carrier dtype."""
        tensor = value_of(value)
        assert tensor is not None
        traced = next(f for f, d in DTYPES.items() if d == tensor.dtype)
        stored = operand_storage(self.storage, traced, compute)
        narrow = self._cast(value, DTYPES[stored])
        carrier = _carrier(compute)
        exact = compute in (stored, "fp32", "fp64")
        if recipe in ("none", "tensor") or axis is None:
            return self._widened(narrow, carrier, "" if exact else compute, recipe)
        wide = self._widened(narrow, carrier, "", "none")
        key = ("round", wide, compute, recipe, axis)
        return self._form(key, lambda: self._round(wide, compute, recipe, axis), None)

    def _widened(self, value: fx.Node, dtype: torch.dtype, compute: str, recipe: str) -> fx.Node:
        """`value` in the carrier dtype and, if `compute` names a format, rounded to it; hoisted above views."""

        def make() -> fx.Node:
            wide = self._widen_to(value, dtype)
            return self._round(wide, compute, recipe, -1) if compute else wide

        tensor = value_of(value)
        if tensor is not None and tensor.dtype == dtype and not compute:
            return value
        key = ("widen", value, dtype, compute, recipe)
        return self._form(key, make, lambda s: self._widened(s, dtype, compute, recipe))

    def _form(
        self, key: tuple[Any, ...], make: Callable[[], fx.Node], above: Callable[[fx.Node], fx.Node] | None
    ) -> fx.Node:
        """The form of a value from the cache, from above the view it is, or newly made."""
        known = self.forms.get(key)
        if known is not None:
            return known
        value = key[1]
        source = value.args[0] if above is not None and _is_hoistable_view(value) else None
        if isinstance(source, fx.Node) and above is not None:
            inner = above(source)
            args = (inner, *value.args[1:])
            fresh = self._call(value.target, args, dict(value.kwargs), after=_later(value, inner), like=value)
            self._mark(fresh, key[0] == "widen")
        else:
            fresh = make()
        self.forms[key] = fresh
        return fresh

    def _convert(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A cast node right behind `value`; opaque where it narrows in a simulated plan."""
        tensor = value_of(value)
        assert tensor is not None
        target: Any = prims.convert_element_type.default
        if self.opaque and dtype.itemsize < tensor.dtype.itemsize:
            target = torch.ops.dsmp.cast.default
        fresh = self._call(target, (value, dtype), {}, after=value, like=value)
        self._mark(fresh, False)
        return fresh

    def _widen_to(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        tensor = value_of(value)
        assert tensor is not None
        if tensor.dtype == dtype:
            return value
        fresh = self._call(prims.convert_element_type.default, (value, dtype), {}, after=value, like=value)
        self._mark(fresh, True)
        return fresh

    def _round(self, value: fx.Node, compute: str, recipe: str, axis: int) -> fx.Node:
        args = (value, compute, recipe, axis)
        fresh = self._call(torch.ops.dsmp.fake_quantize.default, args, {}, after=value, like=value)
        self._mark(fresh, True)
        return fresh

    # nodes

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        like: fx.Node,
        after: fx.Node | None = None,
        before: fx.Node | None = None,
    ) -> fx.Node:
        """A new call next to `after` or `before`, with the provenance of `like` and its own fake value."""
        if after is not None and after.op == "placeholder":
            after = self.last_placeholder
        context = self.graph.inserting_after(after) if after is not None else self.graph.inserting_before(before)
        with context:
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in like.meta.items() if k not in _OWN_META}
        if self.joint:
            node.meta["partitioner_tag"] = "is_backward" if is_backward(like) else "is_forward"
        node.meta["val"] = _fake_result(target, args, kwargs)
        self.made.append(node)
        return node

    def _mark(self, node: fx.Node, derived: bool) -> None:
        """Mark a forward node for recomputation when it is derived for simulation or comes from a parameter."""
        if not self.joint or is_backward(node):
            return
        if derived or _origin(node) in self.parameters:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0

    def _erase_dead(self) -> None:
        mine = set(self.made) | set(self.replaced)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node in mine or _is_orphaned_view(node)):
                self.graph.erase_node(node)


_OWN_META = frozenset({"val", "tensor_meta", "dsmp_key", "recompute", "ac_graph_id", "eager_input_vals", "unbacked_bindings"})


def _carrier(compute: str) -> torch.dtype:
    return torch.float64 if compute == "fp64" else torch.float32


def _is_cast(node: fx.Node) -> bool:
    return node_op(node) in ("prims.convert_element_type", "dsmp.cast", "dsmp.fake_quantize")


def _is_hoistable_view(node: fx.Node) -> bool:
    if node.op != "call_function" or node_op(node) not in VIEW_OPS or not isinstance(node.args[0], fx.Node):
        return False
    here, above = value_of(node), value_of(node.args[0])
    return here is not None and above is not None and numel_of(above) <= numel_of(here) and above.dtype == here.dtype


def _is_orphaned_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node_op(node) in VIEW_OPS


def _origin(node: fx.Node) -> fx.Node:
    """The node whose numbers these are, looking through every cast and rounding."""
    while True:
        node = root(node, through_casts=True)
        if node_op(node) not in ("dsmp.cast", "dsmp.fake_quantize"):
            return node
        node = node.all_input_nodes[0]


def _later(first: fx.Node, second: fx.Node) -> fx.Node:
    return first if second < first else second


def _fake_result(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call returns on the fake values of its arguments."""
    fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    if target is operator.getitem:
        return fake_args[0][fake_args[1]]
    modes = [t.fake_mode for n in [*args, *kwargs.values()] if isinstance(n, fx.Node)
             for t in tensors_of(n) if isinstance(t, FakeTensor)]  # fmt: skip
    if not modes:
        return target(*fake_args, **fake_kwargs)
    with modes[0], torch.no_grad():
        return target(*fake_args, **fake_kwargs)


# Named so that linters see the operators that this module refers to through torch.ops.
_OPERATORS = (cast_op, fake_quantize_op)
