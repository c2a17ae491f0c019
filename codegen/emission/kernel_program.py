"""What a file of specialised device code is made of: its functions, constants and imports, and their names."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from ...errors import KernelUnavailableError
from .constant_folding import Known, is_tritons
from .dead_code import read_names

_DTYPE_NAMES = {v.name: k for k, v in vars(tl).items() if isinstance(v, tl.dtype)}


@dataclass(slots=True)
class Facts:
    """What is known of a function's parameters: constants; types of elements (pointer types of pointers); those
    that are not None. fixed: the function is passed as a value (to tl.reduce), so that its parameters stay."""

    constants: dict[str, Known] = field(default_factory=dict)
    types: dict[str, tl.dtype] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    fixed: bool = False

    @property
    def key(self) -> str:
        """Text that tells sets of facts apart."""
        return repr(
            (sorted(self.constants.items(), key=str), sorted(self.types.items(), key=str), sorted(self.present))
        )


@dataclass(slots=True)
class Copy:
    """A specialised function: its definition, the element type that it returns, and the names that call it, whose text
    is set at the end."""

    function: JITFunction
    facts: Facts
    definition: ast.FunctionDef
    returns: tl.dtype | None
    calls: list[ast.Name] = field(default_factory=list)

    @property
    def parameters(self) -> list[str]:
        return [a.arg for a in self.definition.args.args]


@dataclass(slots=True)
class Program:
    """Everything one file needs. make: specialises one function. copies: specialised functions, callees first.
    constants: module-level ones by name. imports: lines by the name that they bind."""

    make: Callable[[Program, JITFunction, Facts], tuple[ast.FunctionDef, tl.dtype | None]]
    copies: dict[tuple[int, str], Copy] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)

    def specialize(self, function: JITFunction, facts: Facts) -> Copy:
        """The copy of a function for what is known of its parameters. Until `name_copies` it has a name that no other
        thing has."""
        key = id(function), facts.key
        if key not in self.copies:
            definition, returns = self.make(self, function, facts)
            definition.name = f"{function.__name__}#{len(self.copies)}"
            self.copies[key] = Copy(function, facts, definition, returns)
        return self.copies[key]

    @property
    def returns(self) -> dict[str, tl.dtype]:
        """Element types that copies return, by their names."""
        return {c.definition.name: c.returns for c in self.copies.values() if c.returns is not None}

    def constant(self, name: str, value: Any) -> str | None:
        """The module-level constant of a name; None if the name stands for another value."""
        if not _same(self.constants.setdefault(name, value), value):
            return None
        self.write(value)  # for its imports
        return name

    def bind(self, name: str, found: Any) -> None:
        """Import an object of Triton's or of Python's by the name that the kernel calls it."""
        if isinstance(found, ModuleType):
            parent, _, last = found.__name__.rpartition(".")
            line = f"import {found.__name__}" + ("" if found.__name__ == name else f" as {name}")
            if parent and last == name:
                line = f"from {parent} import {name}"
        else:
            module = getattr(found, "__module__", None) or ""
            if not module.startswith("triton."):
                raise KernelUnavailableError(
                    f"{name} ({type(found).__name__} of {module}) cannot be written into a specialised kernel. "
                    "Pass it as a constexpr, or make it a @triton.jit function or a tl.constexpr."
                )
            original = getattr(found, "__name__", name)
            line = f"from {module} import {original}" + ("" if original == name else f" as {name}")
        if self.imports.setdefault(name, line) != line:
            raise KernelUnavailableError(f"{name} means two things in the kernels of one file. Rename one.")

    def write(self, value: Any) -> ast.expr:
        """The expression of a constant."""
        if isinstance(value, tl.dtype):
            self.bind("tl", tl)
            return ast.Attribute(ast.Name("tl", ast.Load()), _DTYPE_NAMES[value.name], ast.Load())
        if isinstance(value, tuple):
            return ast.Tuple([self.write(v) for v in value], ast.Load())
        if isinstance(value, JITFunction) and not is_tritons(value):
            copy = self.specialize(value, Facts(fixed=True))
            return self.called(copy)
        if isinstance(value, float) and not math.isfinite(value):
            return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(str(value))], [])
        if value is None or isinstance(value, bool | int | float | str):
            # by way of text: negative numbers are an operator and a number
            return ast.parse(repr(value), mode="eval").body
        name = getattr(value, "__name__", type(value).__name__)
        self.bind(name, value)
        return ast.Name(name, ast.Load())

    def called(self, copy: Copy) -> ast.Name:
        """A name that calls a copy."""
        copy.calls.append(ast.Name(copy.definition.name, ast.Load()))
        return copy.calls[-1]

    def needed(self, entry: Copy) -> list[Copy]:
        """A copy and those that it calls, callees first; of copies that came out the same just one."""
        first: dict[tuple[int, str], Copy] = {}
        for copy in self.copies.values():
            text = "".join(ast.dump(n) for n in (copy.definition.args, *copy.definition.body))
            same = first.setdefault((id(copy.function), text), copy)
            if same is not copy:
                for call in copy.calls:
                    call.id = same.definition.name
                same.calls += copy.calls
        by_name = {c.definition.name: c for c in self.copies.values()}
        wanted, waiting = {entry.definition.name}, [entry]
        while waiting:
            found = (read_names(waiting.pop().definition.body) & set(by_name)) - wanted
            wanted |= found
            waiting += [by_name[n] for n in found]
        return [c for n, c in by_name.items() if n in wanted]

    def name_copies(self, copies: Iterable[Copy]) -> None:
        """Give copies their functions' names, with what their constants differ by where there are several."""
        groups: dict[str, list[Copy]] = {}
        for copy in copies:
            groups.setdefault(copy.function.__name__, []).append(copy)
        taken = {*groups, *self.constants, *self.imports}
        for base, group in groups.items():
            for copy in group:
                name = base
                if len(group) > 1:
                    name = "_".join([base, *_differences(copy, group)])
                    while name in taken:
                        name += "_2"
                    taken.add(name)
                copy.definition.name = name
                for call in copy.calls:
                    call.id = name


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


def _differences(copy: Copy, group: Sequence[Copy]) -> list[str]:
    """Words for the constants in which copies of a function differ."""
    words = []
    for name in copy.function.arg_names:
        values = [c.facts.constants.get(name) for c in group]
        mine = copy.facts.constants.get(name)
        if mine is None or all(v is not None and _same(v.value, mine.value) for v in values):
            continue
        text = name.lower() if mine.value is True else f"no_{name.lower()}" if mine.value in (False, None) else None
        if isinstance(mine.value, str | tl.dtype):
            text = str(mine.value)
        if mine.name:
            text = mine.name
        text = text or f"{name.lower()}_{mine.value}"
        words.append("".join(c if c.isalnum() else "_" for c in text.lower()).strip("_"))
    return words
