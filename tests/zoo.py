"""Small random models with inputs, for every test that needs a real graph.

`TINY` are plain torch modules that capture in well under a second, `MODELS` are real architectures in small. A builder
seeds torch itself, so two builds give equal weights and inputs. `zoo.build(name)` gives a `Case`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import nn

WIDTH = 128
LENGTH = 16
BATCH = 2
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model in training mode and one call's inputs."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def loss(self) -> torch.Tensor:
        """A scalar of one call of the model: its own loss, or the mean square of what it returns."""
        return scalar(self.model(*self.args, **self.kwargs))


def scalar(output: Any) -> torch.Tensor:
    """A loss from whatever a zoo model returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    values = output.values() if isinstance(output, Mapping) else output
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return sum(t.float().square().mean() for t in tensors)


def build(name: str) -> Case:
    """A fresh copy of a zoo model with its inputs, the same at every call."""
    torch.manual_seed(0)
    model, args, kwargs = {**MODELS, **TINY}[name]()
    return Case(name=name, model=model.train(), args=args, kwargs=kwargs)


Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, length))


def _llama() -> Built:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    ids = _ids()
    return transformers.LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _bert() -> Built:
    config = transformers.BertConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    return transformers.BertForMaskedLM(config), (), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _vit() -> Built:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    pixels = torch.randn(BATCH, 3, 32, 32)
    model = transformers.ViTForImageClassification(config)
    return model, (), {"pixel_values": pixels, "labels": torch.tensor([1, 7])}


def _t5() -> Built:
    config = transformers.T5Config(
        d_model=WIDTH,
        d_kv=32,
        d_ff=256,
        num_layers=1,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        use_cache=False,
    )
    ids = _ids()
    return transformers.T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": ids[:, :8].contiguous()}


def _mixtral() -> Built:
    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    ids = _ids()
    return transformers.MixtralForCausalLM(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _resnet18() -> Built:
    return torchvision.models.resnet18(num_classes=10), (torch.randn(BATCH, 3, 64, 64),), {}


def _mobilenet() -> Built:
    return torchvision.models.mobilenet_v3_small(num_classes=10), (torch.randn(BATCH, 3, 64, 64),), {}


MODELS: Mapping[str, Callable[[], Built]] = {
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "mixtral": _mixtral,
    "resnet18": _resnet18,
    "mobilenet_v3_small": _mobilenet,
}
"""Real architectures in small; 2 to 10 seconds each to capture."""

EVERY_MODEL = [
    pytest.param(name, marks=pytest.mark.slow if name in ("vit", "t5", "mobilenet_v3_small") else ()) for name in MODELS
]
"""The names of `MODELS` to parametrise with: the default run has one of each kind (a decoder, an encoder, experts, a
convolutional net), the slow run the rest."""


class Mlp(nn.Module):
    """Linear, GELU, linear: x float[..., 64] to float[..., 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Normed(nn.Module):
    """An MLP whose last linear is followed by a final norm, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x + self.down(F.relu(self.up(x)))))


class Encoder(nn.Module):
    """The body of `Normed` without a head: the model's answer is a normed value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.relu(self.up(x))))


class Tied(nn.Module):
    """A token embedding whose table is the output head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.body = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


class SharedWeight(nn.Module):
    """Two linear modules that own one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.second = nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Twice(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(self.inner(x)))


class Gram(nn.Module):
    """x @ x.T of a projected x: both operands of the product are one value. At the root, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return y @ y.T


class FusedQkv(nn.Module):
    """Explicit attention (two batched products) on one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (p.unflatten(-1, (4, 16)).transpose(1, 2) for p in self.qkv(x).chunk(3, dim=-1))
        weights = torch.softmax(query @ key.transpose(-1, -2) / 4.0, dim=-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class SdpaBlock(nn.Module):
    """Pre-norm attention through scaled_dot_product_attention, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 3 * 64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = (p.unflatten(-1, (4, 16)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Wide(nn.Module):
    """A language model of one wide layer with its loss, for devices on which small products do not pay."""

    def __init__(self, width: int = 4096, heads: int = 32, vocabulary: int = 32000) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.tiny = nn.Linear(width, 16)
        self.back = nn.Linear(16, width)
        self.final = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        query, key, value = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.back(F.gelu(self.tiny(x)))
        return F.cross_entropy(self.head(self.final(x)).flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """Three convolutions (plain, depthwise, strided without bias), batch norm, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.down(self.depthwise(x)))
        return self.head(x.mean(dim=(2, 3)))


class Router(nn.Module):
    """A gate whose scores are ranked, and the body that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 6, bias=False)
        self.expert = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, _ = torch.topk(torch.softmax(self.gate(x), dim=-1), 2, dim=-1)
        return self.head(F.relu(self.expert(x)) * weights.sum(-1, keepdim=True))


class Positions(nn.Module):
    """Rotary-like angles from integer positions: positions turned float, an outer product, a one-hot product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.rand(16))
        self.table = nn.Parameter(torch.randn(10, 16))
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        angles = torch.bmm(self.rates[None, :, None], positions.to(torch.float32)[None, None, :])[0].T
        chosen = F.one_hot(labels, 10).to(torch.float32) @ self.table
        return self.head(torch.relu(self.mix(angles.cos() + chosen)))


def _wide() -> Built:
    with torch.device("meta"):
        ids = torch.empty(4, 2048, dtype=torch.int64)
        return Wide(), (ids, torch.empty_like(ids)), {}


def _module(factory: Callable[[], nn.Module], *shape: int) -> Callable[[], Built]:
    return lambda: (factory(), (torch.randn(*shape),), {})


TINY: Mapping[str, Callable[[], Built]] = {
    "mlp": _module(Mlp, 4, 10, 64),
    "normed": _module(Normed, 6, 32),
    "encoder": _module(Encoder, 6, 32),
    "tied": lambda: (Tied(), (torch.randint(0, 48, (2, 6)),), {}),
    "shared_weight": _module(SharedWeight, 6, 32),
    "twice": _module(Twice, 6, 32),
    "gram": _module(Gram, 6, 32),
    "fused_qkv": _module(FusedQkv, 2, 8, 64),
    "sdpa": _module(SdpaBlock, 2, 8, 64),
    "wide": _wide,
    "convnet": _module(ConvNet, 2, 3, 12, 12),
    "router": _module(Router, 6, 32),
    "positions": lambda: (Positions(), (torch.arange(12), torch.randint(0, 10, (12,))), {}),
}
"""Plain torch modules; each captures in well under a second."""
