"""Ranks that lie badly on nodes and racks, or lack the C++ operators, are named in a line each, and no others."""

from __future__ import annotations

import logging
from contextlib import redirect_stderr
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.clusters import ClusterConfig
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.stderr_log import messages_on_stderr
from gapless.parallel.placement import nodes_of_stages
from gapless.parallel.real_placement import Place
from gapless.runtime.pipeline.start_warnings import _said_reasons, say_attention, warn_of_fallback, warn_of_placement

GPU = HardwareConfig(device="cuda")


def warned(
    nodes: str,
    tp: int,
    hardware: HardwareConfig = GPU,
    cluster: ClusterConfig | None = None,
    racks: dict[str, str] | None = None,
) -> list[str]:
    """Return the lines for ranks on the nodes of these letters."""
    places = {rank: Place(node, (racks or {}).get(node)) for rank, node in enumerate(nodes)}
    return lines_of(places, tp, hardware, cluster or ClusterConfig())


def messages(text: str) -> list[str]:
    lines = text.splitlines()
    assert all(line.startswith("gapless: warning: ") for line in lines)
    return [line.removeprefix("gapless: warning: ") for line in lines]


def lines_of(places: dict[int, Place], tp: int, hardware: HardwareConfig, cluster: ClusterConfig) -> list[str]:
    parallel = ParallelConfig(pp=len(places) // tp, tp=tp, launcher="ray")
    hosts = {rank: f"host-{place.node}" for rank, place in places.items()}
    with redirect_stderr(StringIO()) as printed, messages_on_stderr():
        warn_of_placement(places, hosts, parallel, hardware, cluster)
    return messages(printed.getvalue())


def test_a_split_stage_and_its_adapters() -> None:
    (line,) = warned("aabb", 4)
    assert line.startswith("stages span several nodes (stage 0 on host-a, host-b), so their all-reduces cross")
    assert len(warned("aabb", 4, cluster=ClusterConfig(network_adapters=2))) == 1
    lines = warned("aabb", 4, cluster=ClusterConfig(network_adapters=1))
    assert lines[1] == (
        "2 ranks of a stage that spans nodes share 1 network adapter per node (cluster.network_adapters) in each "
        "all-reduce"
    )


def test_stages_that_go_to_and_fro() -> None:
    for hardware in (GPU, HardwareConfig()):
        assert warned("aabbaabb", 2, hardware) == [
            "stages change nodes 3 times where 1 would suffice (by stage: host-a, host-b, host-a, host-b): order "
            "ranks by node"
        ]


def test_more_nodes_than_the_cluster_is_said_to_need() -> None:
    assert warned("aabb", 2) == [
        "stages change nodes once (by stage: host-a, host-b), and never by cluster.devices_per_node=8: "
        "nodes have fewer devices, or other jobs use them"
    ]
    assert warned("aabb", 2, cluster=ClusterConfig(devices_per_node=2)) == []
    assert warned("aabb", 2, HardwareConfig()) == []  # for the cores of both


def test_stages_that_cross_racks_too_often() -> None:
    cluster, racks = ClusterConfig(devices_per_node=1), {"a": "x", "b": "y", "c": "x"}
    assert warned("abc", 1, cluster=cluster, racks=racks) == [
        "stages change racks 2 times where 1 would suffice (by stage: x, y, x): order ranks by rack"
    ]
    assert warned("acb", 1, cluster=cluster, racks=racks) == []
    assert warned("abc", 1, cluster=cluster, racks={"a": "x"}) == []


@given(pp=st.integers(1, 9), tp=st.integers(1, 4), devices=st.integers(4, 9), per_rack=st.integers(1, 3))
def test_the_placement_of_a_simulation_is_a_good_one(pp: int, tp: int, devices: int, per_rack: int) -> None:
    nodes = [node for (node,) in nodes_of_stages(pp, tp, devices) for _ in range(tp)]
    places = {rank: Place(f"{node:03}", f"{node // per_rack:03}") for rank, node in enumerate(nodes)}
    assert lines_of(places, tp, GPU, ClusterConfig(devices_per_node=devices)) == []


def test_ranks_that_fall_back_for_the_same_reason_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    _said_reasons.clear()
    warn_of_fallback(("no compiler", "", "no compiler", "no disk"))
    lines = [line.partition("; ")[0] for line in caplog.messages]
    assert lines == [
        "using torch's operators on ranks 0, 2, which are slower: no compiler",
        "using torch's operators on rank 3, which are slower: no disk",
    ]


def test_a_fallback_is_said_once_with_the_measured_speed(caplog: pytest.LogCaptureFixture) -> None:
    _said_reasons.clear()
    rates = [0.0437, 1234.5, 23.4]
    for _ in range(2):
        warn_of_fallback(("no compiler; install GCC",), rates.pop)
    assert caplog.messages == [
        "using torch's operators, which are slower (expect about 23 tokens/s for a single request): no compiler; "
        "install GCC; model.kernels=torch selects them without this warning"
    ]
    warn_of_fallback(("", ""), rates.pop)
    assert (len(caplog.messages), len(rates)) == (1, 2), "nothing more is measured than there are lines for"
    warn_of_fallback(("no disk",), rates.pop)
    warn_of_fallback(("no room",), rates.pop)
    assert [line.partition("about ")[2].partition(" for")[0] for line in caplog.messages[1:]] == [
        "1200 tokens/s",
        "0.044 tokens/s",
    ]


def test_the_start_says_once_which_attention_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    say_attention.cache_clear()
    for _ in range(2):
        say_attention(("flash", "flash"))
    say_attention(("flash", "sdpa, since flash does not run here: needs CUDA"))
    say_attention(("", ""))
    assert caplog.messages == [
        "attention: flash",
        "attention on rank 0: flash",
        "attention on rank 1: sdpa, since flash does not run here: needs CUDA",
    ]
