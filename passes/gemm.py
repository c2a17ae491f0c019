"""What a matrix multiplication, convolution or attention node computes with: which arguments are its operands, along
which axis each is contracted, and how a fused backward node splits into the gradient of the input and of the weight.

Every pass that treats "GEMMs" asks this table, so a new operator is one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ..hardware_db.formats import packs_weight, split_recipe
from ..hardware_db.schema import OpClass
from .graph import node_op


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmOp:
    """One operator that multiplies and accumulates.

    `operands` are positions among the positional arguments: (lhs, rhs) of the product for a GEMM or convolution,
    (query, key, value) for attention, and for a backward node all tensors that enter a product. `axes` gives, per
    operand, the axis that is summed over; None where no single axis is. `mask` is the position or name of an additive
    attention mask, `results` the positions of the tuple's items that are products (None: all of them).
    """

    kind: OpClass
    operands: tuple[int, ...]
    axes: tuple[int | None, ...]
    backward: bool = False
    bias: int | None = None
    mask: int | str | None = None
    results: tuple[int, ...] | None = None


# Fused attention operators and where their additive mask is.
_ATTENTION: Mapping[str, int | str | None] = {
    "_scaled_dot_product_flash_attention_for_cpu": "attn_mask",
    "_scaled_dot_product_flash_attention": None,
    "_scaled_dot_product_efficient_attention": 3,
    "_scaled_dot_product_cudnn_attention": 3,
}


def _attention(mask: int | str | None) -> GemmOp:
    return GemmOp(kind="sdpa", operands=(0, 1, 2), axes=(-1, -1, -2), mask=mask, results=(0,))


GEMM_OPS: Mapping[str, GemmOp] = {
    # `matmul` becomes `linear` where one operand is a parameter (keys.py).
    "aten.mm": GemmOp(kind="matmul", operands=(0, 1), axes=(-1, -2)),
    "aten.addmm": GemmOp(kind="matmul", operands=(1, 2), axes=(-1, -2), bias=0),
    "aten.bmm": GemmOp(kind="matmul", operands=(0, 1), axes=(-1, -2)),
    "aten.baddbmm": GemmOp(kind="matmul", operands=(1, 2), axes=(-1, -2), bias=0),
    "aten.convolution": GemmOp(kind="conv", operands=(0, 1), axes=(1, 1), bias=2),
    "aten.convolution_backward": GemmOp(kind="conv", operands=(0, 1, 2), axes=(None, None, None), backward=True),
    "aten._grouped_mm": GemmOp(kind="grouped_mm", operands=(0, 1), axes=(-1, -2)),
    "dsmp.grouped_mm": GemmOp(kind="grouped_mm", operands=(0, 1), axes=(-1, -2)),
    "transformers.grouped_mm_fallback": GemmOp(kind="grouped_mm", operands=(0, 1), axes=(-1, -2)),
    "transformers.grouped_mm_fallback_backward": GemmOp(
        kind="grouped_mm", operands=(0, 1, 3), axes=(None, None, None), backward=True
    ),
    **{f"aten.{name}": _attention(mask) for name, mask in _ATTENTION.items()},
    # grad_out, query, key, value, out
    **{
        f"aten.{name}_backward": GemmOp(
            kind="sdpa", operands=(0, 1, 2, 3, 4), axes=(None,) * 5, backward=True, mask=mask
        )
        for name, mask in _ATTENTION.items()
        if mask != 3
    },
    # grad_out, query, key, value, bias, out
    **{
        f"aten.{name}_backward": GemmOp(
            kind="sdpa", operands=(0, 1, 2, 3, 5), axes=(None,) * 5, backward=True, mask=4
        )
        for name in ("_scaled_dot_product_efficient_attention",)
    },
    # grad_out, query, key, value, out, logsumexp, two of the random state, bias
    "aten._scaled_dot_product_cudnn_attention_backward": GemmOp(
        kind="sdpa", operands=(0, 1, 2, 3, 4), axes=(None,) * 5, backward=True, mask=8
    ),
}  # fmt: skip

# Which operands (and axes) a split fused backward node really multiplies: (input gradient, weight gradient).
_SPLIT_SLOTS: Mapping[str, tuple[tuple[tuple[int, int | None], ...], tuple[tuple[int, int | None], ...]]] = {
    "aten.convolution_backward": (((0, 1), (2, 0)), ((0, None), (1, None))),
    "transformers.grouped_mm_fallback_backward": (((3, -1), (1, -1)), ((0, 0), (3, 0))),
}


def gemm_op(node: fx.Node) -> GemmOp | None:
    """The table row of a node, None when it is no GEMM."""
    return GEMM_OPS.get(node_op(node))


def operand_slots(node: fx.Node) -> tuple[tuple[int, int | None], ...]:
    """(argument position, contracted axis) of every operand of a GEMM; of a split backward node only of those it uses.

    Raises KeyError when the node is no GEMM.
    """
    name = node_op(node)
    op = GEMM_OPS[name]
    slots = tuple(zip(op.operands, op.axes, strict=True))
    if name in _SPLIT_SLOTS:
        dgrad, wgrad = written_gradients(node)
        if dgrad != wgrad:
            slots = _SPLIT_SLOTS[name][0 if dgrad else 1]
    return tuple((i, axis) for i, axis in slots if i < len(node.args) and isinstance(node.args[i], fx.Node))


def scaling(node: fx.Node, position: int, recipe: str) -> tuple[str, int]:
    """How a recipe's scales lie on an operand (by its place in `operand_slots`): the recipe, and the axis that it
    runs along, as `dsmp::fake_quantize` takes them.

    A convolution is a product over channels and window, so a "row" of its operands is what one sample (of an
    activation) or one channel (of a weight, or in a sum over positions) holds: "channel", with the axis that stays.
    Where no axis is summed over, one scale serves the tensor.
    """
    index, axis = operand_slots(node)[position]
    if recipe == "row" and GEMM_OPS[node_op(node)].kind == "conv":
        kept = _kept_axis(node, index)
        return ("tensor", -1) if kept is None else ("channel", kept)
    if axis is None:
        return ("none" if recipe == "none" else "tensor"), -1
    return recipe, axis


def takes_recipe(node: fx.Node, recipe: str) -> bool:
    """Whether a GEMM's operands can be scaled by a recipe (`activation/weight`): attention and products that are summed
    over no single axis as whole tensors only, convolutions also by rows, the rest by any blocks along the sum.
    Activations stay wide, or have dynamic steps, in products of two matrices alone; static steps there and in
    convolutions of images."""
    names = {r.name for r in split_recipe(recipe)}
    if names <= {"none", "tensor"}:
        return True
    if packs_weight(recipe):
        image = node_op(node) == "aten.convolution" and len(node.args[3]) == 2 and not node.args[6]  # type: ignore[arg-type]
        return node_op(node) in ("aten.mm", "aten.addmm") or ("static" in names and image)
    op = GEMM_OPS[node_op(node)]
    if op.kind == "conv":
        return names == {"row"} and not (op.backward and written_gradients(node) == (True, True))
    return op.kind != "sdpa" and all(axis is not None for _, axis in operand_slots(node))


def _kept_axis(node: fx.Node, index: int) -> int | None:
    """The axis of a convolution's operand that its result keeps."""
    backward = node_op(node) == "aten.convolution_backward"
    transposed = bool(node.args[7 if backward else 6])
    if not backward:
        return 0 if index == 0 else int(transposed)
    dgrad, wgrad = written_gradients(node)
    if dgrad == wgrad:
        return None
    if wgrad:
        return 1
    return 0 if index == 0 else int(not transposed)


def operand_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that enter the product, in the order of `operand_slots`. Raises KeyError when the node is no GEMM."""
    nodes = (node.args[i] for i, _ in operand_slots(node))
    return tuple(n for n in nodes if isinstance(n, fx.Node))


def written_gradients(node: fx.Node) -> tuple[bool, bool]:
    """Which of (gradient of the input, gradient of the weight) a fused backward node is asked for.

    For a convolution that is its `output_mask`; a grouped GEMM's backward always computes both, so its split copies
    carry the answer in `meta["dsmp_writes"]`.
    """
    if node_op(node) == "aten.convolution_backward":
        mask = node.args[-1]
        assert isinstance(mask, (list, tuple))
        return bool(mask[0]), bool(mask[1]) or bool(mask[2])
    writes = node.meta.get("dsmp_writes", (True, True))
    return bool(writes[0]), bool(writes[1])
