"""Which kernels a plan needs: one for each distinct one, all FLOPs accounted for, files that run."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsmp
from dsmp.codegen.emission.kernel_files import emit_kernels
from dsmp.codegen.emission.plan_kernels import PlanKernels, plan_kernels
from dsmp.codegen.interpreter import interpret
from dsmp.codegen.targets import TARGETS, target_of
from dsmp.errors import KernelUnavailableError, PlanFileError
from dsmp.passes.plan import PrecisionPlan


class Stack(nn.Module):
    """Equal layers and one of another size: x float[rows, 256]."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))
        self.head = nn.Linear(256, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def plan_for(hardware: str, rule: str, rows: int = 512) -> PrecisionPlan:
    return dsmp.plan(Stack(), (torch.randn(rows, 256),), hardware=hardware, rules={"*linear*": rule})


@pytest.fixture(scope="module")
def h800() -> PrecisionPlan:
    return plan_for("h800", "fp8_e4m3")


def test_equal_layers_share_their_kernels_and_every_product_is_covered(h800: PrecisionPlan) -> None:
    needed = plan_kernels(h800, dsmp.resolve_hardware("h800"))
    products = [d for d in h800 if d.op == "linear"]
    assert needed.flops == sum(d.flops for d in products)
    assert needed.covered == 1.0
    assert not needed.uncovered
    gemms = [k for k in needed.kernels if k.flops]
    assert sum(k.flops for k in gemms) + sum(c.flops for c in needed.library) == needed.flops
    served = [key for k in gemms for key in k.nodes] + [key for c in needed.library for key in c.nodes]
    assert sorted(served) == sorted(d.key for d in products)
    forward = next(k for k in gemms if "layers.0|fprop|linear|0" in k.nodes)
    assert {"layers.1|fprop|linear|0", "layers.2|fprop|linear|0"} <= set(forward.nodes)
    assert all(k.call.operand_format == "fp8_e4m3" for k in gemms)
    assert all(k.peak_share is not None and 0 < k.peak_share < 1 and k.time_us > 0 for k in gemms)
    assert any(k.call.name.startswith("quantize") for k in needed.kernels)


@pytest.mark.parametrize(
    ("hardware", "rule"), [("a100", "tf32"), ("mi250x", "fp16"), ("mi300x", "fp8_e4m3fnuz"), ("b200", "fp8_e4m3")]
)
def test_other_formats(hardware: str, rule: str) -> None:
    device = dsmp.resolve_hardware(hardware)
    needed = plan_kernels(plan_for(hardware, rule), device)
    assert needed.covered == 1.0
    assert {k.call.operand_format for k in needed.kernels if k.flops} == {rule}


def test_what_nothing_computes_is_named() -> None:
    plan = plan_for("mi100", "fp16")
    needed = plan_kernels(plan, dsmp.resolve_hardware("mi100"))
    assert needed.covered < 1.0
    assert not needed.kernels
    assert all("there are no kernels for gfx908" in why for why in needed.uncovered.values())
    cublas = plan_kernels(plan_for("v100", "fp16"), dsmp.resolve_hardware("v100"))
    assert cublas.covered == 1.0
    assert {c.implementation for c in cublas.library} == {"torch_half_mm"}


def test_the_user_s_choice_counts(h800: PrecisionPlan) -> None:
    device = dsmp.resolve_hardware("h800")
    without = plan_kernels(h800, device, without=["triton_block_gemm"])
    assert without.covered < 1.0
    with pytest.raises(KernelUnavailableError, match="triton_gemm cannot compute fp8_e4m3"):
        plan_kernels(h800, device, forced={"layers.0|fprop*": "triton_gemm"})


@pytest.fixture(scope="module")
def emitted(h800: PrecisionPlan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanKernels, Any]:
    device = dsmp.resolve_hardware("h800")
    needed = plan_kernels(h800, device)
    target = target_of(device)
    assert target is not None
    folder = tmp_path_factory.mktemp("kernels") / "new" / "folder"
    return folder, needed, emit_kernels(needed.kernels, target, folder, {"plan": "Stack on h800"})


def test_sources_and_machine_code_are_written(emitted: tuple[Path, PlanKernels, Any]) -> None:
    folder, needed, kernels = emitted
    names = [k.name for k in kernels]
    assert len(set(names)) == len(names) == len(needed.kernels)
    for kernel in kernels:
        assert {p.suffix for p in folder.glob(f"{kernel.name}.*")} >= {".py", ".ptx", ".cubin"}
        text = kernel.path.read_text()
        assert kernel.planned.nodes[0] in text
        assert "sm_90" in text
        compile(text, str(kernel.path), "exec")
        assert kernel.native
        figures = kernel.figures()
        assert figures["spills"] == 0
        assert 0 < figures["occupancy"] <= 1
        assert 0 < figures["shared_bytes"] <= TARGETS["sm_90"].shared_bytes or not figures["flops"]
        wanted = ("e4m3", "QGMMA") if kernel.planned.flops else ()
        assert all(any(w in i for i in kernel.instructions) for w in wanted)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of a meta tensor's shape and strides: small whole numbers, scales of 1."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if tensor.dtype is torch.float32 and tensor.dim() > 1:
        return made.fill_(1.0)
    return made.copy_(torch.randint(-2, 3, tensor.shape).float())


def test_a_written_kernel_computes(emitted: tuple[Path, PlanKernels, Any]) -> None:
    _, _, kernels = emitted
    kernel = next(k for k in kernels if "layers.0|fprop|linear|0" in k.planned.nodes and k.planned.flops)
    spec = importlib.util.spec_from_file_location("written", kernel.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.launch)
    written = getattr(module, kernel.planned.call.name)
    assert not {p.name for p in written.params if p.is_constexpr}
    call = kernel.planned.call
    arguments = {k: on_cpu(v) if isinstance(v, torch.Tensor) else v for k, v in call.arguments.items()}
    interpret(written, call.grid, {name: arguments[name] for name in written.arg_names})
    found = next(t for t in arguments.values() if isinstance(t, torch.Tensor) and t.dtype is torch.bfloat16).clone()
    replace(call, arguments=arguments).run()
    wanted = next(t for t in arguments.values() if isinstance(t, torch.Tensor) and t.dtype is torch.bfloat16)
    # whole numbers below 256 are exact in bf16; above, the interpreter of a kernel for GPUs cuts off
    small = wanted.abs() <= 256
    assert small.float().mean() > 0.9
    assert torch.equal(found[small], wanted[small])
    assert wanted.abs().max() > 0


def test_a_folder_that_cannot_be_made_is_said(h800: PrecisionPlan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    needed = plan_kernels(h800, dsmp.resolve_hardware("h800"))
    with pytest.raises((PlanFileError, NotADirectoryError)):
        emit_kernels(needed.kernels[:1], TARGETS["sm_90"], tmp_path / "file" / "folder", {})
