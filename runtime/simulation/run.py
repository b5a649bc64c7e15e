"""Runs a workload over what a setting describes: a fleet of replicas, or a prefill and a decode pool."""

from __future__ import annotations

from collections.abc import Iterator

from ..workload import Workload
from .disaggregation import make_disaggregated
from .replicas import Replica, make_replicas, run_fleet
from .setting import Setting


def start(setting: Setting, workload: Workload, *, repeat: int = 1) -> tuple[list[Replica], Iterator[int]]:
    """Make the replicas of a setting, those of a prefill pool first.

    Args:
        setting: of all replicas.
        workload: what they serve.
        repeat: the number of the run, from 1; each run and each replica has disturbances and faults of its own.

    Returns:
        The replicas, and an iterator that runs `workload` to its end; it yields how many requests have just ended.
    """
    config = setting.config
    items, most = workload.without_prompts(), config.workload.max_concurrency
    if setting.prefill is not None:
        fleet = make_disaggregated(setting, repeat=repeat)
        return fleet.replicas, fleet.run(items, max_concurrency=most)
    replicas = make_replicas(setting, repeat=repeat)
    return replicas, run_fleet(replicas, items, router=config.simulation.router, max_concurrency=most)


def simulated(setting: Setting, workload: Workload) -> list[Replica]:
    """Run `workload` to its end over the replicas of a setting, and return them, each with its record.

    Raises:
        PipelineError: a policy takes nothing though nothing is in flight.
    """
    replicas, run = start(setting, workload)
    for _ in run:
        pass
    return replicas
