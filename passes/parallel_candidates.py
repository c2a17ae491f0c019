"""A sharding plan found on the graph: which linears to cut by column and by row, what to cut by data.

Linears that are divided by column and the linears by row that their outputs end in form a group, a connected part of a
bipartite graph: query, key and value with the projection that follows attention, gate and up with down. A group costs
one sum over the ranks each way and is taken when nothing on the way needs the whole value and the mesh divides all that
cannot be cut. Token embeddings and heads before a loss are divided by vocabulary. All else is replicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput

from ..errors import IndivisibleError, InvalidOptionError, ShardingPlanError
from ..hardware_db.capability import Verdict
from .graph import is_backward, node_op, output_node, placeholders, root, shape_of, value_of
from .shard_paths import Linear, Path, linears, parameter_of, path_of
from .sharding import ShardingPlan, ShardingRule
from .strategies import divides

DATA_DIMS = ("dp", "data", "fsdp")
TENSOR_DIMS = ("tp", "tensor", "model")
EXPERT_DIMS = ("ep", "expert")
BATCH_DIMS = (*DATA_DIMS, *EXPERT_DIMS)
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan, and a verdict for every group of parameters that could be divided over the tensor-parallel dimension."""

    plan: ShardingPlan
    verdicts: tuple[Verdict, ...]


def propose(
    gm: fx.GraphModule,
    mesh: Mapping[str, int],
    names: Mapping[str, str],
    *,
    zero: int = 0,
    sequence: bool = False,
) -> Candidate:
    """A plan for a joint graph with descriptors, a mesh (ranks by dimension name) and names of its plain inputs.

    A mesh dimension called dp, data or fsdp divides the batch, one called tp, tensor or model the model, one called ep
    or expert the batch and the experts, which without such a dimension lie divided over the data-parallel one. `zero`
    is the ZeRO stage of the dimensions that divide the batch, `sequence` divides sequences between tensor-parallel
    regions.

    Raises ShardingPlanError for other mesh dimensions, for two that divide the batch, and for a model of which nothing
    can be divided over the tensor-parallel ranks, IndivisibleError for a batch that cannot be divided,
    InvalidOptionError for an unknown stage, and for a stage or divided sequences where no mesh dimension takes it.
    """
    if isinstance(zero, bool) or zero not in ZERO_STAGES:
        raise InvalidOptionError("zero", zero, "0, 1, 2 or 3")
    kinds = (DATA_DIMS, EXPERT_DIMS, TENSOR_DIMS)
    if any(sum(d in kind for d in mesh) > 1 for kind in kinds) or any(all(d not in k for k in kinds) for d in mesh):
        allowed = ", one ".join(" or ".join(kind) for kind in kinds)
        raise ShardingPlanError(
            f"no plan can be found for mesh dimensions {', '.join(mesh)}: name at most one {allowed}, or give a "
            "ShardingPlan. Stages of a pipeline are planned by dsmp.pipeline."
        )
    data = [d for d in mesh if d in BATCH_DIMS]
    if len(data) > 1:
        raise ShardingPlanError(
            f"mesh dimensions {' and '.join(data)} would both divide the batch; name one of them: over "
            f"{data[0]!r} alone experts are divided, too."
        )
    tensor = [d for d in mesh if d in TENSOR_DIMS]
    if zero and not data:
        allowed = f"0 on a mesh of {', '.join(mesh)}: stages are those of {_either(BATCH_DIMS)}"
        raise InvalidOptionError("zero", zero, allowed)
    if sequence and not tensor:
        allowed = f"False on a mesh of {', '.join(mesh)}: sequences are divided over {_either(TENSOR_DIMS)}"
        raise InvalidOptionError("sequence", sequence, allowed)
    placed: dict[str, dict[str, str]] = {}
    verdicts: list[Verdict] = []
    for dim in tensor:
        verdicts += _divide_model(gm, dim, mesh[dim], placed)
        if not placed and mesh[dim] > 1:
            reasons = "; ".join(v.reason for v in verdicts) or "it has no linear whose outputs end in another"
            raise ShardingPlanError(
                f"nothing of the model can be divided over the {mesh[dim]} ranks of mesh dimension {dim!r}: {reasons}. "
                "Take a data-parallel dimension, or give a ShardingPlan."
            )
    experts, refused = _divide_experts(gm, mesh, placed)
    verdicts += refused
    gradients = {dim: _zero(gm, dim, mesh[dim], zero, placed, experts) for dim in data}
    inputs, outputs = _divide_batch(gm, names, {d: mesh[d] for d in data})
    rules = [
        ShardingRule(pattern=_exactly(n), placements=p, gradients={d: g[n] for d, g in gradients.items() if n in g})
        for n, p in _by_name(gm, placed, gradients).items()
    ]
    plan = ShardingPlan(
        mesh=dict(mesh),
        parameters=tuple(rules),
        inputs=inputs,
        outputs=outputs,
        gathered=tuple(data),
        local=tuple(map(_exactly, experts)),
        sequence=tuple(tensor) if sequence else (),
    )
    return Candidate(plan=plan, verdicts=tuple(verdicts))


def _either(names: Sequence[str]) -> str:
    return f"a dimension {', '.join(names[:-1])} or {names[-1]}"


def _by_name(
    gm: fx.GraphModule, placed: Mapping[str, dict[str, str]], gradients: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    names = [n for n in _parameters(gm) if n in placed or any(n in g for g in gradients.values())]
    return {n: placed.get(n, {}) for n in names}


def _exactly(name: str) -> str:
    """A glob that matches one name only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _parameters(gm: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    return {n: shape_of(p.meta["val"]) for p in placeholders(gm) if (n := parameter_of(p)) is not None}


def _divide_model(gm: fx.GraphModule, dim: str, ranks: int, placed: dict[str, dict[str, str]]) -> list[Verdict]:
    """Divide groups of linears, embeddings and heads over a mesh dimension, into `placed`."""
    known = linears(gm)
    paths = {n: path_of(linear, known) for n, linear in known.items()}
    verdicts: list[Verdict] = []
    refused: list[tuple[list[Linear], Verdict]] = []
    groups: Any = nx.Graph()
    groups.add_edges_from((("column", n), ("row", end)) for n, p in paths.items() for end in p.ends)
    groups.add_nodes_from(("column", n) for n, p in paths.items() if p.reduced or p.blocked)
    taken: set[fx.Node] = set()
    for group in nx.connected_components(groups):
        columns = [known[n] for role, n in group if role == "column"]
        rows = [known[n] for role, n in group if role == "row"]
        wanted = _placements(columns, rows, [paths[c.node] for c in columns])
        verdict = _judge(columns, rows, [paths[c.node] for c in columns], dim, ranks)
        clash = _clash(wanted, {n: p[dim] for n, p in placed.items() if dim in p})
        if verdict and clash is not None:
            verdict = clash
        if not verdict or taken & {x.node for x in (*columns, *rows)}:
            refused.append((columns, verdict))
            continue
        verdicts.append(verdict)
        taken |= {x.node for x in (*columns, *rows)}
        for name, place in wanted:
            placed.setdefault(name, {})[dim] = place
    # what goes into the residual stream is no column, but is divided by row in a group of its own
    verdicts += [v for columns, v in refused if any(c.node not in taken for c in columns)]
    shapes = _parameters(gm)
    for table in _token_tables(gm):
        verdict = divides(f"the rows of {table!r}", shapes[table][0], dim, ranks)
        verdicts.append(verdict)
        if verdict:
            placed.setdefault(table, {}).setdefault(dim, "shard(0)")
    return verdicts


def _placements(columns: Sequence[Linear], rows: Sequence[Linear], paths: Sequence[Path]) -> list[tuple[str, str]]:
    """(parameter, placement) for every parameter that a group divides."""
    found = []
    for c, path in zip(columns, paths, strict=True):
        found.append((c.weight, f"shard({c.outputs})"))
        found += [(name, "shard(0)") for name in (*path.vectors, *([c.bias] if c.bias else []))]
    return found + [(r.weight, f"shard({1 - r.outputs})") for r in rows]


def _clash(wanted: Sequence[tuple[str, str]], placed: Mapping[str, str]) -> Verdict | None:
    """A refusal where a parameter would have to lie in two ways, None if none has to."""
    chosen = dict(placed)
    for name, place in wanted:
        if chosen.setdefault(name, place) != place:
            return Verdict(False, f"{name!r} is used in several places and would have to be divided in two ways")
    return None


def _judge(columns: Sequence[Linear], rows: Sequence[Linear], paths: Sequence[Path], dim: str, ranks: int) -> Verdict:
    """Whether linears can be divided by column and row together."""
    title = ", ".join(sorted({repr(c.weight) for c in columns}))
    if rows:
        title += " into " + ", ".join(sorted({repr(r.weight) for r in rows}))
    seen = {n for p in paths for n in p.seen}
    strangers = [n.name for p in paths for n in p.beside if n not in seen]
    blocked = next((p.blocked for p in paths if p.blocked), "")
    if blocked or strangers:
        return Verdict(False, f"{title}: {blocked or 'meets ' + strangers[0] + ', which is not divided'}")
    sizes = [(f"the outputs of {c.weight!r}", c.features) for c in columns]
    for what, size in [*sizes, *(u for p in paths for u in p.units)]:
        verdict = divides(what, size, dim, ranks)
        if not verdict:
            return Verdict(False, f"{title}: {verdict.reason}")
    return Verdict(True, f"{title}: divided over mesh dimension {dim!r}")


def _token_tables(gm: fx.GraphModule) -> list[str]:
    """Tables that an input's values are looked up in: a small table of positions is not worth a sum over ranks."""
    found = []
    for node in gm.graph.nodes:
        if node_op(node) == "aten.embedding" and not is_backward(node):
            name = parameter_of(root(node.args[0]))
            if name is not None and isinstance(root(node.args[1]).meta.get("desc"), PlainAOTInput):
                found.append(name)
    return list(dict.fromkeys(found))


def _divide_experts(
    gm: fx.GraphModule, mesh: Mapping[str, int], placed: dict[str, dict[str, str]]
) -> tuple[list[str], list[Verdict]]:
    """Divide stacked experts over a mesh dimension, into `placed`; the parameters that are, and why others are not."""
    dims = [d for d in mesh if d in EXPERT_DIMS] or [d for d in mesh if d in DATA_DIMS]
    weights = {
        name: shape_of(root(node.args[1]).meta["val"])
        for node in gm.graph.nodes
        if node_op(node) == "dsmp.grouped_mm" and not is_backward(node)
        if (name := parameter_of(root(node.args[1]))) is not None
    }
    verdicts = [(n, d, divides(f"the experts of {n!r}", s[0], d, mesh[d])) for n, s in weights.items() for d in dims]
    for name, dim, verdict in verdicts:
        if verdict:
            placed.setdefault(name, {})[dim] = "shard(0)"
    return [n for n, _, v in verdicts if v], [v for _, _, v in verdicts]


def _zero(
    gm: fx.GraphModule, dim: str, ranks: int, stage: int, placed: dict[str, dict[str, str]], local: Sequence[str]
) -> dict[str, str]:
    """Placements of gradients on a data-parallel dimension; stage 3 places the parameters, too. What is local is
    divided already."""
    gradients: dict[str, str] = {}
    if stage < 2:
        return gradients
    for name, shape in _parameters(gm).items():
        if name in local:
            continue
        taken = set(placed.get(name, {}).values())
        free = [i for i, size in enumerate(shape) if f"shard({i})" not in taken and size % ranks == 0]
        if not free:
            continue
        gradients[name] = f"shard({free[0]})"
        if stage == 3:
            placed.setdefault(name, {})[dim] = gradients[name]
    return gradients


def _divide_batch(
    gm: fx.GraphModule, names: Mapping[str, str], data: Mapping[str, int]
) -> tuple[tuple[ShardingRule, ...], tuple[ShardingRule, ...]]:
    """Rules that divide the first dimension of inputs and outputs that have the batch there."""
    tensors = {
        names[p.name]: shape_of(p.meta["val"]) for p in placeholders(gm) if p.name in names and value_of(p) is not None
    }
    sizes = Counter(shape[0] for shape in tensors.values() if shape)
    if not sizes or not data:
        return (), ()
    batch = sizes.most_common(1)[0][0]
    refused = [divides("the batch", batch, dim, ranks) for dim, ranks in data.items()]
    if any(not v for v in refused):
        raise IndivisibleError([v.reason for v in refused if not v])
    placements = dict.fromkeys(data, "shard(0)")
    inputs = tuple(
        ShardingRule(pattern=_exactly(n), placements=placements) for n, s in tensors.items() if s and s[0] == batch
    )
    values = zip(output_node(gm).args[0], output_node(gm).meta["desc"], strict=True)  # type: ignore[arg-type]
    outputs = tuple(
        ShardingRule(pattern=str(desc.idx), placements=placements)
        for value, desc in values
        if isinstance(desc, PlainAOTOutput) and isinstance(value, fx.Node)
        if (shape := shape_of(value.meta["val"])) and shape[0] == batch
    )
    return inputs, outputs
