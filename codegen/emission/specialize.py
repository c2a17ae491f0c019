"""A kernel call as a file that can be read, kept and run on its own.

The file has the kernel with its configuration put in (`partial_evaluation`), the device functions it calls, and
`launch`, which runs it. Which parameters are constants is as in Triton's launcher: constexprs, None, and ints equal to
1; element types are those of the call's tensors.

The grid is written as an expression over sizes where that is sure: the kernel's docstring has a line such as
`Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),)`, which is checked against the call, or the counts of tiles, cdiv(X,
BLOCK_X) of each size X that the kernel has no loop over, and of splits (SPLIT_K), give the grid in just one way.
Otherwise `launch` takes the grid.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...errors import KernelUnavailableError
from ..kernel_call import KernelCall
from ..targets import TRITON_TYPES, Target
from .constant_folding import Known
from .dead_code import read_names
from .kernel_program import Copy, Facts
from .kernel_text import WIDTH, bracketed, parse_function, render_function
from .partial_evaluation import new_program

_SHOWN_NODES = 6
_GRID = re.compile(r"^\s*Grid: (\(.*\))", re.MULTILINE)


def specialized_source(call: KernelCall, *, nodes: Sequence[str], target: Target, notes: Mapping[str, str]) -> str:
    """The text of a Python file with the kernel of a call, of the name `call.name`, and its `launch`.

    nodes: keys of the nodes that the kernel serves. notes: lines of the header, by what they are about.
    Raises KernelUnavailableError for a kernel that breaks a static assertion of its own or uses objects that text
    cannot name.
    """
    program = new_program()
    kernel = program.specialize(call.kernel, _facts(call))
    copies = program.needed(kernel)
    program.name_copies(c for c in copies if c is not kernel)
    kernel.definition.name = _identifier(call.name)
    used = set().union(*(read_names(c.definition.body) for c in copies)) | {"tl"}
    parts = [
        _header(call, nodes, target, notes),
        _imports({n: line for n, line in program.imports.items() if n in used}),
    ]
    order = [*call.config.blocks, *program.constants]
    constants = {n: program.constants[n] for n in order if n in used and n in program.constants}
    if constants:
        parts.append("\n".join(f"{n} = tl.constexpr({ast.unparse(program.write(v))})" for n, v in constants.items()))
    functions = [_compiled_in(c) + render_function(c.definition, _decorator(c)) for c in copies]
    return "\n\n".join(parts) + "".join(f"\n\n\n{f}" for f in (*functions, _launch(call, kernel))) + "\n"


def _facts(call: KernelCall) -> Facts:
    facts = Facts()
    given = {**call.arguments, **call.compiled_in(interpreted=False)}
    for parameter in call.kernel.params:
        name = parameter.name
        value = given.get(name, parameter.default)
        value = value.value if isinstance(value, tl.constexpr) else value
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr:
            facts.constants[name] = Known(value, name if name in call.config.blocks else None)
        elif value is None or one:
            facts.constants[name] = Known(value, unit=one)
        else:
            facts.present.add(name)
            if isinstance(value, Tensor) and TRITON_TYPES[value.dtype] != "i1":
                facts.types[name] = tl.str_to_ty(f"*{TRITON_TYPES[value.dtype]}", None)
    return facts


def _compiled_in(copy: Copy) -> str:
    """A comment that gives the values of parameters that a function's docstring explains and its text has no more."""
    about = ast.get_docstring(copy.definition) or ""
    gone = {n: k.value for n, k in copy.facts.constants.items() if n not in copy.parameters and k.name is None}
    told = [
        f"{n} = {getattr(v, '__name__', None) or ast.unparse(ast.Constant(v)) if not isinstance(v, tl.dtype) else v}"
        for n, v in gone.items()
        if re.search(rf"\b{n}\b", about)
    ]
    text = f"Compiled in: {', '.join(told)}.".replace("'", '"')
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, WIDTH - 2)) if told else ""


def _decorator(copy: Copy) -> str:
    params = [p for p in copy.function.params if p.name in copy.parameters]
    options = [f'"{p.name}"' for p in params if p.do_not_specialize]
    given = [f"do_not_specialize=[{', '.join(options)}]"] if options else []
    given += ["noinline=True"] if getattr(copy.function, "noinline", False) else []
    return f"@triton.jit({', '.join(given)})" if given else "@triton.jit"


def _identifier(name: str) -> str:
    text = re.sub(r"\W", "_", name)
    return f"_{text}" if not text or text[0].isdigit() or keyword.iskeyword(text) else text


# the header


def _header(call: KernelCall, nodes: Sequence[str], target: Target, notes: Mapping[str, str]) -> str:
    config = call.config
    tile = ", ".join(f"{k} = {v}" for k, v in config.blocks.items())
    lines = [f"Target: {target.isa}."]
    if call.operand_format:
        lines.append(f"Operands: {call.operand_format}.")
    warps = f"num_warps = {config.num_warps}, num_stages = {config.num_stages}"
    lines.append(f"Configuration: {tile + ', ' if tile else ''}{warps}.")
    lines += [f"Option {k}: {v}." for k, v in sorted(config.options.items())]
    if nodes:
        more = f", and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
        lines.append(f"Nodes ({len(nodes)}): {', '.join(nodes[:_SHOWN_NODES])}{more}.")
    lines += [f"{k}: {v}" for k, v in notes.items()]
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ")]
    body = "\n".join(wrapped).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{_identifier(call.name)}: {call.kernel.__name__} for one configuration.\n\n{body}\n"""'


def _imports(lines: Mapping[str, str]) -> str:
    known = {"import torch", "import triton", "import triton.language as tl"}
    third = sorted({*lines.values(), *known}, key=lambda line: (line.startswith("from"), line))
    return "# ruff: noqa\nfrom __future__ import annotations\n\n" + "\n".join(third)


# the launch


def _launch(call: KernelCall, kernel: Copy) -> str:
    sizes = {n: v for n, v in call.arguments.items() if type(v) is int}
    grid = _grid(call, sizes)
    # sizes that only the grid depends on
    more = [n for n in sizes if grid and sizes[n] != 1 and n not in kernel.parameters and n in _names(grid)]
    parameters, types = [], []
    for name in [*kernel.parameters, *more]:
        value = call.arguments.get(name)
        kind = type(value).__name__ if isinstance(value, bool | int | float) else "Any"
        if isinstance(value, Tensor):
            kind = "torch.Tensor"
            types.append(f"{name}: {str(value.dtype).removeprefix('torch.')}")
        parameters.append(f"{name}: {kind}")
    if grid is None:
        parameters.append("grid: tuple[int, ...]")
    options = {"num_warps": call.config.num_warps, "num_stages": call.config.num_stages, **call.config.options}
    given = [*kernel.parameters, *(f"{k}={ast.unparse(ast.Constant(v))}" for k, v in options.items())]
    given = [g.replace("'", '"') for g in given]
    lines = [bracketed("def launch(", parameters, ") -> None:")]
    about = f'"""Run the kernel. {", ".join(types)}."""'
    lines += textwrap.wrap(about, WIDTH, initial_indent="    ", subsequent_indent="    ")
    if grid is not None:
        numbers = [_written(e, call, [*kernel.parameters, *more]) for e in grid]
        lines.append(bracketed("grid = (", numbers, ",)" if len(grid) == 1 else ")", "    "))
    lines.append(bracketed(f"{kernel.definition.name}[grid](", given, ")", "    "))
    return "\n".join(lines)


def _names(expressions: Sequence[ast.expr]) -> set[str]:
    return {n.id for e in expressions for n in ast.walk(e) if isinstance(n, ast.Name)}


def _grid(call: KernelCall, sizes: Mapping[str, int]) -> list[ast.expr] | None:
    """Numbers of programs as expressions over sizes and constants; None where they cannot be told."""
    stated = _GRID.search(call.kernel.fn.__doc__ or "")
    if stated is None:
        return _derived_grid(call, sizes)
    tree = ast.parse(stated[1], mode="eval").body
    expressions = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    values = {**sizes, **{k: v for k, v in call.constants.items() if type(v) in (int, bool)}}
    computed = tuple(_evaluate(e, values) for e in expressions)
    if computed != tuple(call.grid):
        raise KernelUnavailableError(
            f"{call.kernel.__name__} says that its grid is {stated[1]}, here {computed}, "
            f"but is called with {call.grid}. Correct its docstring."
        )
    return expressions


def _evaluate(expression: ast.expr, values: Mapping[str, Any]) -> int:
    code = compile(ast.Expression(expression), "<grid>", "eval")
    return int(eval(code, {"__builtins__": {}, "cdiv": triton.cdiv, "min": min, "max": max, **values}))


def _derived_grid(call: KernelCall, sizes: Mapping[str, int]) -> list[ast.expr] | None:
    """The one way to give every count of tiles, and every count of splits, a dimension of the grid."""
    loops = [n for n in ast.walk(parse_function(call.kernel.fn)) if isinstance(n, ast.For)]
    walked = _names([loop.iter for loop in loops])  # the programs loop over these themselves
    factors: dict[str, int] = {}
    for block, extent in call.config.blocks.items():
        suffix = block.removeprefix("BLOCK_").lower()
        for size in (
            s
            for s in sizes
            if s.lower() in (suffix, f"n_{suffix}", f"num_{suffix}") and sizes[s] != 1 and s not in walked
        ):
            factors[f"cdiv({size}, {block})"] = triton.cdiv(sizes[size], extent)
    splits = {n: v for n, v in call.constants.items() if n.startswith("SPLIT") and type(v) is int and v > 1}
    factors.update(splits)
    found: list[list[ast.expr]] = []
    for places in itertools.product(range(len(call.grid)), repeat=len(factors)):
        shares = [[f for f, p in zip(factors, places, strict=True) if p == d] for d in range(len(call.grid))]
        if all(math.prod(factors[f] for f in s) == n for s, n in zip(shares, call.grid, strict=True)):
            found.append([ast.parse(" * ".join(s) or "1", mode="eval").body for s in shares])
    return found[0] if len(found) == 1 else None


def _written(expression: ast.expr, call: KernelCall, parameters: Sequence[str]) -> str:
    """An expression of the grid in `launch`, where what is no parameter is a number."""
    constants = {**call.arguments, **call.constants}

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id == "cdiv":
                return ast.parse("triton.cdiv", mode="eval").body
            return ast.Constant(constants[node.id]) if node.id in constants and node.id not in parameters else node

        def visit_Call(self, node: ast.Call) -> ast.expr:
            arguments = [self.visit(a) for a in node.args]
            if not _names(arguments):
                return ast.Constant(_evaluate(node, constants))
            return ast.Call(self.visit(node.func), arguments, [])

        def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
            self.generic_visit(node)
            match node:
                case ast.BinOp(op=ast.Mult(), left=other, right=ast.Constant(value=1)):
                    return other
                case ast.BinOp(op=ast.Mult(), left=ast.Constant(value=1), right=other):
                    return other
            return node

    return ast.unparse(Put().visit(expression))
