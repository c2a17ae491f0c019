"""What the tests of expert parallelism run in each rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import dsmp

WIDTH, TOKENS = 64, 16
MODELS = ("mixtral", "qwen3_moe", "deepseek_v3")


def model(name: str, experts: int = 4, chosen: int = 2) -> nn.Module:
    """A small model with random weights, the same in every process."""
    torch.manual_seed(0)
    common = {
        "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 96, "max_position_embeddings": 64, "num_experts_per_tok": chosen, "use_cache": False,
    }  # fmt: skip
    if name == "mixtral":
        made = transformers.MixtralConfig(**common, intermediate_size=48, num_local_experts=experts)
        return transformers.MixtralForCausalLM(made)
    if name == "qwen3_moe":
        made = transformers.Qwen3MoeConfig(
            **common, intermediate_size=96, moe_intermediate_size=48, num_experts=experts, head_dim=16
        )
        return transformers.Qwen3MoeForCausalLM(made)
    made = transformers.DeepseekV3Config(
        **{**common, "num_key_value_heads": 4}, intermediate_size=96, moe_intermediate_size=48,
        n_routed_experts=experts, n_shared_experts=1, n_group=2, topk_group=2, first_k_dense_replace=0,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(made)


def batch(rank: int) -> torch.Tensor:
    return torch.randint(0, 96, (2, TOKENS), generator=torch.Generator().manual_seed(100 + rank))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def loss_of(call: Any, ids: torch.Tensor) -> torch.Tensor:
    return call(input_ids=ids, labels=ids).loss


def reference(whole: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss, and the gradients of their mean, in one process."""
    losses = [loss_of(whole, batch(r)) for r in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    return [float(x.detach()) for x in losses], {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}


def errors(found: nn.Module, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of the gradients, of this rank's experts against their slice."""
    rank, result = dist.get_rank(), {}
    for n, p in found.named_parameters():
        if n not in wanted:
            assert p.grad is None, n
            continue
        exact = wanted[n]
        if exact.shape != p.shape:
            exact = exact.chunk(dist.get_world_size())[rank]
        result[n] = float((p.grad - exact).norm() / exact.norm().clamp_min(1e-12))
    return result


def step(name: str, options: dict[str, Any] | None, wires: dict[str, str]) -> dict[str, Any]:
    """One step: relative errors of the loss and of all gradients."""
    whole = model(name)
    divided = dsmp.expert_parallel(copy.deepcopy(whole), mesh(), **wires)
    call: Any = divided
    if options is not None:
        call = torch.compile(divided, backend="dsmp", fullgraph=True, options=options)
    losses, wanted = reference(whole)
    loss = loss_of(call, batch(dist.get_rank()))
    loss.backward()
    exact = losses[dist.get_rank()]
    return {"loss": abs(float(loss.detach()) - exact) / exact, "gradients": errors(divided, wanted)}
