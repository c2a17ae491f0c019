"""Element types of expressions in device code, as far as they show in the text.

Kernels decide by them (`if x.dtype == tl.bfloat16`). What is not sure is None; then the decision stays in the text.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import triton.language as tl

from .constant_folding import UNKNOWN, Evaluator

_KEEPING = ("trans", "reshape", "broadcast_to", "expand_dims", "permute", "view", "ravel", "abs", "exp", "exp2")


def type_of(node: ast.expr, values: Evaluator, returns: Mapping[str, tl.dtype]) -> tl.dtype | None:
    """The element type of an expression, a pointer type for pointers; None where it is not sure.

    returns: what device functions give back, by the name that calls have.
    """
    match node:
        case ast.Name(id=name):
            return values.types.get(name)
        case ast.Subscript(value=value):
            found = type_of(value, values, returns)
            return None if found is not None and found.is_ptr() else found
        case ast.BinOp(left=left, right=right, op=op):
            a, b = type_of(left, values, returns), type_of(right, values, returns)
            if a is not None and a.is_ptr() and isinstance(op, ast.Add | ast.Sub):
                return a
            floats = a == b == tl.float32 and isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div)
            return tl.float32 if floats else None
        case ast.Call(func=ast.Name(id=name)) if name in returns:
            return returns[name]
        case ast.Call(func=ast.Attribute(attr=attribute)):
            return _of_call(attribute, node, values, returns)
    return None


def _of_call(name: str, node: ast.Call, values: Evaluator, returns: Mapping[str, tl.dtype]) -> tl.dtype | None:
    """Of a function of Triton's, or a method."""
    assert isinstance(node.func, ast.Attribute)
    named = {k.arg: k.value for k in node.keywords}
    is_function = values.static(node.func.value) is not UNKNOWN
    operand = node.args[0] if is_function and node.args else node.func.value
    if name in ("zeros", "full"):
        position = 1 if name == "zeros" else 2
        given = named.get("dtype", node.args[position] if len(node.args) > position else None)
        return _dtype(given, values)
    if name == "to" and not is_function:
        return _dtype(named.get("dtype", node.args[0] if node.args else None), values)
    if name == "load":
        pointer = type_of(operand, values, returns)
        return pointer.element_ty if isinstance(pointer, tl.pointer_type) else None
    if name == "dot":
        given = named.get("acc", node.args[2] if len(node.args) > 2 else None)
        if given is None:
            return _dtype(named.get("out_dtype"), values)
        return type_of(given, values, returns)
    return type_of(operand, values, returns) if name in _KEEPING else None


def _dtype(node: ast.expr | None, values: Evaluator) -> tl.dtype | None:
    found = values.value(node) if node is not None else None
    return found if isinstance(found, tl.dtype) else None
