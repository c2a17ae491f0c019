"""What the tests of collectives run in each rank: light to import, since every process imports it anew."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dsmp.codegen.collective_nodes import find_collectives, graph_ring_bytes, ring_bytes
from dsmp.codegen.collectives import Sent, rewrite_collectives
from dsmp.passes.wire_formats import WIRE_NAMES, parse_wire

KINDS = ("all_gather", "reduce_scatter", "all_reduce")

functional = torch.ops._c10d_functional


def group() -> str:
    return dist.group.WORLD.group_name


def collective(x: torch.Tensor, kind: str, op: str = "sum") -> torch.Tensor:
    """A functional collective among all ranks, as users' code and DTensor leave it in graphs."""
    if kind == "all_gather":
        started = functional.all_gather_into_tensor(x, dist.get_world_size(), group())
    elif kind == "reduce_scatter":
        started = functional.reduce_scatter_tensor(x, op, dist.get_world_size(), group())
    else:
        started = functional.all_reduce(x, op, group())
    return functional.wait_tensor(started)


def rewritten(gm: fx.GraphModule, wire: str, **options: Any) -> list[Sent]:
    return rewrite_collectives(gm, {c.start: parse_wire(wire) for c in find_collectives(gm)}, **options)


class Traffic(TorchDispatchMode):
    """Ring bytes of what is really handed to the process group, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile's code runs under such modes, and under no others."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("_c10d_functional::") and "wait" not in name:
            kind = next(k for k in (*KINDS, "all_to_all") if k in name)
            size = args[0].numel() * args[0].element_size()
            self.sent[kind] = self.sent.get(kind, 0.0) + ring_bytes(kind, size, dist.get_world_size())
        return func(*args, **(kwargs or {}))


def values(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * rank + len(shape))
    return torch.randn(shape, generator=generator)


def every_format(kind: str, op: str, shapes: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """What a rank gets in each format, with fp32's beside it, the bytes on the graph and the bytes measured."""
    given = [values(s, dist.get_rank()) for s in shapes]

    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [collective(t, kind, op) for t in tensors]

    found: dict[str, Any] = {}
    for wire in WIRE_NAMES:
        gm = make_fx(step, tracing_mode="fake")(*given)
        sent = rewritten(gm, f"{wire}:0.1" if wire == "topk" else wire)
        traffic = Traffic()
        with traffic:
            results = gm(*given)
        found[wire] = (results, graph_ring_bytes(gm), sum(traffic.sent.values()), sent, sorted(traffic.sent))
    return found


def not_finite(kind: str) -> list[bool]:
    x = torch.ones(512)
    if dist.get_rank() == 1:
        x[5] = math.nan
    seen = []
    for wire in WIRE_NAMES:
        gm = make_fx(lambda t: collective(t, kind), tracing_mode="fake")(x)
        rewritten(gm, wire)
        seen.append(bool(gm(x).isnan().any()))
    return seen


def fail_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank's own words")
