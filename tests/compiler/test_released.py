"""Released models: packed weights in place of fp32 ones, the same numbers, small states, and clear refusals."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
from compiling import compiled
from narrow_plans import FORMS, Cnn, Mlp, narrow_plan, needs_operators, sample
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from transformers import BertConfig, BertModel

import dsmp
from dsmp.codegen.audit import Ran
from dsmp.codegen.cpu import packs
from dsmp.codegen.cpu.extension import cpu_operators
from dsmp.codegen.cpu.held_modules import HeldConv2d, HeldLinear
from dsmp.compiler import released
from dsmp.errors import PlanMismatchError, ReleasedTrainingError, ReleaseError
from dsmp.hardware_db.capability import Verdict
from dsmp.passes.static_steps import steps_of

pytestmark = needs_operators

SHARES = {"fp16": 0.55, "int8": 0.3, "int4": 0.17, "dynamic": 0.3, "static": 0.3}
"""What is left of the bytes of a model of width 512: of its weights a half, a quarter or an eighth, and scales."""

LAYER_BY_LAYER = {"fp16": 1e-5, "int8": 1e-5, "int4": 1e-5, "dynamic": 1e-5, "static": 0.05}
"""How far a released model is from its compiled self, relative in L2: alone, static layers read residuals unrounded."""


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def run(model: nn.Module, plan: dsmp.PrecisionPlan, x: Tensor, executor: str = "eager") -> Tensor:
    torch._dynamo.reset()
    return compiled(model, plan=plan, strict=True, executor=executor)(x).clone()


def saved(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 100])
def test_numbers_stay(form: str, rows: int) -> None:
    model, x = sample(form)
    x = torch.randn(rows, *x.shape[1:])
    plan = narrow_plan(model, x, form)
    wanted = run(model, plan, x)
    report = dsmp.release_weights(model, plan)
    assert not report.left and len(report.released) == (4 if form == "static" else 2)
    assert torch.equal(run(model, plan, x), wanted)
    assert (model(x) - wanted).norm() / wanted.norm() < LAYER_BY_LAYER[form]
    assert not [n for n, _ in model.named_parameters() if n.endswith("up.weight")]


@pytest.mark.parametrize("form", FORMS)
def test_the_audit_knows_released_layers(form: str) -> None:
    model, x = sample(form)
    plan = narrow_plan(model, x, form)
    dsmp.release_weights(model, plan)
    run = compiled(model, plan=plan, strict=True)
    run(x)
    entries = [e for e in dsmp.audit(run) if e.op in ("linear", "conv")]
    name = {"static": "cpu_int8", "dynamic": "cpu_int8_dynamic"}.get(form, "cpu_narrow_linear")
    assert {(e.implementation, e.ran) for e in entries} == {(name, Ran.NATIVE)}
    assert [e.key for e in entries] == [d.key for d in plan if d.op in ("linear", "conv")]


@pytest.mark.parametrize("form", FORMS)
def test_another_plan_rounds_what_is_left(form: str) -> None:
    """Widened weights are multiplied where a plan asks for another form: nothing is refused, nothing is silent."""
    model, x = sample(form)
    plan, other = narrow_plan(model, x, form), narrow_plan(model, x, "fp16" if form == "int8" else "int8")
    wanted = run(model, plan, x)
    dsmp.release_weights(model, plan)
    torch._dynamo.reset()
    again = compiled(model, plan=other)
    assert torch.allclose(again(x), wanted, rtol=0.1, atol=0.1)
    narrow = [e for e in dsmp.audit(again) if e.op == "linear"]
    assert {e.ran for e in narrow} == {Ran.FELL_BACK}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "static"])
def test_numbers_stay_with_inductor(form: str) -> None:
    model, x = sample(form)
    plan = narrow_plan(model, x, form)
    with fresh_cache():
        wanted = run(model, plan, x, "inductor")
        dsmp.release_weights(model, plan)
        assert torch.allclose(run(model, plan, x, "inductor"), wanted, rtol=1e-5, atol=1e-6)
        torch._dynamo.reset()
        plain = torch.compile(model, fullgraph=True)
        assert torch.allclose(plain(x), model(x), rtol=1e-4, atol=1e-4)
        assert (plain(x) - wanted).norm() / wanted.norm() < LAYER_BY_LAYER[form]


@pytest.mark.parametrize("form", FORMS)
def test_bytes(form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(512)).eval()
    x = torch.randn(2, 512)
    plan, before = narrow_plan(model, x, form), len(saved(model))
    run(model, plan, x)
    packed = packs.packed_bytes()
    alive = [weakref.ref(layer.weight.untyped_storage()) for layer in (model[0].up, model[0].down)]
    report = dsmp.release_weights(model, plan)
    torch._dynamo.reset()
    gc.collect()
    assert [storage() for storage in alive] == [None, None]
    assert packs.packed_bytes() < packed, "the copies that the compiled model made went with their weights"
    assert len(saved(model)) / before < SHARES[form]
    assert report.bytes_before == sum(t.numel() * 4 for t in Mlp(512).parameters())
    assert report.bytes_after == sum(t.nbytes for t in model.state_dict().values())
    assert report.bytes_after / report.bytes_before < SHARES[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("assign", [False, True])
def test_states_load(form: str, assign: bool) -> None:
    model, x = sample(form)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.mul_(0.5)
    plan, wide = narrow_plan(model, x, form), copy.deepcopy(other.state_dict())
    wanted = run(other, plan, x)
    dsmp.release_weights(other, plan)
    dsmp.release_weights(model, plan)
    torch._dynamo.reset()
    again = compiled(model, plan=plan, strict=True)
    first = again(x).clone()
    assert not torch.equal(first, wanted)
    state = torch.load(io.BytesIO(saved(other)), weights_only=True)
    assert not model.load_state_dict(state, assign=assign).missing_keys
    assert torch.equal(again(x), wanted)
    for t in model.state_dict().values():
        t.zero_()
    assert not torch.equal(again(x), wanted)
    model.load_state_dict(wide, assign=assign)  # fp32 weights, which are packed
    assert torch.equal(again(x), wanted)


def test_states_of_other_shapes_are_refused() -> None:
    model, x = sample("int8")
    dsmp.release_weights(model, narrow_plan(model, x, "int8"))
    small = Mlp(32).eval()
    dsmp.release_weights(small, narrow_plan(small, torch.randn(3, 32), "int8"))
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.payload"):
        model.load_state_dict(small.state_dict())


def test_pickles_and_copies() -> None:
    model, x = sample("static")
    dsmp.release_weights(model, narrow_plan(model, x, "static"))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_inputs_of_any_shape_and_order() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 5).eval()
    exact = HeldLinear(layer, "fp16")
    layer.weight.copy_(exact.weight)
    for x in (torch.randn(8), torch.randn(0, 8), torch.randn(2, 3, 8), torch.randn(8, 4).t(), torch.randn(100, 8)):
        assert torch.allclose(exact(x), layer(x), rtol=1e-5, atol=1e-5) and exact(x).shape == layer(x).shape
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=(0, 1), dilation=(1, 2), groups=2).eval()
    held = HeldConv2d(conv, steps_of(-4.0, 4.0))
    x = torch.randn(2, 4, 9, 9)
    for given in (x, x.to(memory_format=torch.channels_last)):
        assert held(given).stride() == conv(given).stride()
        assert torch.allclose(held(given), conv(given), atol=0.1)


class Odd(nn.Module):
    """A layer of each kind that keeps its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.tied, self.plain, self.hooked = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.embedding.weight
        self.own, self.twice = Own(16, 16), nn.Linear(16, 16)
        self.alias = self.twice
        self.wide = nn.Linear(16, 16)
        self.hooked.register_forward_hook(lambda module, args, result: None)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.own(self.hooked(self.plain(self.embedding(ids))))
        return self.tied(self.wide(self.alias(self.twice(x))))


class Own(nn.Linear):
    """A subclass, which may do anything with its weight."""


def test_what_is_left_and_why() -> None:
    torch.manual_seed(0)
    model, ids = Odd().eval(), torch.arange(4)
    plan = narrow_plan(model, ids, "int8")
    nodes = [
        d.model_copy(update={"compute": "fp32", "recipe": "none"}) if d.key.startswith("wide|") else d for d in plan
    ]
    plan = plan.model_copy(update={"nodes": nodes})
    wanted = run(model, plan, ids)
    report = dsmp.release_weights(model, plan)
    assert report.released == {"plain": "int8 wide/row", "twice": "int8 wide/row"}
    assert report.left == {
        "hooked": "it has hooks, which would be lost",
        "own": "it is Own, neither nn.Linear nor nn.Conv2d, and may read its weight in other ways",
        "tied": "its weight is shared: embedding.weight, tied.weight",
        "wide": "planned in fp32, with no narrow weight",
    }
    assert model.alias is model.twice and isinstance(model.alias, HeldLinear)
    assert "2 layers hold packed weights" in str(report) and "left own: it is Own" in str(report)
    assert torch.equal(run(model, plan, ids), wanted)


def test_released_models_are_not_trained() -> None:
    model, x = sample("int8")
    plan = narrow_plan(model, x, "int8")
    dsmp.release_weights(model, plan)
    assert not any(p.requires_grad for p in model.parameters())
    with torch.enable_grad():
        with pytest.raises(ReleasedTrainingError, match=r"before dsmp\.release_weights"):
            model(x.clone().requires_grad_()).sum().backward()
        with pytest.raises(Exception, match="ReleasedTrainingError"):
            compiled(model, plan=plan)(x.clone().requires_grad_())
    model.train()
    with pytest.raises(ReleasedTrainingError):
        model(x)
    assert model.eval()(x).shape == x.shape


def test_released_models_stay_where_they_are() -> None:
    model, x = sample("int8")
    dsmp.release_weights(model, narrow_plan(model, x, "int8"))
    assert torch.equal(model.to("cpu", torch.float32)(x), model(x))
    for move in (nn.Module.half, lambda m: m.to(torch.bfloat16), lambda m: m.to("meta")):
        with pytest.raises(ReleaseError, match=r"stays on the CPU in fp32"):
            move(copy.deepcopy(model))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = sample("int8")
    plan = narrow_plan(model, x, "int8")
    with pytest.raises(ReleaseError, match=r"call model\.eval\(\)"):
        dsmp.release_weights(copy.deepcopy(model).train(), plan)
    with pytest.raises(PlanMismatchError, match="the model has no up, down"):
        dsmp.release_weights(Cnn().eval(), plan)
    with torch.enable_grad():
        training = dsmp.plan(model, x, hardware="cpu")
    with pytest.raises(ReleaseError, match="training=False"):
        dsmp.release_weights(model, training)
    alone = nn.Linear(64, 64).eval()
    report = dsmp.release_weights(alone, narrow_plan(alone, x, "int8"))
    assert report.left == {"": "it is the model itself, which cannot be replaced in place; put it into a module"}
    monkeypatch.setattr(released, "cpu_operators", lambda: Verdict(ok=False, reason="there is no C++ compiler"))
    with pytest.raises(ReleaseError, match=r"there is no C\+\+ compiler"):
        dsmp.release_weights(model, plan)
    assert isinstance(model.up, nn.Linear), "nothing was replaced"


def test_weights_that_cannot_be_packed_are_left() -> None:
    model, x = sample("int4")
    plan = narrow_plan(model, x, "int4")
    model.up.weight[0, 0] = torch.inf
    report = dsmp.release_weights(model, plan)
    assert list(report.released) == ["down"] and "finite" in report.left["up"]


def test_packed_int8_operators_refuse_what_does_not_fit() -> None:
    assert cpu_operators().ok
    ops = torch.ops.dsmp_cpu
    payload, scales, sums = ops.int8_pack(torch.randn(16, 8), 1)
    for args in ((payload[:-1], scales, sums), (payload, scales[1:], sums), (payload, scales, sums.float())):
        with pytest.raises(RuntimeError, match=r"a packed int8 weight of"):
            ops.int8_linear_packed(torch.randn(2, 8), *args, [16, 8], None, 0.1, 64, "none")
    with pytest.raises(RuntimeError, match="at least 2 axes"):
        ops.int8_unpack(payload, scales, sums, [16], 1)


def test_what_was_put_onto_a_layer_is_not_lost() -> None:
    model, x = sample("int8")
    plan = narrow_plan(model, x, "int8")
    forward = model.up.forward
    model.up.forward = lambda z: forward(z) + 100  # type: ignore[method-assign]
    model.down.register_parameter("lora", nn.Parameter(torch.ones(3)))
    wanted = model(x)
    report = dsmp.release_weights(model, plan)
    assert not report.released and torch.equal(model(x), wanted)
    assert report.left == {
        "up": "it has forward of its own, which would be lost", "down": "it has lora of its own, which would be lost",
    }  # fmt: skip


def test_marks_of_libraries_stay_on_layers() -> None:
    config = BertConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=50
    )  # fmt: skip
    model, ids = BertModel(config, add_pooling_layer=False).eval(), torch.arange(20).reshape(2, 10)
    model.encoder.layer[0].intermediate.dense.note = "wide"
    plan = narrow_plan(model, ids, "dynamic")
    report = dsmp.release_weights(model, plan)
    assert len(report.released) == 6 and not report.left
    held = model.encoder.layer[0].intermediate.dense
    assert isinstance(held, HeldLinear) and held.note == "wide" and held._is_hf_initialized is True


@pytest.mark.parametrize("form", FORMS)
def test_a_second_release_changes_nothing(form: str) -> None:
    model, x = sample(form)
    plan = narrow_plan(model, x, form)
    dsmp.release_weights(model, plan)
    wanted = model(x)
    again = dsmp.release_weights(model, plan)
    assert not again.released and set(again.left.values()) == {"it holds a packed weight already"}
    assert torch.equal(model(x), wanted)
