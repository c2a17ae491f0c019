"""A bidirectional LSTM written out step by step, so that a graph shows its matrix products.

`nn.LSTM` is one operator, which torch.compile skips by default and in which no node could be given a format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class LstmDirection(nn.Module):
    """An LSTM layer over time in one direction: float[B, T, inputs] to float[B, T, width], in the order of time.

    The equations and the gates' order (input, forget, cell, output) are those of `torch.nn.LSTM`.
    """

    def __init__(self, inputs: int, width: int, *, backward: bool) -> None:
        super().__init__()
        self.backward_in_time = backward
        self.from_input = nn.Linear(inputs, 4 * width)
        self.from_state = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.from_input(x).unbind(1)
        hidden = cell = x.new_zeros(len(x), self.from_state.in_features)
        states = []
        for step in reversed(projected) if self.backward_in_time else projected:
            enter, forget, candidate, leave = (step + self.from_state(hidden)).chunk(4, -1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states[::-1] if self.backward_in_time else states, 1)


class BidirectionalLstm(nn.Module):
    """Both directions side by side, then a linear layer: float[B, T, inputs] to float[B, T, outputs]."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.ahead = LstmDirection(inputs, width, backward=False)
        self.back = LstmDirection(inputs, width, backward=True)
        self.linear = nn.Linear(2 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.cat([self.ahead(x), self.back(x)], -1))
        return out


_LSTM_KEY = re.compile(r"(?P<owner>.*\.)?rnn\.(?P<kind>weight|bias)_(?P<side>ih|hh)_l0(?P<reverse>_reverse)?")


def split_lstm_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in which `X.rnn`, a bidirectional `nn.LSTM` of one layer, has become `X.ahead` and `X.back`."""
    renamed = {}
    for key, value in weights.items():
        part = _LSTM_KEY.fullmatch(key)
        if part is not None:
            direction = "back" if part["reverse"] else "ahead"
            layer = "from_input" if part["side"] == "ih" else "from_state"
            key = f"{part['owner'] or ''}{direction}.{layer}.{part['kind']}"
        renamed[key] = value
    return renamed
