"""Train the small GPT on a mesh of processes and print its losses beside those of one process.

    torchrun --nproc-per-node 2 examples/sharded_gpt.py --mesh tp=2
    torchrun --nproc-per-node 2 examples/sharded_gpt.py --mesh dp=2 --zero 3 --wire int8
    torchrun --nproc-per-node 4 examples/sharded_gpt.py --mesh dp=2,tp=2 --sequence

CPU processes over gloo; with one GPU a process, the same lines run over NCCL.
"""

from __future__ import annotations

import argparse
import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsmp
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch

STEPS = 10
TIMEOUT = timedelta(seconds=60)  # for one collective: when a rank dies, the others stop with an error


def mesh_sizes(text: str) -> dict[str, int]:
    """`dp=2,tp=2` as {"dp": 2, "tp": 2}."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=mesh_sizes, default={"tp": 2}, help="ranks per dimension: dp=2,tp=2")
    parser.add_argument("--zero", type=int, default=0, help="ZeRO stage of the data-parallel dimension")
    parser.add_argument("--sequence", action="store_true", help="divide sequences where the model is not")
    parser.add_argument("--wire", default="fp32", help="what collectives send: fp32, bf16, int8 ...")
    parser.add_argument("--executor", choices=["eager", "inductor"], default="eager")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    sizes = arguments.mesh
    if math.prod(sizes.values()) != dist.get_world_size():
        raise SystemExit(f"--mesh has {math.prod(sizes.values())} ranks, torchrun started {dist.get_world_size()}.")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    torch.manual_seed(0)
    whole = SmallGpt(SmallGptConfig(layers=2)).to(device)
    sharded = dsmp.parallelize(
        whole,
        mesh,
        inputs=small_gpt_batch(device=device),
        zero=arguments.zero,
        sequence=arguments.sequence,
        wire=arguments.wire,
        executor=arguments.executor,
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-4) for m in (sharded, whole)]
    for step in range(STEPS):
        batch = small_gpt_batch(seed=step, device=device)
        losses = []
        for module, optimizer, inputs in zip(
            (sharded, whole), optimizers, (sharded.shard_inputs(*batch)[0], batch), strict=True
        ):
            optimizer.zero_grad()
            loss = module(*inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2d}  on the mesh {losses[0]:.6f}  in one process {losses[1]:.6f}")
    if dist.get_rank() == 0 and sharded.sent:
        written, sent = (sum(getattr(s, name) for s in sharded.sent) for name in ("bytes_as_written", "bytes"))
        print(f"{len(sharded.sent)} collectives send {sent:,.0f} bytes a rank in place of {written:,.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
