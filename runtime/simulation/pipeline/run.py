"""Runs a workload over what a setting describes: a fleet of replicas, or a prefill and a decode pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
    config, front = setting.config, setting.control.front
    if setting.prefill is not None:
        fleet = make_disaggregated(setting, repeat=repeat)
        serve = partial(fleet.run, workload=config.workload, front=front)
        return fleet.replicas, _phases(fleet.replicas, workload, serve)
    replicas = make_replicas(setting, repeat=repeat)
    run = partial(run_fleet, replicas, router=config.simulation.router, workload=config.workload, front=front)
    return replicas, _phases(replicas, workload, run)


def _phases(replicas: Sequence[Replica], workload: Workload, run: Callable[..., Iterator[int]]) -> Iterator[int]:
    """Run the requests that warm up, forget them, and run the workload."""
    start = 0.0
    if workload.warmup is not None:
        totals = [replica.totals for replica in replicas]
        for replica in replicas:
            replica.totals = None
        for _ in run(workload.warmup.without_prompts()):
            pass
        for replica, own in zip(replicas, totals, strict=True):
            while replica.coordinator.is_recovering:
                replica.step()
            replica.coordinator.begin_record()
            replica.totals = own
        start = max(replica.pipeline.clock.now() for replica in replicas)
    yield from run(workload.without_prompts(), start=start)


def simulated(setting: Setting, workload: Workload) -> list[Replica]:
    """Run `workload` to its end over the replicas of a setting, and return them, each with its record.

    Raises:
        PipelineError: a policy takes nothing though nothing is in flight.
    """
    replicas, run = start(setting, workload)
    for _ in run:
        pass
    return replicas
