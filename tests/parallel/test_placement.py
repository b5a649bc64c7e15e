"""Stages lie on as few nodes as hold them, and what crosses their links at the same time is counted."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.clusters import ClusterConfig
from gapless.parallel.placement import StageLink, nodes_of_stages, stage_links, stages_span_racks


@given(pp=st.integers(1, 12), tp=st.integers(1, 32), devices=st.integers(1, 16))
def test_stages_fill_nodes_in_order_and_none_is_split_that_fits(pp: int, tp: int, devices: int) -> None:
    stages = nodes_of_stages(pp, tp, devices)
    assert len(stages) == pp
    for nodes in stages:
        assert len(nodes) == -(-tp // devices)
        assert nodes == list(range(nodes[0], nodes[0] + len(nodes)))
    for before, after in pairwise(stages):
        assert after[0] in (before[-1], before[-1] + 1)
    for node in {node for nodes in stages for node in nodes}:
        assert sum(min(tp, devices) for nodes in stages if node in nodes) <= devices


def test_hand_made_placements() -> None:
    assert nodes_of_stages(4, 4, 8) == [[0], [0], [1], [1]]
    assert nodes_of_stages(3, 4, 6) == [[0], [1], [2]]
    assert nodes_of_stages(2, 8, 4) == [[0, 1], [2, 3]]


@given(pp=st.integers(1, 9), tp=st.integers(1, 20), devices=st.integers(1, 9), replicas=st.integers(1, 5))
def test_replicas_fill_nodes_in_order(pp: int, tp: int, devices: int, replicas: int) -> None:
    placed = [nodes_of_stages(pp, tp, devices, replica) for replica in range(replicas)]
    assert [nodes for stages in placed for nodes in stages] == nodes_of_stages(pp * replicas, tp, devices)


CLUSTERS = st.builds(
    ClusterConfig,
    devices_per_node=st.integers(1, 9),
    network_adapters=st.none() | st.integers(1, 9),
    nodes_per_rack=st.none() | st.integers(1, 4),
    oversubscription=st.floats(1, 8),
)


@given(pp=st.integers(1, 9), tp=st.integers(1, 20), cluster=CLUSTERS, replicas=st.integers(1, 4))
def test_links_cross_what_their_stages_lie_apart(pp: int, tp: int, cluster: ClusterConfig, replicas: int) -> None:
    everything = stage_links(pp, tp, cluster, replicas)
    assert [len(links) for links in everything] == [pp - 1] * replicas
    for replica, links in enumerate(everything):
        for (before, after), link in zip(
            pairwise(nodes_of_stages(pp, tp, cluster.devices_per_node, replica)), links, strict=True
        ):
            assert link.between_nodes == (before != after)
            racks = [[node // (cluster.nodes_per_rack or 10**6) for node in nodes] for nodes in (before, after)]
            assert link.between_racks == (racks[0] != racks[1])
            ranks = -(-tp // len(before))
            if link.between_nodes:  # in order, only one stage's ranks leave a node at a time, beside all-reduces
                assert link.per_adapter == max(
                    1 + (tp > cluster.devices_per_node),
                    (1 + (tp > cluster.devices_per_node)) * ranks / cluster.adapters,
                )
            assert link.per_uplink >= 1
            assert link.between_racks or link.per_uplink == 1


def test_hand_made_links() -> None:
    inside, ours = StageLink(False), StageLink(True, per_adapter=2.0)
    one_adapter = ClusterConfig(network_adapters=1)
    assert stage_links(8, 2, one_adapter) == [[inside, inside, inside, ours, inside, inside, inside]]
    assert stage_links(3, 4, one_adapter, replicas=2) == [
        [inside, StageLink(True, per_adapter=4.0)],
        [StageLink(True, per_adapter=4.0), inside],
    ]
    racks = ClusterConfig(devices_per_node=2, nodes_per_rack=2, oversubscription=8.0)
    assert stage_links(4, 2, racks) == [[StageLink(True), StageLink(True, True, 1.0, 4.0), StageLink(True)]]


def test_stages_over_racks() -> None:
    cluster = ClusterConfig(devices_per_node=2, nodes_per_rack=3)
    assert stages_span_racks(3, 4, cluster) == [False, True, False]
    assert stages_span_racks(3, 4, cluster, replicas=2) == [False, True, False]
    assert stages_span_racks(1, 4, cluster, replicas=2) == [True]
    assert stages_span_racks(6, 2, cluster) == [False] * 6
