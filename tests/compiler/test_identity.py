"""Node keys: the right module, whatever way a module came to be compiled, and the same offline as at run time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import Seen, compiled, gemms_of, numbered
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dsmp
import dsmp.compiler.backend as backend
from dsmp.compiler.identity import module_names

D = 8


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 4, D)), requires_grad=True)


class Broken(nn.Module):
    """A graph break between its two linears; the continuation owns no parameter until `o`."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, D)
        self.o = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.q(x)
        torch._dynamo.graph_break()
        return self.o(torch.relu(y) @ y.transpose(-1, -2) @ y)


class Gram(nn.Module):
    """No parameters, and a graph break before the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.relu(x) @ x.transpose(-1, -2)


class Mlp(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Mlp, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Outer(nn.Module):
    """An encoder behind a linear."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.pre = nn.Linear(D, D)
        self.encoder = encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.pre(x))


class Wrapper(nn.Module):
    """What a trainer puts around a model."""

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square()


MLP_GEMMS = sorted([*numbered("up"), *numbered("down")])


def under(prefix: str, keys: list[str]) -> list[str]:
    return sorted(f"{prefix}.{k}" for k in keys)


def run(f: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
    f(*args).sum().backward()


def test_a_loop_over_modules_numbers_them_by_their_place(seen: Seen) -> None:
    run(compiled(Stack()), x())
    assert seen.gemms == [sorted(k for i in range(3) for k in under(f"layers.{i}", MLP_GEMMS))]


def test_an_input_without_gradient_has_no_dgrad(seen: Seen) -> None:
    run(compiled(Mlp()), torch.randn(3, D))
    assert seen.gemms == [sorted([*numbered("up", "fprop wgrad"), *numbered("down")])]


def test_a_module_called_twice_counts_its_calls(seen: Seen) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.relu(self.inner(x)))

    run(compiled(Twice()), x())
    assert seen.gemms == [sorted(numbered("inner", count=2))]


def test_one_module_under_two_names_is_one_module(seen: Seen) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU())
    model.append(model[0])
    run(compiled(model), x())
    assert seen.gemms == [sorted(numbered("0", count=2))]


def test_tied_weights_are_named_by_module(seen: Seen) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, D)
            self.body = nn.Linear(D, D)
            self.head = nn.Linear(D, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(ids)))

    run(compiled(Tied()), torch.arange(6).reshape(2, 3))
    assert seen.gemms == [sorted([*numbered("body"), *numbered("head")])]


def test_x_times_its_own_transpose_has_both_gradients(seen: Seen) -> None:
    run(compiled(lambda v: v @ v.transpose(-1, -2)), x())
    assert seen.gemms == [sorted(numbered("", op="matmul"))]
    assert seen.unmatched == []


def test_phases_follow_dataflow_when_all_shapes_are_equal() -> None:
    """With square operands only dataflow tells the two gradients apart: coarsening one phase must change its gradient
    and no other."""
    layer, value = nn.Linear(D, D, bias=False), x(D, D)

    def results(**rules: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        layer.weight.grad = value.grad = None
        asked = {"*": "fp32", **{f"*|{phase}|*": name for phase, name in rules.items()}}
        out = compiled(layer, hardware="h800", rules=asked)(value)
        (out * torch.arange(1.0, D * D + 1).reshape(D, D)).sum().backward()
        return [out.detach(), value.grad, layer.weight.grad]

    exact = results()
    for place, phase in enumerate(("fprop", "dgrad", "wgrad")):
        found = results(**{phase: "bf16"})
        assert [torch.allclose(f, e, rtol=1e-5) for f, e in zip(found, exact, strict=True)] == [
            place != i for i in range(3)
        ]


def test_checkpointed_modules_are_keyed_once(seen: Seen) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp()
            self.out = nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(checkpoint(self.body, x, use_reentrant=False))

    run(compiled(Checkpointed()), x())
    assert seen.gemms == [sorted([*under("body", MLP_GEMMS), *numbered("out")])]


def test_the_backward_method_of_a_custom_function_has_phases(seen: Seen) -> None:
    """AOTAutograd does not number what such a method computes, nor say that it is backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(torch.tanh(x), self.weight) * 2

    run(compiled(nn.Sequential(Custom(), Custom(), nn.Linear(D, D))), x(4, D))
    assert seen.gemms == [sorted([*numbered("0"), *numbered("1"), *numbered("2")])]
    assert seen.unmatched == []
    phases = [(k.split("|")[1], k.split("|")[2]) for k in seen.graphs[0]]
    first_backward = next(i for i, (phase, _) in enumerate(phases) if phase != "fprop")
    assert all(phase != "fprop" for phase, _ in phases[first_backward:])


def test_functional_code_belongs_to_the_module_that_calls_it(seen: Seen) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, D, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bnd,nde->bne", x, self.weight)

    run(compiled(nn.Sequential(nn.ReLU(), Functional())), x(2, 4, D))
    assert seen.gemms == [sorted(numbered("1"))]


# graph breaks


def test_a_break_inside_a_submodule_keeps_its_path(seen: Seen) -> None:
    run(compiled(Outer(Outer(Broken()))), x())
    middle = [*numbered("encoder.encoder", op="matmul", count=2), *numbered("encoder.encoder.o")]
    assert seen.gemms == [
        sorted(numbered("pre")),
        sorted(numbered("encoder.pre")),
        sorted(numbered("encoder.encoder.q")),
        sorted(middle),
    ]
    assert seen.unmatched == []


def test_continuations_without_parameters_keep_their_path(seen: Seen) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(D, D)
            self.left = Gram()
            self.right = Gram()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.right(self.left(self.first(x)))

    run(compiled(Two()), x(2, 4, D))
    assert seen.gemms == [
        sorted(numbered("first")),
        sorted(numbered("left", op="matmul")),
        sorted(numbered("right", op="matmul")),
    ]


def test_classes_used_twice_with_breaks_inside(seen: Seen) -> None:
    """Two modules of one class and different widths: two graphs, each with its own name."""

    class Widths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Outer(nn.Identity())
            self.b = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    run(compiled(Widths()), x())
    assert seen.gemms == [sorted(numbered("a.pre")), under("b", MLP_GEMMS)]


def test_modules_that_share_one_compiled_frame_run_under_the_first_name(seen: Seen) -> None:
    """Dynamo compiles the code of a class once for all its modules of one shape: the graph has the first one's keys, at
    run time and offline alike, and every module computes with its own weights."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Broken()
            self.b = Broken()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model, value = Pair(), x()
    offline = [g.key_texts() for g in dsmp.capture(model, (value,))]
    out = compiled(model, hardware="cpu-avx2")(value)
    assert torch.allclose(out, model(value), atol=1e-6)
    assert seen.graphs == offline
    assert {k.split("|")[0].split(".")[0] for g in seen.gemms for k in g} == {"a"}


# ways to compile


def test_a_compiled_submodule_is_its_own_root(seen: Seen) -> None:
    model = Outer(Mlp())
    model.encoder = compiled(model.encoder)
    run(model, x())
    assert seen.gemms == [MLP_GEMMS]


def test_compiling_in_place_gives_the_keys_of_torch_compile(seen: Seen) -> None:
    model = Mlp()
    model.compile(backend="dsmp", options={"executor": "eager"})
    run(model, x())
    assert seen.gemms == [MLP_GEMMS]


@pytest.mark.parametrize("layer", [Mlp, Broken])
def test_a_trainer_around_a_model_does_not_change_its_keys(seen: Seen, layer: Callable[[], nn.Module]) -> None:
    in_place = Outer(layer())
    in_place.compile(backend="dsmp", options={"executor": "eager"})
    run(Wrapper(in_place), x())
    first = seen.graphs[:]
    seen.graphs.clear()
    torch._dynamo.reset()
    run(Wrapper(compiled(Outer(layer()))), x())
    assert first == seen.graphs
    assert all(k.split("|")[0].split(".")[0] in ("pre", "encoder") for g in seen.gemms for k in g)


def test_a_compiled_part_of_a_compiled_model_is_named_below_the_model(seen: Seen) -> None:
    model = Outer(Broken())
    model.encoder = compiled(model.encoder)
    run(compiled(model), x())
    keys = [k for g in seen.gemms for k in g]
    assert set(keys) >= {*numbered("pre"), *numbered("encoder.q"), *numbered("encoder.o")}


def test_a_function_that_calls_a_module_names_what_is_below_the_module(seen: Seen) -> None:
    model = Stack()
    run(compiled(lambda v: model(v) * 2), x())
    assert seen.gemms == [sorted(k for i in range(3) for k in under(f"layers.{i}", MLP_GEMMS))]


def test_a_compiled_method_names_what_is_below_its_object(seen: Seen) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    run(compiled(Encoder().encode), x())
    assert seen.gemms == [under("mlp", MLP_GEMMS)]


def test_wrapping_in_autocast_or_sequential_keeps_the_path(seen: Seen) -> None:
    class Cast(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(x).float()

    run(compiled(Cast(Mlp())), x())
    assert seen.gemms == [under("model", MLP_GEMMS)]


def test_names_of_wrappers_are_left_out() -> None:
    inner = Mlp()
    wrapped = Outer(torch.compile(inner, backend="eager"))
    wrapped = DataParallel(wrapped)
    names = module_names(wrapped)
    assert names[str(id(inner.up))] == "encoder.up"
    assert names[str(id(wrapped))] == ""


def test_a_child_that_is_called_module_keeps_its_name() -> None:
    model = Wrapper(nn.Identity())
    model.module = Mlp()
    assert module_names(model)[str(id(model.module.up))] == "module.up"


# offline and at run time


@pytest.mark.parametrize("build", [lambda: Outer(Broken()), Stack, lambda: Outer(Gram())])
def test_offline_keys_are_those_of_the_backend(seen: Seen, build: Callable[[], nn.Module]) -> None:
    model, value = build(), x()
    offline = [g.key_texts() for g in dsmp.capture(model, (value,))]
    run(compiled(model), value)
    assert offline == seen.graphs
    assert all(len(set(g)) == len(g) for g in seen.graphs)


def test_a_second_batch_size_gets_the_same_keys(seen: Seen) -> None:
    step = compiled(Stack())
    for size in (2, 3, 5):
        run(step, x(size, 4, D))
    assert len(seen.graphs) == 2
    assert seen.gemms[0] == seen.gemms[1]


def test_inductor_sees_the_keys_of_the_eager_executor(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's pass runs before it compiles anything, so the test stops there."""

    class Enough(BaseException):
        pass

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Enough

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.norm = nn.BatchNorm2d(8)
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.log_softmax(self.out(F.gelu(self.norm(self.conv(x))).mean((2, 3))), -1)

    model, value = Net(), torch.randn(2, 3, 8, 8)
    run(compiled(model), value)
    eager = seen.graphs[:]
    seen.graphs.clear()
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "apply_decisions", stop)
    with pytest.raises(Enough):
        torch.compile(model, backend="dsmp", options={"hardware": "h800"})(value)
    assert seen.graphs == eager


_HASH_OF_KEYS = """
import hashlib, torch, dsmp
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), nn.Linear(16, 4))
keys = [g.key_texts() for g in dsmp.capture(model, (torch.randn(2, 3, 16),))]
assert len(keys[0]) > 40
found = hashlib.sha256(repr(keys).encode()).hexdigest()
print(found)
"""


@pytest.mark.slow
def test_two_processes_give_the_same_keys() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", _HASH_OF_KEYS]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]
    here: dict[str, Any] = {}
    exec(_HASH_OF_KEYS, here)
    assert other == here["found"]


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("outside", [True, False])
def test_ddp_keeps_the_keys_of_the_module(seen: Seen, outside: bool) -> None:
    """Compiled around or inside DDP, in one bucket or split over several, a GEMM keeps the name it has offline."""
    model = Stack(lambda: Mlp(300))
    value = x(2, 300)
    offline = gemms_of([k for g in dsmp.capture(model, (value,)) for k in g.key_texts()])
    if outside:
        run(compiled(DistributedDataParallel(model, bucket_cap_mb=1.5)), value)
        assert len(seen.graphs) > 1, "the model is to be split over buckets"
    else:
        run(DistributedDataParallel(compiled(model)), value)
    assert sorted(k for g in seen.gemms for k in g) == offline


@pytest.mark.usefixtures("one_rank")
def test_capture_of_a_ddp_module() -> None:
    model = Stack()
    value = x()
    offline = [g.key_texts() for g in dsmp.capture(model, (value,))]
    assert [g.key_texts() for g in dsmp.capture(DistributedDataParallel(model), (value,))] == offline
