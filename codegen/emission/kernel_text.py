"""A kernel's source as a tree that remembers its comments, and back to text.

`ast.unparse` drops comments and layout. Here every statement keeps what was written about it: a statement that a
transformation left as it was is written out in its own words, a changed one is unparsed between its comments.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 120
_INDENT = "    "
_FOR_TOOLS = ("# noqa", "# type:", "# fmt:")


@dataclass(slots=True)
class Layout:
    """How a statement was written. before: comment lines above it; trailing: comments on its lines; blank: an empty
    line stood above; source: its own lines less the first one's indentation; dump: the tree they stand for."""

    before: list[str] = field(default_factory=list)
    trailing: list[str] = field(default_factory=list)
    blank: bool = False
    source: list[str] = field(default_factory=list)
    dump: str = ""


def parse_function(function: Callable[..., Any]) -> ast.FunctionDef:
    """The definition of a Python function, each statement in its body with a `Layout` (see `layout`)."""
    return copy.deepcopy(_parsed(function))


@functools.cache
def _parsed(function: Callable[..., Any]) -> ast.FunctionDef:
    source = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT and not t.string.startswith(_FOR_TOOLS)}
    own_lines = {n: t.string for n, t in comments.items() if lines[n - 1].lstrip().startswith("#")}
    previous = definition.body[0].lineno - 1
    for statement in _in_order(definition.body):
        last = _header_end(statement)
        made = Layout(
            before=[
                text
                for n, text in own_lines.items()
                if previous < n < statement.lineno and comments[n].start[1] == statement.col_offset
            ],
            trailing=[t.string for n, t in comments.items() if n not in own_lines and statement.lineno <= n <= last],
        )
        top = statement.lineno - 1
        while top - 1 > 0 and top in own_lines:
            top -= 1
        made.blank = not lines[top - 1].strip()
        if not hasattr(statement, "body"):
            made.source = [lines[statement.lineno - 1][statement.col_offset :], *lines[statement.lineno : last]]
            made.source = _dedented(made.source, statement.col_offset)
            made.dump = ast.dump(statement)
        statement._layout = made  # type: ignore[attr-defined]
        previous = last
    return definition


def layout(statement: ast.stmt) -> Layout:
    """What is remembered of a statement; nothing for one that a transformation made."""
    found: Layout | None = getattr(statement, "_layout", None)
    return found or Layout()


def take_comments(removed: ast.stmt, heirs: Sequence[ast.stmt]) -> None:
    """The comments on a statement that gives way to `heirs` go to the first of them."""
    if heirs:
        old, new = layout(removed), layout(heirs[0])
        heirs[0]._layout = Layout(  # type: ignore[attr-defined]
            before=[*old.before, *old.trailing, *new.before],
            trailing=new.trailing,
            blank=old.blank,
            source=new.source,
            dump=new.dump,
        )


def render_function(definition: ast.FunctionDef, decorator: str) -> str:
    """Text of a function without annotations of its parameters, but for constexprs."""
    parameters = [ast.unparse(a) for a in definition.args.args]
    head = _bracketed(f"def {definition.name}(", parameters, "):", "")
    return "\n".join([decorator, *head, *_block(definition.body, _INDENT)])


def bracketed(opening: str, items: Sequence[str], closing: str, indent: str = "") -> str:
    """`opening item, item closing` on one line where that fits, else as formatters break it."""
    return "\n".join(_bracketed(opening, items, closing, indent))


def _bracketed(opening: str, items: Sequence[str], closing: str, indent: str) -> list[str]:
    line = f"{indent}{opening}{', '.join(items)}{closing}"
    if len(line) <= WIDTH or not items:
        return [line]
    inner = f"{indent}{_INDENT}{', '.join(items)}"
    middle = [inner] if len(inner) <= WIDTH else [f"{indent}{_INDENT}{item}," for item in items]
    return [indent + opening, *middle, indent + closing]


def _block(statements: Sequence[ast.stmt], indent: str) -> list[str]:
    lines: list[str] = []
    for number, statement in enumerate(statements):
        about = layout(statement)
        if about.blank and number:
            lines.append("")
        lines += [indent + text for text in about.before]
        lines += _statement(statement, indent)
    return lines


def _statement(statement: ast.stmt, indent: str) -> list[str]:
    about = layout(statement)
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
        return _compound(statement, indent)
    if about.source and about.dump == ast.dump(statement):
        return [indent + line if line else line for line in about.source]
    lines = _wrapped(statement, indent)
    comment = "  ".join(about.trailing)
    if comment and len(lines) == 1 and len(lines[0]) + 2 + len(comment) <= WIDTH:
        return [f"{lines[0]}  {comment}"]
    return [*(indent + text for text in about.trailing), *lines]


def _compound(statement: ast.If | ast.For | ast.While | ast.With, indent: str, word: str = "") -> list[str]:
    bare = type(statement)(**{**dict(ast.iter_fields(statement)), "body": [ast.Pass()]})
    if not isinstance(bare, ast.With):
        bare.orelse = []
    head = word + _double_quoted(ast.unparse(ast.fix_missing_locations(bare))).rsplit("\n", 1)[0]
    comment = "  ".join(layout(statement).trailing)
    lines = [f"{indent}{head}  {comment}" if comment else indent + head, *_block(statement.body, indent + _INDENT)]
    orelse = [] if isinstance(statement, ast.With) else statement.orelse
    if len(orelse) == 1 and isinstance(orelse[0], ast.If) and isinstance(statement, ast.If):
        lines += [indent + text for text in layout(orelse[0]).before]
        lines += _compound(orelse[0], indent, "el")
    elif orelse:
        lines += [f"{indent}else:", *_block(orelse, indent + _INDENT)]
    return lines


def _wrapped(statement: ast.stmt, indent: str) -> list[str]:
    """A changed statement; a call that does not fit on a line has its arguments on lines of their own."""
    text = _double_quoted(ast.unparse(statement))
    value = getattr(statement, "value", None)
    if len(indent + text) <= WIDTH or not isinstance(value, ast.Call):
        return [indent + line for line in text.splitlines()]
    opening = text[: -len(_double_quoted(ast.unparse(value)))] + _double_quoted(ast.unparse(value.func)) + "("
    items = [_double_quoted(ast.unparse(a)) for a in (*value.args, *value.keywords)]
    return _bracketed(opening, items, ")", indent)


def _double_quoted(text: str) -> str:
    """Code with its 'strings' in double quotes, as formatters have them."""
    if "'" not in text:
        return text
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        plain = token.type == tokenize.STRING and token.string[0] == "'" and '"' not in token.string
        tokens.append(token._replace(string=f'"{token.string[1:-1]}"') if plain else token)
    return str(tokenize.untokenize(tokens)).rstrip("\n")


def _in_order(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        found += _in_order(getattr(statement, "body", []))
        found += _in_order(getattr(statement, "orelse", []))
    return found


def _header_end(statement: ast.stmt) -> int:
    """The last line of a statement, of a compound one's head."""
    if not hasattr(statement, "body"):
        return statement.end_lineno or statement.lineno
    head = [n.end_lineno for n in ast.iter_child_nodes(statement) if isinstance(n, ast.expr) and n.end_lineno]
    return max([statement.lineno, *head])


def _dedented(lines: Sequence[str], columns: int) -> list[str]:
    return [line[columns:] if line[:columns].isspace() else line for line in lines]
