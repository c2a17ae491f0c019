"""What wire formats cost and save: bytes, step time and error of gradients on several processes of this machine.

    python -m bench.distributed [--ranks 2 4] [--compile] [--json FILE]

The embedded small GPT over gloo on the loopback interface. Each case is a mesh and a ZeRO stage; its formats run
interleaved, one step each in turn. `bytes` are those that a rank sends in a step, losses and statistics included;
`step` is the median of forward and backward on rank 0, all ranks started together; `error` is the largest relative
error over parameters against one process. Loopback is faster than any network, so that encoding shows in full: times
here bound what encoding costs, not what sending less gains.

`--compile` measures in place of all that what rewriting collectives adds to compile times: the seconds until the first
forward and backward through Inductor are done, from empty caches, for ZeRO 0 and 3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from bench.table import Row, show
from dsmp.codegen.collective_nodes import graph_ring_bytes
from dsmp.compiler.parallelize import assemble, cut_model
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch

COMPILED = ("fp32", "bf16", "int8")
WIRES = ("fp32", "bf16", "fp8", "int8", "int4")
REPEATS = 7
LAYERS = 2


def cases(ranks: int) -> dict[str, tuple[dict[str, int], dict[str, Any]]]:
    """Meshes of so many ranks, with options of `dsmp.parallelize`."""
    found: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
        "data parallel": ({"dp": ranks}, {}),
        "ZeRO 3": ({"dp": ranks}, {"zero": 3}),
        "tensor parallel": ({"tp": ranks}, {}),
    }
    if ranks % 2 == 0 and ranks > 2:
        found["ZeRO 3 and tensor parallel"] = {"dp": ranks // 2, "tp": 2}, {"zero": 3}
    return found


def small_gpt() -> SmallGpt:
    """The same model in every process."""
    torch.manual_seed(0)
    return SmallGpt(SmallGptConfig(layers=LAYERS))


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name; every rank has to call this."""
    found: dict[str, Any] = {n: p.grad for n, p in module.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def measure(rank: int, ranks: int, store: str, result: str) -> None:
    """All cases on one rank; rank 0 writes the rows."""
    begun = time.perf_counter()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    batch = small_gpt_batch()
    whole = small_gpt()
    whole(*batch).backward()
    exact = gradients(whole)
    rows: list[Row] = []
    for name, (sizes, options) in cases(ranks).items():
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        cut = cut_model(small_gpt(), mesh, inputs=batch, **options)
        modules = {w: assemble(cut, wire=w) for w in WIRES}
        seconds: dict[str, list[float]] = {w: [] for w in WIRES}
        for _ in range(1 + REPEATS):
            for wire, module in modules.items():
                args, kwargs = module.shard_inputs(*batch)
                module.zero_grad()
                dist.barrier()
                started = time.perf_counter()
                module(*args, **kwargs).backward()
                seconds[wire].append(time.perf_counter() - started)
        medians = {w: statistics.median(s[1:]) for w, s in seconds.items()}
        sent = {w: graph_ring_bytes(m.graph.gm) for w, m in modules.items()}
        for wire, module in modules.items():
            found = gradients(module)
            errors = [float((found[n] - g).norm() / g.norm()) for n, g in exact.items()]
            row: Row = {
                "case": name,
                "ranks": ranks,
                "wire": wire,
                "bytes": round(sent[wire]),
                "bytes / fp32": sent[wire] / sent["fp32"],
                "step ms": 1e3 * medians[wire],
                "step / fp32": medians[wire] / medians["fp32"],
                "error": max(errors),
            }
            rows.append(row)
        if rank == 0:
            print(f"{ranks} ranks, {name}: {time.perf_counter() - begun:.0f} s since the start", flush=True)
    if rank == 0:
        Path(result).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def measure_compiling(rank: int, ranks: int, store: str, result: str) -> None:
    """Seconds of compiling on one rank; rank 0 writes the rows."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    batch = small_gpt_batch()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    rows: list[Row] = []
    for zero in (0, 3):
        cut = cut_model(small_gpt(), mesh, inputs=batch, zero=zero)
        seconds: dict[str, list[float]] = {w: [] for w in COMPILED}
        for turn, wire in enumerate(("fp32", *COMPILED, *reversed(COMPILED))):
            dist.barrier()
            with fresh_cache():
                started = time.perf_counter()
                module = assemble(cut, wire=wire, executor="inductor")
                args, kwargs = module.shard_inputs(*batch)
                module(*args, **kwargs).backward()
            if turn:  # the first one loads what all need
                seconds[wire].append(time.perf_counter() - started)
            torch._dynamo.reset()
        medians = {w: statistics.median(s) for w, s in seconds.items()}
        for wire, value in medians.items():
            row: Row = {"case": f"ZeRO {zero}", "ranks": ranks, "wire": wire, "compile s": value,
                        "compile / fp32": value / medians["fp32"]}  # fmt: skip
            rows.append(row)
    if rank == 0:
        Path(result).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def rows_for(ranks: int, run: Callable[[int, int, str, str], None] = measure) -> list[Row]:
    """The rows of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        spawn(run, (ranks, str(Path(folder) / "store"), str(result)), nprocs=ranks)
        found: list[Row] = json.loads(result.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes")
    parser.add_argument("--compile", action="store_true", help="measure compile times instead")
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    run = measure_compiling if arguments.compile else measure
    rows = [row for ranks in arguments.ranks for row in rows_for(ranks, run)]
    show("wire formats of collectives", rows, arguments.json_file)


if __name__ == "__main__":
    main()
