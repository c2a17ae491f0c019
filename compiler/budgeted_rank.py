"""Formats of nodes and of collectives together, within one budget: the program of a rank's graph.

What a collective loses counts as if its value had been stored so: each encoding adds noise in proportion to the value's
power (an all-reduce encodes twice, everything else once; the parts of a sum add up to about the power of the sum), and
what noise on a value does to the model was measured when the value was scored for being stored in bf16. Blocks that the
graph holds once are chosen for once: their times are multiplied, their drifts added up.

The time of collectives that run beside the computation counts where together they take longer than their pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..codegen.collective_nodes import Collective
from ..codegen.sending import why_as_written
from ..codegen.wire_noise import relative_noise
from ..hardware_db.schema import natural_accumulator
from ..passes.cost import format_of
from ..passes.graph import is_backward, node_op, root
from ..passes.keys import NodeKey, key_of
from ..passes.labels import stored_label
from ..passes.mesh_plan import CollectiveDecision, StepTime
from ..passes.program import Candidate, Copy, Program
from ..passes.scores import NodeScores, Score, Scores
from ..passes.wire_formats import WireFormat, parse_wire
from .block_folding import Repeats
from .collective_decisions import CollectiveDecider, is_worth_encoding

OFFERED = ("bf16", "int8", "int4")
"""Wire formats that are weighed; blocks of int8 lose less than fp8 in as many bytes."""

_REFERENCE = "bf16"
_HIDDEN = 1e-3  # of the time of a collective that computation hides: enough to prefer fewer bytes


def folded_scores(scores: Scores, repeats: Repeats) -> Scores:
    """Scores of a model whose repeated blocks stand once: what choosing alike for all of them costs together.

    What belongs to no module is left out: its numbers count all blocks.
    """
    if not repeats.blocks:
        return scores
    nodes: dict[str, NodeScores] = {}
    for text, own in scores.nodes.items():
        key = NodeKey.parse(text)
        if not key.fqn:
            continue
        blocks = [scores.nodes.get(str(NodeKey(p, key.phase, key.op, key.ordinal))) for p in repeats.paths(key.fqn)]
        known = [b for b in blocks if b is not None]
        if len(known) < len(blocks):
            continue
        labels = {
            name: Score(
                drift=sum(b.labels[name].drift for b in known), measured=all(b.labels[name].measured for b in known)
            )
            for name in own.labels
            if all(name in b.labels for b in known)
        }
        nodes[text] = NodeScores(labels=labels, ranges=own.ranges)
    return scores.model_copy(update={"nodes": nodes})


def repeated(program: Program, repeats: Repeats) -> Program:
    """A program with the times and bytes of repeated blocks counted as often as these occur."""

    def count(key: str) -> int:
        return repeats.count(NodeKey.parse(key).fqn)

    candidates = {
        key: [
            c.model_copy(update={"time_us": count(key) * c.time_us, "saved_bytes": count(key) * c.saved_bytes})
            for c in found
        ]
        for key, found in program.candidates.items()
    }
    copies = [_repeated_copy(c, max(map(count, c.readers), default=1)) for c in program.copies]
    return program.model_copy(update={"candidates": candidates, "copies": copies})


def _repeated_copy(found: Copy, times: int) -> Copy:
    return found.model_copy(update={"time_us": {name: times * us for name, us in found.time_us.items()}})


def with_collectives(program: Program, decider: CollectiveDecider, scores: Scores, step: StepTime) -> Program:
    """The program with the wire formats of collectives as candidates. `decider` knows no decisions yet, so that by
    default everything is sent as traced; `step` has the time of each pass; scores are folded."""
    rank, passes = decider.rank, {False: step.forward_us, True: step.backward_us}
    hidden = {False: 0.0, True: 0.0}
    decided = decider.decide()
    for c, d in decided:
        hidden[is_backward(c.start)] += d.hidden * d.time_us * rank.occurrences(c.start)
    candidates = dict(program.candidates)
    for c, d in decided:
        covered = d.hidden and hidden[is_backward(c.start)] <= passes[is_backward(c.start)]
        weight = rank.occurrences(c.start) * (_HIDDEN if covered else 1.0)
        candidates[d.key] = _candidates(c, d, decider, scores, weight)
    return program.model_copy(update={"candidates": candidates})


def _candidates(
    c: Collective, default: CollectiveDecision, decider: CollectiveDecider, scores: Scores, weight: float
) -> list[Candidate]:
    traced = format_of(c.value.dtype) or "fp32"
    encodings = 2 if c.kind == "all_reduce" else 1
    stored = _stored_drift(root(c.source), scores)
    found = {default.wire: (default.time_us, 0.0)}
    asked = decider.rank.dim(c) in decider.asked
    if stored is not None and is_worth_encoding(c) and not asked and c.kind != "all_to_all":
        for name in OFFERED:
            wire = parse_wire(name)
            if not why_as_written(c, wire):
                noise = encodings * relative_noise(wire) / relative_noise(parse_wire(_REFERENCE))
                found[name] = (decider.time_us(c, wire), noise * stored)
    return [
        Candidate(
            label=wire, compute=traced, accumulate=natural_accumulator(traced), output=traced,
            time_us=weight * time_us, drift=drift, measured=False,
        )
        for wire, (time_us, drift) in found.items()
    ]  # fmt: skip


def _stored_drift(node: fx.Node, scores: Scores) -> float | None:
    """The drift of storing a value in the reference format. Of a sum that belongs to no module (gradients that several
    readers send back) it is that of its terms together, as far as these are independent."""
    score = scores.of(str(key_of(node)), stored_label(_REFERENCE))
    if score is not None:
        return score.drift
    if node_op(node) != "aten.add":
        return None
    terms = [_stored_drift(root(n), scores) for n in node.all_input_nodes]
    known = [t for t in terms if t is not None]
    return sum(known) if len(known) == len(terms) else None


def paid_wires(decider: CollectiveDecider, chosen: Mapping[str, Candidate]) -> dict[str, WireFormat]:
    """The formats that a solved program takes for collectives in place of sending as traced, by key."""
    found = {d.key: chosen[d.key].label for _, d in decider.decide()}
    return {key: parse_wire(wire) for key, wire in found.items() if wire in OFFERED}
