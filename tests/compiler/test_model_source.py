"""MODEL: factories, files, archives, and every text that names nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dsmp.compiler.model_source import load_model
from dsmp.errors import InputSpecError, ModelSpecError

TINY_LLAMA = (
    "transformers:LlamaForCausalLM,hidden_size=64,intermediate_size=128,num_hidden_layers=1,num_attention_heads=4,"
    "num_key_value_heads=2,vocab_size=300"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("torchvision:resnet19", "resnet18"),
        ("transformers:LlamaForCausal", "LlamaForCausalLM"),
        ("transformers:LlamaConfig", "unknown transformers model class"),
        ("transformers:", "unknown transformers model class"),
        ("transformers:AutoModelForCausalLM", "concrete class"),
        ("transformers:LlamaForCausalLM,hidden_sise=64", "Did you mean hidden_size"),
        ("transformers:LlamaForCausalLM,hidden_size", "key=value"),
        ("transformers:LlamaForCausalLM,=3", "key=value"),
        ("transformers:LlamaForCausalLM,hidden_size=64,hidden_size=32", "twice"),
        ("transformers:LlamaForCausalLM,hidden_size=wide", "expected int"),
        ("transformers:LlamaForCausalLM,hidden_size=63", "multiple"),
        ("transformers:LlamaForCausalLM,hidden_size.x=63", "no config"),
        ("transformers:CLIPModel,text_config=3", "text_config.KEY=VALUE"),
        ("transformers:CLIPModel,text_config.hidden=3", "Did you mean hidden_"),
        (f"{TINY_LLAMA},hidden_act=gulu", "cannot be built"),
        (f"{TINY_LLAMA},attn_implementation=sparse", "cannot be built"),
        ("torchvison:resnet18", "Did you mean torchvision:NAME"),
        ("resnet18", "MODEL is one of"),
        ("", "MODEL is one of"),
        (":factory", "MODEL is one of"),
        ("nowhere.py:factory", "no file nowhere.py"),
        ("no_such_module_at_all:factory", "no module 'no_such_module_at_all'"),
        ("json.no_such_part:factory", "no module 'json.no_such_part'"),
        ("json:", "MODEL is one of"),
        ("json:dunps", "Did you mean dumps"),
        ("math:pi", "is a float"),
        ("math:sqrt", "requires arguments"),
        ("platform:system", "returned a str"),
        ("nowhere.pt2", "no file nowhere.pt2"),
    ],
)
def test_models_that_cannot_be_loaded(folder: Path, model: str, says: str) -> None:
    with pytest.raises(ModelSpecError) as caught:
        load_model(model)
    assert says in str(caught.value)


FACTORIES = """
import torch
from torch import nn
from helper import WIDTH

class Scale(nn.Module):
    def forward(self, x, *, by=None):
        return x if by is None else x * by

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(1))
    def forward(self, x):
        return self.second(self.first(x))

instance = Pair()
class shelf:
    model = Pair
def plain(): return Pair()
def frozen(): return Pair().eval(), torch.ones(2, WIDTH)
def one(): return Pair(), torch.ones(2, WIDTH)
def args(): return Pair(), [torch.ones(2, WIDTH)]
def kwargs(): return Pair(), {"x": torch.ones(2, WIDTH)}
def both(): return Scale(), ((torch.ones(2),), {"by": torch.ones(1)})
def misfit(): return Pair(), (torch.ones(1), torch.ones(1))
def fails(): return nn.Linear(2, 3)(torch.ones(4))
def leaves(): raise SystemExit(2)
def nothing(): return None
def half(): return Pair(), 1, 2
def on_meta():
    with torch.device("meta"):
        return Pair(), torch.ones(2, WIDTH)
"""


@pytest.fixture
def models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (folder / "helper.py").write_text("WIDTH = 4\n")
    (folder / "my_models.py").write_text(FACTORIES)
    for name in ("helper", "my_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield folder / "my_models.py"
    for name in ("helper", "my_models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("factory", ["one", "args", "kwargs", "both"])
def test_factories_bring_their_inputs(models: Path, factory: str) -> None:
    path = list(sys.path)
    for origin in (str(models), "my_models.py", "my_models"):
        loaded = load_model(f"{origin}:{factory}")
        assert loaded.module(*loaded.args, **loaded.kwargs).shape[0] == 2
    assert len(loaded.kwargs) == (factory in ("kwargs", "both")) and len(loaded.args) == (factory != "kwargs")
    assert sys.path == path


@pytest.mark.parametrize("factory", ["plain", "Pair", "shelf.model", "instance", "one"])
def test_factories_take_specs(models: Path, factory: str) -> None:
    loaded = load_model(f"my_models.py:{factory}", inputs=["float32[5,4]"])
    assert loaded.module(*loaded.args).shape == (5, 4)


def test_a_factory_keeps_its_modes_when_training_only(models: Path) -> None:
    assert load_model("my_models.py:one").module.training
    assert not load_model("my_models.py:frozen").module.training
    assert not load_model("my_models.py:one", training=False).module.training


@pytest.mark.parametrize(("factory", "on_meta"), [("one", True), ("instance", True), ("on_meta", None)])
def test_factories_on_meta(models: Path, factory: str, on_meta: bool | None) -> None:
    loaded = load_model(f"my_models:{factory}", inputs=["float32[2,4]"], on_meta=on_meta)
    assert loaded.device == "meta"
    assert all(t.is_meta for t in (*loaded.args, *loaded.module.parameters(), *loaded.module.buffers()))
    assert loaded.module.first.weight is loaded.module.second.weight
    original = sys.modules["my_models"].instance
    assert not original.first.weight.is_meta and original.first.weight is original.second.weight


def test_inputs_of_a_factory_follow_its_module_to_meta(models: Path) -> None:
    assert load_model("my_models.py:one", on_meta=True).args[0].is_meta


@pytest.mark.parametrize(
    ("factory", "options", "error", "says"),
    [
        ("plan", {}, ModelSpecError, "Did you mean plain"),
        ("nothing", {}, ModelSpecError, "returned a NoneType"),
        ("half", {}, ModelSpecError, "returned a tuple"),
        ("fails", {}, ModelSpecError, r"RuntimeError.*my_models\.py, line \d+"),
        ("leaves", {}, ModelSpecError, "SystemExit"),
        ("Scale.forward", {}, ModelSpecError, "requires arguments"),
        ("on_meta", {"on_meta": False}, ModelSpecError, "built on meta"),
        ("plain", {}, InputSpecError, "comes without inputs"),
        ("misfit", {}, InputSpecError, "does not take"),
    ],
)
def test_factories_that_fail(models: Path, factory, options, error, says) -> None:
    with pytest.raises(error, match=says):
        load_model(f"my_models.py:{factory}", **options)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1 / 0", r"ZeroDivisionError.*broken\.py, line 1"),
        ("import no_such_dependency", "no_such_dependency"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
    ],
)
def test_files_that_fail_while_imported(folder: Path, code: str, says: str) -> None:
    (folder / "broken.py").write_text(code + "\n")
    with pytest.raises(ModelSpecError, match=says):
        load_model("broken.py:f")
    assert "_dsmp_user_broken" not in sys.modules


def test_the_embedded_model_is_a_factory() -> None:
    loaded = load_model("dsmp.compiler.small_gpt:demo_model")
    assert loaded.module(*loaded.args).shape == ()
    assert load_model("dsmp.compiler.small_gpt:demo_model", on_meta=True).args[0].is_meta


# ---- archives ----


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + shift


@pytest.fixture
def archive(folder: Path) -> Path:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(
        Affine(), (torch.ones(4, 3),), {"shift": torch.ones(2)}, dynamic_shapes={"x": {0: batch}, "shift": None}
    )
    torch.export.save(program, folder / "affine.pt2")
    return folder / "affine.pt2"


def test_archives_come_with_their_inputs_or_take_specs(archive: Path) -> None:
    loaded = load_model("affine.pt2")
    assert loaded.module is None and loaded.device == "cpu" and loaded.source == "affine.pt2"
    assert loaded.exported.module()(*loaded.args, **loaded.kwargs).shape == (4, 2)
    other = load_model(str(archive), inputs=["float32[7,3]", "shift=float32[2]"])
    assert other.exported.module()(*other.args, **other.kwargs).shape == (7, 2)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (["float32[7,3]"], "shift by name"),
        (["float32[7,3]", "float32[2]"], "1 positional"),
        (["float32[7,4]", "shift=float32[2]"], "input 0"),
        (["float32[7]", "shift=float32[2]"], "input 0"),
        (["float64[7,3]", "shift=float32[2]"], "torch.float64"),
        (["float32[7,3]", "shift=float32[3]"], "input 1"),
    ],
)
def test_archives_check_their_inputs(archive: Path, inputs, says) -> None:
    with pytest.raises(InputSpecError, match=says):
        load_model("affine.pt2", inputs=inputs)


def test_corrupt_archives_and_meta(archive: Path) -> None:
    with pytest.raises(ModelSpecError, match="carries its weights"):
        load_model("affine.pt2", on_meta=True)
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(ModelSpecError, match="no readable"):
        load_model("affine.pt2")
