"""The forms in which one value is held: its dtype as traced, stored narrower, widened again, rounded for simulation.

A form is made once per value and shared by all its readers. It is put on the value that computed the numbers, above
views and expansions, so that a GEMM's operand and its copy for the weight gradient are one narrow tensor and the
partitioner saves that one; never above a slice, which would cast more than is read. What is derived from a parameter,
or widened for simulation, is marked to be recomputed in the backward pass, not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..hardware_db.formats import get_format
from .graph import VIEW_OPS, is_backward, is_joint, node_op, numel_of, placeholders, prims, root, value_of
from .insertion import insert_call
from .rounding_ops import cast_op, fake_quantize_op

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


def operand_storage(storage: str, traced: str, compute: str, recipe: str = "none") -> str:
    """The format in which a GEMM's activations lie in memory before they are quantised or multiplied.

    `storage` is the device's storage format; only values traced in fp32 and multiplied in 16 bits or fewer are stored
    narrower than traced. What is multiplied in 16 bits is never rounded to the other 16-bit format on the way: it is
    cast, or scaled with the operand's `recipe`, where it is computed.
    """
    bits = get_format(compute).storage_bits
    if traced != "fp32" or bits > 16:
        return traced
    if bits == 16 == get_format(storage).storage_bits and compute != storage:
        return compute if recipe == "none" else traced
    return storage


class ValueForms:
    """Makes and remembers the forms of the values of one graph.

    `storage` is the planned device's format of activations between nodes. While `opaque` is set, casts to a narrower
    dtype are operators that no compiler removes.
    """

    def __init__(self, gm: fx.GraphModule, storage: str, parameters: frozenset[fx.Node]) -> None:
        self.graph = gm.graph
        self.storage = storage
        self.parameters = parameters
        self.opaque = False
        self._joint = is_joint(gm)
        self._last_placeholder = next(reversed(placeholders(gm)), None)
        self._forms: dict[tuple[Any, ...], fx.Node] = {}
        self._made: dict[fx.Node, None] = {}

    @property
    def casts(self) -> int:
        """How many casts and roundings were made and are still in the graph."""
        return sum(1 for n in self._made if _is_cast(n) and not n._erased)

    def remember_stored(self, wide: fx.Node, dtype: torch.dtype, stored: fx.Node) -> None:
        """`wide` was widened from `stored`: whoever casts it to that dtype gets `stored`, and the other way round."""
        self._forms["cast", wide, dtype] = stored
        tensor = value_of(wide)
        if tensor is not None and node_op(wide) == "prims.convert_element_type":
            self._forms.setdefault(("widen", stored, tensor.dtype, "", "none"), wide)

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`value` in another dtype, the cast hoisted above views."""
        tensor = value_of(value)
        if tensor is None or tensor.dtype == dtype:
            return value
        return self._form(("cast", value, dtype), lambda: self.convert(value, dtype), lambda s: self.cast(s, dtype))

    def rounded(self, value: fx.Node, compute: str, recipe: str, axis: int) -> fx.Node:
        """`value` as simulation multiplies it: the exact numbers of the compute format in the carrier dtype."""
        tensor = value_of(value)
        assert tensor is not None
        traced = next(f for f, d in DTYPES.items() if d == tensor.dtype)
        # Weights are not kept in the storage format: a GEMM quantises them from the precision that the optimizer sees.
        is_weight = _origin(value) in self.parameters
        stored = traced if is_weight else operand_storage(self.storage, traced, compute, recipe)
        narrow = self.cast(value, DTYPES[stored])
        carrier = carrier_of(compute)
        exact = compute in (stored, "fp32", "fp64")
        if recipe in ("none", "tensor"):
            return self._widened(narrow, carrier, "" if exact else compute, recipe)
        wide = self._widened(narrow, carrier, "", "none")
        key = ("round", wide, compute, recipe, axis)
        return self._form(key, lambda: self._round(wide, compute, recipe, axis), None)

    def _widened(self, value: fx.Node, dtype: torch.dtype, compute: str, recipe: str) -> fx.Node:
        """`value` in the carrier dtype and, if `compute` names a format, rounded to it; hoisted above views."""

        def make() -> fx.Node:
            wide = self.widen_to(value, dtype)
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
        known = self._forms.get(key)
        if known is not None:
            return known
        value = key[1]
        source = value.args[0] if above is not None and _is_hoistable_view(value) else None
        if isinstance(source, fx.Node) and above is not None:
            inner = above(source)
            args = (inner, *value.args[1:])
            fresh = self.call(value.target, args, dict(value.kwargs), after=_later(value, inner), like=value)
            self._mark(fresh, key[0] == "widen")
        else:
            fresh = make()
        self._forms[key] = fresh
        return fresh

    def convert(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A cast node right behind `value`; opaque where it narrows in a simulated plan."""
        tensor = value_of(value)
        assert tensor is not None
        target: Any = prims.convert_element_type.default
        if self.opaque and dtype.itemsize < tensor.dtype.itemsize:
            target = torch.ops.dsmp.cast.default
        fresh = self.call(target, (value, dtype), {}, after=value, like=value)
        self._mark(fresh, False)
        return fresh

    def widen_to(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`value` in another dtype by a cast that loses nothing, or `value` itself."""
        tensor = value_of(value)
        assert tensor is not None
        if tensor.dtype == dtype:
            return value
        fresh = self.call(prims.convert_element_type.default, (value, dtype), {}, after=value, like=value)
        self._mark(fresh, True)
        return fresh

    def _round(self, value: fx.Node, compute: str, recipe: str, axis: int) -> fx.Node:
        args = (value, compute, recipe, axis)
        fresh = self.call(torch.ops.dsmp.fake_quantize.default, args, {}, after=value, like=value)
        self._mark(fresh, True)
        return fresh

    # nodes

    def call(
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
            after = self._last_placeholder
        node = insert_call(self.graph, target, args, kwargs, like=like, after=after, before=before, joint=self._joint)
        self._made[node] = None
        return node

    def _mark(self, node: fx.Node, derived: bool) -> None:
        """Mark a forward node for recomputation when it is derived for simulation or comes from a parameter."""
        if not self._joint or is_backward(node):
            return
        if derived or _origin(node) in self.parameters:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
        else:
            self.release(node)

    @staticmethod
    def release(node: fx.Node) -> None:
        """Do not save a form because an activation-checkpointing policy saves the value it is made from."""
        if node.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE

    def save_stored(self, computed: fx.Node, stored: fx.Node) -> None:
        """Where an activation-checkpointing policy saves `computed`, let it save what is stored of it instead."""
        policy = computed.meta.get("recompute")
        if stored is not computed and policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            stored.meta["recompute"] = policy
            self.release(computed)

    def settle_regions(self) -> None:
        """Give forms that are recomputed the checkpointed region of their readers.

        The partitioner saves what crosses from one region into the next. A form may cross only if nobody else reads the
        value it is made from, which then need not be saved itself.
        """
        for node in reversed(self.graph.nodes):
            if node not in self._made or node.meta.get("recompute") not in _RECOMPUTED:
                continue
            source = node.all_input_nodes[0]
            if source.op == "placeholder" or len(source.users) > 1:
                regions = [u.meta["ac_graph_id"] for u in node.users if u.meta.get("recompute") in _RECOMPUTED]
                node.meta["ac_graph_id"] = max([node.meta.get("ac_graph_id", 0), *regions])

    def erase_dead(self, replaced: Iterable[fx.Node]) -> None:
        """Erase what nobody reads any more among the forms made, the nodes that were replaced, and views."""
        mine = {*self._made, *replaced}
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node in mine or _is_orphaned_view(node)):
                self.graph.erase_node(node)


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def carrier_of(compute: str) -> torch.dtype:
    """The dtype in which a simulated product in `compute` is multiplied and added up."""
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


# Named so that linters see the operators that this module refers to through torch.ops.
_OPERATORS = (cast_op, fake_quantize_op)
