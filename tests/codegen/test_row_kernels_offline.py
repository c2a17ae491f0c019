"""Kernels over rows compiled for every target: no spills, shared memory within the target's."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsmp.codegen.kernel_call import KernelCall
from dsmp.codegen.kernels.cross_entropy import cross_entropy_backward_call, cross_entropy_call, cross_entropy_configs
from dsmp.codegen.kernels.norm import norm_call, norm_configs
from dsmp.codegen.kernels.norm_backward import norm_backward_call, norm_backward_configs
from dsmp.codegen.kernels.softmax import softmax_backward_call, softmax_call, softmax_configs
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS, Target

ROWS = 4096
SIZES = (128, 4096, 128256)
LONGEST_KEPT = {"norm_backward": 8192, "cross_entropy": 16384}  # where registers are scarcest
KINDS = ("norm", "norm_backward", "softmax", "softmax_backward", "cross_entropy", "cross_entropy_backward")


def offline_call(kind: str, size: int, target: Target, dtype: torch.dtype = torch.bfloat16) -> KernelCall:
    """The shipped configuration of a kernel for rows of `size` elements of a dtype, everything optional switched on."""

    def rows() -> torch.Tensor:
        return meta(ROWS, size, dtype=dtype)

    vector, statistic = meta(size, dtype=torch.float32), meta(ROWS, dtype=torch.float32)
    labels, pairs = meta(ROWS, dtype=torch.int64), meta(ROWS, 2, dtype=torch.float32)
    extras = {"label_smoothing": 0.1, "z_weight": 1e-4}
    if kind == "norm":
        config = norm_configs(size, target)[0]
        return norm_call(rows(), vector, vector, rows(), statistic, statistic, eps=1e-5, config=config)
    if kind == "norm_backward":
        config, partial = norm_backward_configs(size, target)[0], meta(264, size, dtype=torch.float32)
        return norm_backward_call(rows(), rows(), vector, statistic, statistic, rows(), partial, partial, config=config)
    if kind == "softmax":
        return softmax_call(rows(), rows(), config=softmax_configs(size, target)[0])
    if kind == "softmax_backward":
        return softmax_backward_call(rows(), rows(), rows(), config=softmax_configs(size, target)[0])
    config = cross_entropy_configs(size, target)[0]
    if kind == "cross_entropy":
        return cross_entropy_call(rows(), labels, statistic, statistic, pairs, rows(), config=config, **extras)
    return cross_entropy_backward_call(rows(), labels, statistic, pairs, rows(), config=config, **extras)


def offline_cases() -> list[tuple[str, int, str]]:
    """(kind, size, target) of everything that is compiled."""
    cases = [*itertools.product(KINDS, SIZES), *LONGEST_KEPT.items()]
    return [(kind, size, isa) for kind, size in cases for isa in TARGETS]


def check(call: KernelCall, target: Target) -> None:
    compiled = compile_call(call, target)
    assert compiled.code.spills == 0, f"{call.name} {call.config.text}: {compiled.code.spills} spills"
    assert compiled.shared_bytes <= target.shared_bytes
    assert compiled.code.registers <= target.max_registers
    assert compiled.occupancy >= 0.25, f"{call.name} {call.config.text}: {compiled.code.registers} registers"
    assert not compiled.code.matrix_instructions


@pytest.mark.parametrize(
    ("kind", "size", "isa"),
    [("norm_backward", 8192, "sm_90"), ("cross_entropy", 128256, "gfx942"), ("softmax", 128, "sm_120")],
)
def test_a_few(kind, size, isa):
    check(offline_call(kind, size, TARGETS[isa]), TARGETS[isa])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "isa"), offline_cases())
def test_every_target(kind, size, isa):
    check(offline_call(kind, size, TARGETS[isa]), TARGETS[isa])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kind", ["norm", "norm_backward", "cross_entropy"])
def test_fp32_and_offsets_beyond_32_bits(kind, isa):
    target = TARGETS[isa]
    check(offline_call(kind, 4096, target, torch.float32), target)
    call = offline_call(kind, 4096, target)
    stretched = {
        n: torch.empty(1, device="meta", dtype=v.dtype).as_strided((ROWS, 4096), (1, 1 << 20))
        if isinstance(v, torch.Tensor) and v.shape == (ROWS, 4096)
        else v
        for n, v in call.arguments.items()
    }
    assert any(v is not call.arguments[n] for n, v in stretched.items())
    strides = {f"{n}_column": 1 << 20 for n in stretched if f"{n}_column" in stretched}
    wide = KernelCall(
        name=call.name,
        kernel=call.kernel,
        arguments={**stretched, **strides},
        constants={**call.constants, "WIDE": True},
        grid=call.grid,
        config=call.config,
    )
    check(wide, target)
