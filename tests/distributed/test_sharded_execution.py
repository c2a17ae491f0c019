"""What the two halves of a sharded graph save and gather, and that precision keys survive sharding."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from llama import Llama

from dsmp.compiler.capture import capture
from dsmp.compiler.joint_capture import capture_joint
from dsmp.compiler.sharded_execution import build_halves, partition
from dsmp.errors import InvalidOptionError
from dsmp.passes.gemm import gemm_op
from dsmp.passes.graph import node_op, placeholders
from dsmp.passes.keys import key_of
from dsmp.passes.parallel_candidates import propose
from dsmp.passes.shard_graph import shard_graph


@pytest.fixture(scope="module")
def captured():
    ids = torch.zeros(8, 16, dtype=torch.int64)  # 64 tokens a rank: no activation has the shape of a weight
    return capture_joint(Llama(layers=1, hidden=96), (ids, ids))


def sharded(captured, mesh, **options):
    sizes = {d: mesh.size(i) for i, d in enumerate(mesh.mesh_dim_names)}
    plan = propose(captured.gm, sizes, captured.names, **options).plan
    return shard_graph(captured.gm, mesh, plan, captured.names).gm


def counts(gm):
    return Counter(node_op(n).removeprefix("_c10d_functional.") for n in gm.graph.nodes)


def test_parameters_in_shards_are_gathered_again_in_the_backward_pass(captured, fake_mesh):
    forward, backward, _ = partition(sharded(captured, fake_mesh(dp=2), zero=3))
    assert counts(forward)["all_gather_into_tensor"] == 12
    assert counts(backward)["all_gather_into_tensor"] >= 8  # of every weight that a gradient is multiplied with
    whole = {tuple(n.meta["val"].shape) for n in placeholders(backward) if n.meta["val"].dim() == 2}
    assert (96, 32) not in whole and (32, 96) not in whole  # no gathered feed-forward weight is saved


def test_sequences_in_parts_are_gathered_again_in_the_backward_pass(captured, fake_mesh):
    forward, backward, _ = partition(sharded(captured, fake_mesh(tp=2), sequence=True))
    assert counts(forward)["all_gather_into_tensor"] == 3
    assert counts(backward)["all_gather_into_tensor"] == 6


def test_products_keep_their_keys(captured, fake_mesh):
    gm = sharded(captured, fake_mesh(dp=2, tp=2), sequence=True, zero=3)
    keys = [
        [str(key_of(n)) for n in graph.graph.nodes if n.op == "call_function" and gemm_op(n) is not None]
        for graph in (captured.gm, gm)
    ]
    assert keys[0] == keys[1] and len(keys[0]) == 3 * 8 + 2
    assert "layers.0.attention.q_proj|wgrad|linear|0" in keys[0]
    texts = [str(k) for n in gm.graph.nodes if (k := key_of(n)) is not None]
    assert len(texts) == len(set(texts))


def test_keys_are_those_of_torch_compile(captured):
    ids = torch.zeros(8, 16, dtype=torch.int64)
    (compiled,) = capture(Llama(layers=1, hidden=96), (ids, ids)).graphs
    wanted = {k for k in compiled.key_texts() if "|linear|" in k or "|sdpa|" in k}
    found = {str(k) for n in captured.gm.graph.nodes if (k := key_of(n)) is not None}
    assert wanted <= found


def test_unknown_executors_are_refused(captured, fake_mesh):
    with pytest.raises(InvalidOptionError, match="eager"):
        build_halves(sharded(captured, fake_mesh(dp=2)), "tensorrt")
