"""The sharded graph of a Llama-like model on 2,048 ranks of the fake process group."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from llama import Llama

from dsmp.compiler.joint_capture import capture_joint
from dsmp.errors import IndivisibleError, UnshardableError
from dsmp.passes.graph import node_op, placeholders
from dsmp.passes.parallel_candidates import propose
from dsmp.passes.shard_graph import shard_graph
from dsmp.passes.sharding import ShardingPlan, ShardingRule

LAYERS = 4
WIDTH, LENGTH, BATCH = 8192, 2048, 512
PARAMETERS = 3 + 9 * LAYERS


@pytest.fixture(scope="module")
def captured():
    with torch.device("meta"):
        model = Llama(layers=LAYERS, width=WIDTH, heads=64, kv_heads=8, hidden=28672, vocabulary=32000, length=LENGTH)
        ids = torch.empty(BATCH, LENGTH, dtype=torch.int64)
    return capture_joint(model, (ids, ids))


def sharded(captured, mesh, **options):
    sizes = {d: mesh.size(i) for i, d in enumerate(mesh.mesh_dim_names)}
    plan = propose(captured.gm, sizes, captured.names, **options).plan
    return shard_graph(captured.gm, mesh, plan, captured.names)


@pytest.fixture(scope="module")
def tensor_parallel(captured, fake_mesh):
    return sharded(captured, fake_mesh(dp=256, tp=8))


@pytest.fixture(scope="module")
def sequence_parallel(captured, fake_mesh):
    return sharded(captured, fake_mesh(dp=256, tp=8), sequence=True)


def collectives(graph, mesh):
    """(half, collective, mesh dimension, kind of what is sent) -> how many."""
    dims = {mesh.get_group(d).group_name: d for d in mesh.mesh_dim_names}
    found = Counter()
    for node in graph.gm.graph.nodes:
        name = node_op(node)
        if name.startswith("_c10d_functional.") and name != "_c10d_functional.wait_tensor":
            half = node.meta["partitioner_tag"].removeprefix("is_")
            sent = node.args[0].meta["val"]
            kind = "activation" if sent.dim() == 3 else "parameter" if sent.numel() > 4096 else "small"
            found[half, name.split(".")[1], dims[node.args[-1]], kind] += 1
    return found


def test_tensor_parallel_is_megatrons_two_all_reduces_a_layer_each_way(tensor_parallel, fake_mesh):
    assert collectives(tensor_parallel, fake_mesh(dp=256, tp=8)) == {
        ("forward", "all_reduce", "tp", "activation"): 2 * LAYERS + 1,  # and the embedding
        ("forward", "all_reduce", "tp", "small"): 3,  # maximum, normaliser, picked logits of each token
        ("forward", "all_reduce", "dp", "small"): 2,  # the loss and how many targets count
        ("backward", "all_reduce", "tp", "activation"): 2 * LAYERS + 1,  # and the head
        ("backward", "all_reduce", "tp", "small"): 1,  # log-softmax
        ("backward", "all_reduce", "dp", "parameter"): PARAMETERS,
    }


def test_sequence_parallel_halves_every_all_reduce_into_scatter_and_gather(sequence_parallel, fake_mesh):
    found = collectives(sequence_parallel, fake_mesh(dp=256, tp=8))
    each_way = 2 * LAYERS + 1
    for half in ("forward", "backward"):
        assert found[half, "reduce_scatter_tensor", "tp", "activation"] == each_way
        assert found[half, "all_gather_into_tensor", "tp", "activation"] == each_way
        assert not found[half, "all_reduce", "tp", "activation"]
    assert found["backward", "all_reduce", "tp", "parameter"] == 2 * LAYERS + 1  # norms see parts of the sequence


def test_zero_stages_are_placements(fake_mesh):
    model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
    captured = capture_joint(model, (torch.zeros(16, 128),))
    mesh = fake_mesh(dp=8)
    found = {}
    for zero in (1, 2, 3):
        counts = collectives(sharded(captured, mesh, zero=zero), mesh)
        found[zero] = Counter()
        for (half, name, _, _), count in counts.items():
            found[zero][half, name] += count
    assert found[1] == {("backward", "all_reduce"): 4}
    assert found[2] == {("backward", "reduce_scatter_tensor"): 4}
    assert found[3] == {("forward", "all_gather_into_tensor"): 4, ("backward", "reduce_scatter_tensor"): 4}


def test_every_node_knows_its_half_and_products_their_module(sequence_parallel):
    for node in sequence_parallel.gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta["partitioner_tag"] in ("is_forward", "is_backward")
        if node_op(node) == "aten.mm":
            assert list(node.meta["nn_module_stack"].values())[-1][0]


def test_local_shapes_and_placements_of_the_boundary_fit(tensor_parallel):
    described = [n for n in placeholders(tensor_parallel.gm) if hasattr(n.meta["desc"], "target")]
    shapes = {n.meta["desc"].target: tuple(n.meta["val"].shape) for n in described}
    assert shapes["layers.0.attention.k_proj.weight"] == (128, WIDTH)
    assert shapes["layers.0.mlp.down_proj.weight"] == (WIDTH, 3584)
    assert shapes["embed.weight"] == (4000, WIDTH)
    end = tensor_parallel.gm.graph.output_node()
    ends = zip(end.args[0], end.meta["desc"], strict=True)
    gradients = {d.grad_of.target: tuple(v.meta["val"].shape) for v, d in ends if hasattr(d, "grad_of")}
    assert gradients == {n: s for n, s in shapes.items() if n in gradients} and len(gradients) == PARAMETERS


def test_no_logits_of_all_classes_exist_on_any_rank(tensor_parallel):
    whole = [
        n.name
        for n in tensor_parallel.gm.graph.nodes
        if isinstance(v := n.meta.get("val"), torch.Tensor) and v.dim() > 1 and v.shape[-1] == 32000 and v.shape[0] > 1
    ]
    assert not whole


def test_kv_heads_that_the_mesh_does_not_divide_are_refused_by_name(captured, fake_mesh):
    mesh = fake_mesh(dp=2, tp=16)
    plan = ShardingPlan(
        mesh={"dp": 2, "tp": 16},
        parameters=(ShardingRule(pattern="layers.0.attention.k_proj.weight", placements={"tp": "shard(0)"}),),
    )
    with pytest.raises(IndivisibleError, match=r"k_proj|attention") as refused:
        shard_graph(captured.gm, mesh, plan, captured.names)
    assert "'tp'" in str(refused.value) and "16" in str(refused.value) and "8" in str(refused.value)


def test_batches_and_widths_that_the_mesh_does_not_divide_are_refused_together(captured, fake_mesh):
    mesh = fake_mesh(dp=3, tp=7)
    plan = ShardingPlan(
        mesh={"dp": 3, "tp": 7},
        parameters=(ShardingRule(pattern="head.weight", placements={"tp": "shard(0)"}),),
        inputs=(ShardingRule(pattern="ids", placements={"dp": "shard(0)"}),),
    )
    with pytest.raises(IndivisibleError) as refused:
        shard_graph(captured.gm, mesh, plan, captured.names)
    assert "'head.weight'" in str(refused.value) and "'ids'" in str(refused.value)
    assert "'dp'" in str(refused.value) and "'tp'" in str(refused.value)


def test_dropout_is_refused(fake_mesh):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    captured = capture_joint(model, (torch.zeros(4, 8),))
    with pytest.raises(UnshardableError, match="dropout to 0"):
        shard_graph(captured.gm, fake_mesh(tp=2), ShardingPlan(mesh={"tp": 2}), captured.names)
