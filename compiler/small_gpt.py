"""The embedded demonstration model: a small but real GPT on real English text, without downloads.

The model is a decoder-only transformer with pre-norm blocks (Radford et al. 2019, "Language Models are
Unsupervised Multitask Learners", section 2.3): learned positions, causal attention through
`scaled_dot_product_attention`, a GELU MLP of four times the width and an untied output head. Every width is a
multiple of 128, so that all block formats (1x128, 128x128, mx32) apply to every GEMM.

The text is `pydoc_data.topics`, the language reference that ships with Python: about 380 kB of prose and
code, read as bytes (vocabulary 256). The last tenth is held out. It is the same for one Python version and
differs between versions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputSpecError, InvalidOptionError

_BLOCK = 128
_HELD_OUT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallGptConfig:
    """Sizes of the demonstration model.

    Raises InvalidOptionError for a width or vocabulary that is no multiple of 128, for heads that do not
    divide the width and for anything not positive.
    """

    vocab_size: int = 256
    d_model: int = 128
    heads: int = 4
    layers: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model"):
            if (value := getattr(self, name)) < _BLOCK or value % _BLOCK:
                raise InvalidOptionError(name, value, f"a positive multiple of {_BLOCK}")
        for name in ("heads", "layers", "context"):
            if (value := getattr(self, name)) < 1:
                raise InvalidOptionError(name, value, "a positive integer")
        if self.d_model % self.heads:
            raise InvalidOptionError("heads", self.heads, f"a divisor of d_model ({self.d_model})")


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention, float[B, T, d_model] to the same shape."""

    def __init__(self, config: SmallGptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Mlp(nn.Module):
    """down(gelu(up(x))) with four times the width inside, float[B, T, d_model] to the same shape."""

    def __init__(self, config: SmallGptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One pre-norm block: x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: SmallGptConfig) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(config.d_model)
        self.attn = CausalSelfAttention(config)
        self.norm_mlp = nn.LayerNorm(config.d_model)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_attn(x))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class SmallGpt(nn.Module):
    """Byte-level GPT whose forward is its training loss.

    Weights start from N(0, 0.02); projections that write into the residual stream are scaled by 1/sqrt(2
    layers), one factor per residual addition (Radford et al. 2019, section 2.3).
    """

    def __init__(self, config: SmallGptConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or SmallGptConfig()
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm_out = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes_residual = name.endswith((".attn.proj", ".mlp.down"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def logits(self, ids: Tensor) -> Tensor:
        """Next-byte logits, float[B, T, vocab_size], for ids int64[B, T] with T <= context.

        Raises InputSpecError when T exceeds the context.
        """
        length = ids.shape[1]
        if length > self.config.context:
            raise InputSpecError(
                f"ids have length {length}; the model's context is {self.config.context}. Pass shorter rows "
                f"or build SmallGpt(SmallGptConfig(context={length}))."
            )
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm_out(x))
        return out

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, a float scalar, for ids and targets int64[B, T]."""
        return F.cross_entropy(self.logits(ids).flatten(0, 1), targets.flatten())


@functools.cache
def _corpus() -> Tensor:
    """The whole text as uint8[N].

    Topics quote each other's sections, so each paragraph is kept once: otherwise the held-out part would hold
    text of the training part.
    """
    paragraphs = dict.fromkeys(p for title in sorted(topics) for p in topics[title].split("\n\n"))
    return torch.frombuffer(bytearray("\n\n".join(paragraphs).encode("utf-8")), dtype=torch.uint8)


def small_gpt_batch(
    *, batch: int = 8, context: int = 128, seed: int = 0, held_out: bool = False, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """`(ids, targets)`, both int64[batch, context]: windows of real text and the same windows one byte later.

    Windows are drawn uniformly from the training part, or from the held-out last tenth. The same arguments
    give the same windows; pass the step as the seed to train.

    Raises InvalidOptionError for a batch below 1 or a context that the chosen part of the text cannot fill.
    """
    text = _corpus()
    border = int(len(text) * (1 - _HELD_OUT))
    part = text[border:] if held_out else text[:border]
    if batch < 1:
        raise InvalidOptionError("batch", batch, "a positive integer")
    if not 1 <= context < len(part):
        raise InvalidOptionError("context", context, f"an integer from 1 to {len(part) - 1}")
    generator = torch.Generator("cpu").manual_seed(seed)
    # "cpu" by name, because the caller may build its model under another default device
    starts = torch.randint(len(part) - context, (batch, 1), generator=generator, device="cpu")
    windows = part[starts + torch.arange(context + 1, device="cpu")].to(device=device, dtype=torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def demo_model() -> tuple[SmallGpt, tuple[Tensor, Tensor]]:
    """The default model and a batch for it, as a factory: MODEL `dsmp.compiler.small_gpt:demo_model`."""
    return SmallGpt(), small_gpt_batch()


def demo_batches() -> list[tuple[Tensor, Tensor]]:
    """Batches to calibrate the default model on: `--calibrate dsmp.compiler.small_gpt:demo_batches`."""
    return [small_gpt_batch(batch=4, seed=seed) for seed in range(4)]


def train_small_gpt(
    model: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    batch: int = 8,
    context: int = 128,
    seed: int = 0,
    device: str = "cpu",
    scaler: torch.amp.GradScaler | None = None,
    warmup: int = 0,
) -> list[float]:
    """Train for `steps` steps and return the loss of each, in nats per byte.

    `model` is a SmallGpt or anything with its call (a compiled one). Step i reads the batch of seed `seed +
    i`, so two runs with equal arguments see the same text and their losses compare step by step. A `scaler`
    scales the loss and may skip steps. With `warmup` the learning rate rises linearly for so many steps and then
    falls linearly to a twentieth; without it the first steps of Adam, whose size does not depend on the gradient's,
    make a run so sensitive that a change of one part in a million shows as a per cent of the loss.
    """
    scaler = scaler or torch.amp.GradScaler(device, enabled=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * max(0.05, 1 - step / steps) if warmup else 1
    )
    losses = []
    for step in range(steps):
        ids, targets = small_gpt_batch(batch=batch, context=context, seed=seed + step, device=device)
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, targets)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(loss.item())
    return losses
