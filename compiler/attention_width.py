"""Attention whose values are narrower than its keys (multi-head latent attention) in one fused operator, for planning.

GPUs have fused kernels for it; torch's CPU dispatch, which captures go through, has not, and would write the scores
out. Values are padded to the width of the keys, and the padding is cut off the result, which changes no number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@contextlib.contextmanager
def attention_of_one_width() -> Iterator[None]:
    """Within it, `scaled_dot_product_attention` pads values that are narrower than keys."""
    plain = F.scaled_dot_product_attention

    def padded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        missing = key.shape[-1] - value.shape[-1]
        if missing <= 0:
            return plain(query, key, value, *args, **kwargs)
        wide = plain(query, key, F.pad(value, (0, missing)), *args, **kwargs)
        return wide[..., : value.shape[-1]]

    F.scaled_dot_product_attention = padded
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain
