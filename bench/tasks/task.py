"""What a task is: a model in fp32, inputs to calibrate on, other inputs to judge by, and the task's own metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
"""Positional arguments of one call of a task's model."""

Drift = Literal["kl", "bernoulli", "l2"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with real weights and real data.

    All batches of a task have the same shapes, those of `evaluate` included, so one captured graph serves for all.

    Attributes:
        name: What `load` was asked for.
        model: In eval mode, fp32, on the CPU.
        calibration: What a planner may look at.
        held_out: What plans are judged by. Shares no sample with `calibration`, and for mobilenet (stamps against
            photographs) and silero (other scenes) not the distribution either.
        drift: How far outputs have moved: "kl" is KL(fp32 || low) over the last dimension, per leading position for
            sequences; "bernoulli" the KL of independent yes/no outputs, summed over the last dimension of a
            two-dimensional output; "l2" the relative squared L2 distance over all outputs of a sample.
        logits: Whether "kl" and "bernoulli" must apply softmax or sigmoid; False where the model ends in one, and
            without meaning for "l2".
        evaluate: Runs any callable with the model's signature; gives the headline metric first, then side values,
            which move continuously and are the ones to gate on.
    """

    name: str
    model: nn.Module
    calibration: list[Batch]
    held_out: list[Batch]
    drift: Drift
    logits: bool
    evaluate: Callable[[Callable[..., Any]], dict[str, float]]


def split(inputs: Batch, size: int) -> list[Batch]:
    """Tensors of equal length as batches of `size` samples.

    Raises ValueError when the length is no multiple of `size`.
    """
    count = len(inputs[0])
    if count % size:
        raise ValueError(f"{count} samples do not fill batches of {size}")
    return [tuple(t[i : i + size] for t in inputs) for i in range(0, count, size)]


def predict(model: Callable[..., Any], inputs: Batch, size: int) -> Tensor:
    """The model's output tensor for all samples, in fp32, computed in batches of exactly `size`.

    The last batch is filled up with copies of the last sample, whose outputs are dropped.
    """
    count = len(inputs[0])
    missing = -count % size
    filled = tuple(torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in inputs)
    with torch.no_grad():
        outputs = [model(*batch).float() for batch in split(filled, size)]
    return torch.cat(outputs)[:count]
