"""Replace planned products by the kernels that compute them: the last change a legal graph sees before an executor.

The legaliser leaves a product that torch's own operators cannot compute in its planned format as

    operand --round (dsmp::fake_quantize)--> [views] --> aten.mm in fp32 --> cast to the stored format

and a kernel computes the same numbers from the narrow values themselves:

    operand --quantise--> (values, scales) --> dsmp::block_mm / mx_mm / gemm, bias and output cast included

`narrow_operands` makes the values and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload

from ..errors import KernelUnavailableError
from ..hardware_db.capability import Device
from ..passes.gemm import GEMM_OPS, gemm_op, operand_slots
from ..passes.graph import aten, calls, float_dtype, node_op, shape_of, value_of
from ..passes.insertion import insert_call
from ..passes.keys import key_of
from ..passes.plan import Decision
from ..passes.static_steps import Steps, steps_of
from ..passes.workload import gemm_shape, tensor_of
from .audit import Entry, Ran
from .cpu.held_weights import DYNAMIC, is_held
from .cpu.int8_graph import lower_int8, why_not
from .fuse_quantise import fuse_gates
from .half_ops import HALF_OPS
from .narrow_operands import CASTS, NarrowOperands
from .registry import PRODUCTS, SIMULATION, Choice, Product, choose, forced_name
from .tf32_ops import TF32_OPS

_ROUNDINGS = ("dsmp.fake_quantize", "dsmp.fake_quantize_static")
_DYNAMIC = "dsmp.fake_quantize_dynamic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How products are to be run.

    device: the planned device. `native`: the graph will run on it. `interpret`: run Triton kernels in the interpreter
    (on a CPU) whatever device is planned. `forced`: implementations by glob over keys. `without`: names not to use.
    """

    device: Device
    native: bool
    interpret: bool = False
    forced: Mapping[str, str] = field(default_factory=dict)
    without: Collection[str] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of implementations that can run."""
        if self.interpret:
            return ("triton",)
        return ("triton", "library") if self.native else ()


def product_of(node: fx.Node, decision: Decision) -> Product:
    """The planned product of a GEMM-class node."""
    return Product(
        key=decision.key,
        op_class=decision.op,
        phase=decision.phase,
        aten=node_op(node),
        compute=decision.compute,
        recipe=decision.recipe,
        accumulate=decision.accumulate,
        output=decision.output,
        traced=decision.traced,
        shape=gemm_shape(node),
    )


def lower_products(
    gm: fx.GraphModule,
    decisions: Mapping[str, Decision],
    lowering: Lowering,
    simulated: Collection[str],
    parameters: frozenset[fx.Node],
) -> list[Entry]:
    """Replace the products that a kernel computes, in place; returns what runs for every decided product.

    `simulated`: keys that the legaliser left rounded, in the traced dtype; `parameters`: their placeholders.

    Raises KernelUnavailableError for an implementation that was asked for by name and cannot serve.
    """
    lowerer = _Lowerer(gm, parameters)
    entries = []
    for node in list(calls(gm)):
        key = key_of(node)
        decision = decisions.get(str(key)) if key is not None else None
        if decision is None or gemm_op(node) is None:
            continue
        entries.append(_lower(node, decision, lowering, lowerer, decision.key in simulated))
    lowerer.finish(lowerer.replaced)
    fuse_gates(lowerer)
    if lowerer.static:
        lower_int8(gm, lowerer.static)
    return entries


def _lower(node: fx.Node, decision: Decision, how: Lowering, lowerer: _Lowerer, simulated: bool) -> Entry:
    product = product_of(node, decision)
    asked = forced_name(product.key, how.forced)
    if product.as_traced and (asked in (None, "torch") or not how.kinds):
        return Entry.of(decision, "torch", Ran.AS_TRACED, "planned as the model was written")
    if product.shape is None and product.aten in PRODUCTS:
        return Entry.of(decision, "torch", Ran.SIMULATED, "an operand is empty: there is nothing to multiply")
    planned = choose(product, how.device, forced=how.forced, without=how.without)
    able = planned
    if how.kinds != ("triton", "library"):
        forced = how.forced if how.interpret else {}
        able = choose(product, how.device, forced=forced, without=how.without, kinds=how.kinds)
    implementation = able.implementation
    if implementation.name == "cpu_int8" and lowerer.make_static(node, decision):
        return Entry.of(decision, implementation.name, Ran.NATIVE, able.reason)
    replace = _BUILDERS.get(implementation.name)
    if replace is not None and lowerer.replace(node, product, replace):
        if how.interpret:
            return Entry.of(decision, implementation.name, Ran.INTERPRETED, "its kernel runs in Triton's interpreter")
        return Entry.of(decision, implementation.name, Ran.NATIVE, able.reason)
    if asked is not None and implementation.name == asked and replace is not None:
        raise KernelUnavailableError(
            f"{product.key}: the operands are not laid out as {asked} needs them. Do not name an implementation for it."
        )
    if not simulated:
        return Entry.of(decision, "torch", Ran.NATIVE, f"{product.aten} takes {product.compute} operands")
    return _rounded(decision, product, how, planned, able)


def _rounded(decision: Decision, product: Product, how: Lowering, planned: Choice, able: Choice) -> Entry:
    """A product that stays rounded and multiplied in fp32: it must, or its implementation is missing."""
    if how.native or (how.interpret and planned.implementation is SIMULATION):
        if able.implementation is SIMULATION and able.forced:
            return Entry.of(decision, SIMULATION.name, Ran.SIMULATED, able.reason)
        why = able.reason if able.implementation is SIMULATION else "its operands are not laid out for the kernel"
        return Entry.of(decision, SIMULATION.name, Ran.FELL_BACK, why)
    there = planned.implementation.name
    if how.interpret:
        return Entry.of(decision, SIMULATION.name, Ran.SIMULATED, f"{there} of {how.device.id} is no Triton kernel")
    return Entry.of(decision, SIMULATION.name, Ran.SIMULATED, f"not on {how.device.id}; there it would be {there}")


_Builder = Callable[["_Lowerer", fx.Node, Product, fx.Node | None, torch.dtype], "fx.Node | None"]


class _Lowerer(NarrowOperands):
    """Replaces products in one graph."""

    def __init__(self, gm: fx.GraphModule, parameters: frozenset[fx.Node]) -> None:
        super().__init__(gm, parameters)
        self.replaced: list[fx.Node] = []
        self.static: dict[fx.Node, Steps] = {}

    def make_static(self, node: fx.Node, decision: Decision) -> bool:
        """Note a product of int8 in static steps, its operands as they were before they were rounded; False, with
        nothing changed, where the int8 operators cannot take it."""
        rounded = node.args
        for index, _ in operand_slots(node):
            operand = rounded[index]
            if isinstance(operand, fx.Node) and node_op(operand) in _ROUNDINGS:
                node.update_arg(index, operand.args[0])
        if why_not(node) or decision.static_range is None:
            node.args = rounded
            return False
        self.static[node] = steps_of(*decision.static_range)
        return True

    def replace(self, node: fx.Node, product: Product, build: _Builder) -> bool:
        """Replace a product by what `build` makes of it; False where that cannot be."""
        bias, fused = self._bias(node) if node_op(node) in PRODUCTS else (None, True)
        cast = self._output_cast(node) if fused and node_op(node) in PRODUCTS else None
        dtype = float_dtype(cast or node) or torch.float32
        wide = dtype if fused else torch.float32
        fresh = build(self, node, product, bias if fused else None, wide)
        if fresh is None:
            return False
        fresh.meta["dsmp_key"] = key_of(node)
        result = fresh if fused else self._add_bias(node, fresh, bias)
        old = cast or node
        old.replace_all_uses_with(result)
        self.replaced += [node] if cast is None else [cast, node]
        return True

    @staticmethod
    def _output_cast(node: fx.Node) -> fx.Node | None:
        """The cast that stores the result narrower, if nothing else reads the result."""
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
        held = value_of(user)
        if node_op(user) in CASTS and held is not None and held.dtype in (torch.bfloat16, torch.float16):
            return user
        return None

    @staticmethod
    def _bias(node: fx.Node) -> tuple[fx.Node | None, bool]:
        """The bias of a product and whether a kernel can add it: a vector along the columns, as it is."""
        position = GEMM_OPS[node_op(node)].bias
        if position is None or node.kwargs.get("beta", 1) == 0:
            return None, bool(node.kwargs.get("alpha", 1) == 1)
        bias = node.args[position]
        assert isinstance(bias, fx.Node)
        plain = bool(node.kwargs.get("alpha", 1) == 1 and node.kwargs.get("beta", 1) == 1)
        # a bias of one element is stretched over the columns, which a kernel would have to know
        vector = tensor_of(bias).dim() == 1 and shape_of(tensor_of(bias))[0] == shape_of(tensor_of(node))[-1]
        return bias, plain and vector and node_op(node) == "aten.addmm"

    def _add_bias(self, node: fx.Node, product: fx.Node, bias: fx.Node | None) -> fx.Node:
        """alpha * product + beta * bias, in fp32."""
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        if alpha != 1:
            product = self.call(aten.mul.Tensor, (product, alpha), before=node, like=node)
        if bias is None:
            return product
        if beta != 1:
            bias = self.call(aten.mul.Tensor, (bias, beta), before=node, like=node)
        return self.call(aten.add.Tensor, (product, bias), before=node, like=node)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    left, right = (node.args[i] for i in GEMM_OPS[node_op(node)].operands)
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def _gemm(low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
    left, right = (low.whole(operand, product) for operand in _operands(node))
    if left is None or right is None:
        return None
    args = (left.values, right.values, bias, left.scales, right.scales, product.compute, dtype)
    return low.call(torch.ops.dsmp.gemm.default, args, before=node, like=node)


def _block_mm(
    low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype
) -> fx.Node | None:
    left, right = (low.blocks(operand, product) for operand in _operands(node))
    if left is None or right is None:
        return None
    recipes = [str(operand.args[2]) for operand in _operands(node)]
    args = (left.values, left.scales, right.values, right.scales, bias, *recipes, dtype)
    return low.call(torch.ops.dsmp.block_mm.default, args, before=node, like=node)


def _mx_mm(low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
    left, right = (low.blocks(operand, product) for operand in _operands(node))
    if left is None or right is None:
        return None
    args = (left.values, left.scales, right.values, right.scales, bias, dtype)
    return low.call(torch.ops.dsmp.mx_mm.default, args, before=node, like=node)


def _library_mm(op: OpOverload) -> _Builder:
    """A library's product of whole operands with their scales."""

    def build(
        low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype
    ) -> fx.Node | None:
        left, right = (low.whole(operand, product) for operand in _operands(node))
        if left is None or right is None or left.scales is None or right.scales is None:
            return None
        args = (left.values, right.values, left.scales, right.scales, bias, dtype)
        return low.call(op, args, before=node, like=node)

    return build


def _tf32(low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype) -> fx.Node | None:
    """A library's operator on the operands as they were before rounding: its matrix units round them."""

    def given(operand: fx.Node) -> fx.Node | None:
        found = low.whole(operand, product)
        return None if found is None else found.values

    return _library_op(low, node, TF32_OPS.get(product.aten), given)


def _half_op(
    low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype
) -> fx.Node | None:
    """A library's operator in scaled fp16 on the operands as they were before rounding: it scales them itself."""
    return _library_op(low, node, HALF_OPS.get(product.aten), lambda operand: low.unrounded(operand, product))


def _library_op(
    low: _Lowerer, node: fx.Node, target: OpOverload | None, given: Callable[[fx.Node], fx.Node | None]
) -> fx.Node | None:
    """`target` in the place of an operator, on what `given` finds for its operands; None where it finds nothing."""
    if target is None:
        return None
    args = list(node.args)
    for index, _ in operand_slots(node):
        operand = args[index]
        args[index] = given(operand) if isinstance(operand, fx.Node) else None
        if args[index] is None:
            return None
    fresh = insert_call(low.graph, target, tuple(args), dict(node.kwargs), like=node, joint=low.joint, before=node)
    fresh.meta.pop("dsmp_split_of", None)
    return fresh


def _parameter(low: _Lowerer, operand: fx.Node) -> tuple[fx.Node, bool] | None:
    """The parameter that an operand is, rounded or not, and whether it is turned; None if it is computed of one.

    Operators of packed weights read the parameter itself: only so can they see that it has changed.
    """
    turns = 0
    while operand not in low.parameters:
        turned = node_op(operand) == "aten.permute" and bool(operand.args[1] == [1, 0])
        if not turned and node_op(operand) != "dsmp.fake_quantize":
            return None
        turns += int(turned)
        (operand,) = operand.all_input_nodes
    return operand, turns % 2 == 1


def _packed_linear(low: _Lowerer, node: fx.Node, x: fx.Node, form: str, bias: fx.Node | None, target: OpOverload,
                   *how: object) -> fx.Node | None:  # fmt: skip
    """A linear by a weight that `target` packs, or that is held packed in a form; None where it is neither."""
    found = _parameter(low, _operands(node)[1])
    if found is None:
        return None
    weight, turned = found
    if node_op(weight) != "dsmp.held_weight":
        return low.call(target, (x, weight, bias, *how, not turned), before=node, like=node)
    if not is_held(weight, form) or not turned:
        return None
    held, _, size, _ = weight.args
    target = torch.ops.dsmp.held_linear.default
    return low.call(target, (x, held, bias, form, size, None), before=node, like=node)


def _narrow_linear(
    low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype
) -> fx.Node | None:
    left, target = _operands(node)[0], torch.ops.dsmp_cpu.narrow_linear.default
    return _packed_linear(low, node, left, product.compute, bias, target, product.compute)


def _dynamic_linear(
    low: _Lowerer, node: fx.Node, product: Product, bias: fx.Node | None, dtype: torch.dtype
) -> fx.Node | None:
    rounded = _operands(node)[0]
    if node_op(rounded) != _DYNAMIC:
        return None
    x = rounded.args[0]
    assert isinstance(x, fx.Node)
    return _packed_linear(low, node, x, DYNAMIC, bias, torch.ops.dsmp_cpu.int8_dynamic_linear.default)


_BUILDERS: Mapping[str, _Builder] = {
    "cpu_narrow_linear": _narrow_linear,
    "cpu_int8_dynamic": _dynamic_linear,
    "torch_half_mm": _library_mm(torch.ops.dsmp.library_half_mm.default),
    "torch_half_op": _half_op,
    "torch_tf32": _tf32,
    "triton_gemm": _gemm,
    "triton_block_gemm": _block_mm,
    "triton_mx_gemm": _mx_mm,
    "torch_scaled_mm": _library_mm(torch.ops.dsmp.library_scaled_mm.default),
}
