"""Says, before anything is served, where ranks lie badly or lack C++, and which backend computes attention."""

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
        places: of each rank, where it is known.
        hosts: name of each rank's node.
        parallel: the grid of ranks.
        hardware: what a rank runs on.
        cluster: what nodes hold.
    """
    split = split_stages({rank: place.node for rank, place in places.items()}, parallel.tp)
    if split:
        lines = _of_split_stages(split, places, hosts, parallel.tp, cluster)
    else:
        lines = _of_nodes(places, hosts, parallel, hardware, cluster)
    for line in (*lines, *_of_racks(places, parallel)):
        _log.warning(line)


def warn_of_fallback(reasons: tuple[str, ...], measure: Callable[[], float] | None = None) -> None:
    """Log, once in a process, why ranks lack the C++ operators, or Triton's: a line for each reason.

    Args:
        reasons: of each rank, with what would help; empty where it lacks none.
        measure: returns the tokens per second of a single request. It is called only if there is a line to log.
    """
    if reasons in _said_reasons or not any(reasons):
        return
    _said_reasons.add(reasons)
    rate = "" if measure is None else f" (expect about {float(f'{measure():.2g}'):g} tokens/s for a single request)"
    for reason, some in _by_line(reasons):
        _log.warning(
            f"torch's operators run{some}, which take longer{rate}: {reason}; model.kernels=torch asks for them "
            "without this line"
        )


@cache
def say_attention(lines: tuple[str, ...]) -> None:
    """Log, once in a process, which backend computes attention: a line, or more where ranks differ.

    Args:
        lines: of each rank; empty on a CPU.
    """
    for line, some in _by_line(lines):
        _log.info(f"attention{some}: {line}")


@cache
def warn_of_slow_ranks(are_slow: tuple[bool, ...]) -> None:
    """Log, once in a process, which ranks compute in bfloat16 on a processor that does not multiply it."""
    for reason, some in _by_line(tuple("bfloat16 takes long" if slow else "" for slow in are_slow)):
        _log.warning(f"{reason}{some}: the processor has neither AVX-512 BF16 nor AMX; model.dtype=float32 is faster")


def _by_line(lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each line that ranks say, and which of them do if not all."""
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
        f"stages over several nodes ({stages}): each of their all-reduces crosses the network; a smaller parallel.tp, "
        "with more stages, keeps each stage on a node"
    ]
    ranks_a_node = (Counter(places[stage * tp + number].node for number in range(tp)) for stage in split)
    most = max(max(count.values()) for count in ranks_a_node)
    if most > cluster.adapters:
        adapters = f"{cluster.adapters} network adapter{'s' * (cluster.adapters > 1)}"
        lines.append(
            f"{most} ranks of a stage over several nodes share {adapters} of a node (cluster.network_adapters) in "
            "each all-reduce"
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
        return [f"stages change nodes {_times(crossed)} where {least} would do ({by_stage}): order the ranks by node"]
    described, _ = changes([n[0] for n in nodes_of_stages(parallel.pp, parallel.tp, cluster.devices_per_node)])
    if hardware.device == "cuda" and crossed > described:  # stages on CPUs lie apart for the cores
        return [
            f"stages change nodes {_times(crossed)} ({by_stage}), and {_times(described)} by cluster.devices_per_node="
            f"{cluster.devices_per_node}: either nodes have fewer devices, or others use them"
        ]
    return []


def _of_racks(places: Mapping[int, Place], parallel: ParallelConfig) -> list[str]:
    racks = [places[rank].rack for rank in range(0, parallel.world_size, parallel.tp)]
    crossed, least = changes(racks)
    if None in racks or crossed <= least:
        return []
    by_stage = ", ".join(map(str, racks))
    rest = f"where {least} would do (by stage: {by_stage}): order the ranks by rack"
    return [f"stages change racks {_times(crossed)} {rest}"]


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")
