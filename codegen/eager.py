"""Make a graph cheap to run op by op: what a fusing compiler gets for nothing.

A Python scalar in an elementwise operator is turned into a tensor and converted to the other operand's dtype at every
call; as a constant of that dtype it is converted once. `prims.convert_element_type` calls a cast that calls a copy;
`aten._to_copy` is the copy itself.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..passes.graph import aten, prims, value_of

_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
_CARRIERS = (torch.float32, torch.float64)


def lower_for_eager(gm: fx.GraphModule) -> None:
    """Rewrite casts and scalar operands in place; numbers do not change."""
    constants: dict[tuple[str, torch.dtype], fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is prims.convert_element_type.default:
            node.target, node.args, node.kwargs = aten._to_copy.default, (node.args[0],), {"dtype": node.args[1]}
        elif node.target in _ARITHMETIC and not node.kwargs:
            tensor, scalar = node.args
            value, held = value_of(node), value_of(tensor) if isinstance(tensor, fx.Node) else None
            if (
                isinstance(scalar, (int, float))
                and not isinstance(scalar, bool)
                and value is not None
                and held is not None
                and value.dtype == held.dtype
                and value.dtype in _CARRIERS
            ):
                node.args = (tensor, _constant(gm, constants, float(scalar), value.dtype))


def _constant(
    gm: fx.GraphModule, known: dict[tuple[str, torch.dtype], fx.Node], scalar: float, dtype: torch.dtype
) -> fx.Node:
    key = (repr(scalar), dtype)  # 0.0 and -0.0 are equal, but not the same factor
    if key not in known:
        name = f"_dsmp_constant_{len(known)}"
        with _disable_current_modes():
            gm.register_buffer(name, torch.tensor(scalar, dtype=dtype), persistent=False)
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            known[key] = gm.graph.get_attr(name)
    return known[key]
