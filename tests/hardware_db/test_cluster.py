"""Collectives among many nodes: where the ranks of a mesh dimension lie, and what the slower part of the way costs."""

from __future__ import annotations

import pytest

from dsmp.errors import ClusterError, UnknownNodeError
from dsmp.hardware_db.catalog import load_catalog
from dsmp.hardware_db.cluster import GroupLayout, cluster_of


@pytest.fixture(scope="module")
def catalog():
    return load_catalog()


@pytest.fixture(scope="module")
def cluster(catalog):
    return cluster_of(catalog, "h800")


@pytest.mark.parametrize(
    ("mesh", "dim", "per_node", "nodes"),
    [
        ({"dp": 256, "tp": 8}, "tp", 8, 1),
        ({"dp": 256, "tp": 8}, "dp", 1, 256),
        ({"dp": 512, "tp": 4}, "dp", 2, 256),
        ({"dp": 2048}, "dp", 8, 256),
        ({"dp": 128, "tp": 16}, "tp", 8, 2),
        ({"tp": 8, "dp": 256}, "tp", 1, 8),
        ({"dp": 4, "tp": 6}, "tp", 6, 2),  # every other group lies on two nodes
    ],
)
def test_where_the_ranks_of_a_dimension_lie(cluster, mesh, dim, per_node, nodes):
    assert cluster.layout(mesh, dim) == GroupLayout(ranks=mesh[dim], per_node=per_node, nodes=nodes)


def test_inside_a_node_it_costs_what_the_node_says(cluster):
    layout = GroupLayout(ranks=8, per_node=8, nodes=1)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        assert cluster.collective_time(op, 1e9, layout) == pytest.approx(cluster.node.collective_time(op, 1e9, 8))


def test_between_nodes_the_network_bounds_it(cluster):
    one = cluster.collective_time("all_reduce", 1e9, GroupLayout(ranks=256, per_node=1, nodes=256))
    assert one == pytest.approx(2 * 255 / 256 * 1e9 / 50e9 + 2 * 8 * 2.7e-6)
    # eight ranks of the ring in a node send over eight ports: then the links within the node are the slower part
    eight = cluster.collective_time("all_reduce", 1e9, GroupLayout(ranks=2048, per_node=8, nodes=256))
    assert eight == pytest.approx(2 * 2047 / 2048 * 1e9 / 215e9 + 15e-6 + 2 * 8 * 2.7e-6)


def test_an_all_to_all_sends_most_of_it_over_a_rank_s_own_port(cluster):
    layout = GroupLayout(ranks=64, per_node=8, nodes=8)
    assert cluster.collective_time("all_to_all", 1e9, layout) == pytest.approx(
        10.8e-6 + 3 * 2.7e-6 + 56 / 64 * 1e9 / 50e9
    )


def test_nothing_is_sent_to_oneself(cluster):
    assert cluster.collective_time("all_reduce", 1e9, GroupLayout(ranks=1, per_node=1, nodes=1)) == 0


def test_a_node_without_a_network_is_no_cluster(catalog):
    alone = next(n for n in catalog.nodes.values() if n.fabric is None)
    cluster = cluster_of(catalog, alone.device, alone.id)
    assert cluster.collective_time("all_reduce", 1e6, GroupLayout(ranks=2, per_node=2, nodes=1)) > 0
    with pytest.raises(ClusterError, match="no network between nodes"):
        cluster.collective_time("all_reduce", 1e6, GroupLayout(ranks=64, per_node=1, nodes=64))


def test_devices_and_nodes_that_do_not_belong_together(catalog):
    with pytest.raises(ClusterError, match="stands in no node"):
        cluster_of(catalog, "rtx-4090")
    with pytest.raises(ClusterError, match="holds h800, and the plan is for a100"):
        cluster_of(catalog, "a100", "hgx-h800")
    with pytest.raises(UnknownNodeError, match="hgx-h800"):
        cluster_of(catalog, "h800", "hgx-h80")
