"""The values of expressions in device code that are known before a run."""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "UNKNOWN"})()
"""The value of an expression that only a run knows."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Not: operator.not_,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_FUNCTIONS = {min, max, abs, int, float, bool, len}


@dataclass(frozen=True, slots=True)
class Known:
    """A constant. name: of the module-level constant that stands for it in the text, None for its value itself. unit:
    a run-time argument that is 1, e.g. a stride: products with it are their other factor."""

    value: Any
    name: str | None = None
    unit: bool = False


class Evaluator:
    """Values in one function's body.

    names: what globals (and closures) stand for. constants: known parameters. hidden: parameters and local names, which
    hide globals. present: parameters that are not None. types: element types of names (pointer types of pointers), and
    known_locals: values of local constexprs, as of the statement that a walk through the body has reached.
    """

    def __init__(
        self,
        names: Mapping[str, Any],
        constants: Mapping[str, Known],
        hidden: set[str],
        types: Mapping[str, tl.dtype],
        present: set[str],
    ) -> None:
        self.names, self.constants, self.hidden = names, constants, hidden
        self.types, self.present = dict(types), present
        self.known_locals: dict[str, Any] = {}

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, UNKNOWN if it depends on the run."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List():
                values = tuple(self.value(e) for e in node.elts)
                return UNKNOWN if _unknown(values) else values
            case ast.Name() | ast.Attribute():
                return self._named(node)
            case ast.UnaryOp():
                operand = self.value(node.operand)
                return UNKNOWN if operand is UNKNOWN else _OPERATORS[type(node.op)](operand)
            case ast.BinOp():
                left, right = self.value(node.left), self.value(node.right)
                return UNKNOWN if _unknown((left, right)) else _OPERATORS[type(node.op)](left, right)
            case ast.BoolOp():
                return self._boolean(node)
            case ast.Compare():
                return self._comparison(node)
            case ast.IfExp():
                test = self.value(node.test)
                return UNKNOWN if test is UNKNOWN else self.value(node.body if test else node.orelse)
            case ast.Call(keywords=[]):
                function = self.static(node.func)
                arguments = [self.value(a) for a in node.args]
                pure = type(function).__name__ == "ConstexprFunction" or function in _FUNCTIONS
                if pure and not _unknown(arguments):
                    return unwrapped(function(*arguments))
        return UNKNOWN

    def _named(self, node: ast.Name | ast.Attribute) -> Any:
        if isinstance(node, ast.Name) and node.id in self.known_locals:
            return self.known_locals[node.id]
        if isinstance(node, ast.Attribute):
            if node.attr == "dtype" and isinstance(node.value, ast.Name):
                return self.types.get(node.value.id, UNKNOWN)
            if node.attr in ("element_ty", "primitive_bitwidth", "itemsize") and isinstance(node.value, ast.Attribute):
                base = self._named(node.value)
                return getattr(base, node.attr, UNKNOWN) if isinstance(base, tl.dtype) else UNKNOWN
        found = unwrapped(self.static(node))
        constant = found is None or isinstance(found, tl.dtype | bool | int | float | str | tuple | JITFunction)
        return found if constant else UNKNOWN

    def _boolean(self, node: ast.BoolOp) -> Any:
        deciding = isinstance(node.op, ast.Or)
        result: Any = not deciding
        for operand in node.values:
            result = self.value(operand)
            if result is UNKNOWN or bool(result) is deciding:
                return result
        return result

    def _comparison(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            return UNKNOWN
        left, right = self.value(node.left), self.value(node.comparators[0])
        identity = isinstance(node.ops[0], ast.Is | ast.IsNot)
        if (
            identity
            and right is None
            and isinstance(node.left, ast.Name)
            and (node.left.id in self.present or node.left.id in self.types)
        ):
            return isinstance(node.ops[0], ast.IsNot)
        return UNKNOWN if _unknown((left, right)) else _OPERATORS[type(node.ops[0])](left, right)

    def static(self, node: ast.expr) -> Any:
        """The Python object that a name or a chain of attributes stands for; UNKNOWN for what a run computes."""
        if isinstance(node, ast.Name):
            if node.id in self.constants:
                return self.constants[node.id].value
            if node.id in self.hidden:
                return UNKNOWN
            return self.names.get(node.id, getattr(builtins, node.id, UNKNOWN))
        if isinstance(node, ast.Attribute):
            base = self.static(node.value)
            return UNKNOWN if base is UNKNOWN else getattr(base, node.attr, UNKNOWN)
        return UNKNOWN


def parameter(function: JITFunction, name: str) -> Any:
    return function.params[function.arg_names.index(name)]


def is_tritons(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "triton"


def unwrapped(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return UNKNOWN
    return value.value if isinstance(value, tl.constexpr) else value


def _unknown(values: Sequence[Any]) -> bool:
    return any(v is UNKNOWN for v in values)
