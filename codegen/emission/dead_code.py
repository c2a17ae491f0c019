"""Names that device code reads, and assignments that nothing reads."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

_IMPURE = ("atomic", "store", "debug", "device_", "static_", "inline_asm", "assume", "print")


def read_names(body: Sequence[ast.stmt]) -> set[str]:
    nodes = (n for statement in body for n in ast.walk(statement))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def augmented_names(body: Sequence[ast.stmt]) -> set[str]:
    nodes = (n for statement in body for n in ast.walk(statement))
    return {n.target.id for n in nodes if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}


def drop_unread(definition: ast.FunctionDef, read_before: set[str]) -> None:
    """Remove assignments of names that were read before constants were put in and are not any more."""

    class Remover(ast.NodeTransformer):
        def __init__(self, unread: set[str]) -> None:
            self.unread = unread
            self.removed = False

        def _visit(self, node: Any) -> Any:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            if len(names) == len(targets) and names <= self.unread and _pure(node.value):
                self.removed = True
                return None
            return node

        visit_Assign = visit_AugAssign = visit_AnnAssign = _visit

    while True:
        remover = Remover(set(read_before) - read_names(definition.body))
        remover.visit(definition)
        if not remover.removed:
            return
        for node in ast.walk(definition):
            if isinstance(node, ast.If | ast.For | ast.While) and not node.body:
                node.body = [ast.Pass()]


def _pure(node: ast.expr | None) -> bool:
    """Whether an expression only computes: calls of Triton's functions and methods that write nothing."""
    for call in ast.walk(node) if node else ():
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if not name or name.startswith(_IMPURE):
                return False
    return True
