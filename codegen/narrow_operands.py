"""The narrow operands of kernels: values and scales in place of rounded tensors.

A rounding (`dsmp::fake_quantize`) stands for the numbers that a matrix unit multiplies. Those with block scales stand
right before the product; those of whole tensors stand above views, which are put on the narrow values again. A
transposed matrix is quantised as it lies in memory, so the forward and the input-gradient product share one quantised
weight, and an activation that is quantised along its rows (for a product) and along its columns (for a weight gradient)
is read once for both.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..passes.cast_motion import DTYPES
from ..passes.graph import VIEW_OPS, aten, is_backward, is_joint, node_op, root, shape_of, value_of
from ..passes.insertion import insert_call
from ..passes.keys import key_of
from ..passes.workload import tensor_of
from .ops import value_dtype
from .registry import Product

CASTS = ("prims.convert_element_type", "dsmp.cast")
"""Operators that change the dtype of values and nothing else."""
_ROUND = "dsmp.fake_quantize"
_BYTES = ("dsmp.fake_quantize_static", "dsmp.fake_quantize_dynamic")
_WIDEN = "prims.convert_element_type"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """A narrow operand: its values in the product's orientation, and their scales if there are any."""

    values: fx.Node
    scales: fx.Node | None


class NarrowOperands:
    """Makes the narrow operands of one graph's products; each is made once and shared.

    What is made of `parameters` is made again in the backward pass: it must not be saved.
    """

    def __init__(self, gm: fx.GraphModule, parameters: frozenset[fx.Node]) -> None:
        self.gm = gm
        self.parameters = parameters
        self.graph = gm.graph
        self.joint = is_joint(gm)
        self._known: dict[tuple[Any, ...], fx.Node] = {}
        self._of_parameters: set[fx.Node] = set()

    def finish(self, replaced: Iterable[fx.Node]) -> None:
        """Read tensors once that are quantised along both axes, and drop what nobody reads any more: the products that
        were `replaced`, and what only they read."""
        for node in replaced:
            if not node.users:
                self.graph.erase_node(node)
        self.erase_unread()
        self._pair_quantisations()
        self.gm.recompile()

    # operands

    def whole(self, operand: fx.Node, product: Product) -> Operand | None:
        """An operand in the format of a product that is scaled as a whole, or not at all."""
        views, base = self.above_views(operand)
        if node_op(base) == _ROUND:
            source, name, recipe, axis = base.args
            assert isinstance(source, fx.Node)
            if name != product.compute:
                return None
            if recipe == "none":
                dtype = torch.float32 if name == "tf32" else value_dtype(str(name))
                return Operand(values=self.viewed(views, self._in(self._unwidened(source), dtype)), scales=None)
            values, scales = self.quantised(self._unwidened(source), str(name), str(recipe), int(str(axis)))
            if views and recipe != "tensor":
                return None
            return Operand(values=self.viewed(views, values), scales=scales)
        wanted = DTYPES.get(product.compute)
        narrow = self._unwidened(base)
        value = value_of(narrow)
        if wanted is None or value is None or value.dtype != wanted or product.recipe != "none":
            return None
        return Operand(values=self.viewed(views, narrow), scales=None)

    def unrounded(self, operand: fx.Node, product: Product) -> fx.Node | None:
        """An operand as it was before it was rounded, or widened, for simulation; None if that is not the product's
        rounding."""
        views, base = self.above_views(operand)
        if node_op(base) == _ROUND:
            source, name, recipe, _ = base.args
            if name != product.compute or recipe not in product.recipes:
                return None
            assert isinstance(source, fx.Node)
            base = source
        return self.viewed(views, self._unwidened(base))

    def blocks(self, operand: fx.Node, product: Product) -> Operand | None:
        """An operand with block scales along its contraction."""
        if node_op(operand) != _ROUND or operand.args[1] != product.compute:
            return None
        source, name, recipe, axis = operand.args
        assert isinstance(source, fx.Node)
        rank = len(shape_of(tensor_of(source)))
        values, scales = self.quantised(source, str(name), str(recipe), int(str(axis)) % rank - rank)
        return Operand(values=values, scales=scales)

    def quantised(self, source: fx.Node, name: str, recipe: str, axis: int) -> tuple[fx.Node, fx.Node]:
        """(values, scales) of a tensor; a transposed matrix is quantised as it lies in memory."""
        if node_op(source) == "aten.permute" and source.args[1] == [1, 0] and recipe != "tensor":
            base = source.args[0]
            assert isinstance(base, fx.Node)
            inner = self.quantised(base, name, recipe, -1 if axis == -2 else -2)
            return tuple(self._permuted(part, source) for part in inner)  # type: ignore[return-value]
        source = self.as_stored(source)
        axis = -1 if recipe in ("128x128", "tensor") else axis
        key = ("quantize", source, name, recipe, axis)
        if key not in self._known:
            args = (source, name, recipe, axis)
            self._known[key] = self.call(torch.ops.dsmp.quantize.default, args, after=source, like=source)
        return self._item(self._known[key], 0), self._item(self._known[key], 1)

    def as_stored(self, source: fx.Node) -> fx.Node:
        """A tensor before it was widened for simulation; equal views of one value are one node, so that products that
        read it through views of their own share its quantisation."""
        views, base = self.above_views(source)
        return self.viewed(views, self._unwidened(base))

    # nodes

    def call(self, target: Any, args: tuple[Any, ...], *, like: fx.Node, after: fx.Node | None = None,
             before: fx.Node | None = None) -> fx.Node:  # fmt: skip
        """A new node with the provenance of `like`, next to `after` or `before`."""
        if after is not None and after.op == "placeholder":
            after = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        node = insert_call(self.graph, target, args, {}, like=like, joint=self.joint, after=after, before=before)
        self._mark(node)
        return node

    def _mark(self, node: fx.Node) -> None:
        source = node.args[0]
        if not self.joint or is_backward(node) or not isinstance(source, fx.Node):
            return
        if root(source, through_casts=True) in self.parameters or source in self._of_parameters:
            self._of_parameters.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        key = ("item", node, index)
        if key not in self._known:
            self._known[key] = self.call(operator.getitem, (node, index), after=node, like=node)
        return self._known[key]

    def _permuted(self, node: fx.Node, like: fx.Node) -> fx.Node:
        key = ("permute", node)
        if key not in self._known:
            self._known[key] = self.call(aten.permute.default, (node, [1, 0]), after=node, like=like)
        return self._known[key]

    def _in(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        value = tensor_of(node)
        if value.dtype == dtype:
            return node
        key = ("cast", node, dtype)
        if key not in self._known:
            target = torch.ops.prims.convert_element_type.default
            self._known[key] = self.call(target, (node, dtype), after=node, like=node)
        return self._known[key]

    def viewed(self, views: list[fx.Node], node: fx.Node) -> fx.Node:
        """The views (outermost last) put on other values."""
        for view in views:
            key = ("view", node, view.target, repr(view.args[1:]), repr(view.kwargs))
            if key not in self._known:
                later = view if node < view else node
                fresh = insert_call(self.graph, view.target, (node, *view.args[1:]), dict(view.kwargs), like=view,
                                    joint=self.joint, after=later)  # fmt: skip
                self._mark(fresh)
                self._known[key] = fresh
            node = self._known[key]
        return node

    @staticmethod
    def above_views(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
        views: list[fx.Node] = []
        while node_op(node) in VIEW_OPS and isinstance(node.args[0], fx.Node):
            views.insert(0, node)
            node = node.args[0]
        return views, node

    @staticmethod
    def _unwidened(node: fx.Node) -> fx.Node:
        """What was widened for simulation, if this was."""
        if node_op(node) == _WIDEN and isinstance(node.args[0], fx.Node):
            held = value_of(node.args[0])
            if held is not None and held.dtype in (torch.bfloat16, torch.float16):
                return node.args[0]
        return node

    # clean-up

    def erase_unread(self) -> None:
        """Drop roundings, widenings and views that only replaced products read."""
        for node in reversed(list(self.graph.nodes)):
            gone = node_op(node) in (_ROUND, *_BYTES, *CASTS) or node_op(node) in VIEW_OPS
            if node.op == "call_function" and not node.users and gone and key_of(node) is None:
                self.graph.erase_node(node)

    def _pair_quantisations(self) -> None:
        """One read of a tensor for its quantisation along both axes."""
        for key, rows in list(self._known.items()):
            if key[0] != "quantize" or key[3:] != ("1x128", -1):
                continue
            columns = self._known.get((*key[:4], -2))
            if columns is None or len(shape_of(tensor_of(key[1]))) != 2:
                continue
            first = rows if rows < columns else columns
            both = self.call(torch.ops.dsmp.quantize_both.default, (key[1], key[2]), before=first, like=first)
            for offset, old in ((0, rows), (2, columns)):
                for user in list(old.users):
                    index = user.args[1]
                    assert isinstance(index, int)
                    item = self._item(both, offset + index)
                    user.replace_all_uses_with(item)
                    self.graph.erase_node(user)
                self.graph.erase_node(old)
