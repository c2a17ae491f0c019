"""Implementations: who can serve which product, and which one is taken."""

from __future__ import annotations

from typing import Any

import pytest

from dsmp.codegen.registry import IMPLEMENTATIONS, SIMULATION, Product, check_names, choose
from dsmp.errors import InvalidOptionError, KernelUnavailableError
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.hardware_db.work import GemmShape


def product(compute: str, recipe: str = "none", **changes: Any) -> Product:
    given: dict[str, Any] = {
        "key": "up|fprop|linear|0", "op_class": "linear", "phase": "fprop", "aten": "aten.mm", "compute": compute,
        "recipe": recipe, "accumulate": "int32" if compute == "int8" else "fp32", "output": "bf16", "traced": "fp32",
        "shape": GemmShape(m=4096, n=4096, k=4096),
    }  # fmt: skip
    return Product(**given | changes)


@pytest.mark.parametrize(
    ("hardware", "compute", "recipe", "taken"),
    [
        ("a100", "tf32", "none", "triton_gemm"),
        ("a100", "bf16", "none", "torch"),
        ("v100", "fp16", "none", "torch"),
        ("v100", "fp16", "tensor", "torch_half_mm"),
        ("mi100", "fp16", "tensor", "simulation"),
        ("t4", "int8", "row", "simulation"),
        ("mi250x", "fp16", "tensor", "triton_gemm"),
        ("h800", "fp8_e4m3", "1x128/128x128", "triton_block_gemm"),
        ("h800", "fp8_e4m3", "row", "torch_scaled_mm"),
        ("h800", "fp8_e4m3", "tensor", "torch_scaled_mm"),
        ("h800", "int8", "row", "triton_gemm"),
        ("h800", "fp32", "none", "torch"),
        ("mi300x", "fp8_e4m3fnuz", "1x128/128x128", "triton_block_gemm"),
        ("b200", "fp8_e4m3", "mx32", "triton_mx_gemm"),
        ("h800", "fp8_e4m3", "mx32", "simulation"),
        ("cpu-avx2", "int8", "row", "simulation"),
    ],
)
def test_what_is_taken(hardware: str, compute: str, recipe: str, taken: str) -> None:
    choice = choose(product(compute, recipe), resolve_hardware(hardware))
    assert choice.implementation.name == taken
    assert choice.reason
    # every other implementation was asked and said why not, or is slower
    for implementation in IMPLEMENTATIONS[:-1]:
        if implementation.available(product(compute, recipe), resolve_hardware(hardware)).ok:
            assert implementation.name not in choice.refused
        else:
            assert len(choice.refused[implementation.name]) > 10


def test_the_fastest_available_one_is_taken_and_the_times_are_told() -> None:
    device = resolve_hardware("h800")
    choice = choose(product("fp8_e4m3", "tensor"), device)
    times = {i.name: i.time_us(product("fp8_e4m3", "tensor"), device) for i in IMPLEMENTATIONS}
    assert times["torch_scaled_mm"] < times["triton_gemm"]
    assert "us predicted; triton_gemm" in choice.reason
    narrow = choose(product("fp8_e4m3", "tensor", shape=GemmShape(m=64, n=100, k=64)), device)
    assert narrow.implementation.name == "triton_gemm"
    assert "multiples of 16" in narrow.refused["torch_scaled_mm"]


def test_convolutions_and_attention_are_the_library_s() -> None:
    device = resolve_hardware("a100")
    conv = product("tf32", op_class="conv", aten="aten.convolution", shape=None)
    assert choose(conv, device).implementation.name == "torch_tf32"
    assert choose(conv, resolve_hardware("mi300x")).implementation is SIMULATION
    fused = product("tf32", op_class="sdpa", aten="aten._scaled_dot_product_efficient_attention", shape=None)
    assert choose(fused, device).implementation.name == "torch_tf32"
    attention = product("bf16", op_class="sdpa", aten="aten._scaled_dot_product_flash_attention", shape=None)
    assert choose(attention, device).implementation.name == "torch"


@pytest.mark.parametrize(
    ("hardware", "op_class", "taken"),
    [
        ("mi250x", "sdpa", "torch_half_op"),
        ("v100", "sdpa", "torch_half_op"),
        ("t4", "sdpa", "torch_half_op"),
        ("mi100", "sdpa", "simulation"),
        ("mi50", "sdpa", "simulation"),
        ("cpu-avx2", "sdpa", "simulation"),
        ("mi250x", "conv", "torch_half_op"),
        ("v100", "conv", "torch_half_op"),
        ("mi100", "conv", "torch_half_op"),
        ("mi50", "conv", "torch_half_op"),
        ("cpu-avx2", "conv", "simulation"),
    ],
)
@pytest.mark.parametrize("backward", ["", "_backward"])
def test_attention_and_convolutions_in_scaled_fp16(hardware: str, op_class: str, taken: str, backward: str) -> None:
    name = "_scaled_dot_product_flash_attention_for_cpu" if op_class == "sdpa" else "convolution"
    given = product("fp16", "tensor", op_class=op_class, aten=f"aten.{name}{backward}", shape=None)
    choice = choose(given, resolve_hardware(hardware))
    assert choice.implementation.name == taken
    if choice.implementation is SIMULATION:
        assert choice.reason == f"torch_half_op: {choice.refused['torch_half_op']}"
    # only with one scale for each operand, and only in fp16
    for compute, recipe in (("fp16", "none"), ("fp16", "row"), ("fp8_e4m3", "tensor")):
        other = product(compute, recipe, op_class=op_class, aten=given.aten, shape=None)
        assert "torch_half_op" in choose(other, resolve_hardware(hardware)).refused
    with pytest.raises(KernelUnavailableError, match="torch_half_op cannot compute fp16"):
        choose(product("fp16", "tensor"), resolve_hardware(hardware), forced={"*": "torch_half_op"})


def test_names_force_or_exclude() -> None:
    device = resolve_hardware("h800")
    plain = product("bf16")
    assert choose(plain, device, forced={"up*": "triton_gemm"}).implementation.name == "triton_gemm"
    assert choose(plain, device, forced={"up*": "triton_gemm", "*": "torch"}).implementation.name == "torch"
    assert choose(plain, device, without=["torch"]).implementation.name == "triton_gemm"
    assert choose(plain, device, forced={"*": "simulation"}).implementation is SIMULATION
    with pytest.raises(KernelUnavailableError, match=r"torch_scaled_mm cannot compute bf16.*Available: torch"):
        choose(plain, device, forced={"*": "torch_scaled_mm"})
    with pytest.raises(KernelUnavailableError, match="without"):
        choose(plain, device, forced={"*": "torch"}, without=["torch"])
    with pytest.raises(KernelUnavailableError, match="do not run here"):
        choose(plain, device, forced={"*": "torch"}, kinds=("triton",))
    with pytest.raises(InvalidOptionError, match="torch_scaled_mm"):
        check_names("without", ["simulation"])
    with pytest.raises(InvalidOptionError, match="did you mean triton_gemm"):
        check_names("without", ["triton_gem"])


def test_an_empty_product_takes_no_time() -> None:
    choice = choose(product("tf32", shape=None), resolve_hardware("a100"))
    assert choice.implementation.name == "triton_gemm"
    assert choice.implementation.time_us(product("tf32", shape=None), resolve_hardware("a100")) == 0.0
