"""Device code with its constants put in: what Triton's front end does before it compiles, but as source text.

`new_program().specialize` takes a `@triton.jit` function and what is known of its parameters, and gives the definition
that is left: comparisons, conditions and arithmetic over constants are evaluated, branches that are not taken are gone,
so are static assertions that hold, parameters that became constants and what nothing reads any more. Device functions
that it calls are specialised the same way, one copy per distinct set of constants.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Sequence
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from ...errors import KernelUnavailableError
from .constant_folding import UNKNOWN, Evaluator, Known, is_tritons, parameter, unwrapped
from .dead_code import augmented_names, drop_unread, read_names
from .element_types import type_of
from .kernel_program import Facts, Program
from .kernel_text import parse_function, take_comments


def new_program() -> Program:
    """A file's parts, none yet."""
    return Program(_specialized)


def _specialized(program: Program, function: JITFunction, facts: Facts) -> tuple[ast.FunctionDef, tl.dtype | None]:
    """A definition and its type. A parameter that the code assigns is no constant; whether it does is known only when
    the dead code is gone."""
    assigned: set[str] = set()
    while True:
        attempt = _Specializer(program, function, facts, assigned)
        definition, returns = attempt.run()
        found = attempt.stores & set(attempt.constants)
        if not found:
            return definition, returns
        assigned |= found


class _Specializer(ast.NodeTransformer):
    """Walks one function's body in the order of a run."""

    def __init__(self, program: Program, function: JITFunction, facts: Facts, assigned: set[str]) -> None:
        self.program = program
        self.function = function
        self.definition = parse_function(function.fn)
        self.globals = {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
        stored = _stored(self.definition)
        self.locals = {*function.arg_names, *stored}
        self.constants = {n: k for n, k in facts.constants.items() if n not in assigned}
        self.reassigned = {n: k for n, k in facts.constants.items() if n in assigned}
        self.fixed = facts.fixed
        self.values = Evaluator(self.globals, self.constants, self.locals, facts.types, facts.present - set(stored))
        self.returns: list[tl.dtype | None] = []
        self.stores: set[str] = set()
        loops = [n for n in ast.walk(self.definition) if isinstance(n, ast.For | ast.While)]
        self.unsteady = {n for loop in loops for n in _stored(loop) if stored.count(n) > 1}

    def run(self) -> tuple[ast.FunctionDef, tl.dtype | None]:
        definition = self.definition
        read_before = read_names(definition.body)
        definition.body = self._body(definition.body)
        self.stores = {n for statement in definition.body for n in _stored(statement)}
        given: list[ast.stmt] = []
        for name, known in self.reassigned.items():
            if parameter(self.function, name).is_constexpr:
                self.program.bind("tl", tl)
                annotation = ast.parse("tl.constexpr", mode="eval").body
                given.append(ast.AnnAssign(ast.Name(name, ast.Store()), annotation, self._written(known), 1))
        documented = 1 if ast.get_docstring(definition) is not None else 0
        definition.body[documented:documented] = given
        if not self.fixed:
            drop_unread(definition, read_before)
        read = read_names(definition.body) | augmented_names(definition.body)
        kept = []
        for argument in definition.args.args:
            constant = argument.arg in self.constants or argument.arg in _stored(ast.Module(given, []))
            if self.fixed or (argument.arg in read and not constant):
                constexpr = parameter(self.function, argument.arg).is_constexpr
                argument.annotation = ast.parse("tl.constexpr", mode="eval").body if constexpr else None
                if constexpr:
                    self.program.bind("tl", tl)
                kept.append(argument)
        definition.args = ast.arguments([], kept, None, [], [], None, [])
        definition.returns, definition.decorator_list = None, []
        returns = self.returns[0] if len(self.returns) == 1 else None
        return ast.fix_missing_locations(definition), returns

    # expressions

    def visit(self, node: ast.AST) -> Any:
        """A folded expression, or what `ast.NodeTransformer` makes of anything else."""
        if isinstance(node, ast.Compare | ast.BoolOp | ast.IfExp | ast.UnaryOp | ast.BinOp | ast.Call | ast.Attribute):
            found = self.values.value(node)
            if found is not UNKNOWN and not isinstance(found, tl.pointer_type) and self._worth_folding(node):
                return self.program.write(found)
        return super().visit(node)

    def _worth_folding(self, node: ast.expr) -> bool:
        """Decisions always; arithmetic where it has parameters and no name that the text keeps."""
        if isinstance(node, ast.Compare | ast.BoolOp | ast.Call) or isinstance(getattr(node, "op", None), ast.Not):
            return True
        if isinstance(node, ast.Attribute):
            found = unwrapped(self.values.static(node))
            ours = isinstance(found, JITFunction) and not is_tritons(found)
            return found is UNKNOWN or ours or isinstance(found, int | float | str)
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        inline = [n for n in names if n.id in self.constants and self.constants[n.id].name is None]
        return not isinstance(node, ast.IfExp) and bool(names) and len(inline) == len(names)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Store):
            return node
        if node.id in self.constants:
            return self._written(self.constants[node.id])
        if node.id in self.locals:
            return node
        found = self.globals.get(node.id, UNKNOWN)
        if found is UNKNOWN:
            return node  # a builtin
        constant = unwrapped(found)
        if isinstance(constant, bool | int | float | str | tuple):
            name = self.program.constant(node.id, constant)
            return ast.Name(name, ast.Load()) if name else self.program.write(constant)
        if isinstance(found, JITFunction) and not is_tritons(found):
            return self.program.write(found)
        self.program.bind(node.id, found)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if isinstance(node.op, ast.Mult):
            for one, other in ((node.right, node.left), (node.left, node.right)):
                known = self.constants.get(one.id) if isinstance(one, ast.Name) else None
                integral = type(known.value) is int and self.values.value(other) is not UNKNOWN if known else False
                if known and known.name is None and known.value == 1 and (known.unit or integral):
                    result: ast.expr = self.visit(other)
                    return result
        self.generic_visit(node)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.values.value(node.test)
        if test is UNKNOWN:
            self.generic_visit(node)
            return node
        result: ast.expr = self.visit(node.body if test else node.orelse)
        return result

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        deciding = isinstance(node.op, ast.Or)
        while len(node.values) > 1 and self.values.value(node.values[0]) is not UNKNOWN:
            if bool(self.values.value(node.values[0])) is deciding:
                break
            del node.values[0]
        if len(node.values) == 1:
            result: ast.expr = self.visit(node.values[0])
            return result
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = self.values.static(node.func)
        if not isinstance(function, JITFunction) or is_tritons(function):
            self.generic_visit(node)
            return node
        given = _bind(function, node)
        visited: dict[str, ast.expr] = {n: self.visit(copy.deepcopy(a)) for n, a in given.items()}
        facts = Facts()
        for formal in function.params:
            name, argument = formal.name, given.get(formal.name)
            found = unwrapped(formal.default if argument is None else self.values.value(argument))
            if found is not UNKNOWN:
                facts.constants[name] = self._passed(function, argument, found)
            elif argument is not None:
                self._describe(name, argument, visited[name], facts)
        special = self.program.specialize(function, facts)
        alone = [s for s in special.definition.body if not isinstance(s, ast.Expr)]
        match alone[0] if len(alone) == 1 else None:
            case ast.Return(value=ast.Name(id=name)) if name in visited and special.parameters == [name]:
                return visited[name]  # a function that gives its argument back
        missing = [ast.keyword(n, self.program.write(unwrapped(parameter(function, n).default)))
                   for n in special.parameters if n not in given]  # fmt: skip
        by_position = [n for n, _ in zip(function.arg_names, node.args, strict=False) if n in special.parameters]
        by_name = [k.arg for k in node.keywords if k.arg in special.parameters]
        keywords = [ast.keyword(n, visited[str(n)]) for n in by_name]
        return ast.Call(self.program.called(special), [visited[n] for n in by_position], [*keywords, *missing])

    def _passed(self, function: JITFunction, argument: ast.expr | None, value: Any) -> Known:
        """A constant argument; it keeps the name the text has for it, unless the callee means another thing by that."""
        if not isinstance(argument, ast.Name) or isinstance(value, JITFunction | tl.dtype):
            return Known(value)
        known = self.constants.get(argument.id)
        if known is None and argument.id in self.locals:
            return Known(value)
        name = known.name if known else self.program.constant(argument.id, value)
        means_another = name is not None and name in _stored(parse_function(function.fn))
        if name in function.arg_names:
            means_another = not parameter(function, str(name)).is_constexpr
        return Known(value, None if means_another else name, bool(known and known.unit))

    def _describe(self, name: str, argument: ast.expr, visited: ast.expr, facts: Facts) -> None:
        """What is known of an argument that is no constant."""
        found = type_of(visited, self.values, self.program.returns)
        if found is not None:
            facts.types[name] = found
        if isinstance(argument, ast.BinOp | ast.Compare) or (
            isinstance(argument, ast.Name) and argument.id in self.values.present
        ):
            facts.present.add(name)

    def _written(self, known: Known) -> ast.expr:
        if known.name and self.program.constant(known.name, known.value):
            return ast.Name(known.name, ast.Load())
        return self.program.write(known.value)

    # statements

    def _body(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in statements:
            changed = self.visit(statement)
            result += changed if isinstance(changed, list) else [] if changed is None else [changed]
            if result and isinstance(result[-1], ast.Return):
                break
        return result

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        test = self.values.value(node.test)
        if test is not UNKNOWN:
            taken = self._body(node.body if test else node.orelse)
            take_comments(node, taken)
            return taken
        node.test = self.visit(node.test)
        before = dict(self.values.types)
        node.body = self._body(node.body) or [ast.Pass()]
        self.values.types = dict(before)
        node.orelse = self._body(node.orelse)
        self._forget(node, before)
        return node

    def visit_For(self, node: ast.For) -> ast.stmt:
        return self._loop(node, self.values.static(getattr(node.iter, "func", node.iter)) is tl.static_range)

    def visit_While(self, node: ast.While) -> ast.stmt:
        return self._loop(node, False)

    def _loop(self, node: ast.For | ast.While, unrolled: bool) -> ast.stmt:
        """A loop. Names that it carries from step to step have one type throughout, unless it is unrolled."""
        before = dict(self.values.types)
        if unrolled:
            self._forget(node, before)
        if isinstance(node, ast.For):
            node.iter = self.visit(node.iter)
            self._assigned(node.target, None)
        else:
            node.test = self.visit(node.test)
        node.body = self._body(node.body) or [ast.Pass()]
        if unrolled:
            self._forget(node, before)
        else:
            self.values.types = before
        return node

    def _forget(self, node: ast.stmt, before: dict[str, tl.dtype]) -> None:
        """The types as they were before a statement, less those of names that it may have given another."""
        self.values.types = {n: t for n, t in before.items() if n not in _stored(node)}

    def _assigned(self, target: ast.expr, value: ast.expr | None) -> None:
        """A target gets the type of a (visited) value."""
        found = type_of(value, self.values, self.program.returns) if value is not None else None
        for name in _stored(target):
            self.values.known_locals.pop(name, None)
            self.values.types.pop(name, None)
        if isinstance(target, ast.Name) and found is not None:
            self.values.types[target.id] = found

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        self.generic_visit(node)
        self.returns.append(type_of(node.value, self.values, self.program.returns) if node.value else None)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if (
            isinstance(node.target, ast.Name)
            and node.value is not None
            and self.values.static(node.annotation) is tl.constexpr
        ):
            value = self.values.value(node.value)
            self._assigned(node.target, None)
            if value is not UNKNOWN and node.target.id not in self.unsteady:
                self.values.known_locals[node.target.id] = value
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        self.generic_visit(node)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=same)) if name == same:
                return None
        for target in node.targets:
            self._assigned(target, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._assigned(node.target, ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        if isinstance(node.value, ast.Call) and self.values.static(node.value.func) is tl.static_assert:
            holds = self.values.value(node.value.args[0])
            if holds is not UNKNOWN:
                if not holds:
                    raise KernelUnavailableError(f"{self.function.__name__} does not allow {ast.unparse(node.value)}.")
                return None
        if isinstance(node.value, ast.Constant):
            return node
        self.generic_visit(node)
        return node


def _bind(function: JITFunction, call: ast.Call) -> dict[str, ast.expr]:
    """Arguments by parameter name."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        raise KernelUnavailableError(f"a call of {function.__name__} unpacks its arguments. Write them out.")
    given = dict(zip(function.arg_names, call.args, strict=False))
    given.update({k.arg: k.value for k in call.keywords if k.arg is not None})
    return given


def _stored(tree: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
