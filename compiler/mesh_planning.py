"""Plan a model for a mesh of devices, in one process and without any of them.

The model's joint graph is captured with each kind of block once, sharded over a fake mesh in every way that is worth a
look, and each result is priced: formats by the device's tier on local shapes, collectives by the links they run over,
memory by what a rank stores and saves. Taken is the fastest of those that fit into the device's memory. Where the ZeRO
stage is left open, higher ones are tried only as far as memory asks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CaptureError
from ..hardware_db.capability import Device
from ..hardware_db.cluster import Cluster
from ..passes.budget_text import DEFAULT_BUDGET
from ..passes.formulate import formulate
from ..passes.gemm import gemm_op
from ..passes.graph import calls
from ..passes.keys import NodeKey, key_of
from ..passes.mesh_plan import CollectiveDecision, MeshPlan, Placing, RankMemory, StepTime
from ..passes.parallel_candidates import BATCH_DIMS, TENSOR_DIMS, Candidate, propose
from ..passes.plan import Budget, Decision, PrecisionPlan, fingerprint, follow
from ..passes.program import Program, Solution
from ..passes.rules import Rule, given_keys
from ..passes.scores import Scores
from ..passes.select_default import Selection, select_default
from ..passes.sharding import ShardingPlan, ShardingRule
from ..passes.solve import force, solve_program
from ..passes.wire_formats import WireFormat
from .attention_width import attention_of_one_width
from .balanced_experts import balance_experts
from .block_folding import Repeats, fold_blocks
from .budgeted_rank import folded_scores, paid_wires, repeated, with_collectives
from .collective_decisions import CollectiveDecider, wires_by_dim
from .fake_mesh import fake_mesh
from .joint_capture import JointCapture, capture_joint, check_names
from .mesh_groups import shard_over
from .pipeline import assemble_plan, check_rules
from .rank_costs import Decided, rank_memory, step_time, stored_bytes
from .rank_graph import RankGraph, parameters_of

log = logging.getLogger("dsmp")

_STAGES = (0, 2, 3)  # stage 1 sends what stage 0 does


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshRequest:
    """What a user says of the mesh: ranks by dimension, outermost first; the ZeRO stage and whether sequences are
    divided (None: what is best); rules for parameters; wire formats, one for all or by mesh dimension; scores of the
    model and a budget (a share of 1), within which formats of nodes and of collectives are chosen together."""

    mesh: Mapping[str, int]
    zero: int | None = None
    sequence: bool | None = None
    sharding_rules: Sequence[ShardingRule] = ()
    wire: str | Mapping[str, str] | None = None
    scores: Scores | None = None
    budget: float = DEFAULT_BUDGET


@dataclass(frozen=True, kw_only=True, slots=True)
class _Priced:
    """One way to place a model, and what it costs."""

    zero: int
    sequence: bool
    candidate: Candidate
    rank: RankGraph
    selection: Selection
    decided: Decided
    step: StepTime
    memory: RankMemory
    solution: Solution | None = None

    @property
    def placing(self) -> Placing:
        return Placing(
            zero=self.zero, sequence=self.sequence, step_us=self.step.total_us, memory_bytes=self.memory.total,
            fits=self.memory.fits,
        )  # fmt: skip


def plan_for_mesh(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: Device,
    cluster: Cluster,
    request: MeshRequest,
    *,
    rules: Sequence[Rule] = (),
    source: str,
) -> PrecisionPlan:
    """The plan of a model whose inputs (global shapes) are given, for a mesh of equal devices.

    Raises CaptureError, ShardingPlanError, IndivisibleError, UnshardableError, ClusterError, InvalidOptionError and
    PlanHardwareError; with scores ScoresError and BudgetError.
    """
    asked = wires_by_dim(request.wire, tuple(request.mesh))
    with fake_mesh(request.mesh) as mesh:
        capture, repeats = capture_folded(model, args, kwargs, [*rules, *request.sharding_rules])
        if request.scores is not None:
            request.scores.check(_fingerprint(capture, repeats))
        planner = _Planner(capture, repeats, mesh, device, cluster, request, asked, rules)
        tried = planner.search()
    best = min(tried, key=lambda p: (not p.memory.fits, p.memory.total if not p.memory.fits else 0, p.step.total_us))
    if not best.memory.fits:
        log.warning(
            "no placement that was tried fits %s: the smallest needs %.3g GB a rank of %.3g GB",
            device.id, best.memory.total / 1e9, best.memory.available / 1e9,
        )  # fmt: skip
    return _plan(best, tried, planner, source)


def without_gradients(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, for inference."""
    copied, _ = fold_blocks(model, fold=False)
    return copied.requires_grad_(False)


def capture_folded(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], rules: Sequence[Rule | ShardingRule] = ()
) -> tuple[JointCapture, Repeats]:
    """The joint graph with each kind of block once; the whole graph of a model that does not run shortened, or whose
    blocks the rules tell apart."""
    short, repeats = fold_blocks(model)
    balance_experts(short)
    if repeats.blocks:
        try:
            capture = _capture(short, args, kwargs)
        except CaptureError as error:
            log.info("captured whole, since it does not run with fewer blocks: %s", error)
        else:
            if not _tell_blocks_apart(capture, short, repeats, rules):
                return capture, repeats
    whole, repeats = fold_blocks(model, fold=False)
    balance_experts(whole)
    return _capture(whole, args, kwargs), repeats


def _capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JointCapture:
    with attention_of_one_width():
        return capture_joint(model, args, kwargs)


def _fingerprint(capture: JointCapture, repeats: Repeats) -> str:
    """What scores of the whole model are signed with."""
    keys = [k for n in calls(capture.gm) if (k := key_of(n)) is not None and gemm_op(n) is not None]
    found = [NodeKey(p, k.phase, k.op, k.ordinal) for k in keys for p in repeats.paths(k.fqn)]
    return fingerprint((str(k), "", []) for k in found)


def _tell_blocks_apart(
    capture: JointCapture, short: nn.Module, repeats: Repeats, rules: Sequence[Rule | ShardingRule]
) -> bool:
    """Whether a rule applies to some of the blocks that one stands for, and not to others."""
    names = [(n, repeats.paths(n)) for n, _ in short.named_parameters()]
    keys = [k for n in calls(capture.gm) if (k := key_of(n)) is not None]
    texts = [(k, [str(NodeKey(p, k.phase, k.op, k.ordinal)) for p in repeats.paths(k.fqn)]) for k in keys]
    for rule in rules:
        if isinstance(rule, Rule):
            told = any(len({rule.applies(t) for t in found}) > 1 for _, found in texts)
        else:
            told = any(len({fnmatchcase(p, rule.pattern) for p in found}) > 1 for _, found in names)
        if told:
            return True
    return False


class _Planner:
    def __init__(
        self,
        capture: JointCapture,
        repeats: Repeats,
        mesh: DeviceMesh,
        device: Device,
        cluster: Cluster,
        request: MeshRequest,
        asked: Mapping[str, WireFormat],
        rules: Sequence[Rule],
    ) -> None:
        self.capture, self.repeats, self.mesh = capture, repeats, mesh
        self.device, self.cluster, self.request, self.rules = device, cluster, request, rules
        self.asked = asked
        self.scores = None if request.scores is None else folded_scores(request.scores, repeats)
        self.groups: dict[str, str] = {mesh.get_group(i).group_name: name for i, name in enumerate(request.mesh)}

    def search(self) -> list[_Priced]:
        """Every way that is worth a look, priced."""
        r = self.request
        divided = any(r.mesh[d] > 1 for d in r.mesh if d in TENSOR_DIMS)
        sequences = [r.sequence] if r.sequence is not None else [False, True] if divided else [False]
        replicated = not any(r.mesh[d] > 1 for d in r.mesh if d in BATCH_DIMS)
        stages = [r.zero] if r.zero is not None else [0] if replicated else list(_STAGES)
        while len(stages) > 1 and self._stored_bytes(stages[0]) > self.device.memory_bytes:
            stages = stages[1:]
        tried = [self._priced(stages[0], s) for s in sequences]
        while len(stages) > 1 and not any(p.memory.fits for p in tried):
            stages = stages[1:]
            tried += [self._priced(stages[0], s) for s in sequences]
        return tried

    def _stored_bytes(self, zero: int) -> int:
        """What a rank stores between steps, activations left out: known without sharding the graph."""
        found = propose(self.capture.gm, self.request.mesh, self.capture.names, zero=zero)
        return stored_bytes(self.capture.gm, found.plan.with_rules(self.request.sharding_rules), self.repeats)

    def _priced(self, zero: int, sequence: bool) -> _Priced:
        found = propose(self.capture.gm, self.request.mesh, self.capture.names, zero=zero, sequence=sequence)
        plan = found.plan.with_rules(self.request.sharding_rules)
        check_names(self.capture, plan)
        graph = shard_over(self.capture, self.mesh, plan)
        parameters = parameters_of(graph.gm)
        selection = select_default(graph.gm, self.device, parameters=parameters, rules=self.rules)
        program = None
        if self.scores is not None:  # before collectives have keys: their candidates are of another kind
            program = formulate([(graph.gm, parameters)], self.device, self.scores)
            program = force(program, given_keys(self.rules, program)) if self.rules else program
        rank = RankGraph(graph, self.groups, self.repeats)
        paid: dict[str, WireFormat] = {}
        solution = None
        if program is not None:
            selection, paid, solution = self._solved(rank, selection, program)
        decisions = {d.key: d for d in selection.decisions}
        decided = self._decider(rank, decisions, paid).decide()
        step = step_time(rank, decisions, decided, casts_us=solution.cast_us if solution is not None else 0.0)
        return _Priced(
            zero=zero, sequence=sequence, candidate=found, rank=rank, selection=selection, decided=decided,
            step=step, memory=rank_memory(rank, decisions, self.device, decided), solution=solution,
        )  # fmt: skip

    def _decider(
        self, rank: RankGraph, decisions: Mapping[str, Decision], paid: Mapping[str, WireFormat]
    ) -> CollectiveDecider:
        return CollectiveDecider(
            rank, decisions, self.device.storage, self.cluster, self.request.mesh, self.asked, paid
        )

    def _solved(
        self, rank: RankGraph, selection: Selection, program: Program
    ) -> tuple[Selection, dict[str, WireFormat], Solution]:
        """Formats of nodes and collectives that are fastest within the budget."""
        assert self.scores is not None
        step = step_time(rank, {d.key: d for d in selection.decisions}, ())
        blank = self._decider(rank, {}, {})
        whole = with_collectives(repeated(program, self.repeats), blank, self.scores, step)
        solved = solve_program(whole, drift=whole.limit(self.request.budget))
        followed = [d.model_copy(update={"sensitivity": None}) for d in follow(selection.decisions, program, solved)]
        return replace(selection, decisions=followed), paid_wires(blank, solved.chosen), solved.solution


def _plan(best: _Priced, tried: Sequence[_Priced], planner: _Planner, source: str) -> PrecisionPlan:
    repeats = planner.repeats
    decisions = repeats.expand(best.selection.decisions)
    plan = assemble_plan(source, planner.device, [replace(best.selection, decisions=decisions)], planner.rules)
    check_rules(plan)
    in_order = [best, *(p for p in tried if p is not best)]
    mesh_plan = MeshPlan(
        node=planner.cluster.node.id,
        sharding=_expanded_rules(best.candidate.plan, repeats).with_rules(planner.request.sharding_rules).to_dict(),
        placings=[p.placing for p in in_order],
        step=best.step,
        memory=best.memory,
        collectives=_expanded(best),
        refused=[v.reason for v in best.candidate.verdicts if not v],
    )
    counts = [repeats.count(d.module) for d in best.selection.decisions]
    traced = sum(n * us for n, us in zip(counts, best.selection.traced_us, strict=True))
    prediction = plan.prediction.model_copy(
        update={
            "time_us": round(best.step.compute_us, 3), "time_us_fp32": round(traced, 3),
            "saved_bytes": best.memory.activations,
        }
    )  # fmt: skip
    budget = Budget(amount=planner.request.budget) if best.solution is not None else None
    return plan.model_copy(
        update={"mesh": mesh_plan, "prediction": prediction, "budget": budget, "solution": best.solution}
    )


def _expanded_rules(plan: ShardingPlan, repeats: Repeats) -> ShardingPlan:
    """The plan with the rules of kept blocks again for the blocks that they stand for."""
    rules = [replace(r, pattern=path) for r in plan.parameters for path in repeats.paths(r.pattern)]
    local = [path for pattern in plan.local for path in repeats.paths(pattern)]
    return replace(plan, parameters=tuple(rules), local=tuple(local))


def _expanded(priced: _Priced) -> list[CollectiveDecision]:
    """The collectives of the whole model."""
    return [d.model_copy(update={"key": key}) for c, d in priced.decided for key in priced.rank.keys(c)]
