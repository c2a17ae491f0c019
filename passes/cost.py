"""Predicted time of every node on a device: a roofline with the cost of casts and quantisation.

    t(node, format) = max(flops / achievable(format, shape), bytes(format) / bandwidth) + launch + t_prepare(format)

where the device says what is achievable and at which bandwidth: measured, or a usual fraction of its peaks
(capability.py). Bytes count each operand once at its format and the result at its storage format. Quantising an operand
with a recipe reads it once at its storage format and writes it once at the narrow one (one launch each). A weight that
is stored wider than the GEMM wants it is cast on every use, since weights may change between two steps; a cast of an
activation to a 16-bit format is free, it fuses into the producer (the range guard of fp16, one power of two per tensor,
comes from a maximum that the producer's kernel can keep).

Everything else (elementwise operators, norms, reductions) is limited by memory. Inductor fuses it into regions, so a
node is charged only for what crosses a region's border: values it reads from a GEMM, a placeholder or the other half
of the joint graph, once per pass, and values it hands to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..hardware_db.capability import Device
from ..hardware_db.formats import Recipe, get_format
from ..hardware_db.narrow_weights import narrow_weights_time
from ..hardware_db.work import Work
from .dataflow import source_of
from .gemm import gemm_op, operand_nodes
from .graph import is_backward, node_op, numel_of, operands, root, tensors_of
from .op_rules import Policy, rule_of
from .regions import leaves_region
from .workload import gemm_shape, tensor_of

_DTYPE_FORMATS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip
_PICKING = frozenset({
    "aten.embedding", "aten.index", "aten._unsafe_index", "aten.gather", "aten.index_select", "aten.take",
    "aten.take_along_dim",
})  # fmt: skip


def format_of(dtype: torch.dtype) -> str | None:
    """The format that a torch dtype holds, None for integer, boolean, complex and 8-bit dtypes."""
    return _DTYPE_FORMATS.get(dtype)


def storage_bytes(format_name: str, numel: int) -> int:
    """Bytes of `numel` elements in a format."""
    return get_format(format_name).storage_bits * numel // 8


class CostModel:
    """Times and bytes of the nodes of one keyed graph on one device."""

    def __init__(self, device: Device, parameters: frozenset[fx.Node] = frozenset()) -> None:
        self.device = device
        self.parameters = parameters

    def gemm_bytes(self, node: fx.Node, compute: str, output: str, *, weights_only: bool = False) -> int:
        """Bytes a GEMM reads at its compute format (all but parameters as traced with `weights_only`) and writes at its
        output format."""
        bits = min(get_format(compute).storage_bits, 64)
        read = 0
        for operand in operand_nodes(node):
            value = tensor_of(operand)
            kept = weights_only and root(operand, through_casts=True) not in self.parameters
            read += (8 * value.element_size() if kept else bits) * numel_of(value) // 8
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
        product = self.product_time(node, flops, compute, accumulate, output)
        return product + self.preparation(node, compute, recipes, storage)

    def product_time(self, node: fx.Node, flops: int, compute: str, accumulate: str, output: str) -> float:
        """Predicted seconds of a GEMM whose operands lie in its compute format already."""
        work = Work(flops=flops, moved_bytes=self.gemm_bytes(node, compute, output), gemm=gemm_shape(node))
        return self.device.time(work, compute, accumulate)

    def narrow_weights_time(self, node: fx.Node, flops: int, compute: str, output: str) -> float:
        """Predicted seconds of a linear whose parameters alone are stored in `compute`, packed before it runs."""
        moved = self.gemm_bytes(node, compute, output, weights_only=True)
        return narrow_weights_time(self.device, Work(flops=flops, moved_bytes=moved, gemm=gemm_shape(node)), compute)

    def preparation(
        self, node: fx.Node, compute: str, recipes: Sequence[Recipe], storage: str, *, weights_only: bool = False
    ) -> float:
        """Seconds to bring the operands (or only those that are parameters) into the compute format."""
        seconds = 0.0
        bits = get_format(compute).storage_bits
        for i, operand in enumerate(operand_nodes(node)):
            is_weight = root(operand, through_casts=True) in self.parameters
            if weights_only and not is_weight:
                continue
            value = tensor_of(operand)
            held = format_of(value.dtype) or "fp32"
            source = held if is_weight else min((held, storage), key=lambda f: get_format(f).storage_bits)
            recipe = recipes[min(i, len(recipes) - 1)].name
            scaled = bits <= 8 and recipe != "none"
            if bits >= get_format(source).storage_bits or not (scaled or is_weight):
                continue
            seconds += self.device.conversion_time(source, compute, recipe if scaled else "none", numel_of(value))
        return seconds

    def border_bytes(self, node: fx.Node, stored: Mapping[fx.Node, str], seen: set[tuple[fx.Node, bool]]) -> int:
        """Bytes a non-GEMM node moves over the border of its fused region.

        `stored` gives the storage format of values (the traced dtype where it has none); `seen` collects the outside
        values that were read already, since each is read once per pass.
        """
        if rule_of(node).policy is Policy.VIEW:
            return 0
        reads = self.border_reads(node, seen)
        total = sum(read_bytes(node, source, operand, stored.get(source)) for source, operand in reads)
        return total + (value_bytes(node, stored.get(node)) if leaves_region(node) else 0)

    def border_reads(self, node: fx.Node, seen: set[tuple[fx.Node, bool]]) -> list[tuple[fx.Node, fx.Node]]:
        """(source, operand) of the outside values that a node (no GEMM, no view) is the first of its pass to read;
        `seen` as in `border_bytes`."""
        backward = is_backward(node)
        found = []
        for operand in operands(node):
            source = source_of(operand)
            if self._fuses(source, backward) or (source, backward) in seen:
                continue
            seen.add((source, backward))
            found.append((source, operand))
        return found

    def memory_time(self, moved: int) -> float:
        """Seconds to move bytes at the achieved bandwidth."""
        return moved / self.device.achieved_bandwidth

    @staticmethod
    def _fuses(other: fx.Node, backward: bool) -> bool:
        return other.op == "call_function" and gemm_op(other) is None and is_backward(other) == backward


def value_bytes(node: fx.Node, stored: str | None) -> int:
    """Bytes of a node's result with its floating-point tensors in the format `stored`, None for as traced."""
    return sum(_held_bytes(t, stored) for t in tensors_of(node))


def read_bytes(reader: fx.Node, source: fx.Node, operand: fx.Node, stored: str | None) -> int:
    """Bytes that a node moves when it reads `operand`, a view of what `source` made: a slice reads less than its
    source, an expansion no more, and who picks rows of a table reads those."""
    whole = min(value_bytes(operand, stored), value_bytes(source, stored))
    picks = node_op(reader) in _PICKING and reader.args[0] is operand
    return min(whole, value_bytes(reader, stored)) if picks else whole


def _held_bytes(tensor: torch.Tensor, stored: str | None) -> int:
    if stored is not None and format_of(tensor.dtype) is not None:
        return storage_bytes(stored, numel_of(tensor))
    return tensor.element_size() * numel_of(tensor)
