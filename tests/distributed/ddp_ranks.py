"""What the tests of DistributedDataParallel's reductions run in each rank."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from feedback_ranks import Net, batch, exact, net
from rank_functions import Traffic
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import dsmp
from dsmp.codegen.feedback import compress_gradients

SMALL_BUCKETS = 0.004  # MB: several buckets, which are made anew after the first step


def parallel(module: Net | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or net(), **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def backward(call: Any, module: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Gradients of one step, by their names in the module."""
    module.zero_grad()
    call(batch(10 * seed + dist.get_rank())).square().mean().backward()
    return {n: p.grad.clone() for n, p in module.named_parameters()}


def relative(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    wrong = sum(float((found[n] - g).square().sum()) for n, g in wanted.items())
    return math.sqrt(wrong / sum(float(g.square().sum()) for g in wanted.values()))


def means(wire: str, feedback: bool, steps: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Errors of the mean gradient after 1 ... steps steps on one batch, of the last one alone, and bytes of a step."""
    ddp = parallel(gradient_as_bucket_view=True) if options is None else parallel(bucket_cap_mb=25)
    state = dsmp.compress_ddp(ddp, wire=wire, feedback=feedback)
    call = ddp if options is None else torch.compile(ddp, backend="dsmp", options=options)
    wanted, errors = exact(), []
    total = {n: torch.zeros_like(g) for n, g in wanted.items()}
    for step in range(1, steps + 1):
        with Traffic() as traffic:
            found = backward(call, ddp.module)
        for n, g in found.items():
            total[n] += g / steps
        errors.append(relative({n: g * steps / step for n, g in total.items()}, wanted))
    rebuilt = ddp._get_ddp_logging_data()["has_rebuilt_buckets"]
    last = {n: g.numpy() for n, g in found.items()}
    bytes = {"measured": sum(traffic.sent.values()), "planned": state.sent_bytes, "written": state.bytes_as_written}
    return {"errors": errors, "last": relative(found, wanted), "gradients": last, "rebuilt": rebuilt, "bytes": bytes}


def beside_compress_gradients(wire: str, steps: int) -> list[bool]:
    """Whether the gradients of each step are bit for bit those of compress_gradients; both have residuals."""
    ddp, other = parallel(), compress_gradients(net(), wire=wire)
    dsmp.compress_ddp(ddp, wire=wire)
    same = []
    for step in range(steps):
        found, wanted = backward(ddp, ddp.module, step), backward(other, other, step)
        same += [torch.equal(found[n], g) for n, g in wanted.items()]
    return same


def resumed(folder: Path) -> dict[str, Any]:
    """Whether a run that was saved and loaded gives the gradients of one that went on; what loading refuses."""
    ddp = parallel()
    state = dsmp.compress_ddp(ddp, wire="int4")
    for step in range(3):
        backward(ddp, ddp.module, step)
    saved = state.state_dict()
    dcp.save({"residuals": saved}, checkpoint_id=folder)
    again, without = parallel(), parallel()
    loaded = dsmp.compress_ddp(again, wire="int4")
    dsmp.compress_ddp(without, wire="int4")
    empty = {"residuals": loaded.state_dict()}
    dcp.load(empty, checkpoint_id=folder)
    loaded.load_state_dict(copy.deepcopy(saved))
    same_file = all(torch.equal(v, empty["residuals"][n]) for n, v in saved.items())
    wanted, found, fresh = (backward(d, d.module, 3) for d in (ddp, again, without))
    refused = []
    fewer = dict(list(saved.items())[1:])
    other = {n: torch.zeros(3) for n in saved}
    for wrong in (fewer, {**saved, "rank7.local.up.weight": torch.zeros(1)}, other):
        try:
            loaded.load_state_dict(wrong)
        except dsmp.DsmpError as error:
            refused.append(f"{type(error).__name__}: {error}")
    return {
        "names": sorted(saved), "file": same_file, "refused": refused,
        "same": all(torch.equal(found[n], g) for n, g in wanted.items()),
        "fresh": all(torch.equal(fresh[n], g) for n, g in wanted.items()),
    }  # fmt: skip


def accumulated() -> float:
    """The error of gradients summed over two batches, the first without communication."""
    ddp = parallel()
    dsmp.compress_ddp(ddp, wire="int8")
    backward(ddp, ddp.module)
    ddp.zero_grad()
    x = batch(dist.get_rank())
    with ddp.no_sync():
        ddp(x).square().mean().backward()
    ddp(x).square().mean().backward()
    wanted = {n: 2 * g for n, g in exact().items()}
    return relative({n: p.grad for n, p in ddp.module.named_parameters()}, wanted)


def mistakes() -> list[str]:
    """The messages of what is refused."""
    hooked, builtin, twice, inner = parallel(), parallel(), parallel(), parallel()
    hooked.register_comm_hook(None, fp16_compress_hook)
    register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, builtin, None)
    native = parallel()
    native._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    dsmp.compress_ddp(twice)
    dsmp.compress_ddp(inner)
    averaged = parallel(compress_gradients(net()))
    found = []
    for attempt in (
        lambda: dsmp.compress_ddp(hooked),
        lambda: dsmp.compress_ddp(builtin),
        lambda: dsmp.compress_ddp(native),
        lambda: dsmp.compress_ddp(twice),
        lambda: dsmp.compress_ddp(averaged),
        lambda: compress_gradients(inner.module),
        lambda: dsmp.compress_ddp(net()),
        lambda: dsmp.compress_ddp(parallel(), wire="int7"),
        lambda: dsmp.compress_ddp(parallel(), wire="int8:3"),
    ):
        try:
            attempt()
        except dsmp.DsmpError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
