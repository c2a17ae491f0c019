"""`--calibrate FILE.py:NAME` and `--loss FILE.py:NAME`: batches and a loss from the user's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import CalibrationError, LossError
from .batches import Loss
from .model_building import cause
from .user_code import place_of, user_code

FORMS = "Write FILE.py:NAME or module:NAME."


@contextlib.contextmanager
def calibration_code(batches: str, loss: str | None) -> Iterator[tuple[Any, Loss | None]]:
    """The batches (an iterable, or what a function without arguments returns) and the loss that the texts name.

    Raises CalibrationError and LossError.
    """
    _check_form(batches, CalibrationError, "--calibrate")
    with user_code(batches, CalibrationError, "list of batches, or a function that returns one,", FORMS) as found:
        data = _called(found, batches) if callable(found) else found
        if loss is None:
            yield data, None
            return
        _check_form(loss, LossError, "--loss")
        with user_code(loss, LossError, "function of (output, target)", FORMS) as function:
            if not callable(function):
                raise LossError(f"{loss} is a {type(function).__name__}; a loss is a function of (output, target).")
            yield data, function


def _called(function: Any, source: str) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise CalibrationError(
            f"{source} failed: {cause(error)}{place_of(error)}. It is called without arguments and returns batches."
        ) from error


def _check_form(text: str, error: type[CalibrationError] | type[LossError], option: str) -> None:
    origin, colon, name = text.rpartition(":")
    if not (origin and colon and name):
        raise error(f"cannot read {option} {text!r}. {FORMS}")
