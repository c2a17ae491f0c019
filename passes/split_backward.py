"""Split fused backward nodes into one node per gradient, so that dgrad and wgrad can be planned apart.

`convolution_backward` returns (grad_input, grad_weight, grad_bias) and a grouped GEMM's backward (grad_input,
grad_weight). Each becomes two nodes of the same operator, one asked for the input's gradient, one for the weight's
(and bias's). Codegen merges the two again where the plan treats them alike.
"""

from __future__ import annotations

import operator

from torch import fx

from .gemm import gemm_op
from .graph import node_op


def split_backward(gm: fx.GraphModule) -> int:
    """Split every fused convolution and grouped-GEMM backward node in place; returns how many were split."""
    count = 0
    for node in list(gm.graph.nodes):
        op = gemm_op(node)
        if op is None or not op.backward or op.kind == "sdpa" or "dsmp_split_of" in node.meta:
            continue
        used = {item.args[1] for item in node.users if item.target is operator.getitem and item.users}
        is_conv = node_op(node) == "aten.convolution_backward"
        if is_conv:
            mask = [bool(m) and i in used for i, m in enumerate(node.args[-1])]
        else:
            mask = [i in used for i in range(2)]
        if not (mask[0] and any(mask[1:])):
            if not is_conv and any(mask):
                node.meta["dsmp_writes"] = (mask[0], mask[1])  # without a mask of its own, this says which one is used
            continue
        parts = ((0,), tuple(range(1, len(mask))))
        for part in parts:
            with gm.graph.inserting_before(node):
                args = node.args
                if is_conv:
                    args = (*node.args[:-1], [m and i in part for i, m in enumerate(mask)])
                clone = gm.graph.call_function(node.target, args, dict(node.kwargs))
            clone.meta = dict(node.meta)
            clone.meta["dsmp_split_of"] = node.name
            clone.meta["dsmp_writes"] = (0 in part, 0 not in part)
            if is_conv:
                clone.meta["val"] = tuple(
                    v if m and i in part else None for i, (v, m) in enumerate(zip(node.meta["val"], mask, strict=True))
                )
            for item in list(node.users):
                if item.args[1] in part:
                    item.replace_input_with(node, clone)
        gm.graph.erase_node(node)
        count += 1
    if count:
        gm.recompile()
    return count
