"""What a compiled model does outside the graphs that dsmp sees, and that an option or a plan cannot reach.

DistributedDataParallel and `fully_shard` communicate in hooks of their own. `fully_shard` also ends graphs before and
after each module that it wraps, and Dynamo leaves frames of torch.nn's own classes to eager execution: what is wrapped
too finely, or called in a loop with such an end in it, is never compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel

from ..passes.plan_fields import GEMM_CLASSES
from .identity import module_names, modules_on_stack

_PRODUCTS = (nn.Linear, nn.Bilinear, _ConvNd)
_SHOWN = 8
_BLOCKS = (
    "Apply fully_shard to blocks of your own classes, not to modules of torch.nn or around a loop over wrapped "
    "modules, and compile each block (block.compile(backend='dsmp'))"
)


def gradient_reducer(target: Any) -> str:
    """Who reduces gradients of what is being compiled outside its graphs, and what gives these reductions a format; ""
    where nobody does."""
    modules = [*modules_on_stack(), *(target.modules() if isinstance(target, nn.Module) else ())]
    if any(isinstance(m, DistributedDataParallel) for m in modules):
        return "DistributedDataParallel reduces gradients outside the graph; use dsmp.compress_ddp(module, wire=...)"
    if any(map(_is_fully_sharded, modules)):
        return (
            "fully_shard gathers parameters and reduces gradients outside the graph; use "
            "fully_shard(..., mp_policy=dsmp.fsdp_policy(...))"
        )
    return ""


def unplanned_products(target: Any, planned: Iterable[tuple[str, str]]) -> str:
    """What to say of a module's linear layers and convolutions that no graph has; "" where there is nothing to say.

    `planned` are (module path, op class) of planned nodes. A module counts as planned with its parent, which may read
    its weight, and with another of its class and shape, whose compiled code it may share. Single layers are only named
    under `fully_shard`; elsewhere they may simply not have been called.
    """
    if not isinstance(target, nn.Module):
        return ""
    owners = {fqn for fqn, op in planned if op in GEMM_CLASSES}
    names = module_names(target)
    layers = {names[str(id(m))]: m for m in target.modules() if isinstance(m, _PRODUCTS)}
    if not layers:
        return ""
    if not owners:
        return f"no graph has a product, and the model has {_listed(layers)}: they ran as written. {_BLOCKS}."
    if not any(map(_is_fully_sharded, target.modules())):
        return ""
    done = {name for name in layers if name in owners or name.rpartition(".")[0] in owners}
    alike = {_kind(layers[name]) for name in done}
    left = {name: m for name, m in layers.items() if name not in done and _kind(m) not in alike}
    return f"in no graph, and run as written: {_listed(left)}. {_BLOCKS}." if left else ""


def _is_fully_sharded(module: nn.Module) -> bool:
    """By name: importing FSDP2 would cost everybody a moment, and torch is also built without it."""
    return any(c.__name__ == "FSDPModule" for c in type(module).__mro__)


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return (type(module), *(tuple(p.shape) for p in module.parameters(recurse=False)))


def _listed(layers: Iterable[str]) -> str:
    names = [name or "(itself)" for name in layers]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
