"""Mistakes in models, plans, formats, hardware data and calibration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .base import SHOWN, DsmpError, listed, unknown_text


class UnknownFormatError(DsmpError):
    """A numeric format that dsmp does not know."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(unknown_text("numeric format", name, known, "Use one of the known names."))


class UnknownRecipeError(DsmpError):
    """A scaling recipe that dsmp does not know."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(unknown_text("scaling recipe", name, known, "Use one of the known names."))


class RoundingError(DsmpError):
    """A tensor that cannot be rounded or scaled as asked (wrong dtype, wrong number of dimensions)."""


class UnknownHardwareError(DsmpError):
    """A device name that is in no data file."""

    def __init__(self, name: str, near: Iterable[str], count: int) -> None:
        hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if (near := list(near)) else ""
        super().__init__(
            f"unknown hardware {name!r}.{hint} `dsmp hardware list` shows all {count} devices; use 'auto' for the "
            "running device, or describe yours in a file for --hardware-file."
        )


class NodeIsNoDeviceError(UnknownHardwareError):
    """The name of a node (machine of several devices) where a device is wanted."""

    def __init__(self, name: str, count: int, device: str) -> None:
        DsmpError.__init__(self, f"{name!r} is a node of {count} {device}, not a device. Name the device: {device}.")


class UnknownNodeError(DsmpError):
    """A node (machine of several devices) that is in no data file."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(unknown_text("node", name, known, "Use one of the known names."))


class UndetectedHardwareError(DsmpError):
    """A running device of which nothing is known, so that 'auto' and 'cpu' cannot stand for it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the running device is not known: {what}. Name the nearest device of `dsmp hardware list` instead of "
            "'auto' or 'cpu', or describe yours in a file for --hardware-file."
        )


class AmbiguousHardwareError(DsmpError):
    """A device name that fits several devices."""

    def __init__(self, name: str, candidates: Iterable[str]) -> None:
        found = sorted(candidates)
        more = f" and {len(found) - SHOWN} more (`dsmp hardware list`)" if len(found) > SHOWN else ""
        super().__init__(f"hardware {name!r} is ambiguous. Name one of: {', '.join(found[:SHOWN])}{more}.")


class ClusterError(DsmpError):
    """A mesh whose links are not known: no node of the device, several, or none that is joined to others."""


class HardwareDataError(DsmpError):
    """A hardware data file that breaks the schema or contradicts itself."""


class UnsupportedFormatError(DsmpError):
    """A format that a device cannot do, with the verdict's reason."""


class UnknownOptionError(DsmpError):
    """A key in torch.compile's options that dsmp does not have."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(unknown_text("option", name, known, "Pass options={...} with known keys only."))


class InvalidOptionError(DsmpError):
    """A known option with a value it cannot take."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"option {name!r} got {value!r}; allowed: {allowed}.")


class RuleError(DsmpError):
    """A user rule (glob over node keys -> format) that cannot be applied."""


class PlanSchemaError(DsmpError):
    """A plan file that is no valid plan: names the field and what it may hold."""


class PlanFileError(DsmpError):
    """A place where a plan cannot be written."""


class PlanMismatchError(DsmpError):
    """A plan that does not fit the model it is applied to (raised under strict only)."""


class PlanHardwareError(DsmpError):
    """A plan that asks a device for what it cannot do, with the verdict's text."""


class ModelSpecError(DsmpError):
    """A MODEL argument that names nothing loadable."""


class InputSpecError(DsmpError):
    """An input specification such as float32[8,3,224,224] that cannot be read or does not fit the model."""


class CaptureError(DsmpError):
    """A model whose graph could not be captured."""


class VerificationError(DsmpError):
    """A graph that breaks an invariant between two passes: a defect of dsmp, not of the user."""


class NotCalibratedError(DsmpError):
    """A question that only measurements answer, put to a plan that was made without calibration."""

    def __init__(self, source: str) -> None:
        super().__init__(
            f"the plan for {source} was made without calibration: it knows no drift and no alternatives. Make it with "
            "dsmp.plan(..., calibration=batches, budget=0.005) or `dsmp plan MODEL --calibrate FILE.py:batches`."
        )


class CalibrationError(DsmpError):
    """Calibration batches that the model cannot be measured with: none at all, of the wrong form, with NaN."""


class LossError(DsmpError):
    """A loss function that fails or returns something other than one finite number."""


class BudgetError(DsmpError):
    """A budget that cannot be read, or that no choice of formats meets."""


class ScoresError(DsmpError):
    """A file of sensitivity scores that cannot be read or was made for another model."""


class UnknownKeyError(DsmpError):
    """A key, glob or module path that no node of a plan has."""


class AmbiguousKeyError(DsmpError):
    """A glob, prefix or module path that several nodes have where one is wanted."""


class MissingPackageError(DsmpError):
    """An optional package that a command needs and that is not installed."""

    def __init__(self, package: str, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {package}, which is not installed. Run pip install {package} (the extra [{extra}] of dsmp)."
        )


class NotDifferentiableError(DsmpError):
    """A call in a captured graph of which no derivative can be formed."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"sensitivities cannot be measured through {what}. {remedy}")


class UnknownTargetError(DsmpError):
    """An instruction set for which there are no kernels."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(unknown_text("target", name, known, "Use one of the known names, or a device that has one."))


class MissingToolError(DsmpError):
    """A tool of the triton package that reads machine code is not there, or does not run here."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} of the triton package cannot be run. Reinstall triton from its wheel for Linux.")


class KernelUnavailableError(DsmpError):
    """An implementation that was asked for by name and cannot serve the node."""


class ReleaseError(DsmpError):
    """A model or plan whose weights cannot be released, or a released model that is moved where it cannot be."""


class ReleasedTrainingError(DsmpError):
    """A model that is to be trained and whose weights were released."""

    def __init__(self) -> None:
        super().__init__(
            "this model's weights were released: only narrow, packed copies are left, which have no gradients. Train "
            "the model before dsmp.release_weights, or a copy of it; call released models under torch.no_grad()."
        )


class SilentFallbackError(DsmpError):
    """Under strict, a node that was planned narrow would run wide, or simulated on the device that it was planned
    for."""


class TieError(DsmpError):
    """Nodes that must take the same format but share none.

    `nodes` are their numbers in the problem, `names` their keys where the problem knows them.
    """

    def __init__(self, nodes: Sequence[int], names: Sequence[str] = ()) -> None:
        self.nodes, self.names = tuple(nodes), tuple(names)
        super().__init__(
            f"{len(self.nodes)} tied nodes ({listed(self.nodes, self.names)}) have no format in common. Take back the "
            "rules that ask for different formats of them, or untie them (tied=False, on the command line --untied)."
        )


class UnreachableBudgetError(BudgetError):
    """A budget that no choice of formats meets: the least that can be reached, and the nodes that stand in the way.

    `nodes` are the fewest nodes without which the budget could be met, `names` their keys where the problem knows them.
    """

    def __init__(
        self, name: str, budget: float, least: float, nodes: Sequence[int], given: str = "", names: Sequence[str] = ()
    ) -> None:
        self.name, self.budget, self.least, self.nodes, self.names = name, budget, least, tuple(nodes), tuple(names)
        unit = " bytes" if name == "memory" else ""
        super().__init__(
            f"the {name} budget of {budget:,.4g}{unit} cannot be met{given}: the least that can be reached is "
            f"{least:,.4g}{unit}. What binds: {listed(self.nodes, self.names)}. Raise the budget, or take back the "
            "rules and limits on these nodes."
        )
