"""MODEL from torchvision, timm and transformers: what is built, what it is fed with, and mistakes."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dsmp.compiler import model_building
from dsmp.compiler.model_building import LoadedModel, ModelRequest, build_module
from dsmp.compiler.model_source import load_model
from dsmp.errors import InputSpecError, ModelSpecError

TINY = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,vocab_size=300"
TINY_LLAMA = f"transformers:LlamaForCausalLM,{TINY},num_key_value_heads=2,max_position_embeddings=64"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loss_of(loaded: LoadedModel) -> torch.Tensor:
    assert loaded.module is not None and loaded.exported is None
    return loaded.module(*loaded.args, **loaded.kwargs).loss


def test_torchvision_trains_and_evaluates() -> None:
    loaded = load_model("torchvision:resnet18")
    assert loaded.module.training and loaded.device == "cpu" and loaded.source == "torchvision:resnet18"
    assert loaded.args[0].shape == (8, 3, 224, 224) and loaded.args[0].dtype == torch.float32
    small = load_model("torchvision:ResNet18", inputs=["float32[2,3,64,64]"], training=False)
    assert not small.module.training
    assert small.module(*small.args).shape == (2, 1000)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("inception_v3", [(8, 3, 299, 299)]),
        ("efficientnet_b4", [(8, 3, 380, 380)]),
        ("fcn_resnet50", [(8, 3, 520, 520)]),  # its builder downloads a backbone unless told not to
        ("r3d_18", [(2, 3, 16, 112, 112)]),
        ("raft_small", [(1, 3, 128, 128)] * 2),
    ],
)
def test_torchvision_inputs_have_the_size_the_model_was_made_for(name, shapes) -> None:
    loaded = load_model(f"torchvision:{name}", on_meta=True)
    assert [tuple(a.shape) for a in loaded.args] == shapes
    assert all(t.is_meta for t in (*loaded.args, *loaded.module.parameters(), *loaded.module.buffers()))


def test_torchvision_detection_is_refused_with_a_way_out() -> None:
    with pytest.raises(InputSpecError, match="factory"):
        load_model("torchvision:fasterrcnn_resnet50_fpn")


def test_timm() -> None:
    pytest.importorskip("timm")
    loaded = load_model("timm:vit_tiny_patch16_384.augreg_in21k_ft_in1k", on_meta=True)
    assert loaded.args[0].shape == (8, 3, 384, 384) and loaded.device == "meta"
    small = load_model("timm:resnet18", inputs=["float32[1,3,64,64]"], training=False)
    assert small.module(*small.args).shape == (1, 1000) and not small.module.training
    for name in ("resnet19", "hf-hub:someone/model"):
        with pytest.raises(ModelSpecError, match="unknown timm model"):
            load_model(f"timm:{name}")


TRAINED = {
    TINY_LLAMA: {"input_ids": (1, 64), "labels": (1, 64)},
    f"transformers:BertForMaskedLM,{TINY},max_position_embeddings=64": {"input_ids": (1, 64), "labels": (1, 64)},
    f"transformers:RobertaForMaskedLM,{TINY},max_position_embeddings=66": {
        "input_ids": (1, 64),
        "labels": (1, 64),
    },
    f"transformers:BertForSequenceClassification,{TINY},max_position_embeddings=64": {
        "input_ids": (1, 64),
        "labels": (1,),
    },
    f"transformers:BertForTokenClassification,{TINY},max_position_embeddings=64": {
        "input_ids": (1, 64),
        "labels": (1, 64),
    },
    f"transformers:BertForMultipleChoice,{TINY},max_position_embeddings=64": {"input_ids": (1, 2, 64), "labels": (1,)},
    f"transformers:BertForQuestionAnswering,{TINY},max_position_embeddings=64": {
        "input_ids": (1, 64),
        "start_positions": (1,),
        "end_positions": (1,),
    },
    f"transformers:BertForPreTraining,{TINY},max_position_embeddings=64": {
        "input_ids": (1, 64),
        "labels": (1, 64),
        "next_sentence_label": (1,),
    },
    "transformers:ViTForImageClassification,hidden_size=64,intermediate_size=128,num_hidden_layers=2,"
    "num_attention_heads=4,image_size=32,num_labels=10": {"pixel_values": (8, 3, 32, 32), "labels": (8,)},
    "transformers:T5ForConditionalGeneration,d_model=64,d_ff=128,num_layers=2,num_heads=4,d_kv=16,vocab_size=300": {
        "input_ids": (1, 512),
        "decoder_input_ids": (1, 512),
        "labels": (1, 512),
    },
    f"transformers:MixtralForCausalLM,{TINY},num_key_value_heads=2,num_local_experts=4,max_position_embeddings=64": {
        "input_ids": (1, 64),
        "labels": (1, 64),
    },
    "transformers:WhisperForConditionalGeneration,d_model=64,encoder_layers=1,decoder_layers=1,vocab_size=300,"
    "encoder_attention_heads=4,decoder_attention_heads=4,max_source_positions=50,max_target_positions=20,"
    "pad_token_id=0,bos_token_id=1,eos_token_id=2,decoder_start_token_id=1": {
        "input_features": (1, 80, 100),
        "decoder_input_ids": (1, 20),
        "labels": (1, 20),
    },
}


@pytest.mark.parametrize(("model", "shapes"), TRAINED.items(), ids=[m.split(",")[0][13:] for m in TRAINED])
def test_transformers_return_a_loss_when_training(model, shapes) -> None:
    loaded = load_model(model)
    assert {name: tuple(t.shape) for name, t in loaded.kwargs.items()} == shapes
    assert loaded.module.training and not getattr(loaded.module.config, "use_cache", False)
    loss = loss_of(loaded)
    loss.backward()
    assert loss.shape == () and torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.any() for p in loaded.module.parameters())


def test_contrastive_models_compare_a_batch_of_pairs() -> None:
    parts = (f"{part}.{pair}" for part in ("text_config", "vision_config") for pair in TINY.split(",")[:4])
    loaded = load_model(
        f"transformers:CLIPModel,{','.join(parts)},vision_config.image_size=32,vision_config.patch_size=16"
    )
    assert loaded.kwargs["input_ids"].shape == (8, 77) and loaded.kwargs["pixel_values"].shape == (8, 3, 32, 32)
    assert loss_of(loaded) > 1  # ln 8 for a model that tells no pair apart


def test_transformers_for_inference_get_no_labels_and_no_dropout() -> None:
    loaded = load_model(
        "transformers:T5ForConditionalGeneration,d_model=64,num_layers=1,vocab_size=300", training=False
    )
    assert list(loaded.kwargs) == ["input_ids", "decoder_input_ids"] and not loaded.module.training


def test_attention_is_sdpa_where_the_model_has_it() -> None:
    assert load_model(TINY_LLAMA).module.config._attn_implementation == "sdpa"
    assert load_model(f"{TINY_LLAMA},attn_implementation=eager").module.config._attn_implementation == "eager"
    mamba = load_model("transformers:MambaForCausalLM,hidden_size=64,num_hidden_layers=1,vocab_size=300")
    assert mamba.module.config._attn_implementation == "eager"


def test_given_inputs_shape_the_derived_ones() -> None:
    for text in ("input_ids=int64[3,16]<300", "int64[3,16]<300"):
        loaded = load_model(TINY_LLAMA, inputs=[text])
        assert {n: tuple(t.shape) for n, t in loaded.kwargs.items()} == {"input_ids": (3, 16), "labels": (3, 16)}
        assert torch.isfinite(loss_of(loaded))
    own = load_model(TINY_LLAMA, inputs=["int64[1,8]<300", "labels=int64[1,8]<2"])
    assert own.kwargs["labels"].max() <= 1


def test_a_default_llama_is_seven_billion_parameters_without_memory() -> None:
    loaded = load_model("transformers:LlamaForCausalLM")
    assert loaded.device == "meta"
    assert sum(p.numel() for p in loaded.module.parameters()) == 6_738_415_616
    tensors = [*loaded.module.parameters(), *loaded.module.buffers(), *loaded.kwargs.values()]
    assert all(t.is_meta for t in tensors)
    assert loaded.kwargs["input_ids"].shape == loaded.kwargs["labels"].shape == (1, 2048)


def test_the_size_limit_decides_about_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(p.numel() * 4 for p in load_model(TINY_LLAMA).module.parameters())
    monkeypatch.setattr(model_building, "META_BYTES", size)
    assert load_model(TINY_LLAMA).device == "cpu"
    monkeypatch.setattr(model_building, "META_BYTES", size - 1)
    assert load_model(TINY_LLAMA).device == "meta"
    assert load_model(TINY_LLAMA, on_meta=False).device == "cpu"


def test_seeds_give_equal_models_and_leave_the_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, same, other = (load_model(TINY_LLAMA, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    weight = [m.module.model.layers[0].mlp.up_proj.weight for m in (first, same, other)]
    assert torch.equal(weight[0], weight[1]) and not torch.equal(weight[0], weight[2])
    assert torch.equal(first.kwargs["input_ids"], same.kwargs["input_ids"])
    assert not torch.equal(first.kwargs["input_ids"], other.kwargs["input_ids"])


def test_config_file_with_overrides_on_top(folder: Path) -> None:
    values = {"model_type": "llama", **dict(pair.split("=") for pair in TINY.split(","))}
    numbers = {key: int(value) if value.isdigit() else value for key, value in values.items()}
    (folder / "config.json").write_text(json.dumps(numbers))
    loaded = load_model("transformers:LlamaForCausalLM,num_hidden_layers=1", config=Path("config.json"))
    config = loaded.module.config
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (64, 300, 1)
    assert config.head_dim == 16  # derived from the file's width, not left from the default config


def test_override_values_are_read_by_kind() -> None:
    model = load_model(
        f"{TINY_LLAMA},rms_norm_eps=1e-3,tie_word_embeddings=TRUE,hidden_act=gelu,pad_token_id=none"
    ).module
    config = model.config
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.hidden_act) == (1e-3, True, "gelu")
    assert config.pad_token_id is None and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["torchvision", "timm", "transformers"])
def test_a_missing_library_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelSpecError, match=r"pip install 'dsmp\[models\]'"):
        load_model(f"{name}:anything")


def test_a_broken_library_is_told_from_a_missing_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(folder)
    for code, says in [("raise RuntimeError('other torch')", "other torch"), ("import no_such_part", "no_such_part")]:
        (folder / "timm.py").write_text(code + "\n")
        with pytest.raises(ModelSpecError, match=says):
            load_model("timm:resnet18")


def test_library_code_cannot_download(tmp_path: Path) -> None:
    request = ModelRequest(
        source="some:model", name="model", specs=(), config=None, training=True, on_meta=False, seed=0
    )
    download = torch.hub.download_url_to_file

    def build() -> nn.Module:
        return torch.hub.load_state_dict_from_url("https://example.invalid/w.pth", model_dir=str(tmp_path))

    with pytest.raises(ModelSpecError, match="never does"):
        build_module(request, build)
    assert torch.hub.download_url_to_file is download


def test_a_constructor_that_reads_values_is_built_on_the_cpu() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, int(torch.tensor(3).item()))

    options = {"source": "some:model", "name": "model", "specs": (), "config": None, "training": True, "seed": 0}
    module, device = build_module(ModelRequest(on_meta=None, **options), build)
    assert device == "cpu" and module.weight.shape == (3, 4)
    with pytest.raises(ModelSpecError, match="on meta"):
        build_module(ModelRequest(on_meta=True, **options), build)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        ("{", "no JSON"),
        ("[1]", "a list"),
        ('{"model_type": "bert"}', "'bert'"),
        ('{"hidden_size": "x"}', "expected int"),
    ],
)
def test_bad_config_files(folder: Path, content: str | None, says: str) -> None:
    path = folder / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelSpecError) as caught:
        load_model("transformers:LlamaForCausalLM", config=path)
    assert says in str(caught.value)


def test_config_files_go_with_transformers_only(tmp_path: Path) -> None:
    with pytest.raises(ModelSpecError, match="transformers:CLASS only"):
        load_model("torchvision:resnet18", config=tmp_path / "config.json")


@pytest.mark.parametrize(
    ("model", "inputs", "says"),
    [
        ("torchvision:resnet18", ["float32[1,3,8,8]"] * 2, "too many positional"),
        ("torchvision:resnet18", ["images=float32[1,3,8,8]"], "images by name"),
        ("torchvision:resnet18", ["float32[1,3,8"], "cannot read input"),
        (TINY_LLAMA, ["input_id=int64[1,8]<300"], "Did you mean input_ids"),
        (TINY_LLAMA, ["int64[1,8]<300", "input_ids=int64[1,8]<300"], "twice"),
        ("transformers:TimesFmModelForPrediction,num_hidden_layers=1", [], "no default inputs"),
        ("dsmp.compiler.small_gpt:SmallGpt", [], "ids, targets"),
        ("dsmp.compiler.small_gpt:SmallGpt", ["int64[1,8]<256"], "'targets'"),
    ],
)
def test_inputs_that_do_not_fit(model, inputs, says) -> None:
    with pytest.raises(InputSpecError, match=says):
        load_model(model, inputs=inputs)
