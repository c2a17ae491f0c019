"""What the ranks of the pipeline's tests run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dsmp
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch
from dsmp.errors import DsmpError

MICROBATCHES = 4
LEARNING_RATE = 0.05


class Logits(nn.Module):
    """The GPT without its loss, which is given to the pipeline."""

    def __init__(self, gpt: SmallGpt) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt.logits(ids)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt() -> SmallGpt:
    torch.manual_seed(0)
    return SmallGpt(SmallGptConfig(layers=2, context=16))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return small_gpt_batch(batch=8, context=16)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        )
    )  # fmt: skip


def llama_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits, targets)


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))


def gradients(module: nn.Module) -> dict[str, Any]:
    return {n: p.grad.numpy() for n, p in module.named_parameters()}


def train(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One step of the GPT for every case (options of dsmp.pipeline): losses, gradients and what was planned."""
    return {name: step(gpt(), batch(), None, options) for name, options in cases.items()}


def train_llama(options: dict[str, Any]) -> dict[str, Any]:
    ids, targets = batch()
    return step(llama(), {"input_ids": ids}, targets, {"loss_fn": llama_loss, **options})


def step(model: nn.Module, inputs: Any, target: Any, options: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    made = dsmp.pipeline(model, mesh(), inputs=inputs, microbatches=MICROBATCHES, **options)
    with Sent() as sent:
        losses = made.step(**inputs, target=target) if isinstance(inputs, dict) else made.step(*inputs, target=target)
    keys = [d.key for stage in made.stages.values() for d in _planned(stage)] if options.get("compile", True) else []
    return {
        "losses": None if losses is None else losses.numpy(),
        "gradients": gradients(made),
        "plan": made.plan,
        "sent": sent.bytes,
        "state": list(made.state_dict()),
        "text": str(made),
        "keys": keys,
    }


def _planned(stage: nn.Module) -> Any:
    return dsmp.plan_of(stage)


def uses() -> dict[str, Any]:
    """Several optimizer steps with a loss function and layers named, and what is refused while a pipeline is used."""
    ids, targets = batch()
    made = dsmp.pipeline(
        Logits(gpt()),
        mesh(),
        inputs=(ids,),
        microbatches=2,
        split=["gpt.blocks.1"],
        loss_fn=cross_entropy,
        compile=False,
    )
    optimizer = torch.optim.SGD(made.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        found = made.step(ids, target=targets)
        optimizer.step()
        losses.append(None if found is None else found.mean().item())
    refused = {
        "rows": attempt(lambda: made.step(ids[:6], target=targets[:6])),
        "target": attempt(lambda: made.step(ids)),
        "form": attempt(lambda: made.step(ids=ids, target=targets)),
    }
    state = made.state_dict()
    zeros = {n: torch.zeros_like(v) for n, v in Logits(gpt()).state_dict().items()}
    missing = attempt(lambda: made.load_state_dict({}))
    made.load_state_dict(zeros)
    return {
        "losses": losses,
        "refused": refused,
        "state": list(state),
        "missing": missing,
        "zero": all(not p.any() for p in made.parameters()),
        "stages": [s.layers for s in made.plan.stages],
    }


def disagree() -> str | None:
    """What happens where ranks ask for different splits."""
    split = [["blocks.0"], ["blocks.1"]][dist.get_rank()]
    return attempt(lambda: dsmp.pipeline(gpt(), mesh(), inputs=batch(), microbatches=4, split=split, compile=False))


def attempt(function: Any) -> str | None:
    """The name and text of dsmp's error, None without one."""
    try:
        function()
    except DsmpError as error:
        return f"{type(error).__name__}: {error}"
    return None


class Sent:
    """Bytes by dtype that this rank hands to another one while it is open."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def __enter__(self) -> Sent:
        self.before = dist.P2POp.__init__
        before, count = self.before, self.bytes

        def made(op: Any, what: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if what is dist.isend:
                name = str(tensor.dtype).removeprefix("torch.")
                count[name] = count.get(name, 0) + tensor.numel() * tensor.element_size()
            before(op, what, tensor, *args, **kwargs)

        dist.P2POp.__init__ = made
        return self

    def __exit__(self, *_: Any) -> None:
        dist.P2POp.__init__ = self.before
