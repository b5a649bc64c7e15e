"""Runs a workload on a setting's fleet of replicas, or on its prefill and decode pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..workload import Workload
from .disaggregation import make_disaggregated
from .replicas import MakeTotals, Replica, make_replicas, run_fleet
from .setting import Setting


def start(
    setting: Setting, workload: Workload, *, repeat: int = 1, make_totals: MakeTotals | None = None
) -> tuple[list[Replica], Iterator[int]]:
    """Make the replicas of a setting, prefill replicas first, and an iterator that runs the workload.

    Args:
        setting: shared by all replicas.
        workload: the requests.
        repeat: number of the run, from 1; each run and each replica draws its own disturbances and faults.
        make_totals: see `make_replicas`.

    Returns:
        The replicas, and an iterator that runs `workload` to completion; it yields the number of newly ended requests.
    """
    config, front = setting.config, setting.control.front
    if setting.prefill is not None:
        fleet = make_disaggregated(setting, repeat=repeat)
        serve = partial(fleet.run, workload=config.workload, front=front)
        return fleet.replicas, _phases(fleet.replicas, workload, serve)
    replicas = make_replicas(setting, repeat=repeat, make_totals=make_totals)
    run = partial(run_fleet, replicas, router=config.simulation.router, workload=config.workload, front=front)
    return replicas, _phases(replicas, workload, run)


def _phases(replicas: Sequence[Replica], workload: Workload, run: Callable[..., Iterator[int]]) -> Iterator[int]:
    """Run the warm-up requests, discard their records, and run the workload."""
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


def simulated(setting: Setting, workload: Workload, *, make_totals: MakeTotals | None = None) -> list[Replica]:
    """Run `workload` to completion on a setting's replicas, and return them with their records.

    For `make_totals`, see `make_replicas`.

    Raises:
        PipelineError: the scheduler stalled: unfinished requests, and no micro-batch in flight.
    """
    replicas, run = start(setting, workload, make_totals=make_totals)
    for _ in run:
        pass
    return replicas
