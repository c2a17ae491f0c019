"""Collectives within a node: the formula, refusals of wrong data, and that the shipped nodes are plausible."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_records import ARCHITECTURE, DEVICE

from dsmp.errors import HardwareDataError, UnknownNodeError
from dsmp.hardware_db.catalog import build_catalog, load_catalog
from dsmp.hardware_db.measurement import CollectiveOp
from dsmp.hardware_db.topology import Node

OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
MB = 1e6

PROFILE = f"[[architecture]]{ARCHITECTURE}\n[[device]]{DEVICE}"

LINKS = """
[[link]]
kind = "Wire1"
scope = "intra-node"
bidirectional_bytes_per_s = 50e9
latency_s = 1e-6
source = ["none"]
confidence = "A"

[[link]]
kind = "Net1"
scope = "inter-node"
bidirectional_bytes_per_s = 50e9
latency_s = 2e-6
source = ["none"]
confidence = "A"
"""

NODE = """
[[node]]
id = "box-8"
name = "Box of eight"
aliases = ["The Box"]
device = "x1"
count = 8
topology = "switch"
link = "Wire1"
links_per_device = 4
fabric = "Net1"
fabric_bytes_per_s_per_device = 25e9
collectives.all_reduce = { latency_s = 20e-6, bus_bytes_per_s = 80e9 }
collectives.all_gather = { latency_s = 10e-6, bus_bytes_per_s = 80e9 }
collectives.broadcast = { latency_s = 10e-6, bus_bytes_per_s = 50e9 }
source = ["none"]
confidence = "A"
"""


def build(node: str = NODE, links: str = LINKS):
    return build_catalog({"p.toml": PROFILE, "links.toml": links, "nodes.toml": node})


def box() -> Node:
    return build().nodes["box-8"]


def shipped() -> list[Node]:
    return list(load_catalog().nodes.values())


@pytest.mark.parametrize(
    ("op", "ranks", "steps"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 8, 0.875),
        ("broadcast", 2, 1.0),
        ("broadcast", 8, 1.0),
    ],
)
def test_a_collective_takes_its_latency_and_its_steps_over_the_bus(op, ranks, steps):
    node, size = box(), 160 * MB
    cost = node.collectives[op]
    expected = cost.latency_s + steps * size / cost.bus_bytes_per_s
    assert node.collective_time(op, size, ranks) == pytest.approx(expected, rel=1e-12)


def test_the_time_of_one_known_all_reduce():
    # 1.75 x 160 MB at 80 GB/s are 3.5 ms, and 20 microseconds to start
    assert box().collective_time("all_reduce", 160 * MB) == pytest.approx(3.52e-3, rel=1e-12)


def test_all_ranks_are_the_default():
    assert box().collective_time("all_reduce", MB) == box().collective_time("all_reduce", MB, 8)


def test_an_empty_collective_still_has_its_latency():
    assert box().collective_time("all_reduce", 0) == 20e-6


@pytest.mark.parametrize("ranks", [0, -1, 9])
def test_ranks_the_node_does_not_have_are_refused(ranks):
    with pytest.raises(ValueError, match=f"box-8 has 8 devices, not {ranks}"):
        box().collective_time("all_reduce", MB, ranks)


def test_a_collective_the_node_says_nothing_of_is_refused():
    with pytest.raises(KeyError, match="all_to_all"):
        box().collective_time("all_to_all", MB)


@given(size=st.floats(0, 1e11), node=st.sampled_from(shipped()), op=st.sampled_from(OPS))
def test_one_rank_needs_no_time(size, node, op):
    assert node.collective_time(op, size, 1) == 0.0


@given(
    sizes=st.tuples(st.floats(0, 1e11), st.floats(0, 1e11)),
    node=st.sampled_from(shipped()),
    op=st.sampled_from(OPS),
    data=st.data(),
)
def test_more_bytes_never_take_less_time(sizes, node, op, data):
    ranks = data.draw(st.integers(2, node.count))
    less, more = (node.collective_time(op, size, ranks) for size in sorted(sizes))
    assert less <= more


@given(
    size=st.floats(0, 1e11), node=st.sampled_from([n for n in shipped() if n.topology != "full-mesh"]), data=st.data()
)
def test_more_ranks_never_take_less_time_where_links_are_shared(size, node, data):
    op = data.draw(st.sampled_from(OPS))
    few, many = sorted(data.draw(st.tuples(*[st.integers(1, node.count)] * 2)))
    assert node.collective_time(op, size, few) <= node.collective_time(op, size, many)


def test_a_full_mesh_gives_two_ranks_one_of_their_links():
    node = load_catalog().resolve_node("mi300x-8")
    assert node.topology == "full-mesh"
    size = 1e9
    two, all_ranks = (node.collective_time("all_reduce", size, n) for n in (2, 8))
    bus = node.collectives["all_reduce"].bus_bytes_per_s
    latency = node.collectives["all_reduce"].latency_s
    assert two == pytest.approx(latency + size / (bus / 7))
    assert all_ranks == pytest.approx(latency + 2 * 7 / 8 * size / bus)


@given(size=st.floats(1, 1e11), node=st.sampled_from(shipped()), data=st.data())
def test_an_all_reduce_moves_twice_what_a_reduce_scatter_moves(size, node, data):
    ranks = data.draw(st.integers(2, node.count))

    def bus_seconds_at_equal_bandwidth(op):
        transfer = node.collective_time(op, size, ranks) - node.collective_time(op, 0, ranks)
        return transfer * node.collectives[op].bus_bytes_per_s

    twice = 2 * bus_seconds_at_equal_bandwidth("reduce_scatter")
    # the latency is subtracted again, which costs digits for small tensors
    assert bus_seconds_at_equal_bandwidth("all_reduce") == pytest.approx(twice, rel=1e-6, abs=1e-3 * size + 100)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('link = "Wire1"', 'link = "Wire2"', "nodes.toml: node 'box-8': link: no link 'Wire2'; known: Net1, Wire1."),
        ('fabric = "Net1"', 'fabric = "Net2"', "nodes.toml: node 'box-8': fabric: no link 'Net2'; known: Net1, Wire1."),
        ('device = "x1"', 'device = "x2"', "nodes.toml: node 'box-8': device: no device 'x2'; did you mean x1?"),
        (
            'fabric = "Net1"\n',
            "",
            "nodes.toml: node 'box-8': the record as a whole: fabric and fabric_bytes_per_s_per_device",
        ),
        ("collectives.all_reduce", "collectives.all_to_all", "collectives.all_reduce is missing"),
        ("collectives.broadcast", "collectives.gossip", "collectives.gossip"),
        ("count = 8", "count = 1", "count: Input should be greater than or equal to 2 (got 1)"),
        ('topology = "switch"', 'topology = "star"', "topology: Input should be 'switch', 'full-mesh'"),
        ("bus_bytes_per_s = 50e9", "bus_bytes_per_s = 50", "collectives.broadcast.bus_bytes_per_s"),
        ("latency_s = 20e-6", "latency_s = 20", "collectives.all_reduce.latency_s"),
        ("links_per_device = 4", "links = 4", "links: unknown key"),
        ('source = ["none"]', "source = []", "source: Tuple should have at least 1 item"),
    ],
)
def test_a_wrong_node_is_refused_with_file_and_key(old, new, message):
    assert old in NODE
    with pytest.raises(HardwareDataError) as caught:
        build(node=NODE.replace(old, new, 1))
    assert str(caught.value).startswith("nodes.toml: node 'box-8': ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('scope = "intra-node"', 'scope = "rack"', "scope: Input should be 'intra-node' or 'inter-node'"),
        (
            "bidirectional_bytes_per_s = 50e9",
            "bidirectional_bytes_per_s = 50",
            "bidirectional_bytes_per_s: Input should be",
        ),
        ("latency_s = 1e-6", "latency_s = 1.0", "latency_s: Input should be less than or equal to 0.001"),
        ("latency_s = 1e-6", "latency_us = 1", "latency_us: unknown key"),
        ('confidence = "A"', 'confidence = "D"', "confidence: Input should be 'A', 'B' or 'C'"),
    ],
)
def test_a_wrong_link_is_refused_with_file_and_key(old, new, message):
    with pytest.raises(HardwareDataError) as caught:
        build(links=LINKS.replace(old, new, 1))
    assert str(caught.value).startswith("links.toml: link 'Wire1': ")
    assert message in str(caught.value)


def test_a_link_or_node_is_described_once():
    with pytest.raises(HardwareDataError, match=r"links.toml: link 'Wire1' is already in links.toml"):
        build(links=LINKS + LINKS)
    with pytest.raises(HardwareDataError, match=r"nodes.toml: node 'box-8' is already in nodes.toml"):
        build(node=NODE + NODE)


def test_an_overlay_corrects_one_collective_of_a_node():
    overlay = '[[node]]\nid = "box-8"\ncollectives.all_reduce = { latency_s = 5e-6, bus_bytes_per_s = 40e9 }\n'
    texts = {"p.toml": PROFILE, "links.toml": LINKS, "nodes.toml": NODE}
    node = build_catalog(texts, {"mine.toml": overlay}).nodes["box-8"]
    assert node.collective_time("all_reduce", 160 * MB) == pytest.approx(7.005e-3, rel=1e-12)
    assert node.collectives["all_gather"] == box().collectives["all_gather"]


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("hgx-h100", "hgx-h100"),
        ("DGX H100", "hgx-h100"),
        ("dgx a100", "hgx-a100"),
        ("HGX H800", "hgx-h800"),
        ("Frontier", "frontier-mi250x"),
        ("MI300X node", "mi300x-8"),
        ("GB200 NVL72", "gb200-nvl72"),
    ],
)
def test_nodes_are_found_by_the_names_people_type(name, node):
    assert load_catalog().resolve_node(name).id == node


def test_a_misspelt_node_is_answered_with_near_ones():
    with pytest.raises(UnknownNodeError, match=r"unknown node 'hgx-h101'.*Did you mean .*'hgx-h100'"):
        load_catalog().resolve_node("hgx-h101")


@pytest.mark.parametrize("device", ["a100", "h100", "h800", "h200", "b200", "mi250x", "mi300x"])
def test_the_usual_nodes_are_there(device):
    assert [n.count for n in shipped() if n.device == device] == [8]


@pytest.mark.parametrize("node", shipped(), ids=lambda n: n.id)
class TestShippedNode:
    def test_knows_every_collective(self, node):
        assert set(node.collectives) == set(OPS)

    def test_uses_links_within_and_fabrics_between_nodes(self, node):
        links = load_catalog().links
        assert links[node.link].scope == "intra-node"
        assert node.fabric is None or links[node.fabric].scope == "inter-node"

    def test_no_bus_is_faster_than_the_links_carry_one_way(self, node):
        one_way = one_way_bandwidth(node)
        for op, cost in node.collectives.items():
            assert cost.bus_bytes_per_s <= one_way * in_switch_factor(node, op), op

    def test_no_bus_is_absurdly_slow(self, node):
        assert min(c.bus_bytes_per_s for c in node.collectives.values()) >= one_way_bandwidth(node) / 10

    def test_a_device_has_no_more_network_than_one_port(self, node):
        if node.fabric is not None:
            port = load_catalog().links[node.fabric].bidirectional_bytes_per_s / 2
            assert node.fabric_bytes_per_s_per_device <= port

    def test_links_agree_with_the_interconnect_of_the_device(self, node):
        stated = load_catalog().rows[node.device].interconnect
        assert stated is not None
        together, device_link = 2 * one_way_bandwidth(node), stated.bidirectional_bytes_per_s
        if node.topology == "ring":  # a GCD's row tells of its fastest peer only
            assert together >= device_link
        elif node.topology == "pcie-tree":  # bridges join pairs, not all devices
            assert together <= device_link
        else:
            assert together == pytest.approx(device_link, rel=0.03)

    def test_is_made_of_whole_cards(self, node):
        assert node.count % load_catalog().rows[node.device].logical_devices == 0

    def test_an_empty_collective_is_no_faster_than_a_hop(self, node):
        hop = load_catalog().links[node.link].latency_s
        assert all(cost.latency_s > hop for cost in node.collectives.values())


def one_way_bandwidth(node: Node) -> float:
    """Bytes per second that the links of one device carry one way."""
    return node.links_per_device * load_catalog().links[node.link].bidirectional_bytes_per_s / 2


def in_switch_factor(node: Node, op: CollectiveOp) -> float:
    """Switches of NVLink 4 and later sum in flight: each rank sends and receives the tensor once, where the bus
    bandwidth counts 2 (n-1)/n of it."""
    sums_in_switch = node.topology == "switch" and node.link in ("NVLink4", "NVLink5")
    return 2 * (node.count - 1) / node.count if op == "all_reduce" and sums_in_switch else 1.0


@pytest.mark.parametrize("op", OPS)
def test_the_export_part_has_slower_links_than_the_h100(op):
    nodes = load_catalog().nodes
    assert one_way_bandwidth(nodes["hgx-h800"]) == 200e9 < one_way_bandwidth(nodes["hgx-h100"]) == 450e9
    slow, fast = (nodes[i].collective_time(op, 1e9) for i in ("hgx-h800", "hgx-h100"))
    assert slow > 2 * fast


def test_generations_of_nvlink_and_pcie_grow():
    links = load_catalog().links
    for family in (
        ("NVLink1", "NVLink2", "NVLink3", "NVLink4", "NVLink5"),
        ("PCIe 3.0 x16", "PCIe 4.0 x16", "PCIe 5.0 x16", "PCIe 6.0 x16"),
        ("xGMI MI100", "xGMI MI200", "xGMI MI300", "xGMI MI350"),
        ("InfiniBand EDR", "InfiniBand HDR", "InfiniBand NDR", "InfiniBand XDR"),
        ("RoCE 100GbE", "RoCE 200GbE", "RoCE 400GbE", "RoCE 800GbE"),
    ):
        rates = [links[kind].bidirectional_bytes_per_s for kind in family]
        assert rates == sorted(rates)


def test_node_names_do_not_collide():
    spoken = [name.lower() for node in shipped() for name in (node.id, node.name, *node.aliases)]
    assert len(spoken) == len(set(spoken))
