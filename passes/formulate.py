"""From captured graphs, a device and scores to the program that `select_optimal` solves.

The program holds, for every keyed node that computes something, its ways (candidates.py) with time, bytes, drift and
what the backward pass keeps of it; the copies of values that GEMMs share (operand_copies.py); which nodes must agree
(ties.py); and which nodes each node reads.

A value of another operator that only GEMMs read may be stored narrow at no drift, because its readers round it
themselves. That holds for readers that round it at least as much, so a reader that wants it wider, or in the other
16-bit format, is charged `_PROHIBITIVE` times the time of all nodes involved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ..hardware_db.capability import Device
from .candidates import DriftOf, NodeWays, ways_of
from .graph import operands
from .keys import key_of
from .operand_copies import OperandCopy, operand_copies
from .program import Candidate, Copy, Cost, Program
from .program_costs import Bits, ProgramCosts, Roofline, saved_bytes
from .scores import Scores
from .ties import ties_of

Graph = tuple[fx.GraphModule, frozenset[fx.Node]]
CAST_SHARE = 0.30
"""Share of the gain of uniform 8 bits that its casts eat under cost "bits"."""

_PROHIBITIVE = 10.0


def formulate(
    graphs: Sequence[Graph],
    device: Device,
    scores: Scores | DriftOf | None,
    *,
    cost: Cost = "roofline",
    tied: bool = True,
    cast_share: float = CAST_SHARE,
) -> Program:
    """The program of a model on a device.

    `graphs` are keyed graphs with the placeholders that hold parameters; a key that stands in several of them is taken
    from the first. `scores` are measured scores, or a function that gives the drift of (key, label of an arithmetic or
    of a stored result, node); with None drifts are unknown and nothing is barred for want of a score. `cost` chooses
    the cost model (program_costs.py), `cast_share` is for "bits" only. Without `tied` every node chooses for itself.
    """
    taken: set[str] = set()
    nodes: list[list[NodeWays]] = []
    for gm, parameters in graphs:
        found = [n for n in ways_of(gm, device, parameters, scores) if str(n.key) not in taken]
        taken |= {str(n.key) for n in found}
        nodes.append(found)
    rooflines = [Roofline(found, device, parameters) for found, (_, parameters) in zip(nodes, graphs, strict=True)]
    copies = [operand_copies(found, parameters) for found, (_, parameters) in zip(nodes, graphs, strict=True)]
    everything = [n for found in nodes for n in found]
    costs: Sequence[ProgramCosts] = rooflines
    if cost == "bits":
        costs = [Bits(everything, [c for found in copies for c in found], cast_share)] * len(nodes)
    candidates = {
        str(n.key): _candidates(n, model, roofline)
        for found, model, roofline in zip(nodes, costs, rooflines, strict=True)
        for n in found
    }
    by_key = {str(n.key): n for n in everything}
    priced = [_priced(c, model, by_key, candidates) for found, model in zip(copies, costs, strict=True) for c in found]
    return Program(
        cost=cost,
        drift=scores.drift if isinstance(scores, Scores) else "l2",
        loss=scores.loss if isinstance(scores, Scores) else None,
        candidates=candidates,
        copies=[c for c in priced if any(c.time_us.values())],
        ties=ties_of(everything, frozenset().union(*(p for _, p in graphs))) if tied else [],
        reads=_reads(gm for gm, _ in graphs),
    )


def _candidates(node: NodeWays, model: ProgramCosts, roofline: Roofline) -> list[Candidate]:
    saved = {output: saved_bytes(node.node, output) for output in dict.fromkeys(w.output for w in node.ways)}
    return [
        Candidate(
            label=way.label,
            compute=way.compute,
            recipe=way.recipe,
            accumulate=way.accumulate,
            output=way.output,
            bytes=roofline.node_bytes(node, way),
            time_us=model.node_time(node, way),
            drift=way.drift,
            measured=way.measured,
            static_range=way.static_range,
            saved_bytes=saved[way.output],
            blocked=way.blocked,
        )
        for way in node.ways
    ]


def _priced(
    copy: OperandCopy,
    model: ProgramCosts,
    nodes: Mapping[str, NodeWays],
    candidates: Mapping[str, Sequence[Candidate]],
) -> Copy:
    """A copy with its time by the labels of the node that computes the value; labels for which it is free left out."""
    source = nodes.get(str(key_of(copy.source)))
    barred: list[str] = []
    if source is None:
        value, times = copy.source.name, {"": model.copy_time(copy, None)}
    else:
        value = str(source.key)
        by_output = {w.output: model.copy_time(copy, w.output) for w in source.allowed}
        if source.rounded_by_readers and not copy.quantised:
            involved = candidates[value][0].time_us + sum(candidates[reader][0].time_us for reader in copy.readers)
            for output in by_output:
                if output not in (source.traced, copy.format):
                    by_output[output] = _PROHIBITIVE * involved
                    barred += [w.label for w in source.allowed if w.output == output]
        times = {w.label: by_output[w.output] for w in source.allowed if by_output[w.output]}
    return Copy(value=value, format=copy.format, recipe=copy.recipe, time_us=times, readers=copy.readers, barred=barred)


def _reads(graphs: Iterable[fx.GraphModule]) -> dict[str, list[str]]:
    """The keyed nodes that each keyed node reads, through tuple accesses and integer arithmetic, in argument order."""
    found: dict[str, list[str]] = {}
    for gm in graphs:
        above: dict[fx.Node, dict[str, None]] = {}
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            sources: dict[str, None] = {}
            for operand in operands(node):
                key = key_of(operand)
                sources |= {str(key): None} if key is not None else above.get(operand, {})
            key = key_of(node)
            if key is None:
                above[node] = sources
            else:
                found.setdefault(str(key), list(sources))
    return found
