"""Training with interpreted kernels is training with the simulator."""

from __future__ import annotations

import pytest
import torch
from compiling import compiled

import dsmp
from dsmp.codegen.audit import Ran
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, train_small_gpt

STEPS = 20
CONFIG = SmallGptConfig(layers=2, context=32)


def train(kernels: str, steps: int) -> tuple[list[float], torch.nn.Module]:
    """Losses of a small GPT under the plan for an H800, with every block's linears in block-scaled fp8."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = SmallGpt(CONFIG)
    options = {"hardware": "h800", "kernels": kernels, "rules": {"blocks*linear*": "fp8_e4m3"}}
    run = compiled(model, strict=kernels == "interpret", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = train_small_gpt(run, optimizer, steps=steps, batch=2, context=32, warmup=5)
    return losses, run


@pytest.mark.slow
def test_twenty_steps_give_the_simulator_s_losses() -> None:
    simulated, _ = train("off", STEPS)
    interpreted, run = train("interpret", STEPS)
    assert simulated[-1] < simulated[0] - 0.5, "it learns nothing"
    assert interpreted == pytest.approx(simulated, abs=1e-3)
    products = [e for e in dsmp.audit(run) if e.compute == "fp8_e4m3"]
    assert len(products) == 4 * 3 * CONFIG.layers
    assert {(e.implementation, e.ran) for e in products} == {("triton_block_gemm", Ran.INTERPRETED)}
