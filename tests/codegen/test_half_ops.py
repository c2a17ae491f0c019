"""Attention and convolutions of a plan in scaled fp16: lowered to a library's operators, and counted as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from graph_helpers import random_inputs, relative_error, run
from torch import fx

import dsmp
from dsmp.codegen.audit import Ran
from dsmp.codegen.emission.plan_kernels import plan_kernels
from dsmp.codegen.half_ops import HALF_OPS
from dsmp.codegen.lower_products import Lowering
from dsmp.compiler.capture import Capture
from dsmp.compiler.capture import capture as capture_model
from dsmp.compiler.execution import apply_decisions
from dsmp.compiler.pipeline import make_plan
from dsmp.compiler.saved_activations import copy_graph
from dsmp.errors import KernelUnavailableError
from dsmp.passes.gemm import GEMM_OPS
from dsmp.passes.graph import node_op, placeholders
from dsmp.passes.plan import Decision


def flat(outputs: list[Any]) -> torch.Tensor:
    """All results of a step as one vector."""
    return torch.cat([o.detach().reshape(-1).double() for o in outputs if o is not None])


def decided(capture: Capture, hardware: str) -> dict[str, Decision]:
    """The default plan, with every attention and convolution in scaled fp16."""
    plan = make_plan(capture, dsmp.resolve_hardware(hardware), predict_memory=False)
    scaled = {"compute": "fp16", "recipe": "tensor/tensor"}
    return {d.key: d.model_copy(update=scaled) if d.op in ("conv", "sdpa") else d for d in plan}


def lowered(capture: Capture, hardware: str, decisions: dict[str, Decision], **how: Any) -> tuple[Any, Any, Any]:
    """The lowered graph of a captured step, its inputs, and the audit."""
    device = dsmp.resolve_hardware(hardware)
    (graph,) = capture
    copy, parameters = copy_graph(graph.gm, graph.parameters)
    applied = apply_decisions(
        copy, decisions, storage=device.storage, same_device=True, parameters=parameters,
        lowering=Lowering(device=device, native=True, **how),
    )  # fmt: skip
    return copy, random_inputs(graph.gm, graph.parameters), applied.audit


def check_against_simulation(
    capture: Capture, hardware: str, decisions: dict[str, Decision], gm: fx.GraphModule, inputs: Any
) -> None:
    """A lowered step is about as far from the traced one as its simulation."""
    (graph,) = capture
    copy, parameters = copy_graph(graph.gm, graph.parameters)
    storage = dsmp.resolve_hardware(hardware).storage
    apply_decisions(copy, decisions, storage=storage, same_device=False, parameters=parameters)
    expected, simulated, found = (run(g, inputs) for g in (graph.gm, copy, gm))
    assert [o.dtype for o in found if o is not None] == [o.dtype for o in expected if o is not None]
    limit = relative_error(flat(simulated), flat(expected))
    assert 1e-6 < relative_error(flat(found), flat(expected)) < 1.5 * limit


def test_every_attention_and_convolution_has_one() -> None:
    assert set(HALF_OPS) == {name for name, op in GEMM_OPS.items() if op.kind in ("conv", "sdpa")}


@pytest.mark.parametrize("name", ["sdpa", "convnet"])
def test_a_step_on_an_mi250x_is_all_native(name: str, captured: Callable[..., Capture]) -> None:
    capture = captured(name)
    decisions = decided(capture, "mi250x")
    gm, inputs, audit = lowered(capture, "mi250x", decisions)
    mine = [e for e in audit if e.op in ("conv", "sdpa")]
    assert len(mine) >= 2
    assert {(e.implementation, e.ran) for e in mine} == {("torch_half_op", Ran.NATIVE)}
    assert "scales are applied to" in mine[0].reason
    assert audit.fallbacks == []
    audit.check()
    assert "simulat" not in str(audit)
    names = {node_op(n) for n in gm.graph.nodes if n.op == "call_function"}
    assert not names & {"dsmp.fake_quantize", *(n for n in names if n in HALF_OPS)}
    check_against_simulation(capture, "mi250x", decisions, gm, inputs)


@pytest.mark.parametrize("hardware", ["v100", "t4"])
@pytest.mark.parametrize("output", ["fp32", "fp16"])
def test_stored_narrower(hardware: str, output: str, captured: Callable[..., Capture]) -> None:
    """What is stored in fp16 is so once, behind the operator."""
    capture = captured("convnet")
    decisions = {
        k: d.model_copy(update={"output": output} if d.op == "conv" else {})
        for k, d in decided(capture, hardware).items()
    }
    gm, inputs, audit = lowered(capture, hardware, decisions)
    assert {e.implementation for e in audit if e.op == "conv"} == {"torch_half_op"}
    check_against_simulation(capture, hardware, decisions, gm, inputs)


def test_both_gradients_of_a_convolution_keep_scales_of_their_own(captured: Callable[..., Capture]) -> None:
    capture = captured("convnet")
    gm, _, audit = lowered(capture, "mi250x", decided(capture, "mi250x"))
    backward = [n for n in gm.graph.nodes if node_op(n) == "dsmp.convolution_backward_half"]
    assert len(backward) == len([e for e in audit if e.op == "conv" and e.key.split("|")[1] != "fprop"])
    assert {tuple(n.args[-1][:2]) for n in backward} == {(True, False), (False, True)}


@pytest.mark.parametrize("hardware", ["mi250x", "v100"])
def test_all_products_of_a_small_llama_are_covered(hardware: str, captured: Callable[..., Capture]) -> None:
    plan = make_plan(captured("llama"), dsmp.resolve_hardware(hardware), predict_memory=False)
    device = dsmp.resolve_hardware(hardware)
    found = plan_kernels(plan, device)
    assert found.covered == 1.0
    assert not found.uncovered
    attention = [c for c in found.library if c.op == "sdpa"]
    assert sum(len(c.nodes) for c in attention) == 4
    scaled = {d.recipe for d in plan if d.op == "sdpa"} == {"tensor/tensor"}
    assert {c.implementation for c in attention} == {"torch_half_op" if scaled else "torch"}
    without = plan_kernels(plan, device, without=["torch_half_op"])
    assert (without.covered < 1.0) == scaled


def test_named_where_it_cannot_serve(captured: Callable[..., Capture]) -> None:
    capture = captured("sdpa")
    decisions = decided(capture, "mi250x")
    with pytest.raises(KernelUnavailableError, match="it is for convolutions and fused attention"):
        lowered(capture, "mi250x", decisions, forced={"*": "torch_half_op"})
    with pytest.raises(KernelUnavailableError, match="no fused attention in fp16 on gfx908"):
        lowered(capture, "mi100", decisions, forced={"*sdpa*": "torch_half_op"})
    plain = {k: d.model_copy(update={"recipe": "none"}) for k, d in decisions.items()}
    with pytest.raises(KernelUnavailableError, match=r"a scale each, not fp16 \(none\)"):
        lowered(capture, "mi250x", plain, forced={"*sdpa*": "torch_half_op"})
    _, _, audit = lowered(capture, "mi250x", decisions, forced={"*sdpa*": "torch_half_op"})
    assert {e.reason for e in audit if e.op == "sdpa"} == {"asked for by name"}
    _, _, audit = lowered(capture, "mi250x", decisions, without=["torch_half_op"])
    assert {e.ran for e in audit if e.op == "sdpa"} == {Ran.FELL_BACK}
    assert all("the option 'without' names it" in e.reason for e in audit.fallbacks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "convnet"])
def test_dynamic_batches(name: str) -> None:
    case = zoo.build(name)
    torch._dynamo.mark_dynamic(case.args[0], 0)
    captured = capture_model(case.model, case.args)
    (graph,) = captured
    symbols = [str(n.meta["val"]) for n in placeholders(graph.gm) if isinstance(n.meta["val"], torch.SymInt)]
    assert symbols
    decisions = decided(captured, "mi250x")
    gm, _, audit = lowered(captured, "mi250x", decisions)
    assert {e.implementation for e in audit if e.op in ("conv", "sdpa")} == {"torch_half_op"}
    for batch in (case.args[0].shape[0], 7):
        inputs = random_inputs(graph.gm, graph.parameters, sizes=dict.fromkeys(symbols, batch))
        check_against_simulation(captured, "mi250x", decisions, gm, inputs)


@pytest.mark.slow
def test_inductor_keeps_them() -> None:
    """A compiler that plans memory takes the layouts that fake tensors promise."""

    def step(q: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = q.unflatten(-1, (3, 20)).transpose(1, 2) * 2
        out, _ = HALF_OPS["aten._scaled_dot_product_flash_attention_for_cpu"](heads, heads, heads, 0.0, True)
        y = HALF_OPS["aten.convolution"](x + 1, w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2)
        return out.transpose(1, 2).flatten(2) + 1, y.relu()

    torch.manual_seed(0)
    given = torch.randn(2, 9, 60), torch.randn(2, 8, 11, 11), torch.randn(6, 4, 3, 3)
    for dynamic in (False, True):
        torch._dynamo.reset()
        for found, wanted in zip(torch.compile(step, dynamic=dynamic)(*given), step(*given), strict=True):
            assert torch.allclose(found, wanted, rtol=1e-6)
