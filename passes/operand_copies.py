"""The forms in which GEMMs read values that other nodes computed: one copy per (value, format, scales), shared.

A parameter is converted at each use and belongs to the GEMM's own time; it has no copies here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from ..hardware_db.formats import WIDE, get_format
from .candidates import NodeWays, Way
from .dataflow import source_of
from .gemm import gemm_op, operand_nodes
from .graph import is_backward, numel_of, root, value_of
from .keys import DGRAD, WGRAD

_ONE_SCALE = ("none", "tensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandCopy:
    """One form of a value.

    `value` is the tensor that is converted, below slices and above other views, as the legaliser does it; `source` the
    call or placeholder that computed it; `turned` tells scales along the dimension that the forward GEMM keeps from
    those along the one it contracts (None where scales follow no dimension). `readers` holds the labels under which
    each GEMM reads the form.
    """

    value: fx.Node
    source: fx.Node
    traced: str
    format: str
    recipe: str
    turned: bool | None
    readers: dict[str, list[str]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements that are converted."""
        tensor = value_of(self.value)
        return numel_of(tensor) if tensor is not None else 0

    @property
    def quantised(self) -> bool:
        """Whether the form has 8 bits or fewer, which a kernel of its own makes."""
        return get_format(self.format).storage_bits <= 8


def operand_copies(nodes: Iterable[NodeWays], parameters: frozenset[fx.Node]) -> list[OperandCopy]:
    """All forms that the allowed ways of a graph's GEMMs read, in graph order."""
    found: dict[tuple[object, ...], OperandCopy] = {}
    for gemm in nodes:
        if gemm_op(gemm.node) is None:
            continue
        key = str(gemm.key)
        for operand in dict.fromkeys(operand_nodes(gemm.node)):
            if root(operand, through_casts=True) in parameters:
                continue
            value = root(operand, through_slices=False)
            source = source_of(value)
            turned = gemm.key.phase == WGRAD or (gemm.key.phase == DGRAD and not is_backward(source))
            for way in gemm.allowed:
                name, recipe = _form(way, gemm.traced)
                scaled = None if recipe in _ONE_SCALE else turned
                identity = (value, name, recipe, scaled)
                copy = found.get(identity)
                if copy is None:
                    copy = found[identity] = OperandCopy(
                        value=value,
                        source=source,
                        traced=gemm.traced,
                        format=name,
                        recipe=recipe,
                        turned=scaled,
                    )
                labels = copy.readers.setdefault(key, [])
                if way.label not in labels:
                    labels.append(way.label)
    return list(found.values())


def _form(way: Way, traced: str) -> tuple[str, str]:
    """The format and scales in which a way reads its operands from memory: as traced beside narrow weights, tf32 from
    fp32."""
    if way.activation == WIDE.name:
        return traced, "none"
    return way.compute if get_format(way.compute).storage_bits <= 16 else traced, way.activation
