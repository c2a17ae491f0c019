"""From the joint graph of a model on one device to the graph that every rank of a mesh runs.

The joint graph is interpreted on DTensors over fake local tensors while `make_fx` records what happens to the local
ones: ATen on local shapes, and `_c10d_functional` collectives. DTensor's rules choose how operators run on shards; what
makes the result Megatron's graph without any pattern is when sums over ranks are done:

1. A partial sum (`Partial`) stays one through views, sums, and additions of equal placements. The first other reader
   has it reduced, once for all readers; between tensor-parallel regions of a sequence-parallel mesh dimension to a part
   of the sequence (reduce-scatter), else to the whole (all-reduce).
2. A dimension that a view cannot keep sharded (sequence shards where batch and sequence are flattened) is gathered
   before the view, once for all views.
3. What is made from nothing (`arange`, `full`) is the same on all ranks; a mask that is only read beside shards is
   made as a shard.
4. Stored shards of parameters are gathered where they are first used; a gradient is reduced to its own placement where
   it is computed.

No process group is made here, and with a mesh over the fake process group nothing is communicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from ..errors import IndivisibleError, UnshardableError
from ..hardware_db.capability import Verdict
from .graph import VIEW_OPS, complete_halves, fake_mode_of, is_getitem, node_op, output_node, placeholders, value_of
from .graph_identity import hand_on_identity, take_over
from .shard_embedding import embed, embed_backward
from .shard_experts import exchange, expert_shards, gather_rows, register_grouped_products
from .shard_masks import batch_shards, masks_of_batches
from .sharding import Placements, ShardingPlan
from .strategies import divides, register_cpu_attention, shards_evenly

aten = torch.ops.aten

# A sum over ranks may be done after these: they are linear, and read a partial sum and nothing else.
_PASSING = VIEW_OPS | {"aten.sum", "aten.neg", "aten.slice", "aten.select", "aten.split", "aten.split_with_sizes"}
_ADDING = frozenset({"aten.add", "aten.sub"})
_RESHAPING = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape"})
_RANDOM = frozenset(
    {"aten.native_dropout", "aten.bernoulli", "aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like",
     "aten.randint", "aten.randperm", "aten.normal", "aten.uniform", "aten.multinomial"}
)  # fmt: skip


_FAILURES = (AssertionError, NotImplementedError, RuntimeError, ValueError)  # what DTensor raises without a rule


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedGraph:
    """The local graph of one rank, and how its inputs and outputs lie on the mesh.

    Placeholders and outputs keep order, names and descriptors (`meta["desc"]`) of the joint graph; `inputs` has a
    placement tuple per placeholder, `outputs` one per output, None for outputs that are no tensor.
    """

    gm: fx.GraphModule
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


def shard_graph(joint: fx.GraphModule, mesh: DeviceMesh, plan: ShardingPlan, names: Mapping[str, str]) -> ShardedGraph:
    """Shard a joint (or inference) graph with descriptors over a mesh.

    `names` maps a placeholder that is a plain input to the name that the plan's rules for inputs know it by. The mesh
    has the dimensions of the plan, in order.

    Raises IndivisibleError for sizes that a mesh dimension does not divide, UnshardableError for operators without a
    sharded form.
    """
    register_cpu_attention()
    register_grouped_products()
    fakes = [n.meta["val"] for n in placeholders(joint)]
    mode = fake_mode_of(fakes)
    layout = [_placements(n, plan, names) for n in placeholders(joint)]
    verdicts = [
        v
        for n, p in zip(placeholders(joint), layout, strict=True)
        if value_of(n) is not None
        for v in shards_evenly(_title(n, names), n.meta["val"].shape, p, plan.dims)
    ]
    verdicts += [v for n in placeholders(joint) for v in _gradient_exists(n, plan)]
    if refused := [v.reason for v in verdicts if not v]:
        raise IndivisibleError(refused)
    with ExitStack() as stack:
        stack.enter_context(mode)
        local = [_local(f, p, plan) for f, p in zip(fakes, layout, strict=True)]
        stack.enter_context(torch.no_grad())
        stack.enter_context(fx.traceback.preserve_node_meta())
        for node in joint.graph.nodes:  # only this one of the two module stacks is handed on to traced nodes
            if not node.meta.get("nn_module_stack") and "fwd_nn_module_stack" in node.meta:
                node.meta["nn_module_stack"] = node.meta["fwd_nn_module_stack"]
        sharder = _Sharder(joint, mesh, plan, layout)
        gm = make_fx(lambda *args: sharder.run(*args, enable_io_processing=False), tracing_mode="real")(*local)
    hand_on_identity(joint, gm)
    take_over(joint, gm)
    complete_halves(gm)
    return ShardedGraph(gm=gm, inputs=tuple(layout), outputs=tuple(end for _, end in sharder.ends))


def _title(node: fx.Node, names: Mapping[str, str]) -> str:
    desc = node.meta.get("desc")
    if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
        return repr(desc.target)
    return f"input {names[node.name]!r}" if node.name in names else node.name


def _gradient_exists(node: fx.Node, plan: ShardingPlan) -> list[Verdict]:
    """Refusals of shards of a parameter's gradient along dimensions that it lacks; DTensor pads uneven ones."""
    desc = node.meta.get("desc")
    if not isinstance(desc, ParamAOTInput):
        return []
    ndim = node.meta["val"].ndim
    return [
        Verdict(False, f"the gradient of {desc.target!r} has {ndim} dimensions, mesh dimension {dim!r} wants {p.dim}")
        for p, dim in zip(plan.gradient(desc.target), plan.mesh, strict=True)
        if isinstance(p, Shard) and not -ndim <= p.dim < ndim
    ]


def _placements(node: fx.Node, plan: ShardingPlan, names: Mapping[str, str]) -> Placements:
    desc = node.meta.get("desc")
    if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
        return plan.stored(desc.target)
    if isinstance(desc, TangentAOTInput):
        return plan.output(getattr(desc.output, "idx", -1))
    return plan.input(names.get(node.name, ""))


def _local(fake: Any, placements: Placements, plan: ShardingPlan) -> Any:
    """A fake tensor of the shape that one rank holds."""
    if not isinstance(fake, Tensor):
        return fake
    shape = list(fake.shape)
    for p, ranks in zip(placements, plan.mesh.values(), strict=True):
        if isinstance(p, Shard):
            shape[p.dim] //= ranks
    return torch.empty(shape, dtype=fake.dtype, device=fake.device)


class _Sharder(fx.Interpreter):
    """Runs a joint graph on DTensors; `env` holds DTensors wherever the graph holds tensors."""

    def __init__(
        self, joint: fx.GraphModule, mesh: DeviceMesh, plan: ShardingPlan, layout: Sequence[Placements]
    ) -> None:
        super().__init__(joint)
        self.extra_traceback = False  # our errors say themselves where they come from
        self.mesh, self.plan = mesh, plan
        self.layout = dict(zip(placeholders(joint), layout, strict=True))
        self.ends = self._ends(output_node(joint))
        self.ends_of: defaultdict[fx.Node, set[Placements]] = defaultdict(set)
        for value, end in self.ends:
            if isinstance(value, fx.Node) and end is not None:
                self.ends_of[value].add(end)
        self.tables = {n.args[1]: n.args[0] for n in joint.graph.nodes if n.target is aten.embedding.default}
        self.masks = masks_of_batches(joint)
        self.moved: dict[tuple[fx.Node, Placements], Any] = {}
        self.beside: dict[fx.Node, Any] = {}  # what the present call reads instead of env
        self.now = output_node(joint)

    def _ends(self, output: fx.Node) -> list[tuple[Any, Placements | None]]:
        """Every output of the graph and the placements it ends with."""

        def end(desc: Any) -> Placements:
            if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput):
                return self.plan.gradient(desc.grad_of.target)
            if isinstance(desc, InputMutationAOTOutput) and isinstance(desc.mutated_input, BufferAOTInput):
                return self.plan.stored(desc.mutated_input.target)
            if isinstance(desc, PlainAOTOutput):
                return self.plan.output(desc.idx)
            if isinstance(desc, GradAOTOutput):  # of an input
                return next(p for n, p in self.layout.items() if n.meta.get("desc") == desc.grad_of)
            raise UnshardableError(f"the model has an output of kind {type(desc).__name__}, which cannot be sharded.")

        values: Any = output.args[0]
        pairs = zip(values, output.meta["desc"], strict=True)
        return [(v, end(d) if isinstance(v, fx.Node) and value_of(v) is not None else None) for v, d in pairs]

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        local = super().placeholder(target, args, kwargs)
        if not isinstance(local, Tensor):
            return local
        whole = self.now.meta["val"]
        return DTensor.from_local(
            local, self.mesh, self.layout[self.now], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def run_node(self, n: fx.Node) -> Any:
        self.now = n
        self.beside = {}
        if n.op == "call_function" and not is_getitem(n):
            self._settle(n)
        result = self._run(n)
        with fx.traceback.set_current_meta(n):
            for end in self.ends_of.get(n, ()):
                self.moved[n, end] = _move(result, end)
        return result

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        def load(node: fx.Node) -> Any:
            return self.beside[node] if node in self.beside else self.env[node]

        return fx.node.map_arg(n.args, load), fx.node.map_arg(n.kwargs, load)

    def _run(self, n: fx.Node) -> Any:
        if n.op == "output":
            return [v if end is None else self.moved[v, end].to_local() for v, end in self.ends]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with fx.traceback.set_current_meta(n):
            if n.target is torch.ops.dsmp.send_rows.default:
                return exchange(self.mesh, args[0], args[1], self.plan.expert_dims, self.plan.whole_dims)
            if n.target is torch.ops.dsmp.all_rows.default:
                return gather_rows(self.mesh, args[0], self.plan.whole_dims)
            if n.target is aten.copy.default:  # without a rule: what is written, in the form of what is overwritten
                return args[1].expand(args[0].shape).to(args[0].dtype)
            if n.target is aten.embedding.default:
                return embed(self.mesh, *args, **kwargs)
            if n.target is aten.embedding_dense_backward.default:
                table = self.tables.get(n.args[1])
                whole = tuple([Replicate()] * self.mesh.ndim)
                desc = None if table is None else table.meta.get("desc")
                placements = self.plan.computed(desc.target) if isinstance(desc, ParamAOTInput) else whole
                return embed_backward(self.mesh, placements, *args)
            if n.target is aten.convolution_backward.default and self.mesh.ndim > 1:
                # DTensor's rule fails on a mesh of several dimensions where a gradient is left out
                args = (*args[:-1], [True, True, args[7] is not None])
            try:
                result = getattr(self, n.op)(n.target, args, kwargs)
            except _FAILURES as error:
                text = str(error).strip().split("\n")[0]
                raise UnshardableError(
                    f"{n.name} ({node_op(n)}) in {_owner(n)} has no sharded form here: {text}"
                ) from error
        result = tree_map_only(Tensor, self._everywhere, result)
        return _move(result, batch_shards(n.meta["val"].shape[0], self.plan)) if n in self.masks else result

    def _everywhere(self, x: Tensor) -> Tensor:
        """A tensor made from nothing is the same on all ranks."""
        if isinstance(x, DTensor):
            return x
        return DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    # What a call reads

    def _settle(self, n: fx.Node) -> None:
        """Bring the operands of a call into layouts that it can work on."""
        name = node_op(n)
        if name in _RANDOM:
            raise UnshardableError(
                f"{n.name} ({name}) draws random numbers, and ranks would have to draw parts of one sequence. "
                "Set dropout to 0, or put the model in evaluation mode."
            )
        operands = [o for o in n.all_input_nodes if isinstance(self.env[o], DTensor)]
        for operand in operands:
            desc = operand.meta.get("desc")
            if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
                self._replace(operand, self.plan.computed(desc.target), n)
        if not self._passes(n, name, operands):
            for operand in operands:
                if any(p.is_partial() for p in self.env[operand].placements):
                    self._replace(operand, self._reduced(self.env[operand]), operand)
        if name == "dsmp.grouped_mm":
            self._replace(n.args[2], expert_shards(self.plan), n)  # type: ignore[arg-type]
        if name in _RESHAPING and operands:
            self._keep_view_legal(n, operands[0])
        if value_of(n) is not None and n.meta["val"].dtype is torch.bool:
            self._shard_mask(n, operands)

    def _passes(self, n: fx.Node, name: str, operands: Sequence[fx.Node]) -> bool:
        """Whether a call may read partial sums as they are."""
        layouts = {self.env[o].placements for o in operands}
        if any(p.is_partial() and p != Partial() for layout in layouts for p in layout):
            return False
        if name in _ADDING:
            return len(layouts) == 1 and len(n.args) == 2 and all(isinstance(a, fx.Node) for a in n.args)
        return name in _PASSING

    def _reduced(self, value: DTensor) -> Placements:
        """What a partial sum is reduced to: on a sequence-parallel mesh dimension a part of the sequence."""
        found: list[Any] = list(value.placements)
        for i, (dim, ranks) in enumerate(self.plan.dims):
            if found[i].is_partial():
                splits = dim in self.plan.sequence and value.ndim == 3 and Shard(1) not in found
                splits = splits and found[i] == Partial() and value.shape[1] % ranks == 0
                found[i] = Shard(1) if splits else Replicate()
        return tuple(found)

    def _replace(self, node: fx.Node, placements: Placements, origin: fx.Node) -> None:
        """Let this and all later readers of a node see it with other placements."""
        if self.env[node].placements != placements:
            with fx.traceback.set_current_meta(origin):
                self.env[node] = _move(self.env[node], placements)

    def _keep_view_legal(self, n: fx.Node, operand: fx.Node) -> None:
        """Gather the dimensions that a view merges into others in a way that no shard can follow."""
        value = self.env[operand]
        placements = list(value.placements)
        after = n.meta["val"].shape
        divided: dict[int, int] = {}
        for i, (mesh_dim, ranks) in enumerate(self.plan.dims):
            p = placements[i]
            if isinstance(p, Shard):
                size = _size_from(value.shape, p.dim, after)
                by = divided.get(p.dim, 1)
                divided[p.dim] = by * ranks
                if size is None or (by > 1 and size % (by * ranks)):
                    placements[i] = Replicate()
                elif size % ranks:
                    what = f"dimension {p.dim} of {tuple(value.shape)} in {_owner(n)}, viewed as {tuple(after)}"
                    raise IndivisibleError([divides(what, size, mesh_dim, ranks).reason])
        target = tuple(placements)
        if target != value.placements:
            if (operand, target) not in self.moved:
                with fx.traceback.set_current_meta(n):
                    self.moved[operand, target] = _move(value, target)
            self.beside[operand] = self.moved[operand, target]

    def _shard_mask(self, n: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Make a mask in shards where every reader has a sharded value of its shape beside it."""
        shape = n.meta["val"].shape
        beside = [
            [self.env[o].placements for o in user.all_input_nodes if o in self.env and self._is_like(o, shape)]
            for user in n.users
        ]
        for i in range(self.mesh.ndim):
            shards = {next((p[i] for p in found if isinstance(p[i], Shard)), None) for found in beside}
            shard = shards.pop() if len(shards) == 1 else None
            if shard is None or any(self.env[o].placements[i] != Replicate() for o in operands):
                continue
            for operand in operands:
                value = self.beside.get(operand, self.env[operand])
                dim = shard.dim - (len(shape) - value.ndim)
                if dim >= 0 and value.shape[dim] > 1:
                    placements = list(value.placements)
                    placements[i] = Shard(dim)
                    self.beside[operand] = _move(value, tuple(placements))

    def _is_like(self, node: fx.Node, shape: torch.Size) -> bool:
        return isinstance(self.env[node], DTensor) and self.env[node].shape == shape


def _move(value: DTensor, placements: Placements) -> DTensor:
    if value.placements == placements:
        return value
    summed = list(value.placements)
    for i in reversed(range(len(summed))):  # one sum after the other, so that DTensor has no choice of order
        if summed[i].is_partial() and summed[i] != placements[i]:
            summed[i] = placements[i]
            value = value.redistribute(placements=summed)
    return value.redistribute(placements=placements)


def _owner(n: fx.Node) -> str:
    stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
    return repr(list(stack.values())[-1][0]) if stack else n.name


def _size_from(before: Sequence[int], dim: int, after: Sequence[int]) -> int | None:
    """The size of the dimension of a view that starts where `dim` of its source starts; None if none starts there."""
    start = 1
    for size in before[:dim]:
        start *= size
    at = 1
    for size in after:
        if at == start and size != 1:
            return size
        at *= size
    return None
