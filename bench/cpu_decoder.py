"""A Llama-like decoder of about 250 million parameters that writes one token at a time, for `bench/cpu.py`.

RMSNorm, rotary positions, attention over a cache of keys and values, SiLU-gated MLP (Touvron et al., "LLaMA",
arXiv:2302.13971), random weights. The cache is a buffer, so that a step is one graph of fixed shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, LAYERS, VOCABULARY, LENGTH = 1024, 16, 2816, 16, 32000, 256


class Attention(nn.Module):
    """x float[1, T, width] at positions int64[T] -> the same shape."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, size), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)
        self.keys.index_copy_(2, positions, _turned(k, turns))
        self.values.index_copy_(2, positions, v)
        mixed = F.scaled_dot_product_attention(_turned(q, turns), self.keys, self.values, attn_mask=mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a gated MLP, each on normalised values and added."""

    def __init__(self, width: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, length)
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), positions, turns, mask)
        y = self.mlp_norm(x)
        out: Tensor = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return out


class Decoder(nn.Module):
    """tokens int64[1, T] at positions int64[T] -> logits float[1, T, vocabulary]; keys and values are kept."""

    angles: Tensor

    def __init__(
        self, *, width: int = WIDTH, heads: int = HEADS, hidden: int = HIDDEN, layers: int = LAYERS,
        vocabulary: int = VOCABULARY, length: int = LENGTH,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden, length) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        rates = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("angles", torch.outer(torch.arange(length), rates), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        angles = self.angles[positions]
        turns = torch.stack([angles.cos(), angles.sin()])
        mask = torch.arange(self.angles.shape[0]) <= positions[:, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, turns, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions (Su et al., arXiv:2104.09864): pairs of the two halves turned by their angles."""
    cosine, sine = turns
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


def prompts(count: int, length: int, vocabulary: int = VOCABULARY) -> list[tuple[Tensor, Tensor]]:
    """Random token sequences with their positions."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(length)
    return [(torch.randint(0, vocabulary, (1, length), generator=generator), positions) for _ in range(count)]
