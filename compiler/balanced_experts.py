"""Experts as planning sees them: every expert gets the same share of the tokens, so that shapes are known.

A stand-in takes the place of a module that holds the weights of all its experts stacked and is called with tokens, the
experts chosen for each and their weights, which is how transformers writes mixtures of experts. It multiplies the same
operands in grouped products under the same names, so that formats that are planned here are those of the real module.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..passes.shard_experts import all_rows, grouped_mm, send_rows

_CALL = ("hidden_states", "top_k_index", "top_k_weights")


def balance_experts(model: nn.Module) -> list[str]:
    """Let a model's experts (on the meta device) take equal shares, in place; the paths of their modules."""
    found = []
    for path, module in model.named_modules():
        if is_experts(module):
            module.forward = functools.partial(_forward, module)
            found.append(path)
    return found


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds stacked experts without biases, and is called as the module says."""
    weights = dict(module.named_parameters(recurse=False))
    names = set(weights)
    stacked = names in ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"}) and all(
        w.ndim == 3 for w in weights.values()
    )
    code = getattr(type(module).forward, "__wrapped__", type(module).forward)
    return stacked and code.__code__.co_varnames[1:4] == _CALL


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states (tokens, features), top_k_index and top_k_weights (tokens, k) -> (tokens, features)."""
    tokens, features = hidden_states.shape
    chosen = top_k_index.shape[1]
    rows = hidden_states.unsqueeze(1).expand(tokens, chosen, features).reshape(tokens * chosen, features)
    rows = send_rows(rows, False)
    experts = self.down_proj.shape[0]
    ends = torch.arange(1, experts + 1, device=rows.device, dtype=torch.int32) * (rows.shape[0] // experts)
    gated = hasattr(self, "gate_up_proj")
    rows = _product(self, rows, self.gate_up_proj if gated else self.up_proj, ends)
    rows = self._apply_gate(rows) if gated and hasattr(self, "_apply_gate") else _activated(self, rows, gated)
    rows = send_rows(_product(self, rows, self.down_proj, ends), True)
    weighted = rows.view(tokens, chosen, features) * top_k_weights.unsqueeze(-1)
    whole: Tensor = all_rows(weighted.sum(1).to(hidden_states.dtype))
    return whole


def _product(self: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    transposed = getattr(self, "is_transposed", False)
    product: Tensor = grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), ends)
    return product


def _activated(self: Any, rows: Tensor, gated: bool) -> Tensor:
    if not gated:
        return self.act_fn(rows)  # type: ignore[no-any-return]
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate) * up  # type: ignore[no-any-return]
