"""An estimate, from prices alone, of the budget at which a node would take another label.

With all other nodes as they are, label w of a node is the cheapest at every price p (us per unit of the budget) between

    lo = max over labels l with E_l > E_w of (T_w - T_l) / (E_l - E_w)     and
    hi = min over labels l with E_l < E_w of (T_l - T_w) / (E_w - E_l),

where T is time with casts and E what the budget limits. A node turns to a larger E when the price falls below hi, to a
smaller one when it rises above lo. The budget that belongs to a price is the sum of the E that all nodes choose at it;
what the others choose changes T, so this is done a few times.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .assignment import Floats
from .exchange import Exchanges
from .program import Program

Budgeted = Literal["error", "memory"]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_SWEEPS = 3


def estimate_budget(program: Program, exchanges: Exchanges, key: str, label: str, budget: Budgeted) -> float | None:
    """The drift or the saved bytes of the choice at whose prices a node turns to a label; None if it never does."""
    tables = _Tables(program, exchanges, budget)
    variable, column = tables.variable[key], tables.columns[label]
    change = exchanges.change(exchanges.group(key), label)
    upward = ((change.drift or 0.0) if budget == "error" else change.saved_bytes) > 0
    choice, found = tables.choice, None
    for _ in range(_SWEEPS):
        time = tables.time + tables.marginal_casts(choice)
        low, high = _price_range(time[variable], tables.spent[variable], column)
        price = high if upward else low
        if high < low or not math.isfinite(price):
            break
        choice = np.argmin(time + price * tables.spent, axis=1)
        choice[variable] = column
        found = float(tables.spent[np.arange(len(choice)), choice].sum())
    return found


class _Tables:
    """A program in arrays: a row per group of tied nodes, a column per label that occurs anywhere.

    `time` (n, V) is infinite where a member may not take the label. Casts: `cost` (K, V) by label of the `source` (K,),
    -1 for an input; pairs (P,) of a cast and a reading group with the labels that read it, `wants` (P, V).
    """

    def __init__(self, program: Program, exchanges: Exchanges, budget: Budgeted) -> None:
        labels = {c.label for found in program.candidates.values() for c in found}
        self.columns = {name: i for i, name in enumerate(sorted(labels))}
        heads: dict[str, int] = {}
        self.variable = {key: heads.setdefault(exchanges.group(key)[0], len(heads)) for key in program.keys}
        members = np.bincount(list(self.variable.values()), minlength=len(heads))
        shape = len(heads), len(self.columns)
        rows, columns, times, spent = [], [], [], []
        for key, candidates in program.allowed.items():
            for c in candidates:
                rows.append(self.variable[key])
                columns.append(self.columns[c.label])
                times.append(c.time_us)
                spent.append((c.drift or 0.0) if budget == "error" else float(c.saved_bytes))
        allowed = _summed(shape, rows, columns, [1.0] * len(rows)) == members[:, None]
        self.time = np.where(allowed, _summed(shape, rows, columns, times), np.inf)
        self.spent = np.where(allowed, _summed(shape, rows, columns, spent), 0.0)
        self.choice = np.argmin(self.time, axis=1)
        for key, label in exchanges.labels.items():
            if allowed[self.variable[key], self.columns[label]]:
                self.choice[self.variable[key]] = self.columns[label]
        self._add_casts(program)

    def _add_casts(self, program: Program) -> None:
        width = len(self.columns)
        self.cost = np.zeros((len(program.copies), width))
        self.source = np.full(len(program.copies), -1)
        pairs: dict[tuple[int, int], set[int]] = {}
        for k, copy in enumerate(program.copies):
            if copy.value in self.variable:
                self.source[k] = self.variable[copy.value]
                for label, time_us in copy.time_us.items():
                    self.cost[k, self.columns[label]] = time_us
            else:
                self.cost[k] = copy.time_us.get("", 0.0)
            for key, labels in copy.readers.items():
                pairs.setdefault((k, self.variable[key]), set()).update(
                    self.columns[label] for label in labels if label in self.columns
                )
        self.cast, self.reader = np.array(list(pairs), dtype=np.int64).reshape(-1, 2).T
        self.wants = np.zeros((len(pairs), width), dtype=bool)
        at = [(p, column) for p, columns in enumerate(pairs.values()) for column in columns]
        if at:
            self.wants[tuple(np.array(at).T)] = True

    def marginal_casts(self, choice: Ints) -> Floats:
        """Microseconds of casts (n, V) that each label of each row would pay alone, all others as chosen."""
        found = np.zeros_like(self.spent)
        if not len(self.cast):
            return found
        wanted = self.wants[np.arange(len(self.cast)), choice[self.reader]]
        count = np.bincount(self.cast, wanted, len(self.cost))
        price = self.cost[np.arange(len(self.cost)), choice[self.source]]
        alone = np.where(count[self.cast] - wanted < 1, price[self.cast], 0.0)
        np.add.at(found, self.reader, self.wants * alone[:, None])
        paying = (self.source >= 0) & (count > 0)
        np.add.at(found, self.source[paying], self.cost[paying])
        return found


def _summed(shape: tuple[int, int], rows: list[int], columns: list[int], values: list[float]) -> Floats:
    flat = np.array(rows, dtype=np.int64) * shape[1] + np.array(columns, dtype=np.int64)
    found = np.zeros(shape[0] * shape[1])
    np.add.at(found, flat, values)
    return found.reshape(shape)


def _price_range(time: Floats, spent: Floats, column: int) -> tuple[float, float]:
    """The prices between which a label of one row is the cheapest; `time` is infinite where not allowed."""
    low, high = 0.0, math.inf
    for other in np.flatnonzero(np.isfinite(time)).tolist():
        more = spent[other] - spent[column]
        dearer = time[column] - time[other]
        if more > 0:
            low = max(low, dearer / more)
        elif more < 0:
            high = min(high, dearer / more)
        elif dearer > 0:
            return math.inf, 0.0
    return low, high
