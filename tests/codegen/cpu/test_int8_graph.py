"""The pass that puts int8 operators into inference graphs: what it fuses, hands on in bytes, and leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchvision
from graph_helpers import aten_graph, nodes_of
from int8_models import Int8, Ranges, needs_operators
from torch import Tensor, fx, nn

from dsmp.codegen.cpu import int8_graph
from dsmp.codegen.cpu.int8_graph import Lowered, lower_int8
from dsmp.hardware_db.capability import Verdict
from dsmp.passes.graph import node_op
from dsmp.passes.static_steps import Steps, steps_of

CONVOLUTION = "dsmp_cpu.int8_convolution"


def fake_quantised(x: Tensor) -> Tensor:
    steps = steps_of(x.min().item(), x.max().item())
    return ((x / steps.scale).round() + steps.zero).clamp(0, 127).sub(steps.zero) * steps.scale


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


class Block(nn.Module):
    """A convolution with everything that can follow it, between two others."""

    def __init__(self, activation: nn.Module, *, residual: bool, bias: bool = False, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(16, affine=affine)
        self.last = nn.Conv2d(16, 8, 1)
        self.activation, self.residual = activation, residual
        if affine:
            nn.init.uniform_(self.norm.weight, 0.5, 2)
            nn.init.normal_(self.norm.bias)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(self.conv(x))
        return self.last(self.activation(y + x if self.residual else y))


@needs_operators
@pytest.mark.parametrize(
    "activation,name",
    [(nn.ReLU(), "relu"), (nn.Hardswish(), "hardswish"), (nn.ReLU6(), "relu6"), (nn.Identity(), "none"),
     (nn.Hardtanh(-1, 1), "none"), (nn.GELU(), "none")],
)  # fmt: skip
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias,affine", [(False, True), (True, False)])
def test_one_operator_per_convolution(
    activation: nn.Module, name: str, residual: bool, bias: bool, affine: bool
) -> None:
    torch.manual_seed(0)
    model, x = Block(activation, residual=residual, bias=bias, affine=affine).eval(), torch.randn(2, 3, 9, 9)
    int8 = Int8(model)
    with torch.no_grad():
        assert relative(int8(x), model(x)) < 0.04
    _, middle, _ = int8.report
    known = type(activation) not in (nn.Hardtanh, nn.GELU)
    assert (middle.activation, middle.residual, middle.bytes) == (name, residual, known)
    calls = int8.targets()
    assert calls.count(CONVOLUTION) == 3
    if known:
        assert calls == [CONVOLUTION] * 3


@needs_operators
def test_numbers_are_those_of_rounded_operands() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(5, 7, 3, stride=2), nn.ReLU(), nn.Conv2d(7, 4, 3, groups=1)).eval(),
        torch.randn(3, 5, 11, 11),
    )
    found = Int8(model)(x)
    weights = [torch.ops.dsmp_cpu.int8_weight(model[i].weight, 1) for i in (0, 2)]
    with torch.no_grad():
        hidden = F.conv2d(fake_quantised(x), weights[0], model[0].bias, 2).relu()
        top = model[:2](x).max().item()  # ranges are those of the fp32 run
        hidden = ((hidden / (top / 127)).round().clamp(0, 127)) * (top / 127)
        wanted = F.conv2d(hidden, weights[1], model[2].bias)
    assert relative(found, wanted) < 1e-3  # numbers at ties alone may differ
    assert (found - wanted).abs().median() < 1e-5


class Pooled(nn.Module):
    def __init__(self, *, ceil: bool = False, read: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.read = nn.MaxPool2d(3, 2, 1, ceil_mode=ceil), read

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = self.pool(x)
        y = (self.second(y) + y).relu()
        return self.second(y).mean() + x.mean() if self.read else self.second(y)


@needs_operators
def test_pools_work_on_bytes() -> None:
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(2, 3, 16, 16)
    int8 = Int8(model)
    with torch.no_grad():
        assert relative(int8(x), model(x)) < 0.04
    assert int8.targets() == [CONVOLUTION, "dsmp_cpu.int8_max_pool", CONVOLUTION, CONVOLUTION]


@needs_operators
@pytest.mark.parametrize("how", [{"ceil": True}, {"read": True}])
def test_pools_that_others_need_stay(how: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, x = Pooled(**how).eval(), torch.randn(2, 3, 16, 16)
    int8 = Int8(model)
    with torch.no_grad():
        assert torch.allclose(int8(x), model(x), rtol=0.05, atol=0.05)
    assert "dsmp_cpu.int8_max_pool" not in int8.targets()


@needs_operators
def test_residuals_stay_wide_on_request() -> None:
    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(2, 3, 16, 16)
    int8 = Int8(model, narrow_residuals=False)
    with torch.no_grad():
        wanted = model(x)
        assert relative(int8(x), wanted) < relative(Int8(model)(x), wanted) * 1.05
    assert [r.bytes for r in int8.report] == [False, True, False]


class Gated(nn.Module):
    """Squeeze and excitation: the product by a gate is read by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1)
        self.squeeze = torchvision.ops.SqueezeExcitation(16, 8, scale_activation=nn.Hardsigmoid)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.squeeze(self.first(x)))


@needs_operators
@pytest.mark.parametrize("inside", [False, True])
def test_gates_are_applied_while_quantising(inside: bool) -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(2, 3, 16, 16)
    int8 = Int8(model, keep=lambda n: inside or n.meta["val"].shape[-1] > 1)
    with torch.no_grad():
        assert relative(int8(x), model(x)) < 0.04
    calls = int8.targets()
    assert "dsmp_cpu.int8_quantise" in calls and "aten.mul.Tensor" not in calls
    assert calls.count("aten.convolution") == (0 if inside else 2)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return self.linear(y.flatten(1)).relu(), y


@needs_operators
def test_views_and_outputs_keep_their_order() -> None:
    torch.manual_seed(0)
    model, x = Flattened().eval(), torch.randn(2, 3, 8, 8)
    int8 = Int8(model)
    with torch.no_grad():
        wanted = model(x)
    found = int8(x)
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride() and relative(a, b) < 0.04
    assert int8.report[1].activation == "relu" and "dsmp_cpu.int8_linear" in int8.targets()


@needs_operators
def test_what_cannot_be_int8_is_left_alone_and_said() -> None:
    def function(x: Tensor, w: Tensor, t: Tensor, flat: Tensor) -> tuple[Tensor, ...]:
        return (F.conv2d(x, w * 2), F.conv_transpose2d(x, t), F.conv1d(x[:, :, 0], flat), torch.relu(x))

    shapes = ((1, 4, 6, 6), (8, 4, 3, 3), (4, 8, 3, 3), (8, 4, 3))
    gm = aten_graph(function, *(torch.randn(s) for s in shapes))
    before = str(gm.graph)
    chosen = [*nodes_of(gm, "aten.convolution"), *nodes_of(gm, "aten.relu")]
    report = lower_int8(gm, dict.fromkeys(chosen, Steps(0.1, 3)))
    assert str(gm.graph) == before
    assert [r.reason for r in report] == [
        "its weight is computed in the graph",
        "a transposed convolution",
        "operands are not fp32 of 4 axes on a CPU",
        "neither a convolution nor a linear layer",
    ]


def test_without_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_graph, "cpu_operators", lambda: Verdict(ok=False, reason="no compiler"))
    gm = aten_graph(F.conv2d, torch.randn(1, 4, 6, 6), torch.randn(8, 4, 3, 3))
    (node,) = nodes_of(gm, "aten.convolution")
    report = lower_int8(gm, {node: Steps(0.1, 3)})
    assert report == [Lowered(node="convolution", reason="no compiler", activation="")]
    assert [node_op(n) for n in gm.graph.nodes if n.op == "call_function"] == ["aten.convolution"]


@needs_operators
def test_readers_that_quantise_differently_get_their_own_bytes() -> None:
    def two(x: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        y = F.conv2d(x, v)
        return torch.cat([F.conv2d(y, w), F.conv2d(y, u)])

    torch.manual_seed(0)
    inputs = (torch.randn(1, 8, 6, 6), torch.randn(8, 8, 1, 1), torch.randn(8, 8, 1, 1), torch.randn(8, 8, 1, 1))
    gm = aten_graph(two, *inputs)
    wanted = two(*inputs)
    ranges = Ranges(gm)
    ranges.run(*inputs)
    steps = dict(ranges.steps)
    last = nodes_of(gm, "aten.convolution")[-1]
    steps[last] = Steps(steps[last].scale * 1.25, steps[last].zero)
    report = lower_int8(gm, steps)
    assert [r.bytes for r in report] == [False, False, False]
    assert relative(gm(*inputs), wanted) < 0.05


def statistics(model: nn.Module) -> nn.Module:
    """A model of random weights whose batch norms have seen something."""
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, 64, 64))
    return model.eval()


@needs_operators
@pytest.mark.parametrize("name,layers,handed_on", [("resnet18", 21, 16), ("mobilenet_v2", 53, 51)])
def test_whole_networks(name: str, layers: int, handed_on: int) -> None:
    torch.manual_seed(0)
    model, x = statistics(getattr(torchvision.models, name)()), torch.randn(2, 3, 96, 96)
    int8 = Int8(model)
    with torch.no_grad():
        assert relative(int8(x), model(x)) < (0.08 if name == "resnet18" else 0.2)
    assert len(int8.report) == layers and not any(r.reason for r in int8.report)
    assert sum(r.bytes for r in int8.report) == handed_on
    left = [c for c in int8.targets() if not c.startswith("dsmp_cpu.")]
    assert len(left) <= 3, left


@needs_operators
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gated, Pooled, Flattened])
def test_inductor_runs_the_same_graph(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(2, 3, 8, 8)
    eager, inductor = Int8(model), Int8(model, executor="inductor")
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (inductor(x), eager(x))), strict=True):
        assert relative(a, b) < 1e-2 and a.stride() == b.stride()
    assert isinstance(inductor.graph, fx.GraphModule) and CONVOLUTION in inductor.targets()


@needs_operators
def test_batches_of_any_size() -> None:
    torch.manual_seed(0)
    model, x = Flattened().eval(), torch.randn(6, 3, 8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    int8 = Int8(model)
    whole = int8(x)
    graph = int8.graph
    for n in (2, 5):
        assert torch.equal(int8(x[:n].clone())[1], whole[1][:n])
    assert int8.graph is graph  # compiled once


class Ends(nn.Module):
    """A convolution and what is then done with its result."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.end = nn.Conv2d(4, 8, 3), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.conv(x))


@pytest.mark.parametrize(
    "end",
    [
        lambda y: y,
        lambda y: y.relu() * 2,
        lambda y: y.permute(0, 2, 3, 1),
        lambda y: y.as_strided((2, 8, 2), (128, 16, 1)),
        lambda y: torch.view_as_real(
            torch.view_as_complex(y.unflatten(1, (2, 4)).movedim(2, -1).unflatten(-1, (2, 2)))
        ),
        lambda y: torch.view_as_real(torch.view_as_complex(y.unflatten(3, (2, 2)))),
        lambda y: y.flatten(1),
    ],
)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_results_lie_as_they_did(end: Callable[[Tensor], Tensor], order: torch.memory_format) -> None:
    model = Ends(end).eval().to(memory_format=order)  # type: ignore[call-overload]
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=order)
    try:
        with torch.no_grad():
            wanted = model(x)
    except RuntimeError:
        pytest.skip("not a view of results in this order")
    found = Int8(model)(x)
    assert found.stride() == wanted.stride()
    assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_a_bias_for_all_channels_is_left_alone() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    model, x = Shared(), torch.randn(32, 16)
    int8 = Int8(model)
    assert torch.allclose(int8(x), F.linear(x, model.weight, model.bias), atol=1e-4)
    assert not int8.report and not any("int8" in name for name in int8.targets())
