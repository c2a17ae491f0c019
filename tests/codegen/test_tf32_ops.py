"""Library operators in tf32: torch's own, with flags that are set for one call alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dsmp
from dsmp.codegen.audit import Ran
from dsmp.codegen.lower_products import Lowering
from dsmp.codegen.tf32_ops import TF32_OPS, tf32_allowed
from dsmp.compiler.capture import Capture
from dsmp.compiler.execution import apply_decisions
from dsmp.compiler.pipeline import make_plan
from dsmp.compiler.saved_activations import copy_graph
from dsmp.passes.graph import node_op

CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def flags() -> tuple[bool, bool]:
    return torch._C._get_cudnn_allow_tf32(), torch._C._get_cublas_allow_tf32()


def test_the_operators_are_torch_s_own() -> None:
    x, w, b = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    y = torch.ops.aten.convolution(x, w, b, *CONVOLUTION)
    assert torch.equal(TF32_OPS["aten.convolution"](x, w, b, *CONVOLUTION), y)
    mask = [True, True, False]
    arguments = (torch.ones_like(y), x, w, [4], *CONVOLUTION, mask)
    wanted = torch.ops.aten.convolution_backward(*arguments)
    found = TF32_OPS["aten.convolution_backward"](*arguments)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], wanted[:2], strict=True))
    assert found[2] is None
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(TF32_OPS["aten.convolution"], (x, w, b, *CONVOLUTION), test_utils=checks)


@pytest.mark.parametrize("before", [True, False])
def test_flags_are_put_back(before: bool) -> None:
    outside = flags()
    torch._C._set_cudnn_allow_tf32(before)
    torch._C._set_cublas_allow_tf32(before)
    try:
        with tf32_allowed():
            assert flags() == (True, True)
        assert flags() == (before, before)
        with pytest.raises(RuntimeError):
            TF32_OPS["aten.convolution"](torch.randn(2, 3, 8, 8), torch.randn(4, 5, 3, 3), None, *CONVOLUTION)
        assert flags() == (before, before)
    finally:
        torch._C._set_cudnn_allow_tf32(outside[0])
        torch._C._set_cublas_allow_tf32(outside[1])


def test_a_step_on_an_a100_has_every_convolution_in_tf32(captured: Callable[..., Capture]) -> None:
    capture = captured("convnet")
    device = dsmp.resolve_hardware("a100")
    plan = make_plan(capture, device, predict_memory=False)
    decisions = {d.key: d.model_copy(update={"compute": "tf32"}) if d.op in ("conv", "linear") else d for d in plan}
    (graph,) = capture
    copy, parameters = copy_graph(graph.gm, graph.parameters)
    applied = apply_decisions(
        copy, decisions, storage="fp32", same_device=True, parameters=parameters,
        lowering=Lowering(device=device, native=True),
    )  # fmt: skip
    assert applied.audit is not None
    convolutions = [e for e in applied.audit if e.op == "conv"]
    assert {(e.implementation, e.ran) for e in convolutions} == {("torch_tf32", Ran.NATIVE)}
    assert applied.audit.fallbacks == []
    names = [node_op(n) for n in copy.graph.nodes if n.op == "call_function"]
    assert "dsmp.fake_quantize" not in names
    assert "aten.convolution" not in names
    assert names.count("dsmp.convolution_tf32") == 3
    assert names.count("dsmp.convolution_backward_tf32") == len(convolutions) - 3
