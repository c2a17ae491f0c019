"""The transformer block of the two transformers that are trained here."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and MLP, float[B, T, width] to the same shape.

    Not `nn.TransformerEncoderLayer`, whose inference path is one fused operator in which no node can be seen.
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out
