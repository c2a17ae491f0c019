"""What a training step differentiates when it is measured: the user's loss, the model's own, or one without labels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import CalibrationError
from .batches import Batch, Loss, loss_value

LOSS = "(loss)"
"""The module path of what a step computes outside of its model."""
Manner = Literal["own", "loss", "drawn"]
Labels = tuple[Manner, Any]
"""How a step is judged, and with what: nothing, the target of the user's loss, or one tensor for each output: class
labels (integers) or a random projection (floats)."""


class Objective:
    """The number that a training step differentiates, from the model's output.

    With a `loss`, loss(output, target). Without one the loss that the model returns (an output named `loss`, or a
    single number); else the cross-entropy against labels drawn from the output itself, whose gradients are those of a
    real step on labels as the model expects them; for outputs without classes a random projection. Of several outputs
    each is judged, so that every head is trained; what is nested deeper (caches, lists of hidden states) is not.
    """

    def __init__(self, loss: Loss | None = None, seed: int = 0) -> None:
        self.loss = loss
        self._generator = torch.Generator().manual_seed(seed)

    def labels(self, output: Any, batch: Batch) -> Labels:
        """What a batch is judged with, from the output that the model gives in full precision.

        Raises LossError when the user's loss fails or is no finite number, CalibrationError when nothing can be
        differentiated.
        """
        if self.loss is not None:
            loss_value(self.loss, output, batch.target)
            return "loss", batch.target
        if _own_loss(output) is not None:
            return "own", None
        outputs = _judged(output)
        if not outputs:
            raise CalibrationError(
                "the model returns no floating-point tensor, so there is no training step to measure. Give a loss, or "
                "plan inference (training=False, on the command line --infer)."
            )
        return "drawn", [self._drawn(y.detach()) for y in outputs]

    def _drawn(self, y: Tensor) -> Tensor:
        if y.dim() >= 2 and y.shape[-1] >= 2:
            p = y.reshape(-1, y.shape[-1]).float().softmax(-1).cpu()
            if not bool(torch.isfinite(p).all()):
                raise CalibrationError(
                    "the model's outputs are not finite in the precision it was written in. Leave the batch out, or "
                    "repair the model first."
                )
            return torch.multinomial(p, 1, generator=self._generator).reshape(-1).to(y.device)
        return torch.randn(y.shape, generator=self._generator).to(y.device)

    def value(self, output: Any, labels: Labels) -> Tensor:
        """The number to differentiate; traced as part of the step."""
        how, what = labels
        if how == "loss":
            assert self.loss is not None
            return self.loss(output, what).reshape(())
        if how == "own":
            own = _own_loss(output)
            assert own is not None
            return own.reshape(())
        terms = [_judge(y, drawn) for y, drawn in zip(_judged(output), what, strict=True)]
        return functools.reduce(torch.add, terms)


def traced_step(model: Callable[..., Any], judge: Callable[[Any, Labels], Tensor]) -> Callable[..., Tensor]:
    """A function that runs a model and judges its output: what is captured to measure a training step."""

    def step(args: tuple[Any, ...], kwargs: dict[str, Any], labels: Labels) -> Tensor:
        return judge(model(*args, **kwargs), labels)

    return step


def _judge(y: Tensor, drawn: Tensor) -> Tensor:
    if not drawn.is_floating_point():
        return torch.nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]).float(), drawn)
    projected: Tensor = y.float() * drawn
    return projected.mean()


def _own_loss(output: Any) -> Tensor | None:
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    return next((t for t in _floats(_items(output)) if t.numel() == 1), None)


def _judged(output: Any) -> list[Tensor]:
    """The floating-point tensors at the top of an output, or all of those inside it where the top has none."""
    items = _items(output)
    return _floats(items) or _floats(torch.utils._pytree.tree_leaves(items))


def _items(output: Any) -> list[Any]:
    if isinstance(output, dict):
        return list(output.values())
    if dataclasses.is_dataclass(output):
        return [getattr(output, f.name) for f in dataclasses.fields(output)]
    return list(output) if isinstance(output, (list, tuple)) else [output]


def _floats(values: Sequence[Any]) -> list[Tensor]:
    return [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
