"""Links and collectives keep the laws of any cluster, meet published times, and leave one node's times as they were."""

from __future__ import annotations

import dataclasses
import gzip
import math
import os
from collections import defaultdict
from csv import DictReader
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, group_names, load_group, load_hardware
from gapless.conf.clusters import ClusterConfig
from gapless.conf.costs import CostsConfig, LinkConfig
from gapless.conf.schema import SimulateConfig
from gapless.parallel.placement import StageLink, stage_links
from gapless.runtime.simulation.cost.analytic import AnalyticOperators
from gapless.runtime.simulation.cost.link import Link
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.cost.topology import Topology
from gapless.runtime.simulation.pipeline.replicas import make_replicas
from gapless.runtime.simulation.pipeline.setting import make_setting
from tests.support.tiers import examples

DATA = Path(os.environ.get("GAPLESS_DATA", "no folder")) / "a100"
ALGORITHMS = ("ring", "tree", "two_level")
FAR = StageLink(between_nodes=True)
law = settings(max_examples=examples(60))


def costs_of(device: str = "a100-80g") -> CostsConfig:
    costs = load_hardware(device).costs
    assert costs is not None
    return costs


COSTS = costs_of()
LINKS = st.builds(
    LinkConfig,
    least_us=st.floats(0, 200),
    ramp_us=st.floats(0, 20),
    gigabytes_per_s=st.floats(0.1, 500),
    knee=st.floats(1, 5),
)
CLUSTERS = st.builds(
    ClusterConfig,
    devices_per_node=st.integers(1, 8),
    network_adapters=st.none() | st.integers(1, 8),
    nodes_per_rack=st.none() | st.integers(1, 4),
    oversubscription=st.floats(1, 10),
    all_reduce_algorithms=st.sets(st.sampled_from(ALGORITHMS), min_size=1).map(lambda found: tuple(sorted(found))),
    network=st.none() | LINKS,
    spine=st.none() | LINKS,
)
TP = st.integers(2, 40)
SIZE = st.floats(1e3, 1e9)


def seconds(cluster: ClusterConfig, tp: int, size: float, between_racks: bool = False) -> list[float]:
    """Seconds of an all-reduce, of a gather, of a transfer and of sends over each link of three stages."""
    found = Topology(cluster, COSTS, tp, between_racks=between_racks)
    (links,) = stage_links(3, tp, cluster)
    return [
        found.all_reduce(size),
        found.gather(size),
        *(found.send(size, link) for link in links),
    ]


def assert_never_faster(slow: list[float], fast: list[float]) -> None:
    for slower, faster in zip(slow, fast, strict=True):
        assert slower >= faster * (1 - 1e-9)


@law
@given(CLUSTERS, TP, SIZE, st.floats(1, 1000), st.booleans())
def test_more_bytes_are_never_faster(cluster: ClusterConfig, tp: int, size: float, more: float, racks: bool) -> None:
    assert_never_faster(seconds(cluster, tp, size * more, racks), seconds(cluster, tp, size, racks))


@law
@given(CLUSTERS, TP, SIZE, st.booleans())
def test_crossing_racks_is_never_faster(cluster: ClusterConfig, tp: int, size: float, oversubscribed: bool) -> None:
    one_rack = dataclasses.replace(cluster, nodes_per_rack=None)
    assert_never_faster(seconds(cluster, tp, size, True)[:3], seconds(cluster, tp, size)[:3])
    assert_never_faster(seconds(cluster, tp, size), seconds(one_rack, tp, size))
    if oversubscribed:
        free = dataclasses.replace(cluster, oversubscription=1.0)
        assert_never_faster(seconds(cluster, tp, size, True), seconds(free, tp, size, True))


@law
@given(CLUSTERS, TP, SIZE, st.integers(1, 7), st.booleans())
def test_fewer_adapters_are_never_faster(
    cluster: ClusterConfig, tp: int, size: float, adapters: int, racks: bool
) -> None:
    few, more, own = (
        dataclasses.replace(cluster, network_adapters=number) for number in (adapters, adapters + 1, None)
    )
    times = [seconds(each, tp, size, racks) for each in (few, more, own)]
    assert_never_faster(times[0], times[1])
    if adapters + 1 <= cluster.devices_per_node:
        assert_never_faster(times[1], times[2])


@law
@given(CLUSTERS, TP, SIZE, LINKS, st.sampled_from(("all_reduce", "network", "spine")), st.floats(0, 1), st.booleans())
def test_a_faster_link_is_never_slower(
    cluster: ClusterConfig, tp: int, size: float, link: LinkConfig, name: str, share: float, racks: bool
) -> None:
    cluster = dataclasses.replace(cluster, spine=cluster.spine or link)
    slow = dataclasses.replace(cluster, **{name: link})
    better = dataclasses.replace(
        link, gigabytes_per_s=link.gigabytes_per_s * (1 + share), least_us=link.least_us * share
    )
    fast = dataclasses.replace(cluster, **{name: better})
    assert_never_faster(seconds(slow, tp, size, racks), seconds(fast, tp, size, racks))


@law
@given(CLUSTERS, TP, SIZE)
def test_the_fastest_of_the_algorithms_is_taken(cluster: ClusterConfig, tp: int, size: float) -> None:
    alone = [
        Topology(dataclasses.replace(cluster, all_reduce_algorithms=(name,)), COSTS, tp).all_reduce(size)
        for name in ALGORITHMS
    ]
    every = dataclasses.replace(cluster, all_reduce_algorithms=ALGORITHMS)
    assert Topology(every, COSTS, tp).all_reduce(size) == min(alone)


@law
@given(CLUSTERS, st.integers(2, 39), SIZE)
def test_within_a_node_more_ranks_are_never_faster_and_the_cluster_does_not_matter(
    cluster: ClusterConfig, tp: int, size: float
) -> None:
    node = dataclasses.replace(cluster, devices_per_node=tp + 1)
    times = [Topology(node, COSTS, ranks).all_reduce(size) for ranks in (tp, tp + 1)]
    assert times[1] >= times[0] == Link(COSTS.all_reduce).seconds(2 * (tp - 1) / tp * size)


def test_a_ring_over_two_nodes_by_hand() -> None:
    """Sixteen ranks lie on two nodes of eight, and the latency between nodes counts twice.

    Each link of the ring carries 2 x 15/16 of the bytes, four adapters a quarter each.
    """
    size = 1 << 26
    cluster = ClusterConfig(network_adapters=4, all_reduce_algorithms=("ring",))
    network = Link(COSTS.network).seconds(2 * 15 / 16 * size / 4)
    assert network > Link(COSTS.all_reduce).seconds(2 * 15 / 16 * size)
    expected = network + 2 * (COSTS.network.least_us - COSTS.node.least_us) * 1e-6
    assert Topology(cluster, COSTS, 16).all_reduce(size) == pytest.approx(expected)


def test_two_levels_over_two_nodes_by_hand() -> None:
    """Eight ranks on two nodes: 2 x 3/4 of the bytes within a node, then 2 x 1/2 of a quarter of them across."""
    size = 1 << 22
    cluster = ClusterConfig(devices_per_node=4, all_reduce_algorithms=("two_level",))
    expected = Link(COSTS.all_reduce).seconds(1.5 * size) + Link(COSTS.network).seconds(size / 4)
    expected += (COSTS.network.least_us - COSTS.node.least_us) * 1e-6
    assert Topology(cluster, COSTS, 8).all_reduce(size) == pytest.approx(expected)


def test_a_tree_waits_less_than_a_ring_over_many_nodes_and_carries_more() -> None:
    ring, tree = (Topology(ClusterConfig(all_reduce_algorithms=(name,)), COSTS, 256) for name in ("ring", "tree"))
    assert tree.all_reduce(1e4) < ring.all_reduce(1e4) / 4
    assert tree.all_reduce(1e10) > ring.all_reduce(1e10)


@pytest.mark.parametrize(("nodes", "published"), [(2, 91), (2, 86), (3, 96)])
def test_published_all_reduces_over_nodes_of_eight_a100_with_four_adapters(nodes: int, published: float) -> None:
    """Bus bandwidth in GB/s of the largest messages: issues 100, 175 and 119 of NVIDIA/nccl-tests."""
    size, ranks = 1 << 30, 8 * nodes
    found = Topology(ClusterConfig(network_adapters=4), COSTS, ranks).all_reduce(size)
    assert 2 * (ranks - 1) / ranks * size / found / 1e9 == pytest.approx(published, rel=0.15)


def test_published_all_reduces_over_pcie() -> None:
    """Of four GPUs, bytes and microseconds: pull request 22 of tinygrad/open-gpu-kernel-modules."""
    cluster = build(ClusterConfig, load_group("cluster", "pcie"), "cluster")
    found = Topology(cluster, COSTS, 4)
    for size, published in ((1 << 18, 66.3), (1 << 20, 152.7), (1 << 23, 1000.9), (1 << 26, 7888.2)):
        assert found.all_reduce(size) * 1e6 == pytest.approx(published, rel=0.1), size


def test_a_send_beside_all_reduces_over_nodes_takes_longer() -> None:
    """The ranks of a stage over two nodes are always at an all-reduce: a send has half of its adapter."""
    cluster = ClusterConfig(devices_per_node=4)
    (links,) = stage_links(2, 8, cluster)
    found = Topology(cluster, COSTS, 8)
    assert found.send(1e6, links[0]) == found.send(2e6, FAR)


def test_an_uplink_that_is_oversubscribed_is_shared() -> None:
    """Eight ranks of a stage send at once to the next rack, whose links are those of two adapters."""
    cluster = ClusterConfig(devices_per_node=8, nodes_per_rack=1, oversubscription=4.0)
    (links,) = stage_links(2, 8, cluster)
    assert links == [StageLink(True, True, 1.0, 4.0)]
    found = Topology(cluster, COSTS, 8)
    assert found.send(1e6, links[0]) == found.send(4e6, FAR)


@pytest.mark.parametrize(
    ("device", "model", "tp", "pp", "replicas", "stage_us", "sends_us"),
    [
        ("a100-80g", "llama2-70b", 8, 1, 1, 56420.186, 0.0),
        ("a100-80g", "llama2-70b", 4, 2, 1, 85827.969, 113.762),
        ("a100-80g", "gpt3-175b", 8, 8, 1, 119366.745, 1677.302),
        ("h100", "llama2-70b", 8, 2, 2, 22331.157, 57.675),
        ("a100-80g", "llama2-70b", 2, 8, 2, 143690.828, 946.889),
        ("a6000", "llama-33b", 4, 2, 1, 110934.206, 211.992),
    ],
)
def test_stages_within_a_node_and_their_sends_take_as_long_as_before_there_were_clusters(
    device: str, model: str, tp: int, pp: int, replicas: int, stage_us: float, sends_us: float
) -> None:
    """Sums over the stages, and over the links of each replica, by the code of commit 3917336.

    The H100's are by constants that were fitted later, to tables and to servers.
    """
    config = build(
        SimulateConfig,
        {
            "model": load_group("model", model),
            "hardware": load_group("hardware", device),
            "cluster": load_group("cluster", "default"),
            "parallel": {"tp": tp, "pp": pp, "launcher": "ray"},
            "simulation": {"replicas": replicas},
        },
    )
    setting = make_setting(config)
    shape = MicroBatchShape(chunks=((256, 512),), decodes=24, context=24000, sampled=24)
    assert 1e6 * sum(setting.costs.seconds(shape)) == pytest.approx(stage_us, rel=1e-7)
    for replica in make_replicas(setting):
        assert 1e6 * sum(replica.pipeline._send(280)) == pytest.approx(sends_us, abs=1e-3)


def test_only_a_stage_over_racks_pays_for_the_spine() -> None:
    """Stages of two nodes each, racks of three: the second of three stages lies in two racks."""
    config = build(
        SimulateConfig,
        {
            "model": load_group("model", "llama2-70b"),
            "hardware": load_group("hardware", "a100-80g"),
            "cluster": {"devices_per_node": 2, "nodes_per_rack": 3, "oversubscription": 8},
            "parallel": {"tp": 4, "pp": 3, "launcher": "ray", "layers": [26, 28, 26]},
        },
    )
    free = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes_per_rack=None))
    shape = MicroBatchShape(chunks=((512, 0),))
    slow, fast = (make_setting(each).costs.seconds(shape) for each in (config, free))
    assert slow[0] == fast[0]
    assert slow[1] > 1.2 * fast[1]
    assert slow[2] == fast[2]


@pytest.mark.parametrize("device", ["a100-80g", "h100", "h200", "a6000"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_stage_over_more_nodes_takes_longer(device: str, tp: int) -> None:
    arch = Architecture(**load_group("model", "llama2-70b")["architecture"])
    for rows in (1, 32, 512, 4096):
        clusters = [ClusterConfig(devices_per_node=per_node) for per_node in (16, 8, 4, 2, 1)]
        hardware = load_hardware(device)
        sources = [
            AnalyticOperators(arch, tp, costs_of(device), 2, attention=hardware.attention, cluster=cluster)
            for cluster in clusters
        ]
        times = [source.all_reduce(rows) for source in sources]
        assert times[0] == times[1]  # fits into a node
        assert times == sorted(times)
        assert times[-1] > times[0]
        sends = [source.send(rows, link=FAR, scatter_gather=True) for source in sources]
        assert sends == sorted(sends)
        embeddings = [source.embedding(rows) for source in sources]
        assert embeddings == sorted(embeddings)


def test_a_group_of_clusters_differs_where_the_network_matters() -> None:
    times = {}
    for name in group_names("cluster"):
        cluster = build(ClusterConfig, load_group("cluster", name), "cluster")
        times[name] = [Topology(cluster, COSTS, tp).all_reduce(1e7) for tp in (8, 16)]
    assert times["default"][0] == times["dgx-a100"][0] == times["ethernet-25g"][0] < times["pcie"][0] / 5
    assert times["dgx-a100"][1] < times["ethernet-100g"][1] < times["ethernet-25g"][1]


@pytest.mark.skipif(not DATA.is_dir(), reason="GAPLESS_DATA names no folder with measurements")
@pytest.mark.parametrize(("ranks", "share"), [(2, 0.77), (4, 0.45), (8, 0.64), (16, 0.49)])
def test_all_reduces_over_two_nodes_take_this_share_of_what_was_measured(ranks: int, share: float) -> None:
    """The cluster's sends reach 7.8 GB/s between nodes. How many adapters a node has is not stated; here it is four."""
    sends = _medians("dgx_send_recv", "send_recv", 2)
    sizes, times = np.array([(size, t) for (_, size), t in sends.items()]).T
    columns = np.stack([np.ones_like(sizes), sizes**0.5, sizes], axis=1) / times[:, None]
    least, ramp, byte = map(float, np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)[0])
    network = LinkConfig(least_us=least * 1e6, ramp_us=ramp * 1e9, gigabytes_per_s=1e-9 / byte, knee=1.0)
    assert network.gigabytes_per_s == pytest.approx(7.8, rel=0.05)
    node = dataclasses.replace(COSTS.node, least_us=8.0)  # of the same file, as all of it without the launch
    cluster = ClusterConfig(devices_per_node=ranks // 2, network_adapters=4, network=network, node=node)
    found, measured = Topology(cluster, COSTS, ranks), _medians("dgx_all_reduce", "all_reduce", 2)
    shares = [found.all_reduce(size) / t for (number, size), t in measured.items() if number == ranks]
    assert len(shares) > 900
    assert median(shares) == pytest.approx(share, abs=0.02)


def _medians(name: str, column: str, nodes: int) -> dict[tuple[int, int], float]:
    """Seconds of the messages of a file over `nodes` nodes, by ranks and bytes."""
    found = defaultdict(list)
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
        for row in DictReader(file):
            ranks, a_node, size = (int(row[key]) for key in ("num_workers", "devices_per_node", "size"))
            if text := row[f"time_stats.{column}.median"]:
                time = float(text) * 1e-3
                if size and ranks == nodes * a_node and not math.isnan(time):
                    found[ranks, size].append(time)
    return {key: median(times) for key, times in found.items()}
