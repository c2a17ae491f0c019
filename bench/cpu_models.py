"""What `bench/cpu.py` runs: models of random weights with their inputs, calibration batches and budgets.

    linears_4096         four layers 4096x4096 after one another, 268 MB in fp32: no cache holds them
    linears_11008        a layer 11008x4096 and one back, 361 MB in fp32
    resnet18, mobilenet_v3_large   images of 224x224; batch norms have seen random images
    bert                 BERT-base without a pooler, 128 tokens
    decoder              `bench/cpu_decoder.py`: one token, after a prompt of 32
    tiny                 two small layers, for tests

Layers of the decoder and of BERT are compiled alone, by every compiler: equal ones are compiled once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from bench.cpu_decoder import LAYERS, Decoder, prompts
from dsmp.passes.program import DriftKind

BERT_LAYERS, BERT_LENGTH, BERT_VOCABULARY = 12, 128, 30522
PROMPT = 32
IMAGE = 224


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What of the models the command line may change: rows of linears, batches, layers (None: all)."""

    rows: tuple[int, ...] = (1, 4, 16, 128)
    batches: tuple[int, ...] = (1, 8)
    layers: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, eval mode and fp32, the inputs it is called with by the title of the case, and how it is planned.

    `alone` are names of modules to be compiled alone; none of them: the whole model is compiled. With a budget that is
    "untied" equal layers choose their formats each for itself.
    """

    name: str
    model: Callable[[], nn.Module]
    cases: Mapping[str, tuple[Tensor, ...]]
    calibration: Callable[[], Sequence[Any]]
    budgets: tuple[str, ...] = ("1%",)
    drift: DriftKind | None = "l2"
    alone: tuple[str, ...] = ()
    images: bool = False
    linears: bool = field(default=True)


def workload(name: str, sizes: Sizes) -> Workload:
    """The workload of that name; KeyError for another one."""
    return _WORKLOADS[name](name, sizes)


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _linears(shapes: Sequence[tuple[int, int]], name: str, sizes: Sizes) -> Workload:
    def model() -> nn.Module:
        layers = [nn.Linear(k, n, bias=False) for n, k in shapes]
        for seed, layer in enumerate(layers):
            nn.init.normal_(
                layer.weight, std=1 / math.sqrt(layer.in_features), generator=torch.Generator().manual_seed(seed)
            )
        return nn.Sequential(*layers).eval()

    width = shapes[0][1]
    return Workload(
        name=name,
        model=model,
        cases={f"{m} rows": (_randn(m, m, width),) for m in sizes.rows},
        calibration=lambda: [(_randn(1000 + i, 16, width),) for i in range(2)],
        budgets=("1%", "10%"),
    )


def _images(name: str, sizes: Sizes) -> Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = getattr(torchvision.models, name)()
        made.train()
        with torch.no_grad():
            for i in range(3):
                made(_randn(2000 + i, 8, 3, IMAGE, IMAGE))
        return made.eval()

    return Workload(
        name=name,
        model=model,
        cases={f"batch {b}": (_randn(b, b, 3, IMAGE, IMAGE),) for b in sizes.batches},
        calibration=lambda: [(_randn(1000 + i, 4, 3, IMAGE, IMAGE),) for i in range(2)],
        drift=None,
        images=True,
        linears=False,
    )


def _bert(name: str, sizes: Sizes) -> Workload:
    layers = min(sizes.layers or BERT_LAYERS, BERT_LAYERS)

    def model() -> nn.Module:
        torch.manual_seed(0)
        config = BertConfig(num_hidden_layers=layers, return_dict=False, use_cache=False)
        made: nn.Module = BertModel(config, add_pooling_layer=False)
        return made.eval()

    def tokens(seed: int, batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(0, BERT_VOCABULARY, (batch, BERT_LENGTH), generator=generator),)

    return Workload(
        name=name,
        model=model,
        cases={f"batch {b}": tokens(b, b) for b in sizes.batches},
        calibration=lambda: [tokens(1000 + i, 2) for i in range(2)],
        budgets=("1%", "1% untied", "3%"),
        alone=tuple(f"encoder.layer.{i}" for i in range(layers)),
    )


def _decoder(name: str, sizes: Sizes) -> Workload:
    layers = min(sizes.layers or LAYERS, LAYERS)

    def model() -> nn.Module:
        torch.manual_seed(0)
        made = Decoder(layers=layers).eval()
        with torch.no_grad():
            made(*prompts(1, PROMPT)[0])
        return made

    return Workload(
        name=name,
        model=model,
        cases={"a token": (torch.tensor([[5]]), torch.tensor([PROMPT]))},
        calibration=lambda: prompts(2, PROMPT),
        budgets=("0.1%", "1%", "3%", "10%"),
        alone=(*(f"layers.{i}" for i in range(layers)), "head"),
    )


def _tiny(name: str, sizes: Sizes) -> Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).eval()

    return Workload(
        name=name,
        model=model,
        cases={f"{m} rows": (_randn(m, m, 128),) for m in sizes.rows},
        calibration=lambda: [(_randn(1000 + i, 16, 128),) for i in range(2)],
        alone=("0",),
    )


_WORKLOADS: dict[str, Callable[[str, Sizes], Workload]] = {
    "linears_4096": partial(_linears, [(4096, 4096)] * 4),
    "linears_11008": partial(_linears, [(11008, 4096), (4096, 11008)]),
    "resnet18": _images,
    "mobilenet_v3_large": _images,
    "bert": _bert,
    "decoder": _decoder,
    "tiny": _tiny,
}
GROUPS = {"linears": ("linears_4096", "linears_11008")}
"""Names that stand for several workloads."""
NAMES = tuple(_WORKLOADS)
