"""Mistakes in meshes, wire formats, ranks, experts and pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .base import NODES_SHOWN, DsmpError, listed, unknown_text


class UnknownWireFormatError(DsmpError):
    """A format for collectives that dsmp does not know."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            unknown_text("wire format", name, known, "Use one of the known names, or 'int8:64', 'topk:0.05'.")
        )


class InvalidWireFormatError(DsmpError):
    """A known format for collectives with a block or a share that it cannot have."""

    def __init__(self, text: object, allowed: str) -> None:
        super().__init__(f"wire format {text!r} is not possible; allowed: {allowed}.")


class FeedbackError(DsmpError):
    """A module or group for which error feedback cannot be set up."""


class ShardingPlanError(DsmpError):
    """A sharding plan that cannot be read or does not fit the mesh or the model."""


class IndivisibleError(ShardingPlanError):
    """Sizes (heads, widths, vocabulary, batch) that a mesh dimension does not divide."""

    def __init__(self, reasons: Sequence[str]) -> None:
        listed = "; ".join(dict.fromkeys(reasons))
        super().__init__(
            f"the model cannot be sharded so: {listed}. Replicate it there, or take a mesh that divides it."
        )


class UnshardableError(DsmpError):
    """An operation that has no sharded form."""


class RanksDisagreeError(DsmpError):
    """Ranks that hold different sharding plans or graphs: their collectives would wait for each other for ever."""


class ExpertsError(DsmpError):
    """A model, a module of experts or a mesh for which experts cannot be divided among ranks."""


class EmptyStateError(DsmpError):
    """A sharded module that is called while its parameters or buffers have no values yet."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"on the meta device, without values: {listed(range(len(names)), names)}. Call "
            "to_empty(device=...) and load a checkpoint (torch.distributed.checkpoint.load into state_dict()) first."
        )


class RankLostError(DsmpError):
    """A rank that others communicate with has died, stopped or left, seen from a collective that cannot end.

    `dims` are the mesh dimensions that the collective may run along: one where it is known.
    """

    def __init__(self, dims: Mapping[str, Sequence[int]], half: str, reason: str) -> None:
        self.dims = tuple(dims)
        where = " or ".join(f"{name!r} (ranks {', '.join(map(str, ranks))})" for name, ranks in dims.items())
        super().__init__(
            f"a rank was lost: in the {half} pass a collective along mesh dimension {where} did not end: {reason}. "
            "Look for the first error in the logs of the other ranks, then start all ranks again from the last "
            "checkpoint: these process groups cannot be used any more. For ranks that are slow, not dead, give "
            "init_process_group a longer timeout."
        )


class GradientOwnerError(DsmpError):
    """Gradients that two owners would average or encode."""

    def __init__(self, owner: str, remedy: str) -> None:
        super().__init__(f"gradients have one owner, and {owner}. {remedy}.")


class ResidualsError(DsmpError):
    """Saved residuals of error feedback that are not those of this rank and module."""

    def __init__(self, what: str, rank: int, ranks: int) -> None:
        super().__init__(
            f"residuals that do not fit rank {rank} of {ranks}: {what}. Load what this rank saved, with the same "
            "module, wire format and number of ranks, or start without residuals."
        )


class FsdpPolicyError(DsmpError):
    """A format that `fully_shard` cannot gather parameters or reduce gradients in."""

    def __init__(self, name: str, value: object, possible: Iterable[str]) -> None:
        super().__init__(
            f"fully_shard cannot {name} in {value!r}; possible: {', '.join(possible)}. Other formats need collectives "
            "in the graph: dsmp.parallelize(..., wire=...), or the backend's option 'wire' for SimpleFSDP-style code."
        )


class NoEffectError(DsmpError):
    """Under strict, an option or a plan that reaches nothing of what was compiled."""


class PipelineError(DsmpError):
    """A model, batch or plan that cannot be run as a pipeline of stages."""


class UnknownScheduleError(PipelineError):
    """A pipeline schedule that dsmp does not know."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(unknown_text("schedule", name, known, "Use one of the known names."))


class ScheduleError(PipelineError):
    """A known schedule that these numbers of stages, ranks or microbatches do not suit, or that cannot run compiled."""


class TooFewLayersError(PipelineError):
    """A model with fewer layers to cut between than there are stages."""

    def __init__(self, layers: Sequence[str], stages: int, why: str = "") -> None:
        super().__init__(
            f"the model has {len(layers)} layers to cut between ({', '.join(layers[:NODES_SHOWN])}), and {stages} "
            f"stages are asked for{f': {why}' if why else ''}. Ask for fewer stages, or take a deeper model."
        )


class LayerTooLargeError(PipelineError):
    """A layer that no device of a pipeline has the memory for."""

    def __init__(self, layer: str, needed: int, largest: str, memory: int) -> None:
        super().__init__(
            f"layer {layer!r} needs {needed:,} bytes (parameters, gradients, optimizer state and the activations of "
            f"one microbatch), and the largest device, {largest}, has {memory:,}. Take smaller microbatches or a "
            "device with more memory, or shard the layer first (dsmp.parallelize)."
        )


class PipelineMemoryError(PipelineError):
    """Layers that fit one by one, but in no cut into stages."""

    def __init__(self, over: Mapping[str, int], remedy: str) -> None:
        listed = "; ".join(f"{device} by {amount:,} bytes" for device, amount in over.items())
        super().__init__(
            f"no cut into stages fits the devices' memory. In the nearest one too much lies on {listed}. {remedy}"
        )


class StageSplitError(PipelineError):
    """A split into stages that was asked for by name and cannot be made, or a plan for another model."""
