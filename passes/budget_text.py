"""Budgets as users write them: shares (`0.005`, `0.5%`) and amounts of memory (`1.5GB`, `60%`, bytes)."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from ..errors import BudgetError

DEFAULT_BUDGET = 0.005
"""Half a per cent: what a calibrated plan may cost where nothing is said."""

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AMOUNT = re.compile(r"\s*(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(?P<unit>%|[A-Za-z]*)\s*")


def parse_budget(value: Any) -> float:
    """A budget as a share of 1, from a number or text. A bare 1, which reads as one per cent too, is refused.

    Raises BudgetError.
    """
    number = _number(value, ("", "%"))
    if number is None or not math.isfinite(number[0]) or number[0] < 0:
        raise BudgetError(
            f"budget {value!r} cannot be read; allowed: a share such as 0.005, or a percentage such as '0.5%'."
        )
    share = number[0] / 100 if number[1] == "%" else number[0]
    if share > 1:
        raise BudgetError(f"budget {value!r} is more than everything (100 %). Did you mean {share:g}%?")
    if share == 1 and number[1] != "%" and str(value).strip() == "1":
        raise BudgetError(f"budget {value!r} is everything. Write '1%' for a hundredth, 1.0 or '100%' for no limit.")
    return share


def parse_memory(value: Any, traced_bytes: int | None) -> int | None:
    """A budget on saved bytes from a number of bytes, `1.5GB`, or a percentage of what is saved as traced.

    Raises BudgetError for what cannot be read, and for a percentage where nothing is saved.
    """
    if value is None:
        return None
    number = _number(value, (*_UNITS, "%"))
    if number is None or not math.isfinite(number[0]) or number[0] < 0:
        raise BudgetError(
            f"memory {value!r} cannot be read; allowed: bytes, an amount such as '1.5GB' or '800MiB', or a share of "
            "what the model saves as written, such as '60%'."
        )
    amount, unit = number
    if unit != "%":
        return int(amount * _UNITS[unit])
    if not traced_bytes:
        raise BudgetError(
            f"memory {value!r} is a share of the activations saved for the backward pass; there are none."
        )
    return int(amount / 100 * traced_bytes)


def _number(value: Any, units: tuple[str, ...]) -> tuple[float, str] | None:
    if type(value) is not bool and isinstance(value, numbers.Real):
        try:
            return float(value), ""
        except OverflowError:  # an integer of hundreds of digits
            return None
    found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if found is None or found["unit"].upper() not in units:
        return None
    return float(found["number"]), found["unit"].upper()
