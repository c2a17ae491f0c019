"""Models for inference on CPUs, and plans that have them compute in each narrow form whatever it gains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsmp
from dsmp.codegen.cpu.extension import cpu_operators
from dsmp.passes.plan import Decision, PrecisionPlan

needs_operators = pytest.mark.skipif(not cpu_operators().ok, reason=cpu_operators().reason)

FORMS = {
    "fp16": {"compute": "fp16", "recipe": "wide/none", "accumulate": "fp32"},
    "int8": {"compute": "int8", "recipe": "wide/row", "accumulate": "fp32"},
    "int4": {"compute": "int4", "recipe": "wide/1x128", "accumulate": "fp32"},
    "dynamic": {"compute": "int8", "recipe": "dynamic/row", "accumulate": "int32"},
    "static": {"compute": "int8", "recipe": "static/row", "accumulate": "int32", "static_range": (-4.0, 4.0)},
}
"""What a linear's decision says in each form; convolutions have the last one alone."""


class Mlp(nn.Module):
    """Two linears, one of them without a bias, and a norm between them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Cnn(nn.Module):
    """Convolutions with norms, a residual, a pool and groups, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.other = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.pool, self.deep = nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        self.head = nn.Linear(16, 10)
        for norm in (self.norm, self.other):
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = (self.other(self.second(x)) + x).relu()
        return self.head(self.deep(self.pool(x)).mean((2, 3)))


def narrow_plan(model: nn.Module, x: Tensor, form: str) -> PrecisionPlan:
    """The model's plan for inference on this CPU, its linears (and in static int8 its convolutions) in a form."""
    classes = ("linear", "conv") if form == "static" else ("linear",)

    def changed(d: Decision) -> Decision:
        traced = {"compute": d.traced, "output": d.traced, "recipe": "none"}  # whatever the tier of this CPU says
        return d.model_copy(update={**traced, **(FORMS[form] if d.op in classes else {})})

    plan = dsmp.plan(model, x, hardware="cpu", training=False)
    return plan.model_copy(update={"nodes": [changed(d) for d in plan]})


def sample(form: str) -> tuple[nn.Module, Tensor]:
    """A model that has all that a form is for, in evaluation, and an input."""
    torch.manual_seed(0)
    return (Cnn().eval(), torch.randn(2, 3, 16, 16)) if form == "static" else (Mlp().eval(), torch.randn(3, 64))
