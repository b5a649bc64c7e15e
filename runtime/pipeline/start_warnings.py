"""Startup log lines: badly placed ranks, missing C++ kernels, and the attention backend."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

from ...conf.clusters import ClusterConfig
from ...conf.schema import HardwareConfig, ParallelConfig
from ...parallel.placement import nodes_of_stages
from ...parallel.real_placement import Place, changes, split_stages

_log = logging.getLogger(__name__)
_said_reasons: set[tuple[str, ...]] = set()  # of `warn_of_fallback`, in this process


def warn_of_placement(
    places: Mapping[int, Place],
    hosts: Mapping[int, str],
    parallel: ParallelConfig,
    hardware: HardwareConfig,
    cluster: ClusterConfig,
) -> None:
    """Log a line for each way in which the ranks are badly placed.

    Args:
        places: place of each rank, if known.
        hosts: name of each rank's node.
        parallel: the grid of ranks.
        hardware: what a rank runs on.
        cluster: the nodes' resources.
    """
    split = split_stages({rank: place.node for rank, place in places.items()}, parallel.tp)
    if split:
        lines = _of_split_stages(split, places, hosts, parallel.tp, cluster)
    else:
        lines = _of_nodes(places, hosts, parallel, hardware, cluster)
    for line in (*lines, *_of_racks(places, parallel)):
        _log.warning(line)


def warn_of_fallback(reasons: tuple[str, ...], measure: Callable[[], float] | None = None) -> None:
    """Log, once per process, why ranks lack the C++ or Triton kernels: one line per reason.

    Args:
        reasons: reason of each rank, with a remedy; empty if it lacks none.
        measure: returns the tokens per second of a single request. Called only if there is a line to log.
    """
    if reasons in _said_reasons or not any(reasons):
        return
    _said_reasons.add(reasons)
    rate = "" if measure is None else f" (expect about {float(f'{measure():.2g}'):g} tokens/s for a single request)"
    for reason, some in _by_line(reasons):
        _log.warning(
            f"using torch's operators{some}, which are slower{rate}: {reason}; model.kernels=torch selects them "
            "without this warning"
        )


@cache
def say_attention(lines: tuple[str, ...]) -> None:
    """Log, once per process, the attention backend: one line, or more if ranks differ.

    Args:
        lines: line of each rank; empty on a CPU.
    """
    for line, some in _by_line(lines):
        _log.info(f"attention{some}: {line}")


@cache
def warn_of_slow_ranks(are_slow: tuple[bool, ...]) -> None:
    """Log, once per process, which ranks compute in bfloat16 on a processor without bfloat16 instructions."""
    for reason, some in _by_line(tuple("bfloat16 is slow" if slow else "" for slow in are_slow)):
        _log.warning(f"{reason}{some}: the processor has neither AVX-512 BF16 nor AMX; model.dtype=float32 is faster")


def _by_line(lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each distinct line, with its ranks unless they are all ranks."""
    found = []
    for line in dict.fromkeys(filter(None, lines)):
        ranks = [str(rank) for rank, own in enumerate(lines) if own == line]
        some = "" if len(ranks) == len(lines) else f" on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        found.append((line, some))
    return found


def _of_split_stages(
    split: Mapping[int, list[int]],
    places: Mapping[int, Place],
    hosts: Mapping[int, str],
    tp: int,
    cluster: ClusterConfig,
) -> list[str]:
    stages = "; ".join(f"stage {stage} on {', '.join(hosts[rank] for rank in ranks)}" for stage, ranks in split.items())
    lines = [
        f"stages span several nodes ({stages}), so their all-reduces cross the network; a smaller parallel.tp with "
        "more stages keeps each stage on one node"
    ]
    ranks_a_node = (Counter(places[stage * tp + number].node for number in range(tp)) for stage in split)
    most = max(max(count.values()) for count in ranks_a_node)
    if most > cluster.adapters:
        adapters = f"{cluster.adapters} network adapter{'s' * (cluster.adapters > 1)}"
        lines.append(
            f"{most} ranks of a stage that spans nodes share {adapters} per node (cluster.network_adapters) in each "
            "all-reduce"
        )
    return lines


def _of_nodes(
    places: Mapping[int, Place],
    hosts: Mapping[int, str],
    parallel: ParallelConfig,
    hardware: HardwareConfig,
    cluster: ClusterConfig,
) -> list[str]:
    first = range(0, parallel.world_size, parallel.tp)  # rank of each stage
    crossed, least = changes([places[rank].node for rank in first])
    by_stage = f"by stage: {', '.join(hosts[rank] for rank in first)}"
    if crossed > least:
        return [f"stages change nodes {_times(crossed)} where {least} would suffice ({by_stage}): order ranks by node"]
    described, _ = changes([n[0] for n in nodes_of_stages(parallel.pp, parallel.tp, cluster.devices_per_node)])
    if hardware.device == "cuda" and crossed > described:  # stages on CPUs are spread out for their cores
        return [
            f"stages change nodes {_times(crossed)} ({by_stage}), and {_times(described)} by cluster.devices_per_node="
            f"{cluster.devices_per_node}: nodes have fewer devices, or other jobs use them"
        ]
    return []


def _of_racks(places: Mapping[int, Place], parallel: ParallelConfig) -> list[str]:
    racks = [places[rank].rack for rank in range(0, parallel.world_size, parallel.tp)]
    crossed, least = changes(racks)
    if None in racks or crossed <= least:
        return []
    by_stage = ", ".join(map(str, racks))
    rest = f"where {least} would suffice (by stage: {by_stage}): order ranks by rack"
    return [f"stages change racks {_times(crossed)} {rest}"]


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")
