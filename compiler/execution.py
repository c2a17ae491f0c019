"""What running a plan takes: decisions applied to a graph, and what that costs in casts and saved activations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..codegen.audit import Audit, Entry, Ran
from ..codegen.collectives import rewrite_collectives
from ..codegen.lower import merge_backward, protect_mutated_inputs
from ..codegen.lower_products import Lowering, lower_products
from ..codegen.sending import Sent, plan_sending, wires_by_key
from ..hardware_db.capability import Device
from ..passes.cast_motion import operand_storage
from ..passes.cost import format_of
from ..passes.graph import float_dtype
from ..passes.keys import key_of
from ..passes.legalize import LegalizeReport, legalize
from ..passes.plan import Decision
from ..passes.plan_fields import GEMM_CLASSES, Reason
from ..passes.verify import snapshot, verify
from ..passes.wire_formats import WireFormat
from .capture import Capture
from .saved_activations import copy_graph, lazily, saved_activation_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What running a plan takes: casts inserted in all graphs; bytes saved for the backward pass with the plan and as
    traced (None without a backward pass)."""

    casts: int
    saved_bytes: int | None
    saved_bytes_fp32: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What became of a graph: casts and keys by how they were legalised, and what runs for every planned node of it
    (None where nothing was lowered)."""

    report: LegalizeReport
    audit: Audit | None


def apply_decisions(
    gm: fx.GraphModule,
    decisions: Mapping[str, Decision],
    *,
    storage: str,
    same_device: bool,
    parameters: frozenset[fx.Node],
    lowering: Lowering | None = None,
    wires: Mapping[str, WireFormat] | None = None,
) -> Applied:
    """Legalise a keyed graph in place and, with `lowering`, put kernels in and send the tensors of collectives in the
    formats of `wires` (globs over keys), with the invariants checked after each pass. Raises KernelUnavailableError."""
    before = snapshot(gm)
    here = {str(k) for n in gm.graph.nodes if (k := key_of(n)) is not None}
    decided = [d.key for k, d in decisions.items() if k in here and d.reason.code != "view"]
    report = legalize(gm, decisions, same_device=same_device, storage=storage, parameters=parameters)
    verify(gm, before, decided)
    audit = None
    if lowering is not None:
        products = lower_products(gm, decisions, lowering, frozenset(report.simulated), parameters)
        sent = rewrite_collectives(gm, wires_by_key(gm, wires)) if wires else []
        collectives = [_sent(decisions[s.key], s) for s in sent if s.key in decisions]
        audit = _audit(gm, decisions, here, [*products, *collectives])
    merge_backward(gm)
    protect_mutated_inputs(gm)
    verify(gm, before, (), ())
    return Applied(report=report, audit=audit)


def _audit(
    gm: fx.GraphModule, decisions: Mapping[str, Decision], here: Collection[str], entries: Iterable[Entry]
) -> Audit:
    """Entries for every decision whose node the graph had, in the plan's order."""
    known = {e.key: e for e in entries}
    return Audit(tuple(known.get(d.key) or _other(d) for key, d in decisions.items() if key in here))


def _sent(decision: Decision, sent: Sent) -> Entry:
    """The entry of a collective for which a wire format was asked."""
    if sent.bucket is None:
        return Entry.of(decision, "torch", Ran.AS_TRACED, sent.reason)
    return Entry.of(decision, f"wire_{sent.wire}", Ran.NATIVE, f"{sent.described}, bucket {sent.bucket}")


def _other(decision: Decision) -> Entry:
    """The entry of a node that is no product: it computes as traced, and may be stored narrower."""
    if decision.op == "view" or decision.reason.code == "view":
        return Entry.of(decision, "view", Ran.AS_TRACED, "moves no numbers")
    if decision.output != decision.traced:
        return Entry.of(decision, "torch", Ran.NATIVE, f"computes in {decision.compute}, stored as {decision.output}")
    return Entry.of(decision, "torch", Ran.AS_TRACED, "planned as the model was written")


def with_wires(gm: fx.GraphModule, decisions: Sequence[Decision], wires: Mapping[str, WireFormat]) -> list[Decision]:
    """The decisions with what becomes of collectives in these formats (globs over keys) as their reasons."""
    if not wires:
        return list(decisions)
    sent = {s.key: s for s in plan_sending(gm, wires_by_key(gm, wires)).values()}
    return [d.model_copy(update={"reason": _wire_reason(sent[d.key])}) if d.key in sent else d for d in decisions]


def _wire_reason(sent: Sent) -> Reason:
    return Reason(code="wire", text=f"stays as written: {sent.reason}" if sent.reason else sent.described)


def predict_execution(capture: Capture, decisions: Mapping[str, Decision], device: Device) -> Execution:
    """Apply decisions to copies of the captured graphs: casts, and bytes saved as the partitioner would choose.

    Casts are those of the legaliser. Bytes are those of the planned device, where a GEMM reads what is stored:
    roundings that only simulation needs would be recomputed in the backward pass, and the tensors before them with
    them.
    """
    casts = planned = traced = 0
    for graph in capture:
        with lazily():
            copy, parameters = copy_graph(graph.gm, graph.parameters)
            applied = apply_decisions(copy, decisions, storage=device.storage, same_device=True, parameters=parameters)
        casts += applied.report.casts
        if graph.joint:
            stored = as_stored(graph.gm, decisions, device.storage)

            def change(
                gm: fx.GraphModule, parameters: frozenset[fx.Node], stored: Mapping[str, Decision] = stored
            ) -> None:
                legalize(gm, stored, same_device=True, storage=device.storage, parameters=parameters)

            traced += saved_activation_bytes(graph.gm, graph.parameters)
            planned += saved_activation_bytes(graph.gm, graph.parameters, change)
    if not capture.joint:
        return Execution(casts=casts, saved_bytes=None, saved_bytes_fp32=None)
    return Execution(casts=casts, saved_bytes=planned, saved_bytes_fp32=traced)


def as_stored(gm: fx.GraphModule, decisions: Mapping[str, Decision], storage: str) -> dict[str, Decision]:
    """The decisions with each GEMM computing in the format that its operands are stored in."""
    found = {}
    for node in gm.graph.nodes:
        decision = decisions.get(str(key_of(node)))
        if decision is None:
            continue
        dtype = float_dtype(node) if decision.op in GEMM_CLASSES else None
        if dtype is not None:
            held = operand_storage(storage, format_of(dtype) or "fp32", decision.compute)
            decision = decision.model_copy(update={"compute": held, "recipe": "none"})
        found[decision.key] = decision
    return found
