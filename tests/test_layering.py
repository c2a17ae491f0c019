"""The rules of the house: layers, no circles, torch-free hardware data, relative imports, short files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dsmp
from dsmp.hardware_db import names

ROOT = Path(dsmp.__file__).resolve().parent
LAYERS = ("errors", "hardware_db", "passes", "codegen", "compiler", "bench")
FOLDERS = LAYERS[:5]
FILES = sorted(f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py"))
FACE = [ROOT / "__init__.py", ROOT / "__main__.py"]
MAX_LINES = 400


def module_name(file: Path) -> str:
    """`passes.graph` for passes/graph.py, `passes` for its __init__."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(f): f for f in FILES}


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[0])


def own_imports(file: Path, tree: ast.AST | None = None) -> set[str]:
    """The dsmp modules that relative imports of a file name."""
    package = list(file.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(tree or ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            up = node.level - 1
            base = [*(package[:-up] if up else package), *(node.module.split(".") if node.module else [])]
            assert up <= len(package), f"{file}:{node.lineno} imports from outside the package"
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                found.add(whole if whole in MODULES else ".".join(base))
    return found - {""}


def absolute_imports(file: Path) -> set[str]:
    """The top-level names of absolute imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_there_is_something_to_check():
    assert {"errors", "passes.graph", "codegen.lower", "compiler.capture", "hardware_db.detect"} <= set(MODULES)
    assert own_imports(MODULES["passes.keys"]) == {"passes.gemm", "passes.graph"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    upwards = {i for i in own_imports(MODULES[module]) if layer(i) > layer(module)}
    assert not upwards, f"{module} imports from a higher layer: {sorted(upwards)}"
    unknown = own_imports(MODULES[module]) - set(MODULES)
    assert not unknown, f"{module} imports what is no module: {sorted(unknown)}"


def test_there_are_no_circles():
    arrows = {m: own_imports(f) - {m} for m, f in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for target in sorted(arrows[module]):
                visit(target, (*way, module))
            done.add(module)

    for module in arrows:
        visit(module, ())


@pytest.mark.parametrize("file", [*FILES, *FACE], ids=lambda f: str(f.relative_to(ROOT)))
def test_product_code_imports_its_own_modules_relatively(file):
    assert not absolute_imports(file) & {"dsmp", "tests", "bench", *FOLDERS, "zoo"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_function_imports_its_own_modules(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            local = own_imports(file, node)
            assert not local, f"{file.name}:{node.lineno} {node.name} imports {sorted(local)}"


@pytest.mark.parametrize("file", [*FILES, *FACE], ids=lambda f: str(f.relative_to(ROOT)))
def test_files_are_short_and_modern(file):
    text = file.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert not text.strip() or "from __future__ import annotations" in text


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("hardware_db")])
def test_hardware_data_needs_no_torch(module):
    if module != "hardware_db.detect":
        assert "torch" not in absolute_imports(MODULES[module])
        assert "hardware_db.detect" not in own_imports(MODULES[module])


def test_the_hardware_database_loads_without_torch():
    code = "import sys, dsmp.hardware_db as h; h.resolve('h800'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("passes")])
def test_no_pass_looks_at_a_device_name(module):
    tree = ast.parse(MODULES[module].read_text())
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not texts & set(names())


# Sharding decides with DTensor's placements and rules, on a mesh that its caller has made.
SHARDING = {"shard_embedding", "shard_experts", "shard_graph", "shard_masks", "sharding", "strategies"}
MAKES_GROUPS = {"init_process_group", "new_group", "init_device_mesh", "DeviceMesh.from_group"}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("passes")])
def test_passes_know_neither_kernels_nor_process_groups(module):
    tree = ast.parse(MODULES[module].read_text())
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}
    assert not {i for i in imported if i.split(".")[0] == "triton" or i.startswith("torch._inductor")}
    distributed = {i for i in imported if i.startswith("torch.distributed")}
    if module.split(".")[-1] in SHARDING:
        allowed = ("torch.distributed.tensor", "torch.distributed.device_mesh")
        assert all(i.startswith(allowed) for i in distributed)
        called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        assert not {c for c in called if c.endswith(tuple(MAKES_GROUPS)) or c == "DeviceMesh"}
    else:
        assert not distributed
