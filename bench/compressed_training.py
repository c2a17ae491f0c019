"""Does training survive gradients in few bits? The embedded small GPT on two processes, same weights, same batches.

    python -m bench.compressed_training [--steps 300] [--json FILE]

Two gloo processes train as DistributedDataParallel replicas, each on its half of every batch; their gradients travel
as written, or in a wire format through `dsmp.compress_ddp`, without or with error feedback. All runs start from the
same weights and read the same bytes. `loss` is the mean of the last 20 steps over both ranks, `held out` that of 20
batches of text that was not trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import dsmp
from bench.table import Row, show
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch, train_small_gpt

RANKS = 2
RUNS: dict[str, tuple[str, bool]] = {
    "fp32": ("fp32", False),
    "bf16": ("bf16", False),
    "int8": ("int8", False),
    "int4": ("int4", False),
    "int4, error feedback": ("int4", True),
}
_TAIL = 20


def train(wire: str, feedback: bool, steps: int, layers: int, context: int, batch: int) -> tuple[float, float, float]:
    """One run on one rank: (loss of the last steps, held-out loss, bytes sent in a step), means over the ranks."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(SmallGpt(SmallGptConfig(layers=layers, context=context)))
    state = dsmp.compress_ddp(ddp, wire=wire, feedback=feedback)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    # each rank reads texts of its own: the seeds of a run of `steps` steps follow each other
    losses = train_small_gpt(
        ddp, optimizer, steps=steps, batch=batch // RANKS, context=context, seed=rank * steps, warmup=50
    )
    with torch.no_grad():
        batches = [small_gpt_batch(batch=batch, context=context, seed=i, held_out=True) for i in range(_TAIL)]
        held_out = sum(ddp.module(*b).item() for b in batches) / len(batches)
    tail = losses[-_TAIL:]
    found = torch.tensor([sum(tail) / len(tail), held_out], dtype=torch.float64)
    dist.all_reduce(found)
    loss, held_out = (found / RANKS).tolist()
    return loss, held_out, state.sent_bytes


def measure(rank: int, store: str, result: str, steps: int, layers: int, context: int, batch: int) -> None:
    """All runs on one rank; rank 0 writes the rows."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    rows: list[Row] = []
    reference: tuple[float, float, float] | None = None
    for name, (wire, feedback) in RUNS.items():
        started = time.perf_counter()
        loss, held_out, sent = train(wire, feedback, steps, layers, context, batch)
        reference = reference or (loss, held_out, sent)
        seconds = time.perf_counter() - started
        rows.append(
            {
                "gradients": name,
                "bytes / fp32": sent / reference[2],
                f"loss (last {_TAIL})": loss,
                "vs fp32 %": 100 * (loss / reference[0] - 1),
                "held-out loss": held_out,
                "held-out vs fp32 %": 100 * (held_out / reference[1] - 1),
                "s": seconds,
            }
        )
        if rank == 0:
            print(f"{name}: loss {loss:.4f}, held out {held_out:.4f}, {seconds:.0f} s", flush=True)
    if rank == 0:
        Path(result).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="of both ranks together")
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    sizes = (arguments.steps, arguments.layers, arguments.context, arguments.batch)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        spawn(measure, (str(Path(folder) / "store"), str(result), *sizes), nprocs=RANKS)
        rows: list[Row] = json.loads(result.read_text(encoding="utf-8"))
    show(f"small GPT, {arguments.steps} steps, seed 0, {RANKS} ranks", rows, arguments.json_file)


if __name__ == "__main__":
    main()
