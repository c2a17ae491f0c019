"""`--mesh dp=256,tp=8` of `dsmp plan` and `dsmp report`: one plan for a mesh of devices, without any of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import InvalidOptionError
from ..hardware_db.capability import Device
from ..hardware_db.catalog import load_catalog
from ..hardware_db.cluster import cluster_of
from ..passes.budget_text import DEFAULT_BUDGET, parse_budget
from ..passes.parallel_candidates import BATCH_DIMS
from ..passes.plan import PrecisionPlan
from ..passes.rules import Rule
from ..passes.scores import load_scores
from ..passes.sharding import ShardingRule
from .cli_mesh import MeshArguments
from .mesh_planning import MeshRequest, plan_for_mesh, without_gradients
from .model_building import LoadedModel


def plan_on_mesh(
    arguments: MeshArguments, loaded: LoadedModel, device: Device, rules: Sequence[Rule], files: Sequence[Path],
    *, given_inputs: bool, training: bool, scores: Path | None = None, budget: str | None = None,
) -> PrecisionPlan:  # fmt: skip
    """Plan a loaded model. Inputs that the user gave are of the whole batch; of those that the model's library chose
    every data-parallel rank has its own. Raises as `plan_for_mesh`, and InvalidOptionError for an exported program."""
    if budget is not None and scores is None:
        raise InvalidOptionError("--budget", budget, "with --mesh and --scores")
    if loaded.module is None:
        raise InvalidOptionError("--mesh", arguments.mesh, "with a module; an exported program has its shapes fixed")
    request = MeshRequest(
        mesh=arguments.mesh,
        zero=arguments.zero,
        sequence=arguments.sequence,
        sharding_rules=[ShardingRule(pattern=g, placements={d: p}) for g, d, p in arguments.place],
        wire=arguments.wire,
        scores=load_scores(scores) if scores is not None else None,
        budget=parse_budget(budget) if budget is not None else DEFAULT_BUDGET,
    )
    cluster = cluster_of(load_catalog(files), device.id, arguments.node)
    args, kwargs = loaded.args, loaded.kwargs
    if not given_inputs:
        args, kwargs = for_every_rank((args, kwargs), arguments.mesh)
    model = loaded.module if training else without_gradients(loaded.module)
    return plan_for_mesh(model, args, kwargs, device, cluster, request, rules=rules, source=loaded.source)


def for_every_rank(inputs: Any, mesh: dict[str, int]) -> Any:
    """Inputs of a batch that is as many times larger as the mesh has data-parallel ranks, on the meta device."""
    ranks = 1
    for dim in BATCH_DIMS:
        ranks *= mesh.get(dim, 1)
    sizes = Counter(t.shape[0] for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim)
    batch = sizes.most_common(1)[0][0] if sizes else 0

    def larger(x: Tensor) -> Tensor:
        shape = [ranks * batch, *x.shape[1:]] if x.ndim and x.shape[0] == batch else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta")

    return tree_map_only(Tensor, larger, inputs)
