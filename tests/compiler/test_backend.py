"""torch.compile(model, backend="dsmp"): whatever the model and the call, what comes out is what eager would give."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import Seen, compiled, relative
from torch import nn

DEVICES = ("v100", "t4", "a100", "h100", "h800", "h200", "h20", "b200", "mi250x", "mi300x", "cpu-avx2", "cpu-amx")

# Largest relative error of a small MLP's output: half a unit in the last place of the narrowest operand, a few times.
EXPECTED = {"fp32": 1e-6, "tf32": 1.5e-3, "fp16": 1.5e-3, "bf16": 1.2e-2}


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Convolutions, batch norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.grouped(F.relu(self.norm(self.stem(x))))).mean((2, 3)))


def step(f: Callable[..., torch.Tensor], model: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    """The output of one call and the gradients of all parameters, for the same output gradient every time."""
    model.zero_grad()
    out = f(*args)
    torch.manual_seed(7)
    out.backward(torch.randn_like(out))
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def both(model: nn.Module, *args: torch.Tensor, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of the compiled model and of eager, both from the same state."""
    twin = copy.deepcopy(model)
    found, wanted = step(compiled(model, **options), model, *args), step(twin, twin, *args)
    for f, w in zip(found, wanted, strict=True):
        assert f.dtype == w.dtype and f.shape == w.shape and f.stride() == w.stride()
    return found, wanted


# every device, every mode


@pytest.mark.parametrize("hardware", DEVICES)
def test_every_device_runs_a_training_step(hardware: str) -> None:
    found, wanted = both(Mlp(), torch.randn(6, 16), hardware=hardware)
    plan_format = {"v100": "fp16", "t4": "fp16", "a100": "tf32", "mi250x": "fp16", "cpu-avx2": "fp32"}.get(
        hardware, "bf16"
    )
    error = relative(found, wanted)
    assert error < EXPECTED[plan_format]
    assert plan_format == "fp32" or error > 1e-5, "the format leaves its mark"


@pytest.mark.parametrize("hardware", ["v100", "h800", "mi250x", "cpu-avx2"])
def test_convolutions_and_batch_norm(hardware: str) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    value = torch.randn(4, 3, 9, 9)
    found, wanted = step(compiled(model, hardware=hardware), model, value), step(twin, twin, value)
    assert relative(found, wanted) < {"h800": 2e-2, "cpu-avx2": 1e-6}.get(hardware, 2e-3)
    buffers = list(zip(model.buffers(), twin.buffers(), strict=True))
    assert all(torch.allclose(a.float(), b.float(), atol=0.02) and a.dtype == b.dtype for a, b in buffers)
    assert model.norm.num_batches_tracked == 1


@pytest.mark.parametrize("hardware", ["h800", "cpu-avx2"])
def test_training_no_grad_and_inference_mode_agree(hardware: str) -> None:
    model, value = Mlp(), torch.randn(6, 16)
    f = compiled(model, hardware=hardware)
    with torch.inference_mode():
        first = f(value)
        assert first.is_inference()
    with torch.no_grad():
        second = f(value)
        assert not second.requires_grad
    third = f(value)
    assert third.requires_grad
    assert torch.equal(first, second) and torch.equal(second, third)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("hardware", ["v100", "h800", "cpu-avx2"])
def test_eight_batch_sizes_compile_at_most_three_times(seen: Seen, hardware: str, training: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    f = compiled(model, hardware=hardware)
    with torch.set_grad_enabled(training):
        for size in (3, 5, 7, 9, 12, 17, 20, 33):
            value = torch.randn(size, 8)
            out = f(value)
            assert out.shape == (size, 4) and relative([out], [model(value)]) < 0.02
            if training:
                out.sum().backward()
    assert len(seen.graphs) <= 3


@pytest.mark.parametrize("rule", ["bf16", "fp8_e4m3", "int8"])
def test_dynamic_shapes_with_every_kind_of_rounding(seen: Seen, rule: str) -> None:
    model = Mlp()
    f = compiled(model, hardware="h800", rules={"*|linear|*": rule})
    for size in (3, 5, 33):
        value = torch.randn(size, 16)
        assert relative([f(value)], [model(value)]) < 0.1
        f(value).sum().backward()
    assert len(seen.graphs) <= 2


@pytest.mark.parametrize("hardware", ["v100", "h800", "b200"])
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (16,), (2, 0, 16)])
def test_empty_single_and_unbatched_inputs(hardware: str, shape: tuple[int, ...]) -> None:
    rules = {"*|linear|*": "fp8_e4m3"} if hardware != "v100" else {"*|linear|*": "fp16"}
    found, wanted = both(Mlp(), torch.randn(shape), hardware=hardware, rules=rules)
    assert all(torch.allclose(f, w, atol=0.2, rtol=0.2) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("hardware", ["h800", "v100"])
def test_memory_formats_are_kept(hardware: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)
    value = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    found, wanted = both(model, value, hardware=hardware)  # strides are compared there
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert relative(found, wanted) < 0.01


def test_inputs_that_are_not_contiguous() -> None:
    found, wanted = both(Mlp(), torch.randn(16, 6).t(), hardware="h800")
    assert relative(found, wanted) < 0.012


# dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hardware", ["v100", "h800", "cpu-avx2"])
def test_half_precision_models_stay_as_written(dtype: torch.dtype, hardware: str) -> None:
    """No tier is narrower than 16 bits for a small model, so nothing changes."""
    found, wanted = both(Mlp().to(dtype), torch.randn(6, 16, dtype=dtype), hardware=hardware)
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_a_half_precision_model_takes_eight_bits_by_rule() -> None:
    model, value = Mlp().bfloat16(), torch.randn(6, 16, dtype=torch.bfloat16)
    found, wanted = both(model, value, hardware="h800", rules={"*|linear|*": "fp8_e4m3"})
    assert 0.005 < relative(found, wanted) < 0.08


@pytest.mark.parametrize("hardware", ["v100", "h800", "cpu-amx"])
def test_fp64_models_are_not_touched(hardware: str) -> None:
    found, wanted = both(Mlp().double(), torch.randn(6, 16).double(), hardware=hardware)
    assert relative(found, wanted) < 1e-15


@pytest.mark.parametrize("hardware", ["v100", "h800"])
def test_complex_parameters_and_intermediates(hardware: str) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.filter, n=8))

    found, wanted = both(Spectral(), torch.randn(4, 8), hardware=hardware)
    assert found[1].dtype == torch.complex64
    assert relative([f.abs() for f in found], [w.abs() for w in wanted]) < 0.012


def test_complex_inputs_and_outputs() -> None:
    linear = nn.Linear(8, 8)

    def f(z: torch.Tensor) -> torch.Tensor:
        return (linear(z.real) + 1j * z.imag) @ z.mT.conj()

    z = torch.randn(4, 8, dtype=torch.complex64, requires_grad=True)
    out = compiled(f, hardware="h800")(z)
    assert out.dtype == torch.complex64 and torch.allclose(out, f(z), atol=0.2)
    out.abs().sum().backward()
    assert z.grad.dtype == torch.complex64


@pytest.mark.parametrize("hardware", ["h800", "cpu-avx2"])
def test_ambient_autocast_keeps_its_dtypes_and_its_end(hardware: str) -> None:
    model, value = Mlp(), torch.randn(6, 16)
    f = compiled(model, hardware=hardware)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = f(value), model(value)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert relative([found], [wanted]) < 0.01
    assert f(value).dtype == torch.float32
    found.sum().backward()
    assert model.up.weight.grad.dtype == torch.float32


# what a call leaves behind


def test_outputs_that_alias_inputs_and_each_other() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(-1), x, x + 1

    x = torch.randn(2, 3)
    flat, same, more = compiled(f, hardware="h800")(x)
    assert flat.data_ptr() == x.data_ptr() and same is x and more.data_ptr() != x.data_ptr()


def test_inputs_written_in_place_and_read_by_a_product() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x @ w

    x = torch.ones(2, 4)
    out = compiled(f, hardware="h800")(x, torch.eye(4))
    assert x.tolist() == [[2] * 4] * 2 and out.tolist() == [[2] * 4] * 2


def test_buffers_are_written_as_in_eager() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean(0))
                self.count += 1
            return y - self.mean

    model = Average()
    twin = copy.deepcopy(model)
    f = compiled(model, hardware="cpu-avx2")
    for _ in range(3):
        value = torch.randn(5, 4)
        f(value).sum().backward()
        twin(value).sum().backward()
    assert model.count == 3 and model.count.dtype == torch.int64
    assert torch.allclose(model.mean, twin.mean, atol=1e-6)


def test_dropout_repeats_with_its_seed_and_uses_one_mask() -> None:
    dropout = nn.Dropout(0.5)
    f = compiled(lambda x: dropout(x), hardware="h800")
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(1)
    first, second = f(x), f(x)
    torch.manual_seed(1)
    assert torch.equal(f(x), first)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())
    assert 0.4 < (first == 0).float().mean() < 0.6


def test_structured_outputs() -> None:
    @dataclass
    class Answer:
        logits: torch.Tensor
        loss: torch.Tensor | None = None

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.linear(x)
            return {"answer": Answer(y), "best": y.argmax(-1), "rows": x.shape[0], "list": [y * 2, None]}

    model, x = Head(), torch.randn(2, 4)
    found, wanted = compiled(model, hardware="cpu-avx2")(x), model(x)
    assert torch.allclose(found["answer"].logits, wanted["answer"].logits) and found["answer"].loss is None
    assert torch.equal(found["best"], wanted["best"]) and found["best"].dtype == torch.int64
    assert found["rows"] == 2 and found["list"][1] is None


def test_the_models_own_exceptions_come_through() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 3:
                raise KeyError("three rows")
            return x * 2

    f = compiled(Picky(), hardware="h800")
    assert f(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(KeyError, match="three rows"):
        f(torch.ones(3))
    assert f(torch.ones(4)).tolist() == [2, 2, 2, 2]


# unusual code


@pytest.mark.parametrize("hardware", ["h800", "cpu-avx2"])
def test_custom_autograd_functions(hardware: str) -> None:
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
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(torch.tanh(x), self.weight) * 2

    found, wanted = both(nn.Sequential(nn.Linear(16, 16), Custom()), torch.randn(6, 16), hardware=hardware)
    assert relative(found, wanted) < (0.012 if hardware == "h800" else 1e-6)


def test_control_flow_operators_run_as_written() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda v: self.a(v), lambda v: self.b(v).relu(), (x,))

    model = Choice()
    f = compiled(model, hardware="h800")
    for value in (torch.ones(2, 4), -torch.ones(2, 4)):
        assert torch.allclose(f(value), model(value), atol=1e-6)
        f(value).sum().backward()


def test_function_transforms() -> None:
    w = torch.randn(4, 4)
    f = compiled(lambda x: torch.vmap(lambda row: row @ w)(x), hardware="h800")
    x = torch.randn(3, 2, 4)
    assert relative([f(x)], [x @ w]) < 0.01
    g = compiled(lambda x: torch.func.grad(lambda y: (y @ w).square().sum())(x), hardware="h800")
    assert relative([g(x[0])], [2 * x[0] @ w @ w.t()]) < 0.02


def test_attention_module_with_a_mask() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]

    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)
    found, wanted = both(Attend(), torch.randn(2, 5, 16), mask, hardware="v100")
    assert relative(found, wanted) < 2e-3


# the compiled object


def test_two_compilations_of_one_model_do_not_mix() -> None:
    model, x = Mlp(), torch.randn(6, 16)
    exact = model(x)
    coarse, fine, half = (compiled(model, hardware=h) for h in ("h800", "cpu-avx2", "v100"))
    for _ in range(2):
        errors = [relative([f(x)], [exact]) for f in (coarse, fine, half)]
        assert errors[0] > 1e-3 and errors[1] < 1e-6 and 1e-5 < errors[2] < 1e-3


def test_copies_of_a_compiled_model_are_independent() -> None:
    model, x = Mlp(), torch.randn(6, 16)
    f = compiled(model, hardware="cpu-avx2")
    before = f(x)
    twin = copy.deepcopy(f)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.down.weight.zero_()
        twin.down.bias.zero_()
    assert not twin(x).any()
    assert torch.equal(f(x), before)


def test_state_dicts_are_the_models_own() -> None:
    model = Mlp()
    f = compiled(model, hardware="h800")
    f(torch.randn(6, 16)).sum().backward()
    state = pickle.loads(pickle.dumps(f.state_dict()))
    assert list(model.state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert all(torch.equal(v, model.state_dict()[k.removeprefix("_orig_mod.")]) for k, v in state.items())
    f.load_state_dict(state)


def test_nothing_holds_a_model_after_its_end() -> None:
    model = Mlp()
    f = compiled(model, hardware="h800")
    f(torch.randn(6, 16)).sum().backward()
    gone = weakref.ref(model)
    del model, f
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


_WITHOUT_IMPORT = """
import sys, torch
model = torch.nn.Linear(8, 8)
x = torch.randn(4, 8)
assert not [m for m in sys.modules if m.split(".")[0] == "dsmp"]
assert "dsmp" in torch._dynamo.list_backends(exclude_tags=())
out = torch.compile(model, backend="dsmp", options={"executor": "eager", "hardware": "h800"})(x)
out.sum().backward()
error = ((out - model(x)).norm() / model(x).norm()).item()
assert 1e-5 < error < 2e-2, error
print("ran")
"""


def test_a_process_that_never_imports_dsmp() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_IMPORT], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "ran", done.stderr
