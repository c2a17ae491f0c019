"""Cut a model's layers into contiguous stages, exactly: an integer program solved by HiGHS.

    y[l, s] = 1 if layer l lies in a stage up to s          x[l, s] = y[l, s] - y[l, s-1]   layer l lies in stage s
    e[l, s] = y[l, s] - y[l+1, s]                            stage s ends behind layer l

    minimise    T
    subject to  y[l, s] >= y[l+1, s],  y[l, s] <= y[l, s+1],  y[l, last] = 1            contiguous, in order
                sum_l x[l, s] >= 1                                                      no stage is empty
                m (sum_{s on d} sum_l x[l, s] t[l, d] + sends(d)) <= T                  for every device d
                sum_{s on d} (P_s + n_s A_s) <= M[d]        for every device d and every moment n of its schedule

t are seconds of forward and backward, P_s the parameters' bytes of a stage, A_s the bytes it keeps per microbatch
(its activations, what it got and what it sent), n_s how many microbatches it keeps at a moment. A device's sends are
the activations of its stages that go to another device and the gradients that it sends back. Every term is linear in y.
T is the busiest device's time, and of cuts with equal T that with the shortest longest stage is taken where devices
have several; the bubble follows from the schedule (pipeline_timing.py). The program is that of PipeDream's partitioning
(Narayanan et al. 2019, "PipeDream", section 3.1) with memory and unequal devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ..errors import LayerTooLargeError, PipelineMemoryError, StageSplitError, TooFewLayersError
from .pipeline_plan import Cut, LayerCost, PipelineDevice, Sending, kept_bytes

Moments = Sequence[Mapping[int, int]]
"""Live microbatches by stage, at the moments that count of one rank."""

_INFEASIBLE = 2


class _Linear:
    """A linear expression: coefficients by variable, and a constant."""

    def __init__(self) -> None:
        self.terms: defaultdict[int, float] = defaultdict(float)
        self.constant = 0.0

    def add(self, other: _Linear, factor: float) -> None:
        self.constant += factor * other.constant
        for variable, value in other.terms.items():
            self.terms[variable] += factor * value


class _Program:
    def __init__(
        self,
        layers: Sequence[LayerCost],
        devices: Sequence[PipelineDevice],
        placement: Sequence[int],
        sending: Sending,
    ) -> None:
        self.layers, self.devices, self.placement, self.sending = layers, devices, placement, sending
        self.stages = len(placement)
        self.y = len(layers) * (self.stages - 1)
        self.rows: list[tuple[_Linear, float, float]] = []
        self._order()

    def up_to(self, layer: int, stage: int) -> _Linear:
        found = _Linear()
        if stage == self.stages - 1:
            found.constant = 1.0
        elif stage >= 0:
            found.terms[layer * (self.stages - 1) + stage] = 1.0
        return found

    def inside(self, layer: int, stage: int) -> _Linear:
        found = self.up_to(layer, stage)
        found.add(self.up_to(layer, stage - 1), -1.0)
        return found

    def weighted(self, stage: int, weights: Sequence[float]) -> _Linear:
        """The sum of the layers' weights in a stage."""
        found = _Linear()
        for layer, weight in enumerate(weights):
            found.add(self.inside(layer, stage), weight)
        return found

    def border(self, stage: int, weights: Sequence[float]) -> _Linear:
        """The weight of the layer that a stage ends behind; nothing for the last stage."""
        found = _Linear()
        if 0 <= stage < self.stages - 1:
            for layer in range(len(self.layers) - 1):
                found.add(self.up_to(layer, stage), weights[layer])
                found.add(self.up_to(layer + 1, stage), -weights[layer])
        return found

    def seconds(self, device: int, microbatches: int) -> _Linear:
        """Seconds of a device in a step."""
        found = _Linear()
        kind = self.devices[device].kind
        times = [x.seconds[kind].total for x in self.layers]
        sends = [self.sending.seconds(x.boundary_bytes) for x in self.layers]
        for stage, place in enumerate(self.placement):
            if place == device:
                found.add(self.weighted(stage, times), microbatches)
                for border, other in ((stage, stage + 1), (stage - 1, stage - 1)):
                    if 0 <= other < self.stages and self.placement[other] != device:
                        found.add(self.border(border, sends), microbatches)
        return found

    def memory(self, device: int, moment: Mapping[int, int]) -> _Linear:
        found = _Linear()
        kind = self.devices[device].kind
        parameters = [x.parameter_bytes for x in self.layers]
        kept = [x.activation_bytes[kind] for x in self.layers]
        borders = [x.boundary_bytes for x in self.layers]
        for stage, place in enumerate(self.placement):
            if place == device:
                found.add(self.weighted(stage, parameters), 1.0)
                live = moment.get(stage, 0)
                if live:
                    found.add(self.weighted(stage, kept), live)
                    found.add(self.border(stage, borders), live)
                    found.add(self.border(stage - 1, borders), live)
        return found

    def _order(self) -> None:
        for stage in range(self.stages - 1):
            for layer in range(len(self.layers)):
                if layer + 1 < len(self.layers):
                    self.at_least(self.up_to(layer, stage), self.up_to(layer + 1, stage))
                if stage + 1 < self.stages - 1:
                    self.at_least(self.up_to(layer, stage + 1), self.up_to(layer, stage))
        for stage in range(self.stages):
            self.rows.append((self.weighted(stage, [1.0] * len(self.layers)), 1.0, math.inf))

    def at_least(self, larger: _Linear, smaller: _Linear) -> None:
        row = _Linear()
        row.add(larger, 1.0)
        row.add(smaller, -1.0)
        self.rows.append((row, 0.0, math.inf))

    def solve(self, extra: int, cost: Sequence[float]) -> np.ndarray | None:
        """Minimise the cost of `extra` continuous variables behind the y; None where no values are allowed."""
        size = self.y + extra
        data, rows, columns, low, high = [], [], [], [], []
        for i, (row, at_least, at_most) in enumerate(self.rows):
            for variable, value in row.terms.items():
                data.append(value)
                rows.append(i)
                columns.append(variable)
            low.append(at_least - row.constant)
            high.append(at_most - row.constant)
        result = milp(
            np.r_[np.zeros(self.y), cost],
            constraints=LinearConstraint(csr_array((data, (rows, columns)), shape=(len(self.rows), size)), low, high),
            integrality=np.r_[np.ones(self.y), np.zeros(extra)],
            bounds=Bounds(np.zeros(size), np.r_[np.ones(self.y), np.full(extra, np.inf)]),
            options={"mip_rel_gap": 1e-9},
        )
        if result.status == _INFEASIBLE:
            return None
        if result.x is None or result.status != 0:
            raise StageSplitError(f"the cut into stages could not be solved: {result.message}")
        return np.asarray(result.x)

    def ends(self, values: np.ndarray) -> tuple[int, ...]:
        inside = values[: self.y].reshape(len(self.layers), self.stages - 1).round()
        return (*(int(n) for n in inside.sum(0)), len(self.layers))


def cut_stages(
    layers: Sequence[LayerCost],
    devices: Sequence[PipelineDevice],
    placement: Sequence[int],
    microbatches: int,
    moments: Sequence[Moments],
    sending: Sending | None = None,
) -> Cut:
    """The cut with the least time of the busiest device that fits the devices' memory.

    `placement` gives the device of every stage, `moments` the live microbatches of every device (`live_microbatches`).
    Raises TooFewLayersError, LayerTooLargeError for a layer that fits on no device, PipelineMemoryError where no cut
    fits.
    """
    if len(layers) < len(placement):
        raise TooFewLayersError([x.name for x in layers], len(placement), _ties(layers))
    _check_each_fits(layers, devices)
    # Seconds and bytes as shares of the whole, so that the solver's tolerances mean the same in every model.
    scale = microbatches * max(sum(x.seconds[d.kind].total for x in layers) for d in devices) or 1.0
    program = _Program(layers, devices, placement, sending or Sending())
    for device in range(len(devices)):
        row = _Linear()
        row.add(program.seconds(device, microbatches), 1.0 / scale)
        row.terms[program.y] -= 1.0
        program.rows.append((row, -math.inf, 0.0))
    limits = [(device, moment) for device in range(len(devices)) for moment in moments[device]]
    for device, moment in limits:
        room = max(devices[device].memory_bytes, 1)
        row = _Linear()
        row.add(program.memory(device, moment), 1.0 / room)
        program.rows.append((row, -math.inf, 1.0 + 1e-9))
    values = program.solve(1, [1.0])
    if values is None:
        raise _over(program, limits)
    if len(placement) > len(devices):  # of the cuts that are as fast the one with the least longest stage
        program.rows.append((_variable(program.y), -math.inf, float(values[program.y]) * (1 + 1e-7)))
        for stage, place in enumerate(placement):
            row = _variable(program.y + 1, -1.0)
            times = [x.seconds[devices[place].kind].total for x in layers]
            row.add(program.weighted(stage, times), microbatches / scale)
            program.rows.append((row, -math.inf, 0.0))
        even = program.solve(2, [0.0, 1.0])
        values = values if even is None else even
    ends = program.ends(values)
    busiest = max(busy_seconds(layers, devices, placement, microbatches, ends, sending or Sending()))
    return Cut(ends=ends, busiest_s=busiest)


def _variable(index: int, factor: float = 1.0) -> _Linear:
    found = _Linear()
    found.terms[index] = factor
    return found


def busy_seconds(
    layers: Sequence[LayerCost],
    devices: Sequence[PipelineDevice],
    placement: Sequence[int],
    microbatches: int,
    ends: Sequence[int],
    sending: Sending,
) -> list[float]:
    """Seconds of each device in a step of a cut: its stages' work and its sends."""
    found = [0.0] * len(devices)
    for s, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        place = placement[s]
        found[place] += sum(layers[i].seconds[devices[place].kind].total for i in range(start, end))
        if s + 1 < len(ends) and placement[s + 1] != place:
            send = sending.seconds(layers[end - 1].boundary_bytes)
            found[place] += send
            found[placement[s + 1]] += send
    return [microbatches * t for t in found]


def used_bytes(
    layers: Sequence[LayerCost],
    devices: Sequence[PipelineDevice],
    placement: Sequence[int],
    moments: Sequence[Moments],
    ends: Sequence[int],
) -> list[int]:
    """The most bytes that each device holds in a step of a cut."""
    parts = [range(a, b) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
    found = []
    for device, d in enumerate(devices):
        own = [s for s, place in enumerate(placement) if place == device]
        parameters = sum(layers[i].parameter_bytes for s in own for i in parts[s])
        kept = {s: kept_bytes(layers, parts[s], d.kind) for s in own}
        found.append(parameters + max((sum(n * kept[s] for s, n in m.items()) for m in moments[device]), default=0))
    return found


def _check_each_fits(layers: Sequence[LayerCost], devices: Sequence[PipelineDevice]) -> None:
    largest = max(devices, key=lambda d: d.memory_bytes)
    for layer in layers:
        needed = {d: layer.parameter_bytes + layer.activation_bytes[d.kind] for d in devices}
        if all(size > d.memory_bytes for d, size in needed.items()):
            raise LayerTooLargeError(layer.name, min(needed.values()), largest.kind, largest.memory_bytes)


def _ties(layers: Sequence[LayerCost]) -> str:
    """Which layers had to be joined, and why."""
    joined = [x for x in layers if len(x.names) > 1]
    return "; ".join(f"{x.names[0]} to {x.names[-1]} share a parameter and so form one layer" for x in joined)


def _over(program: _Program, limits: Sequence[tuple[int, Mapping[int, int]]]) -> PipelineMemoryError:
    """Which devices the nearest cut overfills, and by how much: the least sum of bytes too many."""
    devices = program.devices
    room = max(d.memory_bytes for d in devices) or 1
    relaxed = _Program(program.layers, devices, program.placement, program.sending)
    for device, moment in limits:
        row = _Linear()
        row.add(relaxed.memory(device, moment), 1.0 / room)
        row.terms[relaxed.y + device] -= 1.0
        relaxed.rows.append((row, -math.inf, devices[device].memory_bytes / room))
    values = relaxed.solve(len(devices), [1.0] * len(devices))
    assert values is not None  # every cut is allowed here
    moments: list[list[Mapping[int, int]]] = [[m for d, m in limits if d == i] for i in range(len(devices))]
    used = used_bytes(program.layers, devices, program.placement, moments, relaxed.ends(values))
    over = {
        f"rank {i} ({d.kind}, {d.memory_bytes:,} bytes)": size - d.memory_bytes
        for i, (d, size) in enumerate(zip(devices, used, strict=True))
        if size > d.memory_bytes
    }
    return PipelineMemoryError(
        over,
        "Take more ranks, smaller microbatches, or a schedule that keeps fewer of them ('1f1b' in place of 'gpipe').",
    )
