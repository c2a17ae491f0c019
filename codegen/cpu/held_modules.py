"""Layers that hold their weight packed, in the place of `nn.Linear` and `nn.Conv2d`: for inference on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...errors import ReleasedTrainingError, ReleaseError
from ...passes.static_steps import Steps, steps_tensor
from .held_weights import FORMATS, STATIC, pack_weight


class _HeldWeight(nn.Module):
    """A weight of shape `size`, packed in `format` (held_weights.py) into buffers, and a bias [size[0]] or None.

    A state of this layer loads, and so does that of the layer that it stands for, whose weight is packed then. Raises
    ReleasedTrainingError when called in training mode, ReleaseError when moved off the CPU or to another dtype.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, format: str, groups: int, steps: Steps | None) -> None:
        super().__init__()
        self.size, self.format, self.groups = list(layer.weight.shape), format, groups
        # a tensor, for numbers would be constants of what is compiled; no buffer, which `float()` would round
        self.steps = None if steps is None else steps_tensor([steps])
        for name, made in zip(FORMATS[format], pack_weight(layer.weight, format, groups), strict=True):
            self.register_buffer(name, made)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.training = layer.training

    @property
    def packed(self) -> list[Tensor]:
        """The packed tensors, in the operators' order."""
        return [self.get_buffer(name) for name in FORMATS[self.format]]

    @property
    def weight(self) -> Tensor:
        """float32 of shape `size`: what products multiply by, widened for this reader."""
        wide: Tensor = torch.ops.dsmp.held_weight(self.packed, self.format, self.size, self.groups)
        return wide

    def _check(self) -> None:
        # not in `train`: an error there would leave the model half in training mode
        if self.training:
            raise ReleasedTrainingError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = fn(torch.zeros(1))
        if probe.dtype != torch.float32 or probe.device.type != "cpu":
            raise ReleaseError(
                f"a layer whose weight was released stays on the CPU in fp32; it cannot become {probe.dtype} on "
                f"{probe.device.type}. Move or cast the model before dsmp.release_weights."
            )
        applied: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and list(weight.shape) == self.size:
            del state_dict[f"{prefix}weight"]
            made = pack_weight(weight.float(), self.format, self.groups)
            state_dict |= {f"{prefix}{name}": t for name, t in zip(FORMATS[self.format], made, strict=True)}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.size))}, {self.format}, bias={self.bias is not None}"


class HeldLinear(_HeldWeight):
    """As `nn.Linear` for fp32 [..., K], by a held weight; its activations are rounded to `steps` if that is STATIC."""

    def __init__(self, layer: nn.Linear, format: str, steps: Steps | None = None) -> None:
        super().__init__(layer, format, 1, steps)
        self.out_features, self.in_features = self.size

    def forward(self, x: Tensor) -> Tensor:
        self._check()
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        args = (self.packed, self.bias, self.format, self.size, self.steps)
        y: Tensor = torch.ops.dsmp.held_linear(rows, *args)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)


class HeldConv2d(_HeldWeight):
    """As `nn.Conv2d` padded with zeros, for fp32 [N, C, H, W], by an int8 weight and activations in `steps`."""

    def __init__(self, layer: nn.Conv2d, steps: Steps) -> None:
        super().__init__(layer, STATIC, layer.groups, steps)
        assert not isinstance(layer.padding, str)
        self.stride, self.padding, self.dilation = list(layer.stride), list(layer.padding), list(layer.dilation)

    def forward(self, x: Tensor) -> Tensor:
        self._check()
        how = (self.stride, self.padding, self.dilation, self.groups, self.steps)
        y: Tensor = torch.ops.dsmp.held_convolution(x, self.packed, self.bias, self.size, *how)
        return y
