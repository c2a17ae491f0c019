"""Which module a traced frame belongs to, found when Dynamo hands the frame to the backend.

Dynamo keys each entry of a node's module stack by `id(module)`. While a frame is compiled, the module that the user
compiled is being called: it, or the wrapper that `torch.compile` puts around it, stands on Python's call stack. Its
`named_modules()` turn ids into true names, also in frames that a graph break left inside a submodule and in their
continuations, where the path that Dynamo writes down starts anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..passes.keys import ModuleNames

PART = "_dsmp_part_"
"""How the names of modules begin that hold a part of what the module above them computes: its name is theirs."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def frame_names() -> ModuleNames:
    """Module names for the frame being compiled, from the modules that are being called right now, innermost last.

    The root is the outermost module that was compiled, by `torch.compile` or in place, or, when a function was
    compiled, the outermost module on the call stack. Without any module on the stack the names stay those that Dynamo
    wrote down.
    """
    called = list(modules_on_stack())
    if not called:
        return ModuleNames()
    compiled = [m for m in called if isinstance(m, OptimizedModule) or m._compiled_call_impl is not None]
    root = compiled[-1] if compiled else called[-1]
    names = module_names(root)
    frame = next((names[str(id(m))] for m in called if str(id(m)) in names), "")
    return ModuleNames(by_id=names, frame=frame)


def module_names(root: nn.Module) -> dict[str, str]:
    """`str(id(module))` -> name below `root`, the names of wrapper modules left out."""
    found: dict[str, str] = {}
    plain: dict[str, tuple[nn.Module, str]] = {}
    for name, module in root.named_modules():
        above, _, own = name.rpartition(".")
        parent, path = plain.get(above, (None, ""))
        parallel = own == "module" and isinstance(parent, (DataParallel, DistributedDataParallel))
        if name and own not in _WRAPPERS and not own.startswith(PART) and not parallel:
            path = f"{path}.{own}" if path else own
        plain[name] = (module, path)
        found[str(id(module))] = path
    return found


def module_paths(gm: fx.GraphModule, names: ModuleNames) -> tuple[str, ...]:
    """The module path of every call of a Dynamo graph and its subgraphs, in graph order."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return tuple(names.of(n) for graph in graphs for n in graph.nodes if n.op.startswith("call_"))


def modules_on_stack() -> Iterator[nn.Module]:
    """Modules whose call is on the stack, innermost first, each once."""
    seen: set[int] = set()
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl", "__call__"):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) not in seen:
                seen.add(id(module))
                yield module
        frame = frame.f_back  # type: ignore[assignment]
