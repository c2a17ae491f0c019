"""What the nodes and copies of a program cost, in microseconds: on a device (`Roofline`) or in bits (`Bits`).

**Roofline.** A GEMM takes its time of the cost model (cost.py) with its parameters brought into the compute format; its
activations are copies of the program. What a node writes and what others read of it counts with the node, since its
label says how many bytes that is: one write if anything outside of its fused region reads it, and one read by the other
operators of each pass. What is read of the model's inputs counts with the first reader. Copies:

    8 bits or fewer   a kernel reads what is stored and writes the quantised copy; free where one is stored (never)
    16 bits, wide     one more write: the conversion fuses into the kernel that computes the value; free where the value
                      is stored in that format
    of an input       read, write and launch
    static steps      one write: who computes the value rounds it, knowing the steps before
    dynamic steps     one read more: they are found first

CPUs pack the 8-bit weights of a graph without a backward pass once: there they cost no conversion.

**Bits.** For models too small for a device's launch times to mean anything, and to compare methods: a GEMM takes 1 us
per 1e9 FLOP at 16 bits, in proportion to its bits (32 for fp32 and tf32, the traced format's where weights alone are
narrow); all other nodes take nothing. Quantising
takes a time per element such that the copies of the best uniform 8-bit plan eat the share `cast_share` of what that
plan saves over 16 bits; other copies are free.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from ..hardware_db.capability import Device
from ..hardware_db.formats import get_format, keeps_wide, packs_weight, split_recipe
from .candidates import NodeWays, Way
from .cost import CostModel, read_bytes, storage_bytes, value_bytes
from .dataflow import readers
from .gemm import gemm_op, operand_nodes
from .graph import is_backward, is_getitem, node_op, operands, root, shape_of, tensors_of
from .labels import split_label
from .operand_copies import OperandCopy
from .regions import leaves_region
from .workload import flops_of, tensor_of

_INT8_CALL_S = 5e-6
"""Seconds that calling a product of static or dynamic steps takes beyond a library's: measured on a Zen 4 core, 8.5
against 3.8 microseconds for a convolution of 16 channels."""

_DEPTHWISE_CALL_S = 5e-5
"""Seconds that a call of torch's depthwise convolution takes on CPUs beyond its arithmetic: it brings the weights into
an order of its own each time. Timing F.conv2d, 3x3, on a Zen 3 core: 75 microseconds for 200 channels of 14x14, 111
for 480."""

_BITS_FLOP_PER_US = 1e9
_BITS_BASE = 16


class ProgramCosts(Protocol):
    """A cost model of the nodes and copies of one graph; times are microseconds."""

    def node_time(self, node: NodeWays, way: Way) -> float:
        """The time of a node with its own memory traffic."""

    def copy_time(self, copy: OperandCopy, stored: str | None) -> float:
        """The time of making a copy of a value that is stored in a format; None: of an input, as it is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Product:
    seconds: float
    moved: int


class Roofline(CostModel):
    """Predicted time on a device."""

    def __init__(self, nodes: Sequence[NodeWays], device: Device, parameters: frozenset[fx.Node]) -> None:
        super().__init__(device, parameters)
        known = {n.node for n in nodes}
        self._packed = device.kind == "cpu" and not any(is_backward(n) for n in known)
        seen: set[tuple[fx.Node, bool]] = set()
        self._reads: defaultdict[fx.Node, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
        self._constant: Counter[fx.Node] = Counter()
        self._traffic_bytes: dict[tuple[fx.Node, str], int] = {}
        self._products: dict[Hashable, _Product] = {}
        self._kinds: dict[fx.Node, Hashable] = {}
        for found in nodes:
            if gemm_op(found.node) is not None:
                continue
            for source, operand in self.border_reads(found.node, seen):
                if source in known:
                    self._reads[source].append((found.node, operand))
                else:
                    self._constant[found.node] += read_bytes(found.node, source, operand, None)

    def node_time(self, node: NodeWays, way: Way) -> float:
        seconds = self.memory_time(self._traffic(node.node, way.output))
        if gemm_op(node.node) is not None:
            seconds += self._product(node.node, way).seconds
        return 1e6 * seconds

    def node_bytes(self, node: NodeWays, way: Way) -> int:
        """Bytes that a node and the other operators that read its result move."""
        product = self._product(node.node, way).moved if gemm_op(node.node) is not None else 0
        return product + self._traffic(node.node, way.output)

    def _traffic(self, node: fx.Node, output: str) -> int:
        """Bytes that a node's result moves when it is stored as `output`, except what GEMMs read and write."""
        moved = self._traffic_bytes.get((node, output))
        if moved is None:
            reads = self._reads[node]
            moved = self._constant[node] + sum(read_bytes(reader, node, operand, output) for reader, operand in reads)
            if gemm_op(node) is None and leaves_region(node):
                moved += value_bytes(node, output)
            self._traffic_bytes[node, output] = moved
        return moved

    def _product(self, node: fx.Node, way: Way) -> _Product:
        """A GEMM with its parameters converted; one of the same operator and shapes is computed once."""
        identity = (self._alike(node), way.compute, way.recipe, way.output)
        known = self._products.get(identity)
        if known is None and keeps_wide(way.recipe):
            seconds = self.narrow_weights_time(node, flops_of(node), way.compute, way.output)
            moved = self.gemm_bytes(node, way.compute, way.output, weights_only=True)
            known = self._products[identity] = _Product(seconds=seconds, moved=moved)
        if known is None:
            compute, accumulate = way.compute, way.accumulate
            if not self.device.rated(compute, accumulate):
                compute, accumulate = "fp32", "fp32"  # emulated
            seconds = self.product_time(node, flops_of(node), compute, accumulate, way.output)
            if packs_weight(way.recipe):
                seconds += _INT8_CALL_S
            elif self._packed and _is_depthwise(node):
                seconds += _DEPTHWISE_CALL_S
            if not (self._packed and get_format(compute).storage_bits <= 8):
                seconds += self.preparation(node, compute, split_recipe(way.recipe), "fp32", weights_only=True)
            known = _Product(seconds=seconds, moved=self.gemm_bytes(node, way.compute, way.output))
            self._products[identity] = known
        return known

    def _alike(self, node: fx.Node) -> Hashable:
        """What the cost of a GEMM depends on."""
        kind = self._kinds.get(node)
        if kind is None:
            tensors = tuple((t.dtype, shape_of(t)) for n in operands(node) for t in tensors_of(n))
            weights = tuple(root(n, through_casts=True) in self.parameters for n in operand_nodes(node))
            plain = str([a for a in node.args if not isinstance(a, fx.Node)])
            kind = self._kinds[node] = (node.target, tensors, weights, plain, str(node.meta.get("dsmp_writes")))
        return kind

    def copy_time(self, copy: OperandCopy, stored: str | None) -> float:
        if stored is None and copy.format == copy.traced:
            return 0.0
        if copy.recipe in ("static", "dynamic"):
            found = storage_bytes(copy.traced, copy.numel) if copy.recipe == "dynamic" else 0
            return 1e6 * self.memory_time(found + storage_bytes(copy.format, copy.numel))
        if stored is None or copy.quantised:
            recipe = copy.recipe if copy.quantised else "none"
            return 1e6 * self.device.conversion_time(stored or copy.traced, copy.format, recipe, copy.numel)
        if stored == copy.format:
            return 0.0
        return 1e6 * self.memory_time(storage_bytes(copy.format, copy.numel))


class Bits:
    """FLOPs times bits, and quantisation as a share of what 8 bits save."""

    def __init__(self, nodes: Sequence[NodeWays], copies: Sequence[OperandCopy], cast_share: float) -> None:
        self._at_base = {
            n.node: flops_of(n.node) / _BITS_FLOP_PER_US if gemm_op(n.node) is not None else 0.0 for n in nodes
        }
        self._per_element = self._time_per_element(nodes, copies, cast_share)

    def node_time(self, node: NodeWays, way: Way) -> float:
        multiplied = node.traced if keeps_wide(way.recipe) else way.compute
        return self._at_base[node.node] * get_format(multiplied).storage_bits / _BITS_BASE

    def copy_time(self, copy: OperandCopy, stored: str | None) -> float:
        return self._per_element * copy.numel if copy.quantised else 0.0

    def _time_per_element(self, nodes: Sequence[NodeWays], copies: Sequence[OperandCopy], share: float) -> float:
        """Microseconds per quantised element; 0 where nothing may be computed in 8 bits."""
        saved: defaultdict[str, float] = defaultdict(float)
        for node in nodes:
            narrow = {w.arithmetic: w for w in node.allowed if get_format(w.compute).storage_bits == 8}
            for text, way in narrow.items():
                saved[text] += self._at_base[node.node] - self.node_time(node, way)
        if not saved:
            return 0.0
        best = max(saved, key=lambda text: saved[text])
        elements = sum(
            c.numel for c in copies if any(split_label(t)[0] == best for ts in c.readers.values() for t in ts)
        )
        return share * saved[best] / elements if elements else 0.0


def _is_depthwise(node: fx.Node) -> bool:
    if node_op(node) != "aten.convolution":
        return False
    weight = tensor_of(operand_nodes(node)[1])
    return bool(node.args[8] != 1) and shape_of(weight)[1] == 1


def saved_bytes(node: fx.Node, stored: str) -> int:
    """Bytes of a forward node's result, stored in a format, that the backward pass reads; 0 for backward nodes."""
    if is_backward(node):
        return 0
    values = [u for u in node.users if is_getitem(u)] or [node]
    return sum(value_bytes(v, stored) for v in values if any(is_backward(user) for _, user in readers(v)))
