"""Train a small Mixtral whose experts are divided among processes, and print its losses beside those of one process.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
    torchrun --nproc-per-node 2 examples/expert_parallel.py --dispatch fp8 --combine bf16
    torchrun --nproc-per-node 4 examples/expert_parallel.py --gradients int8 --eager

Every process has its own part of the batch; the single process has all parts. CPU processes over gloo; with one GPU a
process, the same lines run over NCCL. Needs the package transformers.
"""

from __future__ import annotations

import argparse
import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import dsmp
from dsmp.passes.wire_formats import parse_wire

STEPS, TOKENS, WIDTH, CHOSEN, VOCABULARY = 10, 64, 64, 2, 128
TIMEOUT = timedelta(seconds=60)  # for one collective: when a rank dies, the others stop with an error


def small_mixtral() -> transformers.MixtralForCausalLM:
    """Two layers of eight experts; the same in every process."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, num_local_experts=8, num_experts_per_tok=CHOSEN, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def batch(step: int, rank: int) -> torch.Tensor:
    """Sequences [1, TOKENS] that count upwards, from a start of their own."""
    start = torch.randint(VOCABULARY, (1, 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return (start + torch.arange(TOKENS)) % VOCABULARY


def loss_of(call: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's own next-token loss, a scalar."""
    loss: torch.Tensor = call(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatch", default="fp32", help="how rows go to the experts: fp32, bf16, fp8, int8 ...")
    parser.add_argument("--combine", default="fp32", help="how results come back")
    parser.add_argument("--gradients", default="fp32", help="how the gradients of all else are averaged")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("ep",))

    whole = small_mixtral().to(device)
    formats = {name: getattr(arguments, name) for name in ("dispatch", "combine", "gradients")}
    divided = dsmp.expert_parallel(copy.deepcopy(whole), mesh, **formats)
    call: Any = divided
    if not arguments.eager:
        call = torch.compile(divided, backend="dsmp", fullgraph=True, options={"executor": "eager"})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (divided, whole)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = loss_of(call, batch(step, rank).to(device))
        mine.backward()
        theirs = torch.stack([loss_of(whole, batch(step, r).to(device)) for r in range(ranks)]).mean()
        theirs.backward()
        for optimizer in optimizers:
            optimizer.step()
        mean = mine.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:2d}  on the mesh {mean.item():.6f}  in one process {theirs.item():.6f}")
    if rank == 0:
        for way in ("dispatch", "combine"):
            rows, sent = TOKENS * CHOSEN, parse_wire(formats[way]).payload_bytes(WIDTH)
            print(f"{way} as {formats[way]}: {rows * sent:,} bytes a rank and layer, of {rows * 4 * WIDTH:,} in fp32")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
