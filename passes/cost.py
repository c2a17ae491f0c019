"""Predicted time of every node on a device: a roofline with the cost of casts and quantisation.

    t(node, format) = max(flops / (peak(format) * e_c), bytes(format) / (bandwidth * e_m)) + launch + t_quantise(format)

with the achieved fractions e_c, e_m of the device's data. Bytes count each operand once at its format and the result
at its storage format. Quantising an operand with a recipe reads it once at its storage format and writes it once at
the narrow one (one launch each). A weight that is stored wider than the GEMM wants it is cast on every use, since
weights may change between two steps; a cast of an activation to a 16-bit format is free, it fuses into the producer
(the range guard of fp16, one power of two per tensor, comes from a maximum that the producer's kernel can keep).

Everything else (elementwise operators, norms, reductions) is limited by memory. Inductor fuses it into regions, so a
node is charged only for what crosses a region's border: values it reads from a GEMM, a placeholder or the other half
of the joint graph, once per pass, and values it hands to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ..hardware_db.capability import Device
from ..hardware_db.formats import Recipe, get_format
from .gemm import gemm_op, operand_nodes, written_gradients
from .graph import (
    concrete,
    is_backward,
    is_getitem,
    node_op,
    numel_of,
    operands,
    real_users,
    root,
    shape_of,
    tensors_of,
    value_of,
)  # fmt: skip
from .op_rules import Policy, class_of, rule_of

_DTYPE_FORMATS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


def format_of(dtype: torch.dtype) -> str | None:
    """The format that a torch dtype holds, None for integer, boolean, complex and 8-bit dtypes."""
    return _DTYPE_FORMATS.get(dtype)


def storage_bytes(format_name: str, numel: int) -> int:
    """Bytes of `numel` elements in a format."""
    return get_format(format_name).storage_bits * numel // 8


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a node (multiply and add counted apart); elements of the result for non-GEMMs."""
    op = gemm_op(node)
    name = node_op(node)
    if op is None:
        if rule_of(node).policy is Policy.VIEW:
            return 0
        read = [numel_of(v) for n in operands(node) if (v := value_of(n)) is not None]
        written = [numel_of(t) for t in tensors_of(node)]
        return max(read + written, default=0) if class_of(node) != "other" else 0
    if op.kind == "sdpa":
        first = 1 if op.backward else 0
        query, key, value = (shape_of(_tensor(n)) for n in operand_nodes(node)[first : first + 3])
        if op.backward:
            # Five products in place of two: the scores again, and one for each gradient (of value, scores, query, key).
            return _attention_flops(query, key, value) * 5 // 2
        return _attention_flops(query, key, value)
    if op.kind == "grouped_mm":
        tokens, weight = (_tensor(n) for n in node.args[:2] if isinstance(n, fx.Node))
        count = 2 * numel_of(tokens) * concrete(weight.shape[-1])
        return count * (sum(node.meta.get("dsmp_writes", (True, True))) if op.backward else 1)
    if op.kind == "conv" and op.backward:
        return _convolution_flops(node) * sum(written_gradients(node))
    packet = getattr(node.target, "_overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        raise KeyError(f"no FLOP formula for {name}")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: tree_map(_sized, n.meta.get("val")))
    return int(formula(*args, **kwargs, out_val=tree_map(_sized, node.meta["val"])))


def _convolution_flops(node: fx.Node) -> int:
    """One product of a convolution's backward node: every weight meets every position it is applied at, in each of the
    three passes. (torch's own count of the weight's gradient is too large by the number of groups.)"""
    grad, value, weight, *_ = (_tensor(n) for n in node.args[:3] if isinstance(n, fx.Node))
    transposed = bool(node.args[7])
    batch, _, *positions = shape_of(value if transposed else grad)
    return 2 * batch * math.prod(positions) * numel_of(weight)


def _attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """query @ key^T and scores @ value of [batch, heads, length, width] tensors."""
    *batch, length, width = query
    return 2 * math.prod(batch) * length * key[-2] * (width + value[-1])


def _sized(value: object) -> object:
    """A value with plain numbers for sizes, so that counting adds no guard to a dynamic graph."""
    if isinstance(value, torch.Tensor):
        return torch.empty(shape_of(value), dtype=value.dtype, device="meta")
    return concrete(value) if isinstance(value, torch.SymInt) else value


def _tensor(node: fx.Node) -> torch.Tensor:
    value = value_of(node)
    assert value is not None, f"{node} holds no tensor"
    return value


class CostModel:
    """Times and bytes of the nodes of one keyed graph on one device."""

    def __init__(self, device: Device, parameters: frozenset[fx.Node] = frozenset()) -> None:
        self.device = device
        self.parameters = parameters

    def gemm_bytes(self, node: fx.Node, compute: str, output: str) -> int:
        """Bytes a GEMM reads at its compute format and writes at its output format."""
        bits = min(get_format(compute).storage_bits, 64)
        read = sum(bits * numel_of(_tensor(n)) // 8 for n in operand_nodes(node))
        return read + sum(storage_bytes(output, numel_of(t)) for t in tensors_of(node) if t.is_floating_point())

    def gemm_time(
        self,
        node: fx.Node,
        flops: int,
        compute: str,
        recipes: Sequence[Recipe],
        accumulate: str,
        output: str,
        storage: str,
    ) -> float:
        """Predicted seconds of a GEMM with quantisation and weight casts; activations lie in `storage`."""
        device = self.device
        rate = device.peak(compute, accumulate) * device.efficiency.compute_for(compute)
        busy = max(flops / rate, self.gemm_bytes(node, compute, output) / self._bandwidth)
        return busy + device.launch_overhead_s + self._preparation(node, compute, recipes, storage)

    def _preparation(self, node: fx.Node, compute: str, recipes: Sequence[Recipe], storage: str) -> float:
        """Seconds to bring the operands into the compute format."""
        seconds = 0.0
        bits = get_format(compute).storage_bits
        for i, operand in enumerate(operand_nodes(node)):
            value = _tensor(operand)
            held = format_of(value.dtype) or "fp32"
            is_weight = root(operand, through_casts=True) in self.parameters
            source = held if is_weight else min((held, storage), key=lambda f: get_format(f).storage_bits)
            scaled = bits <= 8 and recipes[min(i, len(recipes) - 1)].name != "none"
            if bits >= get_format(source).storage_bits or not (scaled or is_weight):
                continue
            moved = storage_bytes(source, numel_of(value)) + storage_bytes(compute, numel_of(value))
            seconds += moved / self._bandwidth + self.device.launch_overhead_s
        return seconds

    def border_bytes(self, node: fx.Node, stored: Mapping[fx.Node, str], seen: set[tuple[fx.Node, bool]]) -> int:
        """Bytes a non-GEMM node moves over the border of its fused region.

        `stored` gives the storage format of values (the traced dtype where it has none); `seen` collects the outside
        values that were read already, since each is read once per pass.
        """
        if rule_of(node).policy is Policy.VIEW:
            return 0
        backward = is_backward(node)
        total = 0
        for operand in operands(node):
            source = root(operand)
            if is_getitem(source):
                source = source.all_input_nodes[0]
            if self._fuses(source, backward) or (source, backward) in seen:
                continue
            seen.add((source, backward))
            read = sum(_held_bytes(t, stored.get(source)) for t in tensors_of(operand))
            held = sum(_held_bytes(t, stored.get(source)) for t in tensors_of(source))
            total += min(read, held)  # a slice reads less than its source, an expansion no more
        if any(not self._fuses(user, backward) for user in _consumers(node)):
            total += sum(_held_bytes(t, stored.get(node)) for t in tensors_of(node))
        return total

    def memory_time(self, moved: int) -> float:
        """Seconds to move bytes at the achieved bandwidth."""
        return moved / self._bandwidth

    @property
    def _bandwidth(self) -> float:
        return self.device.memory_bandwidth * self.device.efficiency.memory

    @staticmethod
    def _fuses(other: fx.Node, backward: bool) -> bool:
        return other.op == "call_function" and gemm_op(other) is None and is_backward(other) == backward


def _held_bytes(tensor: torch.Tensor, stored: str | None) -> int:
    if stored is not None and format_of(tensor.dtype) is not None:
        return storage_bytes(stored, numel_of(tensor))
    return tensor.element_size() * numel_of(tensor)


def _consumers(node: fx.Node) -> list[fx.Node]:
    """Users of a value, looking through views."""
    found: list[fx.Node] = []
    pending = list(real_users(node))
    while pending:
        user = pending.pop()
        if user.op == "call_function" and rule_of(user).policy is Policy.VIEW:
            pending.extend(real_users(user))
        else:
            found.append(user)
    return found
