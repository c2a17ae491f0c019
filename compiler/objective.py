"""What a training step differentiates when it is measured: the user's loss, the model's own, or one without labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import CalibrationError
from .batches import Batch, Loss, loss_value

Manner = Literal["own", "loss", "classes", "probe"]
Labels = tuple[Manner, Any]
"""How a step is judged, and with what: nothing, the target of the user's loss, class labels, a random projection."""


class Objective:
    """The number that a training step differentiates, from the model's output.

    With a `loss`, loss(output, target). Without one the loss that the model returns (an output named `loss`, or a
    single number); else the cross-entropy against labels drawn from the output itself, whose gradients are those of a
    real step on labels as the model expects them; for outputs without classes a random projection.
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
        tensors = _float_tensors(output)
        if not tensors:
            raise CalibrationError(
                "the model returns no floating-point tensor, so there is no training step to measure. Give a loss, or "
                "plan inference (training=False, on the command line --infer)."
            )
        y = tensors[0].detach()
        if y.dim() >= 2 and y.shape[-1] >= 2:
            drawn = torch.multinomial(
                y.reshape(-1, y.shape[-1]).float().softmax(-1).cpu(), 1, generator=self._generator
            )
            return "classes", drawn.reshape(-1).to(y.device)
        return "probe", torch.randn(y.shape, generator=self._generator).to(y.device)

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
        y = _float_tensors(output)[0]
        if how == "classes":
            return torch.nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]).float(), what)
        projected: Tensor = y.float() * what
        return projected.mean()


def traced_step(model: Callable[..., Any], objective: Objective) -> Callable[..., Tensor]:
    """A function that runs a model and judges its output: what is captured to measure a training step."""

    def step(args: tuple[Any, ...], kwargs: dict[str, Any], labels: Labels) -> Tensor:
        return objective.value(model(*args, **kwargs), labels)

    return step


def _own_loss(output: Any) -> Tensor | None:
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    return next((t for t in _float_tensors(output) if t.numel() == 1), None)


def _float_tensors(output: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
