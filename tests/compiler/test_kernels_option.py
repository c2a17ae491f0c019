"""Products run by kernels: the same numbers as simulation, shared quantisations, and an audit that tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import compiled, gradients, relative
from torch import fx, nn

import dsmp
import dsmp.compiler.backend as backend
from dsmp.codegen.audit import Audit, Ran
from dsmp.errors import InvalidOptionError, KernelUnavailableError, SilentFallbackError
from dsmp.passes.graph import node_op
from dsmp.passes.plan import Decision, PrecisionPlan


class Mlp(nn.Module):
    """Two linears with a nonlinearity: x float[rows, 144] to float[rows, 40], sizes that are no multiple of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(144, 160)
        self.down = nn.Linear(160, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def planned(model: nn.Module, x: torch.Tensor, hardware: str, change: Callable[[Decision], dict[str, str]]) -> Any:
    """A plan in which `change` says what each product is computed in."""
    plan = dsmp.plan(model, (x,), hardware=hardware)
    nodes = [d.model_copy(update=change(d)) if d.op in ("linear", "matmul") else d for d in plan]
    return plan.model_copy(update={"nodes": nodes})


def formats(compute: str, recipe: str, accumulate: str = "fp32", output: str | None = None) -> Callable[..., Any]:
    """The same format and recipe for every product; the two operands of a weight gradient are both activations."""

    def change(decision: Decision) -> dict[str, str]:
        given = "1x128/1x128" if recipe == "1x128/128x128" and decision.phase == "wgrad" else recipe
        update = {"compute": compute, "recipe": given, "accumulate": accumulate}
        return update | ({"output": output} if output else {})

    return change


def step(model: nn.Module, x: torch.Tensor, plan: PrecisionPlan, **options: Any) -> tuple[list[torch.Tensor], Audit]:
    """Output and gradients of a training step, and its audit."""
    torch._dynamo.reset()
    model.zero_grad()
    run = compiled(model, plan=plan, **options)
    y = run(x)
    y.square().mean().backward()
    return [y.detach(), *(g.clone() for g in gradients(model))], dsmp.audit(run)


@pytest.mark.parametrize(
    ("hardware", "change", "implementation"),
    [
        ("a100", formats("tf32", "none"), "triton_gemm"),
        ("h800", formats("bf16", "none", output="bf16"), "triton_gemm"),
        ("mi250x", formats("fp16", "tensor"), "triton_gemm"),
        ("a100", formats("int8", "row", "int32"), "triton_gemm"),
        ("h800", formats("fp8_e4m3", "row", output="bf16"), "triton_gemm"),
        ("h800", formats("fp8_e5m2", "tensor"), "triton_gemm"),
        ("h800", formats("fp8_e4m3", "1x128/128x128", output="bf16"), "triton_block_gemm"),
        ("mi300x", formats("fp8_e4m3fnuz", "1x128/128x128"), "triton_block_gemm"),
        ("b200", formats("fp8_e4m3", "mx32"), "triton_mx_gemm"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_kernels_give_what_simulation_gives(hardware: str, change: Any, implementation: str) -> None:
    model, x = Mlp(), torch.randn(130, 144)
    plan = planned(model, x, hardware, change)
    simulated, before = step(model, x, plan)
    interpreted, audit = step(model, x, plan, kernels="interpret", strict=True)
    products = [e for e in audit if e.op == "linear"]
    assert len(products) == 5
    assert {(e.implementation, e.ran) for e in products} == {(implementation, Ran.INTERPRETED)}
    assert {e.ran for e in before if e.op == "linear"} == {Ran.SIMULATED}
    # rounded alike; sums are taken in another order, and what is stored in bf16 may round to the neighbour
    narrow = any(d.output == "bf16" for d in plan if d.op == "linear")
    assert relative(interpreted, simulated) < (4e-3 if narrow else 2e-5)


def graph_of(model: nn.Module, x: torch.Tensor, plan: PrecisionPlan, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operator stands in the lowered graph of a step."""
    counted: Counter[str] = Counter()
    apply = backend.apply_decisions

    def count(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        applied = apply(gm, *args, **kwargs)
        counted.update(node_op(n) for n in gm.graph.nodes if n.op == "call_function")
        return applied

    monkeypatch.setattr(backend, "apply_decisions", count)
    step(model, x, plan, kernels="interpret")
    return counted


def test_what_is_quantised_is_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Mlp(), torch.randn(130, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128", output="bf16"))
    found = graph_of(model, x, plan, monkeypatch)
    assert found["dsmp.block_mm"] == 5
    # x, the hidden activation and both output gradients along rows and columns; x needs no gradient but its columns do
    assert found["dsmp.quantize_both"] == 3
    # both weights once: forward and input gradient share them; the first gradient has no input gradient to go into
    assert found["dsmp.quantize"] == 3
    assert found["dsmp.fake_quantize"] == found["aten.mm"] == found["aten.addmm"] == 0


class Heads(nn.Module):
    """Three projections of one normed sequence, as in attention: x float[2, length, 144] to float[2, length, 40]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(144)
        self.q, self.k, self.v = (nn.Linear(144, 40) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.q(y) * self.k(y) + self.v(y)


def test_what_several_products_read_is_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Heads(), torch.randn(2, 65, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128", output="bf16"))
    found = graph_of(model, x, plan, monkeypatch)
    assert found["dsmp.block_mm"] == 9
    # the normed sequence for all three, and the gradient of each projection
    assert found["dsmp.quantize_both"] == 4
    assert found["dsmp.quantize"] == 3, "the weights"
    monkeypatch.undo()
    simulated, _ = step(model, x, plan)
    interpreted, _ = step(model, x, plan, kernels="interpret", strict=True)
    assert relative(interpreted, simulated) < 4e-3


class Gated(nn.Module):
    """A gated MLP: x float[..., 144] to float[..., 144]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(144, 160, bias=False) for _ in range(2))
        self.down = nn.Linear(160, 144, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_a_gated_product_is_quantised_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Gated(), torch.randn(2, 65, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128", output="bf16"))
    found = graph_of(model, x, plan, monkeypatch)
    assert found["dsmp.gated_quantize_both"] == 1
    assert found["dsmp.quantize_both"] == 2, "x and the output's gradient"
    monkeypatch.undo()
    simulated, _ = step(model, x, plan)
    interpreted, _ = step(model, x, plan, kernels="interpret", strict=True)
    assert relative(interpreted, simulated) < 4e-3
    with torch.no_grad():
        torch._dynamo.reset()
        run = compiled(model, plan=plan, kernels="interpret")
        assert relative([run(x)], [simulated[0]]) < 4e-3


def test_a_fused_quantisation_has_the_bits_of_the_separate_one() -> None:
    gate, up = (torch.randn(130, 160).bfloat16() for _ in range(2))
    product = (nn.functional.silu(gate.float()) * up.float()).bfloat16()
    fused = torch.ops.dsmp.gated_quantize_both(gate, up, "fp8_e4m3")
    separate = torch.ops.dsmp.quantize_both(product, "fp8_e4m3")
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(fused, separate, strict=True))
    rows = torch.ops.dsmp.gated_quantize(gate, up, "fp8_e4m3")
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(rows, separate[:2], strict=True))
    torch.library.opcheck(torch.ops.dsmp.gated_quantize_both.default, (gate, up, "fp8_e4m3"))


def test_a_gated_product_that_is_read_twice_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Returned(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = nn.functional.silu(self.gate(x)) * self.up(x)
            return self.down(hidden).sum() + hidden.square().sum()

    model, x = Returned(), torch.randn(2, 65, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128", output="bf16"))
    found = graph_of(model, x, plan, monkeypatch)
    monkeypatch.undo()
    simulated, _ = step(model, x, plan)
    interpreted, _ = step(model, x, plan, kernels="interpret", strict=True)
    assert relative(interpreted, simulated) < 4e-3
    assert found["dsmp.gated_quantize_both"] + found["dsmp.quantize_both"] == 3


def test_weights_are_quantised_again_and_activations_saved_narrow() -> None:
    model, x = Mlp(), torch.randn(130, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128", output="bf16"))
    saved: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    run = compiled(model, plan=plan, kernels="interpret")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run(x).sum().backward()
    narrow = {shape for dtype, shape in saved if dtype is torch.float8_e4m3fn}
    assert narrow == {(130, 144), (130, 160)}
    assert not {(160, 144), (40, 160), (144, 160), (160, 40)} & narrow


class Sums(nn.Module):
    """Products with a matrix or a scaled bias, and a batched one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 40))
        self.bias = nn.Parameter(torch.randn(6, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x, self.weight, beta=0.5, alpha=2.0)
        z = torch.addmm(self.bias[0], x, self.weight)
        heads = y.view(2, 3, 40)
        return torch.baddbmm(z.view(2, 3, 40)[:, :, :3], heads, heads.transpose(1, 2), beta=0.25)


def test_biases_factors_and_batches() -> None:
    model, x = Sums(), torch.randn(6, 48)
    plan = planned(model, x, "a100", formats("tf32", "none"))
    simulated, _ = step(model, x, plan)
    interpreted, audit = step(model, x, plan, kernels="interpret", strict=True)
    assert all(e.ran is Ran.INTERPRETED for e in audit if e.op in ("linear", "matmul"))
    assert relative(interpreted, simulated) < 2e-6


class Odd(nn.Module):
    """A bias of one element, a factor without a bias, and an explicit batch with its own scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 40))
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x, self.weight)
        y = y + torch.addmm(y, x, self.weight, beta=0, alpha=3)
        heads = y.view(2, -1, 40)
        return heads @ heads.transpose(1, 2)


@pytest.mark.parametrize(
    ("hardware", "rule"),
    [("a100", "tf32"), ("mi250x", "fp16"), ("h800", "fp8_e4m3"), ("a100", "int8"), ("b200", "fp8_e4m3")],
)
@pytest.mark.parametrize("rows", [6, 0])
def test_odd_sums(hardware: str, rule: str, rows: int) -> None:
    model, x = Odd(), torch.randn(rows, 48)
    found = []
    for kernels in ("off", "interpret"):
        torch._dynamo.reset()
        run = compiled(model, hardware=hardware, rules={"*linear*": rule, "*matmul*": rule}, kernels=kernels)
        found.append(run(x))
    assert found[0].shape == found[1].shape
    if rows:
        assert relative([found[1]], [found[0]]) < 1e-2


def test_scaled_fp16_of_a_v100_by_cublas() -> None:
    a, b, bias = torch.randn(6, 48), torch.randn(48, 40), torch.randn(40)
    (x, s), (y, t) = (torch.ops.dsmp.quantize(v * 1e5, "fp16", "tensor", -1) for v in (a, b))
    found = torch.ops.dsmp.library_half_mm(x, y, s, t, bias, torch.float32)
    exact = (a.double() * 1e5) @ (b.double() * 1e5) + bias
    assert relative([found], [exact]) < 1e-3
    torch.library.opcheck(torch.ops.dsmp.library_half_mm.default, (x, y, s, t, bias, torch.float32))


def test_names_for_what_is_planned_as_traced_count_too(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(130, 144)
    options: dict[str, Any] = {"hardware": "a100", "rules": {"*": "fp32"}, "kernels": "interpret"}
    with pytest.raises(Exception, match="triton_mx_gemm cannot compute fp32"):
        compiled(Mlp(), implementations={"*": "triton_mx_gemm"}, **options)(x)
    torch._dynamo.reset()
    run = compiled(Mlp(), implementations={"up*": "triton_gemm", "nothing*": "torch"}, **options)
    run(x)
    ran = {e.key.split("|")[0]: e.ran for e in dsmp.audit(run) if e.op == "linear"}
    assert ran == {"up": Ran.INTERPRETED, "down": Ran.AS_TRACED}
    assert "'torch' for 'nothing*' matches no product" in caplog.text


def test_inference_and_dynamic_sizes() -> None:
    model = Mlp().eval()
    x = torch.randn(9, 144)
    with torch.no_grad():
        plan = dsmp.plan(model, (x,), hardware="a100", training=False)
        plan = plan.model_copy(
            update={"nodes": [d.model_copy(update={"compute": "tf32"}) if d.op == "linear" else d for d in plan]}
        )
        run = torch.compile(
            model, backend="dsmp", dynamic=True,
            options={"executor": "eager", "plan": plan, "kernels": "interpret", "strict": True},
        )  # fmt: skip
        for rows in (9, 5, 1):
            x = torch.randn(rows, 144)
            assert relative([run(x)], [model(x)]) < 1e-3
    assert all(e.ran is Ran.INTERPRETED for e in dsmp.audit(run) if e.op == "linear")


# what cannot be had


def test_without_its_kernel_a_node_falls_back_and_strict_raises() -> None:
    model, x = Mlp(), torch.randn(130, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128"))
    without = ["triton_block_gemm"]
    _, audit = step(model, x, plan, kernels="interpret", without=without)
    assert {e.key for e in audit.fallbacks} == {d.key for d in plan if d.op == "linear"}
    assert "without" in audit.fallbacks[0].reason
    assert "fell back" in str(audit)
    with pytest.raises(Exception, match="5 planned nodes would run wide") as caught:
        step(model, x, plan, kernels="interpret", without=without, strict=True)
    assert "SilentFallbackError" in str(caught.value) or isinstance(caught.value, SilentFallbackError)


def test_an_implementation_asked_for_by_name_must_be_there() -> None:
    model, x = Mlp(), torch.randn(130, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128"))
    with pytest.raises(Exception, match=r"up\|fprop\|linear\|0: triton_gemm cannot compute fp8_e4m3") as caught:
        step(model, x, plan, kernels="interpret", implementations={"up|fprop*": "triton_gemm"})
    assert "Available: triton_block_gemm" in str(caught.value)
    assert "KernelUnavailableError" in str(caught.value) or isinstance(caught.value, KernelUnavailableError)


def test_simulation_by_name_is_no_fallback() -> None:
    model, x = Mlp(), torch.randn(130, 144)
    plan = planned(model, x, "h800", formats("fp8_e4m3", "1x128/128x128"))
    _, audit = step(model, x, plan, kernels="interpret", implementations={"up|*": "simulation"}, strict=True)
    ran = {e.key.split("|")[0]: e.ran for e in audit if e.op == "linear"}
    assert ran == {"up": Ran.SIMULATED, "down": Ran.INTERPRETED}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernels": "fast"}, "'auto' or 'interpret' or 'off'"),
        ({"implementations": {"*": "cublas"}}, "torch_scaled_mm"),
        ({"implementations": ["triton_gemm"]}, "a dict such as"),
        ({"without": "triton_gemm"}, "a list of implementations"),
        ({"without": ["triton_gem"]}, "did you mean triton_gemm"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Exception, match="(?s)" + text) as caught:
        compiled(Mlp(), hardware="h800", **options)(torch.randn(2, 144))
    assert "InvalidOptionError" in str(caught.value) or isinstance(caught.value, InvalidOptionError)


def test_only_what_was_compiled_has_an_audit() -> None:
    for thing in (Mlp(), 3, "model"):
        with pytest.raises(InvalidOptionError, match="after its first call"):
            dsmp.audit(thing)
        with pytest.raises(InvalidOptionError, match="after its first call"):
            dsmp.plan_of(thing)
    with pytest.raises(InvalidOptionError, match="after its first call"):
        dsmp.audit(compiled(Mlp(), hardware="a100"))


def test_strict_says_in_one_line_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Mlp(), torch.randn(130, 144)
    plan = planned(model, x, "a100", formats("tf32", "none"))
    step(model, x, plan, strict=True)
    line = capsys.readouterr().err.strip()
    assert line.startswith("dsmp: Mlp on a100: ")
    assert "GEMM FLOPs: 100.0% simulated (simulation)" in line
