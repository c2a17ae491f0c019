"""Activation checkpointing keeps its savings under a plan: what a policy saves is saved once, in its stored format."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH, TOKENS, LAYERS = 128, 256, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def save_gemms(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.kind == "full":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.kind == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, save_gemms)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        return x.square().mean()


def saved_and_gradient(kind: str, hardware: str) -> tuple[int, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Net(kind), torch.randn(TOKENS, WIDTH)
    known = {t.untyped_storage().data_ptr() for t in [*net.parameters(), x]}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    compiled = torch.compile(net, backend="dsmp", options={"hardware": hardware, "executor": "eager"})
    with saved_tensors_hooks(pack, lambda t: t):
        loss = compiled(x)
    total = sum(held.values())
    loss.backward()
    return total, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


ONE_STREAM = TOKENS * WIDTH * 4  # one fp32 residual stream


def test_full_checkpointing_saves_only_the_inputs_of_the_blocks() -> None:
    fp32, wanted = saved_and_gradient("full", "cpu-avx2")
    bf16, gradient = saved_and_gradient("full", "h800")
    assert bf16 <= fp32 <= LAYERS * ONE_STREAM
    assert (gradient - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.parametrize("hardware", ["h800", "cpu-amx"])
def test_a_policy_that_saves_gemms_saves_their_stored_results(hardware: str) -> None:
    fp32, wanted = saved_and_gradient("selective", "cpu-avx2")
    bf16, gradient = saved_and_gradient("selective", hardware)
    # Five streams a block (the results of up and down) in half the bytes, and the stream that enters it in fp32.
    assert bf16 <= 0.65 * fp32
    assert (gradient - wanted).norm() / wanted.norm() < 0.01


def test_checkpointing_changes_no_number_of_a_plan() -> None:
    _, plain = saved_and_gradient("none", "h800")
    _, full = saved_and_gradient("full", "h800")
    _, selective = saved_and_gradient("selective", "h800")
    assert torch.equal(plain, full)
    assert torch.equal(plain, selective)
