"""Calibration batches: what users may hand over, checked before anything is measured.

A batch is what the model is called with: a tensor, a tuple or list of positional inputs, a dict of keyword inputs. With
a loss it is a pair (inputs, target), and the loss is called as loss(output, target).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import CalibrationError, LossError

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The inputs of one call, and what the loss compares its output with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


def split_inputs(inputs: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs from a tensor, a sequence or a mapping."""
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(kwargs or {})}
    if isinstance(inputs, (list, tuple)):
        return tuple(inputs), dict(kwargs or {})
    return (inputs,), dict(kwargs or {})


def read_batches(batches: Any, *, with_target: bool) -> Iterator[Batch]:
    """The checked batches of an iterable, one at a time.

    Raises CalibrationError for what is no iterable of batches, for an empty one, for a batch that cannot be made, and
    for one without samples or with NaN or inf.
    """
    if isinstance(batches, (Tensor, str, bytes, Mapping)) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"calibration is a {type(batches).__name__}; allowed: a list or another iterable of batches, each what the "
            "model is called with (a tensor, a tuple, a dict), or (inputs, target) pairs with a loss. Put one batch "
            "into a list."
        )
    count = 0
    for count, batch in enumerate(_given(batches), start=1):
        yield _read(batch, count, with_target)
    if not count:
        raise CalibrationError(
            "calibration holds no batch. Give at least one; 16 sequences or 64 images in all are a good start. An "
            "iterator that was used up before is empty: hand over a list or a new one."
        )


def _given(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, and what fails while the user's code makes them told as such."""
    number = 1
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise CalibrationError(
                f"calibration batch {number} could not be made: {type(error).__name__}: {error}."
            ) from error
        yield batch
        number += 1


def _read(batch: Any, number: int, with_target: bool) -> Batch:
    target = None
    if with_target:
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise CalibrationError(
                f"calibration batch {number}: with a loss every batch is a pair (inputs, target), this one is "
                f"{_shape(batch)}."
            )
        batch, target = batch
    args, kwargs = split_inputs(batch)
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 0:
            raise CalibrationError(
                f"calibration batch {number} holds no samples: a tensor in it has the shape {list(leaf.shape)}. Leave "
                "the batch out."
            )
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.device.type != "meta":
            bad = int((leaf.isnan() | leaf.isposinf()).sum())  # -inf is how attention masks rule positions out
            if bad:
                raise CalibrationError(
                    f"calibration batch {number}: {bad} of {leaf.numel()} values are NaN or inf. Leave such samples "
                    "out: nothing can be measured with them."
                )
    with torch.inference_mode(False):  # what was made in inference mode cannot take part in a training step
        args, kwargs, target = tree_map(_recorded, (args, kwargs, target))
    return Batch(args=args, kwargs=kwargs, target=target)


def _recorded(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _shape(batch: Any) -> str:
    length = f" of {len(batch)}" if isinstance(batch, (list, tuple)) else ""
    return f"a {type(batch).__name__}{length}"


def loss_value(loss: Loss, output: Any, target: Any) -> Tensor:
    """The loss as a tensor without dimensions. Raises LossError when it fails or is not one finite number."""
    name = getattr(loss, "__name__", type(loss).__name__)
    try:
        value = loss(output, target)
    except Exception as error:
        raise LossError(
            f"the loss {name} failed: {type(error).__name__}: {error}. It is called as loss(output, target), with the "
            "model's output and the second item of the calibration batch."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise LossError(f"the loss {name} returned {what}; it must return one number (a tensor with one element).")
    if not bool(torch.isfinite(value.detach())):
        raise LossError(f"the loss {name} is {float(value):g}; check the calibration batches and targets.")
    return value.reshape(())
