"""Train the small GPT as a pipeline of processes and print its losses beside those of one process.

    torchrun --nproc-per-node 2 examples/pipeline_gpt.py
    torchrun --nproc-per-node 2 examples/pipeline_gpt.py --schedule interleaved --boundary bf16
    torchrun --nproc-per-node 2 examples/pipeline_gpt.py --schedule zbv --no-compile

CPU processes over gloo; with one GPU a process, the same lines run over NCCL.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsmp
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch

STEPS = 10
TIMEOUT = timedelta(seconds=120)  # for one message: when a rank dies, the others stop with an error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zbv, dualpipev")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--boundary", default="fp32", help="what stages send: fp32, bf16, fp16")
    parser.add_argument("--executor", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--no-compile", action="store_true", help="run stages as torch does, op by op")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("pp",))

    torch.manual_seed(0)
    whole = SmallGpt(SmallGptConfig(layers=4, context=64)).to(device)
    staged = dsmp.pipeline(
        whole,
        mesh,
        inputs=small_gpt_batch(context=64, device=device),
        microbatches=arguments.microbatches,
        schedule=arguments.schedule,
        boundary=arguments.boundary,
        executor=arguments.executor,
        compile=not arguments.no_compile,
    )
    if dist.get_rank() == 0:
        print(staged.plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-4) for m in (staged, whole)]
    for step in range(STEPS):
        batch = small_gpt_batch(context=64, seed=step, device=device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = staged.step(*batch)
        loss = whole(*batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if losses is not None:
            print(f"step {step:2d}  in the pipeline {losses.mean():.6f}  in one process {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
